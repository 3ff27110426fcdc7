//! The userspace mode: this process accepts clients itself and carries their connections to endpoints. The last resort, which
//! needs nothing of the kernel.
//!
//! `plan` says which listeners a service port needs, `balancer` which endpoint a client gets; both are pure. `tcp` and `udp`
//! carry what comes, in the thread of `runtime`.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    os::unix::net::UnixListener,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use self::{
    balancer::{Balancer, SharedBalancer},
    datagrams::Datagrams,
    listen::{ListenError, Listening},
    plan::{Entrance, ListenerKey, Plan, Reach},
    runtime::{Runtime, Task},
    shared::{Permit, Portal, Shared, lock},
    snapshot::{RunningProcess, Served, ServedPort},
    supports::Unlistened,
};
use super::{
    Applied, Dataplane, Error, ErrorKind, Host, MetricFamily, Programmed, Snapshot, Unsupported, Usage,
    entry::{Entry, Removed},
};
use crate::{
    config::{Config, PortRange},
    model::desired::{Changes, DesiredPort, Frontend, ServicePortName},
    sys::{
        limits,
        namespace_lock::{NamespaceAttempt, NamespaceLock},
    },
};

mod balancer;
mod datagrams;
mod listen;
mod metrics;
mod plan;
pub(super) mod probe;
mod runtime;
mod shared;
mod snapshot;
mod supports;
mod tcp;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;
mod udp;

#[cfg(test)]
pub(crate) use self::metrics::sample_metrics;

/// Of the lock that the process in this mode holds, and answers at.
const NAME: &str = "userspace";

pub(super) const ENTRY: Entry = Entry {
    // What it knows of is a listener's, not an endpoint's.
    tracks_flows: false,
    retires: false,
    hands_over: true,
    serves_beside: false,
    probe: probe::probe,
    prepare: |_| Ok(()),
    open: |config| Ok(Box::new(UserspaceDataplane::open(config)?)),
    read: |_| match RunningProcess::ask()? {
        Some(process) => Ok(Some(Box::new(process))),
        None => Ok(None),
    },
    controller: |_| NamespaceLock::holder(NAME),
    // Listeners end with their process.
    cleanup: |_| Ok(Removed::default()),
};

/// Collections between two looks for clients whose affinity has ended.
const COLLECTIONS_BETWEEN_EXPIRIES: u32 = 30;

