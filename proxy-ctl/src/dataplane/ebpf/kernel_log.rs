//! What the kernel programs log, into our own log: with the feature `debug-log` only.

use std::{io, os::fd::AsFd as _, thread};

use aya::Ebpf;
use aya_log::EbpfLogger;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::Error;

/// Starts a thread that ends with the process. To be called before the programs are loaded from `object`.
pub(super) fn follow(object: &mut Ebpf) -> Result<(), Error> {
    let mut logger =
        EbpfLogger::init(object).map_err(|error| Error::KernelLog(io::Error::other(error.to_string())))?;
    let body = move || {
        loop {
            logger.flush();
            let readable = poll(&mut [PollFd::new(logger.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
            if let Err(error) = readable.map(drop).or_else(interrupted) {
                tracing::warn!(%error, "the log of the kernel programs is no longer followed");
                return;
            }
        }
    };
    thread::Builder::new().name("kernel-log".to_owned()).spawn(body).map(drop).map_err(Error::KernelLog)
}

fn interrupted(error: Errno) -> Result<(), Errno> {
    if error == Errno::EINTR { Ok(()) } else { Err(error) }
}
