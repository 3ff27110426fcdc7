//! A description of what this mode serves, for this process and for others. Nothing of it is in the
//! kernel, so other processes ask the one that serves.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::unix::net::UnixListener as StdUnixListener,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{io::AsyncWriteExt as _, net::UnixListener, time};
use tokio_util::sync::CancellationToken;

use super::{NAME, shared::lock};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, Frontend, FrontendKind, ServicePortName},
        node::Host,
        objects::Protocol,
    },
    modes::{
        BackendSnapshot, EndpointSnapshot, Error, ErrorKind, FrontendSnapshot, NodeSnapshot, Programmed,
        ServiceSnapshot, Snapshot, Usage, netfilter::EndpointSet,
    },
    sys::net::namespace_lock::{self, NamespaceLock},
};

#[derive(Debug)]
pub(super) struct ServedPort {
    pub(super) desired: Arc<DesiredPort>,
    /// The frontends whose clients this process serves or refuses.
    pub(super) frontends: Vec<Frontend>,
}

#[derive(Debug, Default)]
pub(super) struct Served {
    pub(super) ports: BTreeMap<ServicePortName, ServedPort>,
    pub(super) host: Host,
    /// True once everything desired was written.
    pub(super) complete: bool,
}

/// Backends, whose ids are their positions in this order.
type Backends = BTreeMap<(SocketAddr, Protocol), BackendSnapshot>;

fn address(endpoint: &Endpoint) -> SocketAddr {
    SocketAddr::new(endpoint.address, endpoint.port)
}

impl Served {
    pub(super) fn snapshot(&self) -> Snapshot {
        let mut backends = Backends::new();
        for port in self.ports.values().map(|served| &served.desired) {
            for endpoint in &port.endpoints.all {
                let (address, protocol) = (address(endpoint), port.name.protocol);
                let backend = backends.entry((address, protocol)).or_insert(BackendSnapshot {
                    id: 0,
                    address,
                    protocol: Some(protocol),
                    local: endpoint.local,
                    terminating: endpoint.terminating,
                    uses: 0,
                    connections: None,
                });
                backend.uses += 1;
            }
        }
        (1..).zip(backends.values_mut()).for_each(|(id, backend)| backend.id = id);
        Snapshot {
            services: self.ports.values().map(|port| service(port, &backends)).collect(),
            backends: backends.into_values().collect(),
            node: self.node(),
            ..Snapshot::default()
        }
    }

    fn node(&self) -> NodeSnapshot {
        let addresses = self.host.node_port_addresses.iter();
        NodeSnapshot {
            node_port_addresses: addresses.map(|address| (*address, address.is_loopback())).collect(),
            ..NodeSnapshot::default()
        }
    }
}

fn service(served: &ServedPort, backends: &Backends) -> ServiceSnapshot {
    let port = &served.desired;
    let endpoints = |set: EndpointSet| {
        let endpoint = |index: &u32| {
            let endpoint = port.endpoints.all.get(*index as usize)?;
            let address = address(endpoint);
            let backend = backends.get(&(address, port.name.protocol))?.id;
            Some(EndpointSnapshot { address, local: endpoint.local, backend })
        };
        set.of(port).iter().filter_map(endpoint).collect()
    };
    let frontend = |frontend: &Frontend| FrontendSnapshot {
        address: (frontend.kind != FrontendKind::NodePort).then_some(frontend.address),
        port: frontend.port,
        external: frontend.kind != FrontendKind::ClusterIp,
    };
    ServiceSnapshot {
        frontends: served.frontends.iter().map(frontend).collect(),
        cluster: endpoints(EndpointSet::Cluster),
        internal: endpoints(EndpointSet::Internal),
        external: endpoints(EndpointSet::External),
        any_endpoints: port.endpoints.any,
        internal_policy: port.internal_policy,
        external_policy: port.external_policy,
        affinity_seconds: port.affinity_seconds.unwrap_or(0),
        ..ServiceSnapshot::new(port.name.clone())
    }
}

/// The longest wait until a process that asks has read its answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers processes that call [`RunningProcess::ask`], one at a time.
pub(super) async fn answer(listener: StdUnixListener, served: Arc<Mutex<Served>>, stop: CancellationToken) {
    let answered = async {
        let listener = UnixListener::from_std(listener)?;
        loop {
            let (mut asker, _) = listener.accept().await?;
            if !namespace_lock::is_trusted(&asker) {
                continue;
            }
            let text = {
                let served = lock(&served);
                if served.complete { serde_json::to_vec(&served.snapshot())? } else { Vec::new() }
            };
            // A process that only wants to know who holds the lock has gone by now.
            let _ = time::timeout(PATIENCE, asker.write_all(&text)).await;
        }
    };
    let answered: Result<io::Result<()>, ()> = tokio::select! {
        () = stop.cancelled() => Err(()),
        error = answered => Ok(error),
    };
    if let Ok(Err(error)) = answered {
        tracing::warn!(%error, "`proxy-ctl services` gets no answer any more");
    }
}

/// The snapshot of another process of this node.
pub(super) struct RunningProcess(Snapshot);

impl RunningProcess {
    /// Asks the process in this mode. `None`: there is none, or it serves nothing yet.
    pub(super) fn ask() -> Result<Option<Self>, Error> {
        let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(ErrorKind::Other, format!("asking the proxy in mode userspace: {error}"))
        };
        let Some(text) = NamespaceLock::ask(NAME).map_err(|error| failed(error.into()))? else {
            return Ok(None);
        };
        if text.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&text)
            .map(|snapshot| Some(Self(snapshot)))
            .map_err(|error| failed(error.into()))
    }
}

impl Programmed for RunningProcess {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(self.0.clone())
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::objects::TrafficPolicy,
        modes::userspace::test_support::{host, web},
    };

    #[test]
    fn what_is_served_as_data_and_read_by_another_process() {
        let desired = web(&["10.0.0.1:8080", "10.0.0.2:8080"], TrafficPolicy::Local);
        let frontends = desired.frontends.clone();
        let ports = BTreeMap::from([(desired.name.clone(), ServedPort { desired, frontends })]);
        let served = Served { ports, host: host(), complete: true };
        let snapshot = served.snapshot();
        let [service] = snapshot.services.as_slice() else { panic!("{snapshot:?}") };
        assert_eq!((service.frontends.len(), service.cluster.len(), service.external.len()), (4, 2, 0));
        let ids: Vec<u32> = service.cluster.iter().map(|endpoint| endpoint.backend).collect();
        assert_eq!(ids, [1, 2]);
        assert_eq!(snapshot.backends.iter().map(|backend| backend.uses).collect::<Vec<_>>(), [1, 1]);
        let read: Snapshot = serde_json::from_slice(&serde_json::to_vec(&snapshot).unwrap()).unwrap();
        assert_eq!(read, snapshot);
    }
}
