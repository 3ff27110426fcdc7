//! Mode ipvs turns the desired state into virtual servers of IPVS, the addresses by which they are
//! reached, and sets and rules. These say which clients are masqueraded or refused. Everything has
//! kube-proxy's names, so what a kube-proxy of this mode has left is adopted like what a
//! predecessor has left.
//!
//! `plan` says what a service port needs, `state` what is to be written in which order, and `rules`
//! what iptables must have. These are pure. `kernel` writes to the kernel, and `netfilter::chains`
//! writes the rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, mem,
    path::Path,
    sync::Arc,
    time::Duration,
};

use rustc_hash::FxHashMap;

use self::{
    calls::{Calls as _, System},
    error::{Error, Failures},
    family_rules::{FamilyRules, Step},
    kernel::{Kernel, Written},
    plan::Site,
    refusals::Refusals,
    state::{Change, KernelObjects, Key, Wanted},
};
use super::{
    Applied, Dataplane, MapUsage, MetricFamily, Programmed, Snapshot, UnservedField, Usage,
    entry::{Entry, TrackedFlows},
    mode_lock::lock,
    netfilter::{chains::FamilyChains, metrics, own_rules},
};
use crate::{
    cleanup,
    config::{self, Config},
    model::{
        desired::{Changes, DesiredPort, ServicePortName},
        mode::{HostFacts, Mode, Probe, RequestedMode, Requirement},
        node::Host,
        objects::IpFamily,
    },
    names::IPVS_DEVICE,
    node::modprobe::modprobe,
    sys::{
        net::{
            ipvs::{Balancing, Ipvs, ServerChange, Timeouts, VirtualSocket},
            link,
            namespace_lock::NamespaceLock,
        },
        xtables,
    },
};

mod calls;
mod error;
mod family_rules;
mod kernel;
pub(super) mod load;
mod parameters;
mod plan;
pub(super) mod probe;
mod refusals;
mod rules;
mod sets;
mod snapshot;
mod state;

pub(super) const ENTRY: Entry = Entry {
    tracked_flows: TrackedFlows::All,
    drains: false,
    keeps_min_sync_period: true,
    reads_service_cidrs: |_| false,
    delegates: false,
    can_be_secondary: false,
    probe,
    prepare: |config| Ok(prepare(&config.ipvs)?),
    open: |config| Ok(Box::new(IpvsDataplane::open(&config.ipvs)?)),
    read: |_| Ok(read()?.map(|programmed| Box::new(programmed) as _)),
    controller: |_| NamespaceLock::holder(Mode::Ipvs.name()),
    cleanup: |_, keeps| own_rules::remove_own(Mode::Ipvs, keeps),
};

/// Returns what the mode needs. The kernel's answer about the scheduler needs a virtual server. So
/// it is asked only if this mode is wanted and nothing else is missing.
fn probe(config: &Config, host: &HostFacts) -> Probe {
    let mut probe = probe::probe(config, host);
    if config.mode == RequestedMode::Ipvs && probe.can_run() {
        let scheduler = Requirement::new("ipvsScheduler", "IPVS scheduler", scheduler(&config.ipvs));
        let refusal = check(&config.ipvs).err();
        let missing = refusal.into_iter().map(|error| error.to_string()).collect();
        probe.requirements.push(Requirement { missing, ..scheduler });
    }
    probe
}

fn scheduler(config: &config::Ipvs) -> String {
    Site::new(&config.scheduler).scheduler().to_owned()
}

/// Asks the kernel for IPVS, the scheduler and ipset.
fn check(config: &config::Ipvs) -> Result<(), Error> {
    let rules = open_rules()?;
    check_scheduler(&System::open(families(&rules))?.ipvs, &scheduler(config))
}

/// Opens the rules of the families that are served.
fn open_rules() -> Result<Vec<FamilyChains>, Error> {
    let mut rules = FamilyChains::open(xtables::choose()?.backend);
    rules.retain(family_rules::is_served);
    Ok(rules)
}

fn families(rules: &[FamilyChains]) -> Vec<IpFamily> {
    rules.iter().map(|rules| rules.family).collect()
}