#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("another controller, {holder}, runs in mode userspace in this network namespace; stop it first")]
    Locked { holder: String },
    #[error("starting mode userspace: {0}")]
    Start(#[from] std::io::Error),
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        let kind = match error {
            OpenError::Locked { .. } => ErrorKind::TakenOver,
            OpenError::Start(_) => ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

#[derive(Debug)]
struct Listener {
    task: Task,
    _permit: Permit,
}

/// The listeners of this node. Dropping it closes them, and connections go on until they end by themselves.
#[derive(Debug)]
struct UserspaceDataplane {
    runtime: Runtime,
    shared: Arc<Shared>,
    port_range: Option<PortRange>,
    reach: Reach,
    served: Arc<Mutex<Served>>,
    balancers: BTreeMap<ServicePortName, SharedBalancer>,
    listeners: BTreeMap<ListenerKey, Listener>,
    unlistened: BTreeMap<ServicePortName, Vec<Unsupported>>,
    /// `unlistened` is other than at the last [`Dataplane::take_without_room`].
    unlistened_changed: bool,
    answering: Option<Task>,
    collections: u32,
    _lock: NamespaceLock,
}

impl UserspaceDataplane {
    fn open(config: &Config) -> Result<Self, OpenError> {
        let lock = match NamespaceLock::acquire(NAME)? {
            NamespaceAttempt::Held(lock) => lock,
            NamespaceAttempt::Taken(process) => {
                let holder = process.map_or_else(|| "a process".to_owned(), |id| format!("process {id}"));
                return Err(OpenError::Locked { holder });
            }
        };
        Self::with_lock(lock, config.port_range, config.udp_idle_timeout)
    }

    fn with_lock(
        lock: NamespaceLock,
        port_range: Option<PortRange>,
        udp_idle_timeout: Duration,
    ) -> Result<Self, OpenError> {
        let limit = limits::raise_open_files().map_err(|error| error.source)?;
        let runtime = Runtime::start(|| tracing::debug!("the last connection of mode userspace has ended"))?;
        let served = Arc::new(Mutex::new(Served::default()));
        let asked: UnixListener = lock.listener()?;
        asked.set_nonblocking(true)?;
        let answering = runtime.spawn(|stop| snapshot::answer(asked, Arc::clone(&served), stop));
        Ok(Self {
            runtime,
            shared: Arc::new(Shared::new(limit, udp_idle_timeout)),
            port_range,
            reach: Reach::Direct,
            served,
            balancers: BTreeMap::new(),
            listeners: BTreeMap::new(),
            unlistened: BTreeMap::new(),
            unlistened_changed: true,
            answering: Some(answering),
            collections: 0,
            _lock: lock,
        })
    }

    /// Makes the node serve these ports so, and the others no longer.
    fn write(&mut self, changed: &[Arc<DesiredPort>], removed: &[ServicePortName]) -> Applied {
        let mut applied = Applied::default();
        let host = lock(&self.served).host.clone();
        let mut ending = Vec::new();
        for name in removed {
            applied.removed += u64::from(lock(&self.served).ports.remove(name).is_some());
            ending.extend(self.take_listeners(name, &Plan::default()));
            self.balancers.remove(name);
            self.unlistened_changed |= self.unlistened.remove(name).is_some();
        }
        let plans: Vec<Plan> = changed.iter().map(|port| Plan::new(port, &host, self.reach)).collect();
        for (port, plan) in changed.iter().zip(&plans) {
            ending.extend(self.take_listeners(&port.name, plan));
            self.update_balancer(port, &host);
        }
        // An address may pass from one service port to another.
        for listener in ending {
            listener.task.end();
            applied.removed += 1;
        }
        for (port, plan) in changed.iter().zip(plans) {
            let Plan { listeners, refused: mut frontends } = plan;
            let mut unlistened = Vec::new();
            for (key, led_here) in listeners {
                match self.listen(key.clone()) {
                    Ok(is_new) => {
                        applied.written += u64::from(is_new);
                        frontends.extend(led_here);
                    }
                    Err(why) => unlistened.push(Unlistened { key, frontends: led_here, why }),
                }
            }
            applied.written += u64::from(self.served_now(port, frontends));
            self.report(&port.name, &unlistened);
        }
        applied
    }

    /// Listeners of the service port that are not planned any more.
    fn take_listeners(&mut self, name: &ServicePortName, plan: &Plan) -> Vec<Listener> {
        let first = ListenerKey { name: name.clone(), entrance: Entrance::ClusterIp, at: None };
        let of_port = self.listeners.range(first..).map(|(key, _)| key).take_while(|key| key.name == *name);
        let stale: Vec<ListenerKey> =
            of_port.filter(|key| !plan.listeners.contains_key(key)).cloned().collect();
        stale.iter().filter_map(|key| self.listeners.remove(key)).collect()
    }

    fn update_balancer(&mut self, port: &DesiredPort, host: &Host) {
        match self.balancers.get(&port.name) {
            Some(balancer) => lock(balancer).update(port, host),
            None => {
                // Nodes that learn of a Service at once do not all begin with the same endpoint.
                let balancer = Balancer::new(port, host, fastrand::usize(..usize::MAX / 2));
                self.balancers.insert(port.name.clone(), Arc::new(Mutex::new(balancer)));
            }
        }
    }

    /// Answers whether there was no such listener; or why there is none.
    fn listen(&mut self, key: ListenerKey) -> Result<bool, String> {
        let ListenerKey { name, entrance, at } = &key;
        if self.listeners.contains_key(&key) {
            return Ok(false);
        }
        let Some(balancer) = self.balancers.get(name).cloned() else { return Ok(false) };
        let Some(permit) = self.shared.descriptors.for_listener() else {
            return Err(self.shared.descriptors.exhausted());
        };
        let (shared, _alive) = (Arc::clone(&self.shared), self.runtime.alive.clone());
        let portal = Portal { balancer, entrance: *entrance, shared, _alive };
        let listening = match *at {
            Some(address) => Listening::on(name.protocol, address),
            None => Listening::anywhere(name.protocol, name.family, self.port_range),
        };
        let started = listening.and_then(|listening| self.start(listening, portal));
        let task = started.map_err(|error| supports::why(&error, *at))?;
        self.listeners.insert(key, Listener { task, _permit: permit });
        Ok(true)
    }

    fn start(&self, listening: Listening, portal: Portal) -> Result<Task, ListenError> {
        let _in_runtime = self.runtime.handle.enter();
        Ok(match listening {
            Listening::Tcp(listener) => {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                self.runtime.spawn(|stop| tcp::serve(listener, portal, stop))
            }
            Listening::Udp(socket) => {
                let listener = Datagrams::new(socket)?;
                self.runtime.spawn(|stop| udp::serve(listener, portal, stop))
            }
        })
    }

    /// Answers whether that is new.
    fn served_now(&self, port: &Arc<DesiredPort>, frontends: Vec<Frontend>) -> bool {
        let served = ServedPort { desired: Arc::clone(port), frontends };
        let before = lock(&self.served).ports.insert(port.name.clone(), served);
        before.is_none_or(|before| before.desired != *port)
    }

    fn report(&mut self, name: &ServicePortName, unlistened: &[Unlistened]) {
        let before = if unlistened.is_empty() {
            self.unlistened.remove(name)
        } else {
            self.unlistened.insert(name.clone(), supports::without_listener(unlistened))
        };
        self.unlistened_changed |= before.as_ref() != self.unlistened.get(name);
    }

    /// Those that are served otherwise than desired, or have an address that nothing could listen on.
    fn differing(&self, desired: &[Arc<DesiredPort>]) -> Vec<Arc<DesiredPort>> {
        let served = lock(&self.served);
        let differs = |port: &&Arc<DesiredPort>| {
            self.unlistened.contains_key(&port.name)
                || served.ports.get(&port.name).is_none_or(|served| served.desired != **port)
        };
        desired.iter().filter(differs).cloned().collect()
    }
}

impl Drop for UserspaceDataplane {
    fn drop(&mut self) {
        let listeners = mem::take(&mut self.listeners).into_values().map(|listener| listener.task);
        for task in listeners.chain(self.answering.take()) {
            task.end();
        }
    }
}

impl Programmed for UserspaceDataplane {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(lock(&self.served).snapshot())
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage::default())
    }
}

