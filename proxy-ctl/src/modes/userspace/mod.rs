//! Mode userspace: this process accepts clients itself, and carries their connections to endpoints.
//! It is the last resort, and needs nothing of the kernel.
//!
//! `plan` says which listeners a service port needs, and `balancer` which endpoint a client gets.
//! Both are pure. `tcp` and `udp` carry connections and datagrams in the thread of `runtime`.
//!
//! `redirect` has the rules that redirect clients to the listeners, where this process may make
//! rules. Otherwise the listeners are on the frontends themselves, as far as these are addresses of
//! this node.

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
    redirect::{PortRedirect, Redirect, RedirectError},
    runtime::{Runtime, Task},
    shared::{Permit, Portal, Shared, lock},
    snapshot::{RunningProcess, Served, ServedPort},
    unserved::Unlistened,
};
use super::{
    Applied, Dataplane, Error, ErrorKind, MetricFamily, Programmed, Snapshot, UnservedField, Usage,
    entry::{Entry, Removed, TrackedFlows},
    mode_lock::{self, LockError},
    netfilter::own_rules,
};
use crate::{
    config::Config,
    model::{
        desired::{Changes, DesiredPort, Frontend, ServicePortName},
        mode::Mode,
        node::{Host, PortRange},
        objects::IpFamily,
    },
    sys::{
        net::namespace_lock::{NamespaceAttempt, NamespaceLock},
        proc::limits,
    },
};

mod balancer;
mod both_ways;
mod datagrams;
mod listen;
mod metrics;
mod plan;
pub(super) mod probe;
mod redirect;
mod runtime;
mod shared;
mod snapshot;
mod tcp;
#[cfg(test)]
mod test_support;
#[cfg(test)]
mod tests;
mod udp;
mod unserved;

#[cfg(test)]
pub(crate) use self::metrics::sample_metrics;

/// The name of the lock that the process in this mode holds, and at which it answers.
const NAME: &str = "userspace";

pub(super) const ENTRY: Entry = Entry {
    // Tracked flows are translated to listeners, not to endpoints. The mode ends stale ones itself.
    tracked_flows: TrackedFlows::None,
    drains: false,
    keeps_min_sync_period: false,
    reads_service_cidrs: |_| false,
    delegates: true,
    can_be_secondary: false,
    probe: probe::probe,
    prepare: |_| Ok(()),
    open: |config| Ok(Box::new(UserspaceDataplane::open(config)?)),
    read: |_| match RunningProcess::ask()? {
        Some(process) => Ok(Some(Box::new(process))),
        None => Ok(None),
    },
    controller: |_| NamespaceLock::holder(NAME),
    cleanup: |_, _| Ok(Removed { objects: cleanup()?, ..Removed::default() }),
};

/// The number of garbage collections between two looks for clients whose affinity has ended.
const COLLECTIONS_BETWEEN_EXPIRIES: u32 = 30;