/// Checks that the kernel has the scheduler. It says so when a virtual server is made with it. That
/// one is for an address that no node has (RFC 5737). None is made if there is a virtual server
/// with that scheduler already.
fn check_scheduler(ipvs: &Ipvs, scheduler: &str) -> Result<(), Error> {
    if ipvs.servers()?.iter().any(|server| *server.balancing.scheduler == *scheduler) {
        return Ok(());
    }
    // The module is loaded before a virtual server asks for it. Otherwise Linux 6.1 loads it with
    // IPVS locked, and the end of any network namespace waits for this lock. `lblc` and `lblcr`
    // wait for that end in turn, and nothing goes on.
    let loaded = modprobe(&format!("ip_vs_{scheduler}"));
    tracing::debug!(scheduler, ?loaded, "modprobe");
    let socket =
        VirtualSocket { protocol: libc::IPPROTO_TCP as u16, address: ([198, 51, 100, 0], 20_000).into() };
    let balancing = Balancing { scheduler: scheduler.into(), affinity_seconds: None, by_source_port: false };
    let refused = ipvs.write(&[ServerChange::Create(socket, balancing)])?;
    let removed = ipvs.write(&[ServerChange::Remove(socket)])?;
    match (refused.into_iter().next(), removed.into_iter().next()) {
        (Some((_, source)), _) => Err(Error::Scheduler { scheduler: scheduler.to_owned(), source }),
        (None, Some((_, error))) => Err(error.into()),
        (None, None) => Ok(()),
    }
}

/// Does what needs privileges beyond CAP_NET_ADMIN. The parameters of IPVS exist once its module is
/// loaded.
fn prepare(config: &config::Ipvs) -> Result<(), Error> {
    let ipvs = Ipvs::open()?.ok_or(Error::Missing("IPVS (CONFIG_IP_VS; module ip_vs)"))?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    parameters::set(Path::new("/"), &parameters::wanted(config.strict_arp, release.trim()))?;
    let timeouts = timeouts(config);
    if timeouts != Timeouts::default() {
        ipvs.set_timeouts(timeouts)?;
    }
    Ok(())
}

fn timeouts(config: &config::Ipvs) -> Timeouts {
    let seconds = |timeout: Duration| u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
    Timeouts {
        tcp: seconds(config.tcp_timeout),
        tcp_fin: seconds(config.tcp_fin_timeout),
        udp: seconds(config.udp_timeout),
    }
}

/// The virtual servers, addresses, sets and rules of this node. They stay in place when this value
/// is dropped.
struct IpvsDataplane {
    kernel: Kernel,
    /// The rules of each family that is served.
    family_rules: Vec<FamilyRules>,
    site: Site,
    desired: FxHashMap<ServicePortName, Arc<DesiredPort>>,
    wanted: Wanted,
    objects: KernelObjects,
    refusals: Refusals,
    /// True once `resync` was called.
    is_synced: bool,
    /// True if everything is written as the last `set_host` asks for it.
    is_host_written: bool,
    _lock: NamespaceLock,
}

impl IpvsDataplane {
    /// Opens the mode, and reads nothing yet. Needs CAP_NET_ADMIN, and privileges to write kernel
    /// parameters that differ.
    fn open(config: &config::Ipvs) -> Result<Self, Error> {
        let lock = lock(Mode::Ipvs)?;
        let rules = open_rules()?;
        let system = System::open(families(&rules))?;
        check_scheduler(&system.ipvs, &scheduler(config))?;
        prepare(config)?;
        let kernel = Kernel::new(system, config.exclude_cidrs.clone());
        let family_rules = rules.into_iter().map(FamilyRules::new).collect();
        Ok(Self::new(kernel, family_rules, Site::new(&config.scheduler), lock))
    }

    fn new(kernel: Kernel, family_rules: Vec<FamilyRules>, site: Site, lock: NamespaceLock) -> Self {
        Self {
            kernel,
            family_rules,
            site,
            desired: FxHashMap::default(),
            wanted: Wanted::default(),
            objects: KernelObjects::default(),
            refusals: Refusals::default(),
            is_synced: false,
            is_host_written: true,
            _lock: lock,
        }
    }

