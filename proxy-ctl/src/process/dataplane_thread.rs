//! The thread that blocks on the dataplane's system calls.

use std::{sync::Arc, thread};

use anyhow::Context as _;
use tokio::sync::oneshot::{self, error::RecvError};

use super::{mode_choice::BuiltModes, proxy::Proxy};
use crate::controller::{self, Controller, Ended, Inputs};

pub(super) type DataplaneEnd = Result<(), Ended>;

/// Starts the thread, and returns the channel by which it reports its end. `opened` is called once
/// the dataplane holds its lock.
pub(super) fn start(
    proxy: &Proxy,
    inputs: Inputs,
    opened: impl FnOnce() + Send + 'static,
) -> anyhow::Result<oneshot::Receiver<DataplaneEnd>> {
    let (end, ended) = oneshot::channel();
    let controller =
        Controller::new(Arc::clone(&proxy.config), Arc::clone(&proxy.node_name), proxy.reports())
            .keeping_endpoints_of(proxy.server);
    let runtime = tokio::runtime::Handle::current();
    let body = move || {
        // The receiver may have given up.
        let _ = end.send(controller::run(controller, inputs, &BuiltModes, opened, &runtime));
    };
    thread::Builder::new()
        .name("dataplane".to_owned())
        .spawn(body)
        .context("starting the dataplane's thread")?;
    Ok(ended)
}

/// Returns the error for the end of the thread, which should not have ended.
pub(super) fn failure(result: Result<DataplaneEnd, RecvError>) -> anyhow::Error {
    match result {
        Ok(Err(Ended::NotOpened(error))) => anyhow::Error::new(error).context("starting the dataplane"),
        Ok(Err(error @ (Ended::NoSources | Ended::TakenOver(_)))) => error.into(),
        Ok(Ok(())) | Err(_) => anyhow::anyhow!("the dataplane's thread ended unexpectedly"),
    }
}
