//! Waiting for kernel sockets in async code.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd, RawFd},
};

use netlink_sys::Socket;
use nix::sys::inotify::Inotify;
use tokio::io::{Interest, unix::AsyncFd};

/// Registers the socket, which must not block, with the async runtime.
pub fn readable(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: a `Socket` owns its descriptor and keeps the same one until it is dropped.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(io::Error::from)
}

/// An inotify instance that the async runtime watches.
#[derive(Debug)]
pub struct Watching(pub Inotify);

impl AsRawFd for Watching {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Registers the instance, which must not block, with the async runtime.
pub fn watching(inotify: Inotify) -> io::Result<AsyncFd<Watching>> {
    // SAFETY: an `Inotify` owns its descriptor and keeps the same one until it is dropped.
    unsafe { AsyncFd::register_with_interest(Watching(inotify), Interest::READABLE) }.map_err(io::Error::from)
}