    /// Takes over the desired state of a service port. Adds the keys that may differ now to
    /// `touched`.
    fn set(&mut self, port: &Arc<DesiredPort>, touched: &mut BTreeSet<Key>) {
        if self.family_rules.iter().any(|rules| rules.family() == port.name.family) {
            self.wanted.set(&port.name, Some(plan::plan(port, &self.site)), touched);
            self.desired.insert(port.name.clone(), Arc::clone(port));
        }
    }

    fn remove(&mut self, name: &ServicePortName, touched: &mut BTreeSet<Key>) {
        self.wanted.set(name, None, touched);
        self.desired.remove(name);
    }

    /// Reads the kernel's objects. Of the excluded virtual servers it returns those that are or
    /// were wanted: those in `touched`, and those that are known.
    fn read(&self, touched: &BTreeSet<Key>) -> Result<KernelObjects, Error> {
        self.kernel.read(|socket| {
            self.wanted.server(socket).is_some()
                || self.objects.servers.contains_key(&socket)
                || touched.contains(&Key::Server(socket))
        })
    }

    /// Reads everything from the kernel, and writes what differs. `touched` are keys that are no
    /// longer wanted, and that may not exist.
    fn write_everything(&mut self, mut touched: BTreeSet<Key>) -> Result<Applied, Error> {
        self.kernel.provide()?;
        self.objects = self.read(&touched)?;
        self.family_rules.iter_mut().for_each(FamilyRules::forget);
        touched.extend(self.wanted.keys().chain(self.objects.keys()));
        let applied = self.write(touched)?;
        self.is_host_written = true;
        Ok(applied)
    }

    /// Writes what differs at these keys, and the rules. Sets come first, because rules use them to
    /// decide who is masqueraded or refused. Then come rules, because virtual servers need them.
    ///
    /// Rules of another mode in the same chains serve until everything else is written, because
    /// their translation precedes IPVS.
    fn write(&mut self, touched: BTreeSet<Key>) -> Result<Applied, Error> {
        let mut changes = state::differences(&self.wanted, &self.objects, touched.iter().copied());
        let others = changes.split_off(changes.partition_point(Change::precedes_rules));
        let mut failures = Failures::default();
        let mut written = self.kernel.write(changes, &mut self.objects)?;
        written.applied.written += self.write_rules(Step::BeforeServers, &mut failures);
        written += self.kernel.write(others, &mut self.objects)?;
        let Written { mut applied, refused } = written;
        for (key, error) in self.refusals.tried(&touched, refused, &self.wanted) {
            failures.add(key.family(), || self.shown(key), error.into());
        }
        applied.written += self.write_rules(Step::AfterAll, &mut failures);
        failures.into_result().map(|()| applied)
    }

    /// Describes an object for people, with a service port that asks for it.
    fn shown(&self, key: Key) -> String {
        match self.wanted.asking(|one| *one == key).next() {
            Some((name, _)) => format!("{name}, {key}"),
            None => format!("{key}, which is not desired"),
        }
    }

    /// Writes the rules. In [`Step::AfterAll`] only those of families in which nothing has failed
    /// are written. Returns the number of tables that were written.
    fn write_rules(&mut self, step: Step, failures: &mut Failures) -> u64 {
        let mut count = 0;
        for rules in &mut self.family_rules {
            let family = rules.family();
            if step == Step::AfterAll && failures.concern(family) {
                continue;
            }
            let (wanted, host) = (&self.wanted, &self.site.host);
            let has_members = |set| wanted.has_members(set);
            let chains = rules::chains(family, host, wanted.closed_to_node(), has_members);
            match rules.write(step, &chains) {
                Ok(written) => count += written,
                Err(error) => failures.add(family, || format!("rules of {}", family.name()), error.into()),
            }
        }
        count
    }
}

