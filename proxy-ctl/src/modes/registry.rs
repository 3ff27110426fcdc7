//! Leads from the name of a mode to its [`Entry`]. A new mode has a line in [`entry`].

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use ipnet::IpNet;

use super::{
    Dataplane, Error, ErrorKind,
    conntrack::{self, WithConntrack},
    ebpf,
    entry::{BoxedProgrammed, Entry, Removed, TrackedFlows},
    iptables, ipvs, netfilter, nftables,
    secondary::{SecondaryMode, WithSecondary, dialled::DialledFrontends},
    source_ports::SourcePorts,
    userspace,
};
use crate::{
    cleanup::{self, Remains},
    config::{Config, SocketLoadBalancing},
    model::{
        mode::{HostFacts, Mode, Probe},
        node::PortRange,
    },
};

const fn entry(mode: Mode) -> &'static Entry {
    match mode {
        Mode::Ebpf => &ebpf::ENTRY,
        Mode::Nftables => &nftables::ENTRY,
        Mode::Iptables => &iptables::ENTRY,
        Mode::Ipvs => &ipvs::ENTRY,
        Mode::Userspace => &userspace::ENTRY,
    }
}

fn entries() -> impl Iterator<Item = (Mode, &'static Entry)> {
    Mode::ALL.into_iter().map(|mode| (mode, entry(mode)))
}

/// Returns what each mode needs, and whether this node has it. It changes nothing.
pub fn probe(config: &Config, host: &HostFacts) -> Vec<Probe> {
    entries().map(|(_, entry)| (entry.probe)(config, host)).collect()
}

/// Has the kernel load the modules that the mode needs, where it can. Returns the modules that are
/// missing after that, each with the reason. `None`: no module is asked for, because the kernel and
/// the tools load modules when they use them.
pub fn load(mode: Mode, config: &Config, host: &HostFacts) -> Option<BTreeMap<String, String>> {
    (mode == Mode::Ipvs).then(|| ipvs::load::load(config, host))
}

/// Returns fields, and whole sections, that have no effect in this mode.
pub fn unused_fields(mode: Mode, config: &Config) -> Vec<&'static str> {
    match mode {
        Mode::Ebpf => ebpf::probe::unused_fields(config),
        Mode::Nftables => nftables::probe::UNUSED_FIELDS.to_vec(),
        Mode::Iptables => iptables::probe::UNUSED_FIELDS.to_vec(),
        Mode::Ipvs => ipvs::probe::UNUSED_FIELDS.to_vec(),
        Mode::Userspace => userspace::probe::UNUSED_FIELDS.to_vec(),
    }
}

/// Returns the shortest interval between two calls of [`Dataplane::apply`]. `configured` is the
/// mode's `minSyncPeriod`.
pub fn min_interval(mode: Mode, configured: Duration) -> Duration {
    if entry(mode).keeps_min_sync_period { configured } else { Duration::ZERO }
}

/// Does the part of opening this mode that needs all privileges.
pub fn prepare(mode: Mode, config: &Config) -> Result<(), Error> {
    (entry(mode).prepare)(config)
}

/// Returns true if the mode needs [`crate::model::node::Host::service_cidrs`].
pub fn reads_service_cidrs(mode: Mode, config: &Config) -> bool {
    (entry(mode).reads_service_cidrs)(config)
}

/// Returns true if the mode translates connections of the node's own processes in `connect()`.
pub fn translates_in_connect(mode: Mode, config: &Config) -> bool {
    mode == Mode::Ebpf && config.ebpf.sockets() != SocketLoadBalancing::Off
}

/// The active mode of a node and its secondary mode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Modes {
    pub active: Mode,
    /// The secondary mode, which serves what `active` cannot.
    pub secondary: Option<Mode>,
}

impl Modes {
    /// Returns `mode` with its secondary mode: the first of `probes` that may be one and can run.
    pub fn new(mode: Mode, probes: &[Probe]) -> Self {
        let can = |probe: &&Probe| entry(probe.mode).can_be_secondary && probe.can_run();
        let secondary = if entry(mode).delegates { probes.iter().find(can) } else { None };
        Self { active: mode, secondary: secondary.map(|probe| probe.mode) }
    }
}

