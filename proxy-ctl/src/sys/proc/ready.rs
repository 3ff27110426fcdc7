//! Waits for kernel sockets in async code.

use std::io;

use netlink_sys::Socket;
use tokio::io::{Interest, unix::AsyncFd};

/// Registers a non-blocking socket with the async runtime.
pub fn readable(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: a `Socket` owns its descriptor and keeps the same one until it is dropped.
    unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(io::Error::from)
}
