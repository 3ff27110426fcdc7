//! Keeps what `status` reads about the running controller up to date.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::record::{self, Record};
use crate::{
    config::Config,
    dataplane::{NodeNetwork, Role},
    source::kubernetes::{ResourceKind, SourceState},
};

const PERIOD: Duration = Duration::from_secs(1);

/// What changes while the process runs.
pub(super) struct Live {
    /// `None`: the manifests tell nothing about themselves.
    pub(super) state: Option<SourceState>,
    pub(super) hosts: watch::Receiver<Option<NodeNetwork>>,
    pub(super) configs: watch::Receiver<Arc<Config>>,
}

/// Writes the record anew whenever it has changed, from when `recorded` says that it is there until `stop`.
pub(super) async fn keep(
    mut record: Record,
    live: Live,
    recorded: CancellationToken,
    stop: CancellationToken,
) {
    tokio::select! {
        () = recorded.cancelled() => {}
        () = stop.cancelled() => return,
    }
    let mut written: Option<Record> = None;
    loop {
        let config = Arc::clone(&live.configs.borrow());
        record.sources = live.sources();
        record.interfaces = live.interfaces(&config);
        if written.as_ref() != Some(&record) {
            match record.write(&config.ebpf.bpffs) {
                Ok(()) => written = Some(record.clone()),
                Err(error) => tracing::debug!(%error, "what status reads is not up to date"),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            () = stop.cancelled() => return,
        }
    }
}

impl Live {
    fn sources(&self) -> Vec<record::Source> {
        let source = |state: &SourceState, kind: ResourceKind| record::Source {
            name: kind.plural().to_owned(),
            connected: state.connected(kind),
            objects: state.objects(kind),
            problem: state.problem(kind),
        };
        let Some(state) = &self.state else { return Vec::new() };
        state.kinds().into_iter().map(|kind| source(state, kind)).collect()
    }

    fn interfaces(&self, config: &Config) -> Vec<record::Interface> {
        let hosts = self.hosts.borrow();
        let interfaces = hosts.iter().flat_map(|host| &host.interfaces);
        interfaces
            .filter(|interface| config.ebpf.interfaces.select(&interface.name))
            .map(|interface| record::Interface {
                index: interface.index,
                name: interface.name.clone(),
                role: match interface.role {
                    Role::Workload => "workload",
                    Role::Uplink => "uplink",
                }
                .to_owned(),
            })
            .collect()
    }
}