#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("starting mode userspace: {0}")]
    Start(#[from] std::io::Error),
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        let kind = match &error {
            OpenError::Lock(error) => error.kind(),
            OpenError::Start(_) => ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

impl From<RedirectError> for Error {
    fn from(error: RedirectError) -> Self {
        Self::new(ErrorKind::Other, error)
    }
}

#[derive(Debug)]
struct Listener {
    task: Task,
    /// The port to which it is bound.
    port: u16,
    _permit: Permit,
}

/// The listeners of this node. They close when this value is dropped, and connections go on until
/// they end by themselves.
#[derive(Debug)]
struct UserspaceDataplane {
    runtime: Runtime,
    shared: Arc<Shared>,
    port_range: Option<PortRange>,
    /// The rules. `None`: this process may not make rules, or the kernel has none.
    redirect: Option<Redirect>,
    served: Arc<Mutex<Served>>,
    balancers: BTreeMap<ServicePortName, SharedBalancer>,
    listeners: BTreeMap<ListenerKey, Listener>,
    unlistened: BTreeMap<ServicePortName, Vec<UnservedField>>,
    /// True if `unlistened` differs from what the last [`Dataplane::take_waiting`] has
    /// returned.
    unlistened_changed: bool,
    answering: Option<Task>,
    collections: u32,
    /// The lock of the mode. It is held until this value is dropped.
    lock: Option<NamespaceLock>,
}

impl UserspaceDataplane {
    fn open(config: &Config) -> Result<Self, OpenError> {
        let lock = mode_lock::lock(Mode::Userspace)?;
        let redirect = Redirect::open();
        match &redirect {
            Some(redirect) => tracing::info!(by = redirect.by(), "rules redirect clients to this process"),
            None => tracing::warn!(
                "no rules redirect clients to this process: it serves those that dial an address of this node"
            ),
        }
        Self::with_lock(lock, redirect, config.port_range, config.udp_idle_timeout)
    }

    fn with_lock(
        lock: NamespaceLock,
        redirect: Option<Redirect>,
        port_range: Option<PortRange>,
        udp_idle_timeout: Duration,
    ) -> Result<Self, OpenError> {
        let limit = limits::raise_open_files().map_err(|error| error.source)?;
        let makes_rules = redirect.is_some();
        let opens_as = makes_rules.then_some(redirect::DIALLING_GROUP);
        let runtime = Runtime::start(opens_as, move || {
            if makes_rules {
                remove_rules();
            }
        })?;
        let served = Arc::new(Mutex::new(Served::default()));
        let asked: UnixListener = lock.listener()?;
        asked.set_nonblocking(true)?;
        let answering = runtime.spawn(|stop| snapshot::answer(asked, Arc::clone(&served), stop));
        Ok(Self {
            runtime,
            shared: Arc::new(Shared::new(limit, udp_idle_timeout)),
            port_range,
            redirect,
            served,
            balancers: BTreeMap::new(),
            listeners: BTreeMap::new(),
            unlistened: BTreeMap::new(),
            unlistened_changed: true,
            answering: Some(answering),
            collections: 0,
            lock: Some(lock),
        })
    }

    fn reach(&self, family: IpFamily) -> Reach {
        let redirected = self.redirect.as_ref().is_some_and(|redirect| redirect.has(family));
        if redirected { Reach::Redirected } else { Reach::Direct }
    }

    /// Makes the node serve the changed ports as they are now, and the removed ones no longer.
    fn write(
        &mut self,
        changed: &[Arc<DesiredPort>],
        removed: &[ServicePortName],
    ) -> Result<Applied, RedirectError> {
        let mut applied = Applied::default();
        let host = lock(&self.served).host.clone();
        let mut stale = Vec::new();
        let mut redirects = Vec::new();
        for name in removed {
            applied.removed += u64::from(lock(&self.served).ports.remove(name).is_some());
            stale.extend(self.take_listeners(name, &Plan::default()));
            self.balancers.remove(name);
            self.unlistened_changed |= self.unlistened.remove(name).is_some();
            redirects.push((name.clone(), Vec::new()));
        }
        let plan = |port: &Arc<DesiredPort>| Plan::new(port, &host, self.reach(port.name.family));
        let plans: Vec<Plan> = changed.iter().map(plan).collect();
        for (port, plan) in changed.iter().zip(&plans) {
            stale.extend(self.take_listeners(&port.name, plan));
            self.update_balancer(port, &host);
        }
        applied.removed += stale.len() as u64;
        // Listeners on frontends end first, because an address may pass from one service port to
        // another. Listeners to which rules redirect end after these rules.
        let (redirected, direct): (Vec<_>, Vec<_>) = stale.into_iter().partition(|(key, _)| key.at.is_none());
        end(direct);
        for (port, plan) in changed.iter().zip(plans) {
            let (written, of_port) = self.write_port(port, plan);
            applied.written += written;
            redirects.push((port.name.clone(), of_port));
        }
        let outcome = self.redirect.as_mut().map_or(Ok((0, 0)), |redirect| redirect.apply(redirects));
        end(redirected);
        let (come, go) = outcome?;
        applied += Applied { written: come, removed: go };
        Ok(applied)
    }

    /// Writes one service port. Returns how much was written, and the listener of each of its
    /// frontends.
    fn write_port(&mut self, port: &Arc<DesiredPort>, plan: Plan) -> (u64, Vec<PortRedirect>) {
        let Plan { listeners, refused } = plan;
        let (mut written, mut unlistened) = (0, Vec::new());
        let refusing_port = self.redirect.as_ref().and_then(|redirect| redirect.refusing_port(&port.name));
        let refused_at =
            |frontend: &Frontend| Some(PortRedirect { frontend: *frontend, port: refusing_port? });
        let mut redirects: Vec<PortRedirect> = refused.iter().filter_map(refused_at).collect();
        let mut frontends = refused;
        for (key, redirected_here) in listeners {
            match self.listen(key.clone()) {
                Ok(is_new) => {
                    written += u64::from(is_new);
                    if let Some(listener) = self.listeners.get(&key).filter(|_| key.at.is_none()) {
                        let port_redirect =
                            |frontend: &Frontend| PortRedirect { frontend: *frontend, port: listener.port };
                        redirects.extend(redirected_here.iter().map(port_redirect));
                    }
                    frontends.extend(redirected_here);
                }
                Err(why) => unlistened.push(Unlistened { key, frontends: redirected_here, why }),
            }
        }
        written += u64::from(self.served_now(port, frontends));
        self.report(&port.name, &unlistened);
        (written, redirects)
    }

    /// Takes out the listeners of the service port that are no longer planned.
    fn take_listeners(&mut self, name: &ServicePortName, plan: &Plan) -> Vec<(ListenerKey, Listener)> {
        let first = ListenerKey { name: name.clone(), entrance: Entrance::ClusterIp, at: None };
        let of_port = self.listeners.range(first..).map(|(key, _)| key).take_while(|key| key.name == *name);
        let stale: Vec<ListenerKey> =
            of_port.filter(|key| !plan.listeners.contains_key(key)).cloned().collect();
        stale.iter().filter_map(|key| self.listeners.remove_entry(key)).collect()
    }

    fn update_balancer(&mut self, port: &DesiredPort, host: &Host) {
        match self.balancers.get(&port.name) {
            Some(balancer) => lock(balancer).update(port, host),
            None => {
                // The start is random, so that nodes that learn of a Service at once do not all
                // begin with the same endpoint.
                let balancer = Balancer::new(port, host, fastrand::usize(..usize::MAX / 2));
                self.balancers.insert(port.name.clone(), Arc::new(Mutex::new(balancer)));
            }
        }
    }

    /// Opens a listener. Returns true if it is new, or the reason why nothing can listen.
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
        let started = listening.and_then(|listening| {
            let port = listening.address()?.port();
            Ok((self.start(listening, portal)?, port))
        });
        let (task, port) = started.map_err(|error| unserved::why(&error, *at))?;
        self.listeners.insert(key, Listener { task, port, _permit: permit });
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

    /// Notes that a port is served. Returns true if the port is new or has changed.
    fn served_now(&self, port: &Arc<DesiredPort>, frontends: Vec<Frontend>) -> bool {
        let served = ServedPort { desired: Arc::clone(port), frontends };
        let before = lock(&self.served).ports.insert(port.name.clone(), served);
        before.is_none_or(|before| before.desired != *port)
    }

    fn report(&mut self, name: &ServicePortName, unlistened: &[Unlistened]) {
        let before = if unlistened.is_empty() {
            self.unlistened.remove(name)
        } else {
            self.unlistened.insert(name.clone(), unserved::without_listener(unlistened))
        };
        self.unlistened_changed |= before.as_ref() != self.unlistened.get(name);
    }

    /// Returns the ports that are not served as desired, or that have an address at which nothing
    /// could listen.
    fn differing(&self, desired: &[Arc<DesiredPort>]) -> Vec<Arc<DesiredPort>> {
        let served = lock(&self.served);
        let differs = |port: &&Arc<DesiredPort>| {
            self.unlistened.contains_key(&port.name)
                || served.ports.get(&port.name).is_none_or(|served| served.desired != **port)
        };
        desired.iter().filter(differs).cloned().collect()
    }
}

/// Returns true if there are rules of this mode, whichever process has made them. Needs
/// CAP_NET_ADMIN.
pub(super) fn has_rules() -> Result<bool, Error> {
    Ok(redirect::has_tables()?)
}

/// Removes the rules of this mode, because they do not end with their process as listeners do. The
/// rules of a process that is in this mode stay.
fn cleanup() -> Result<Vec<String>, Error> {
    let mut removed = match NamespaceLock::acquire(NAME).map_err(OpenError::Start)? {
        NamespaceAttempt::Held(_lock) => redirect::remove_tables()?,
        NamespaceAttempt::Taken(_) => return Ok(Vec::new()),
    };
    removed.extend(own_rules::remove_own(Mode::Userspace, &[])?.objects);
    Ok(removed)
}

/// Removes the rules after the last connection, which the kernel may have translated by them. They
/// stay if a process is in this mode again.
fn remove_rules() {
    match cleanup() {
        Err(error) if !error.is_taken_over() => {
            tracing::warn!(%error, "rules of mode userspace are left; `proxy-ctl cleanup` removes them");
        }
        _ => {}
    }
}

impl Drop for UserspaceDataplane {
    fn drop(&mut self) {
        let listeners = mem::take(&mut self.listeners).into_values().map(|listener| listener.task);
        // Rules end before the listeners. Clients that come later belong to another mode, or to
        // nobody.
        let left = self.redirect.as_mut().map_or(Ok(()), Redirect::redirect_nobody);
        for task in listeners.chain(self.answering.take()) {
            task.end();
        }
        if let Err(error) = left {
            tracing::warn!(%error, "clients may still be redirected to listeners that are gone");
        }
        drop(self.lock.take());
        // Connections that the kernel translates need the rules until they end. Then `runtime`
        // removes the rules.
        if self.redirect.is_some() && self.shared.descriptors.is_idle() {
            remove_rules();
        }
    }
}

fn end(listeners: Vec<(ListenerKey, Listener)>) {
    for (_, listener) in listeners {
        listener.task.end();
    }
}

impl Programmed for UserspaceDataplane {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        Ok(lock(&self.served).snapshot())
    }

    fn usage(&self) -> Result<Usage, Error> {
        Ok(Usage::default())
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        Ok(metrics::families(&self.shared.counters))
    }
}

impl Dataplane for UserspaceDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        Ok(self.write(&changes.changed, &changes.removed)?)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let names: BTreeSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let is_gone = |name: &&ServicePortName| !names.contains(name);
        let removed: Vec<_> = lock(&self.served).ports.keys().filter(is_gone).cloned().collect();
        let changed = self.differing(desired);
        let mut applied = self.write(&changed, &removed)?;
        if let Some(redirect) = &mut self.redirect {
            applied.written += u64::from(redirect.restore_if_gone()?);
            redirect.end_unanswered_once();
        }
        lock(&self.served).complete = true;
        Ok(applied)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        if lock(&self.served).host == *host {
            // The redirection writes what it could not write before.
            return Ok(self.write(&[], &[])?);
        }
        let ports: Vec<_> = {
            let mut served = lock(&self.served);
            served.host = host.clone();
            served.ports.values().map(|port| Arc::clone(&port.desired)).collect()
        };
        let applied = self.write(&ports, &[]);
        // The redirection gets the host also after an error, because it must know it when it tries
        // again.
        let outcome = self.redirect.as_mut().map_or(Ok(0), |redirect| redirect.set_host(host).map(|()| 1))?;
        let mut applied = applied?;
        applied.written += outcome;
        Ok(applied)
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        self.collections += 1;
        if self.collections.is_multiple_of(COLLECTIONS_BETWEEN_EXPIRIES) {
            let now = Instant::now();
            self.balancers.values().for_each(|balancer| lock(balancer).forget_expired(now));
        }
        Ok(())
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        unserved::unserved_fields(port)
    }

    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        mem::take(&mut self.unlistened_changed).then(|| self.unlistened.clone())
    }
}