impl Dataplane for IpvsDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, super::Error> {
        let mut touched = BTreeSet::new();
        changes.removed.iter().for_each(|name| self.remove(name, &mut touched));
        changes.changed.iter().for_each(|port| self.set(port, &mut touched));
        Ok(self.write(touched)?)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, super::Error> {
        let mut touched = BTreeSet::new();
        let names: BTreeSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let gone: Vec<_> = self.wanted.names().filter(|name| !names.contains(name)).cloned().collect();
        gone.iter().for_each(|name| self.remove(name, &mut touched));
        desired.iter().for_each(|port| self.set(port, &mut touched));
        self.is_synced = true;
        Ok(self.write_everything(touched)?)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, super::Error> {
        let device = link::index(IPVS_DEVICE).map_err(Error::from)?;
        let own = link::addresses().map_err(Error::from)?.into_iter();
        let own = own.filter(|one| Some(one.interface) != device).map(|one| one.address);
        let before = self.site.clone();
        self.site.own_addresses = own.collect();
        self.site.host = host.clone();
        if self.site == before && self.is_host_written || !self.is_synced {
            return Ok(Applied::default());
        }
        let mut touched = BTreeSet::new();
        let ports: Vec<_> = self.desired.values().cloned().collect();
        ports.iter().for_each(|port| self.set(port, &mut touched));
        // After a write that failed, the kernel's state is not known.
        let is_known = mem::replace(&mut self.is_host_written, false);
        let applied = if is_known { self.write(touched)? } else { self.write_everything(touched)? };
        self.is_host_written = true;
        Ok(applied)
    }

    /// Removes destinations that take no new connections and have no old ones any more.
    fn collect_garbage(&mut self) -> Result<(), super::Error> {
        let mut changes = Vec::new();
        for socket in self.objects.draining() {
            let destinations = self.kernel.destinations(socket).map_err(Error::from)?;
            let done = destinations.into_iter().filter(|one| !one.is_used && one.connections == 0);
            changes
                .extend(done.map(|one| Change::Server(ServerChange::RemoveDestination(socket, one.address))));
        }
        let written = self.kernel.write(changes, &mut self.objects).map_err(Error::from)?;
        let mut failures = Failures::default();
        for (change, error) in written.refused {
            let key = change.key();
            failures.add(key.family(), || self.shown(key), error.into());
        }
        Ok(failures.into_result()?)
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        super::unserved::balancing(port, "mode ipvs chooses endpoints as ipvs.scheduler says, each alike")
    }

    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        self.refusals.take(&self.wanted, &self.desired)
    }
}

impl Programmed for IpvsDataplane {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        let objects = self.read(&BTreeSet::new())?;
        Ok(snapshot::snapshot(&objects, |socket| Some(self.wanted.server(socket)?.0.clone())))
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        Ok(usage(&self.objects))
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, super::Error> {
        let counts = self.family_rules.iter().map(|rules| (rules.family(), rules.failures()));
        Ok(vec![metrics::restore_failures(counts)])
    }
}

fn usage(objects: &KernelObjects) -> Usage {
    let destinations: usize = objects.servers.values().map(|server| server.destinations.len()).sum();
    let number =
        |name, used: usize| MapUsage { name, used: used as u64, capacity: 0, can_fill_up: false, bytes: 0 };
    let maps = vec![
        number("virtual_servers", objects.servers.len()),
        number("destinations", destinations),
        number("addresses", objects.addresses.len()),
        number("set_members", objects.members.len()),
    ];
    Usage { maps, reasons: Vec::new() }
}

/// The programmed state, read without a controller.
struct Read(KernelObjects);

/// Reads the programmed state. `None`: there is no device of this mode, or another kube-proxy has
/// written since.
fn read() -> Result<Option<Read>, Error> {
    if link::index(IPVS_DEVICE)?.is_none() || !cleanup::has_owner_tag(Mode::Ipvs)? {
        return Ok(None);
    }
    // The excluded networks are not known here, so the members of the sets show which virtual
    // servers are ours.
    Ok(Some(Read(System::open(IpFamily::ALL.into())?.read()?.without_others())))
}

impl Programmed for Read {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        Ok(snapshot::snapshot(&self.0, |_| None))
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        Ok(usage(&self.0))
    }
}

#[cfg(test)]
mod fake_kernel;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod write_tests;