impl Dataplane for UserspaceDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        Ok(self.write(&changes.changed, &changes.removed))
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let names: BTreeSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let is_gone = |name: &&ServicePortName| !names.contains(name);
        let removed: Vec<_> = lock(&self.served).ports.keys().filter(is_gone).cloned().collect();
        let changed = self.differing(desired);
        let applied = self.write(&changed, &removed);
        lock(&self.served).complete = true;
        Ok(applied)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        let ports: Vec<_> = {
            let mut served = lock(&self.served);
            if served.host == *host {
                return Ok(Applied::default());
            }
            served.host = host.clone();
            served.ports.values().map(|port| Arc::clone(&port.desired)).collect()
        };
        Ok(self.write(&ports, &[]))
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        self.collections += 1;
        if self.collections.is_multiple_of(COLLECTIONS_BETWEEN_EXPIRIES) {
            let now = Instant::now();
            self.balancers.values().for_each(|balancer| lock(balancer).forget_expired(now));
        }
        Ok(())
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        Ok(metrics::families(&self.shared.counters))
    }

    fn min_interval(&self, _configured: Duration) -> Duration {
        // A change costs what it changes.
        Duration::ZERO
    }

    fn supports(&self, port: &DesiredPort) -> Vec<Unsupported> {
        supports::supports(port)
    }

    fn take_without_room(&mut self) -> Option<BTreeMap<ServicePortName, Vec<Unsupported>>> {
        mem::take(&mut self.unlistened_changed).then(|| self.unlistened.clone())
    }
}