/// Opens the node's dataplane. It adopts what a predecessor has left of these modes.
pub fn open(modes: Modes, config: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error> {
    let Modes { active: active_mode, secondary } = modes;
    let dataplane = open_one(active_mode, config)?;
    Ok(match secondary {
        None => dataplane,
        Some(mode) => {
            let secondary = Secondary { mode, active_mode, config: Arc::clone(config) };
            Box::new(WithSecondary::new(dataplane, Box::new(secondary)))
        }
    })
}

fn open_one(mode: Mode, config: &Config) -> Result<Box<dyn Dataplane>, Error> {
    let entry = entry(mode);
    let dataplane = (entry.open)(config)?;
    Ok(match entry.tracked_flows {
        TrackedFlows::None => dataplane,
        TrackedFlows::Former => Box::new(WithConntrack::of_former_proxy(dataplane)),
        TrackedFlows::All => Box::new(WithConntrack::new(dataplane)),
    })
}

/// Returns the modes other than this one that a predecessor has programmed. What this process may
/// not read, it may not remove either, so such a mode is left out.
pub fn to_drain(active_mode: Mode, config: &Config) -> Result<Vec<Mode>, Error> {
    let mut modes = Vec::new();
    for (mode, entry) in entries().filter(|(mode, _)| *mode != active_mode) {
        let is_left = match mode {
            // Mode userspace is read from its process, which has ended. So its rules are looked
            // for.
            Mode::Userspace => userspace::has_rules(),
            Mode::Ebpf | Mode::Nftables | Mode::Iptables | Mode::Ipvs => {
                (entry.read)(&config.ebpf.bpffs).map(|programmed| programmed.is_some())
            }
        };
        match is_left {
            Err(error) if error.is_denied() => {}
            is_left => modes.extend(is_left?.then_some(mode)),
        }
    }
    Ok(modes)
}

/// Opens what a predecessor has programmed of this mode, if connections would end with it.
pub fn open_to_drain(mode: Mode, config: &Config) -> Result<Option<Box<dyn Dataplane>>, Error> {
    if entry(mode).drains { open_one(mode, config).map(Some) } else { Ok(None) }
}

/// Removes what this mode has programmed. Its dataplane must have been dropped, and another mode
/// must be active. Connections that netfilter translates go on.
///
/// Returns false if virtual servers with connections stay until these have ended. `remains` is what
/// the attempt before has found of this mode.
pub fn remove_drained(
    mode: Mode,
    active_mode: Mode,
    config: &Config,
    remains: &mut Remains,
) -> Result<bool, Error> {
    let entry = entry(mode);
    if entry.drains {
        (entry.cleanup)(&config.ebpf.bpffs, &config.ipvs.exclude_cidrs)?;
        return cleanup::remove_holders().map(|()| true).map_err(|error| Error::new(ErrorKind::Other, error));
    }
    // The cleanup finds this mode's rules by their names. No mode but the active ones may have any.
    remains
        .remove(mode, &config.ipvs.exclude_cidrs, translates_in_connect(active_mode, config))
        .map_err(|error| Error::new(ErrorKind::Other, error))
}

/// Returns the source ports that rules of netfilter may use for masquerading while these modes are
/// active or drain. If mode ebpf is one of them, the other ports are left to its programs. `None`:
/// every port may be used.
pub fn masquerade_ports(modes: impl IntoIterator<Item = Mode>) -> Option<PortRange> {
    modes.into_iter().any(|mode| entry(mode).drains).then(|| SourcePorts::read().netfilter)
}

struct Secondary {
    mode: Mode,
    active_mode: Mode,
    config: Arc<Config>,
}

impl SecondaryMode for Secondary {
    fn mode(&self) -> Mode {
        self.mode
    }

    fn open(&self) -> Result<Box<dyn Dataplane>, Error> {
        open_one(self.mode, &self.config)
    }

    fn has_connections(&self, to: &DialledFrontends) -> Result<bool, Error> {
        if self.active_mode != Mode::Ebpf {
            // No connection breaks when the secondary mode is removed: the rules of mode userspace
            // make the kernel go on translating connections.
            return Ok(false);
        }
        conntrack::has_translated_connections(|dialled| to.has(dialled))
            .map_err(|error| Error::new(ErrorKind::Other, error))
    }

    fn remove(&self) -> Result<(), Error> {
        (entry(self.mode).cleanup)(&self.config.ebpf.bpffs, &self.config.ipvs.exclude_cidrs).map(drop)
    }
}

/// Reads what is programmed on this node, without a controller. If a mode cannot be read, as by an
/// ordinary user, the others are still read.
pub fn read(bpffs: &Path) -> Result<Option<(Mode, BoxedProgrammed)>, Error> {
    let mut failure = None;
    for (mode, entry) in entries() {
        match (entry.read)(bpffs) {
            Ok(Some(programmed)) => return Ok(Some((mode, programmed))),
            Ok(None) => {}
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(None), Err)
}

/// Reads what is programmed of this mode.
pub fn read_mode(mode: Mode, bpffs: &Path) -> Result<Option<BoxedProgrammed>, Error> {
    (entry(mode).read)(bpffs)
}

/// Returns the process that programs this node. It may only just have begun. `None`: there is no
/// such process, or the kernel does not report it, as for a process of another PID namespace.
pub fn controller(bpffs: &Path) -> Option<u32> {
    entries().find_map(|(_, entry)| (entry.controller)(bpffs))
}

/// Removes everything that any mode has programmed, and nothing else. `keeps` is
/// `ipvs.excludeCIDRs`.
pub fn cleanup(bpffs: &Path, keeps: &[IpNet]) -> Result<Removed, Error> {
    let mut all = Removed::default();
    let mut entries: Vec<_> = entries().collect();
    // A process that was killed while it switched between modes ipvs and iptables leaves rules of
    // both. The rules of the former mode go first. They jump to chains of both modes, which the
    // mode that wrote them last removes. An error here is ignored, because the cleanup of that mode
    // reports it.
    entries.sort_by_key(|(mode, _)| !cleanup::is_overwritten(*mode).unwrap_or(false));
    for (_, entry) in entries {
        let Removed { links, filters, objects } = (entry.cleanup)(bpffs, keeps)?;
        all.links.extend(links);
        all.filters += filters;
        all.objects.extend(objects);
    }
    let of_health_checks = netfilter::health_checks::remove();
    all.objects.extend(of_health_checks.map_err(|error| Error::new(ErrorKind::Other, error))?);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(Mode::Ebpf, true)]
    #[case(Mode::Nftables, true)]
    #[case(Mode::Userspace, true)]
    #[case(Mode::Iptables, false)]
    #[case(Mode::Ipvs, false)]
    fn modes_that_write_at_once_do_not_use_the_shortest_interval(#[case] mode: Mode, #[case] unused: bool) {
        let config = Config::default();
        let fields = ["iptables.minSyncPeriod", "ipvs.minSyncPeriod", "nftables.minSyncPeriod"];
        let said = unused_fields(mode, &config);
        assert_eq!(fields.map(|field| said.contains(&field)), [unused; 3]);
        assert_eq!(min_interval(mode, Duration::from_secs(1)).is_zero(), unused);
    }
}
