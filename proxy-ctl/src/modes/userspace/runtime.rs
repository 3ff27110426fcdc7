//! The thread that carries connections. It outlives the dataplane until the last of them has ended.

use std::{future::Future, io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::mpsc,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use super::shared::Alive;
use crate::sys::proc::credentials;

#[derive(Debug)]
pub(super) struct Runtime {
    pub(super) handle: Handle,
    pub(super) alive: Alive,
}

impl Runtime {
    /// Starts the thread. `opens_as` is the group of the sockets that tasks open, if it is not the
    /// process's own. `at_the_end` is called when neither this value nor any holder of `alive` is
    /// left.
    pub(super) fn start(
        opens_as: Option<u32>,
        at_the_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (alive, mut ended) = mpsc::channel(1);
        let (started, starting) = std::sync::mpsc::sync_channel(1);
        thread::Builder::new().name("connections".to_owned()).spawn(move || {
            let opening = opens_as.map_or(Ok(()), credentials::open_as_group);
            let may_run = opening.is_ok();
            // The caller, which starts this thread, waits for the answer.
            let _ = started.send(opening);
            if may_run {
                // Nothing is ever sent, so receiving ends with the last sender.
                let _ = runtime.block_on(ended.recv());
            }
            at_the_end();
        })?;
        starting.recv().map_err(io::Error::other)?.map_err(io::Error::other)?;
        Ok(Self { handle, alive })
    }

    pub(super) fn spawn<F: Future<Output = ()> + Send + 'static>(
        &self,
        task: impl FnOnce(CancellationToken) -> F,
    ) -> Task {
        let stop = CancellationToken::new();
        let running = self.handle.spawn(task(stop.clone()));
        Task { stop, running, handle: self.handle.clone() }
    }
}

/// A task that ends when it is told to.
#[derive(Debug)]
pub(super) struct Task {
    stop: CancellationToken,
    running: JoinHandle<()>,
    handle: Handle,
}

impl Task {
    /// Stops the task, and waits until everything that it held is free.
    pub(super) fn end(self) {
        self.stop.cancel();
        if let Err(error) = self.handle.block_on(self.running) {
            tracing::error!(%error, "a task of mode userspace has failed");
        }
    }
}
