//! Reads from the pins what is really in the maps. It works with the controller down and changes
//! nothing.

use std::{
    collections::{BTreeMap, HashSet},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd as _, AsRawFd, OwnedFd},
    path::Path,
    time::Duration,
};

use proxy_common::{
    family::{Slot as _, V4, V6},
    inventory::{Limit, map_name},
    layout::{
        BACKEND_LOCAL, BACKEND_TERMINATING, EndpointSet, FRONTEND_EXTERNAL, Lease, NODE_ADDRESS_LOOPBACK,
        SCOPE_NODE_PORT, SERVICE_EXTERNAL_LOCAL, SERVICE_HAS_ENDPOINTS, SERVICE_INTERNAL_LOCAL, Service,
    },
    reason::{Reason, Verdict},
};

use super::{events::Events, flows::Newest};
use crate::{
    config::Limits,
    model::{
        desired::ServicePortName,
        objects::{Algorithm, TrafficPolicy},
    },
    modes::{
        self, BackendSnapshot, EndpointSnapshot, EventQuery, EventStream, FlowQuery, FlowSnapshot,
        FrontendSnapshot, Hook, MapUsage, NodeSnapshot, OtherProgram, Programmed, ReasonUsage,
        ServiceSnapshot, ServiceUsage, Snapshot, Usage,
        ebpf::{
            Error,
            hooks::attach::filters::is_ours,
            maps::{
                family::MapFamily,
                handles::{CommonMaps, FamilyMaps, Shape, counts::Counted, open_pinned, shapes},
                paths::{Paths, is_there},
            },
            services::entries,
        },
        source_ports::runs,
    },
    sys::{
        CallError, bpf,
        net::tc::{self, Direction},
        proc::{clock, lock},
    },
};

/// The pinned maps of this layout version, for reading.
#[derive(Debug)]
pub struct Pinned {
    common: CommonMaps,
    v4: FamilyMaps<V4>,
    v6: FamilyMaps<V6>,
    paths: Paths,
}

/// Returns the process that writes the maps below the bpffs at this path. It may only just have
/// begun to make them.
///
/// It is `None` if there is no such process, or if the kernel does not report it, as for a process
/// of another PID namespace.
pub fn controller(bpffs: &Path) -> Option<u32> {
    lock::holder_of(&Paths::new(bpffs).top)
}

/// Returns the ports for translated sources, in the order in which they are taken.
pub(crate) fn masquerade_ports(maps: &CommonMaps) -> Result<Vec<u16>, Error> {
    let count = usize::from(maps.settings.get(&0)?.unwrap_or_default().masquerade_ports);
    let map = &maps.masquerade_ports;
    let mut ports = Vec::with_capacity(count);
    for index in 0..count.div_ceil(super::super::node::FOUR).min(map.len()) {
        map.provide(index).map_err(|source| Error::Map { name: map_name::masquerade_ports, source })?;
        ports.extend(map.get(index).unwrap_or_default().ports);
    }
    ports.truncate(count);
    Ok(ports)
}

/// Reads the maps of a dataplane or of the pins.
pub(crate) struct Reader<'a> {
    pub(crate) common: &'a CommonMaps,
    pub(crate) v4: &'a FamilyMaps<V4>,
    pub(crate) v6: &'a FamilyMaps<V6>,
    pub(crate) paths: &'a Paths,
}

impl Pinned {
    /// Opens the maps below the bpffs at this path; [`Error::NotThere`] if there are none. A folder
    /// that the caller may not read gives another error, because maps may be in it.
    pub fn open(bpffs: &Path) -> Result<Self, Error> {
        let paths = Paths::new(bpffs);
        let folder = paths.maps();
        if !is_there(&folder)? {
            return Err(Error::NotThere(bpffs.to_owned()));
        }
        Ok(Self {
            common: CommonMaps::open(&folder, false)?,
            v4: FamilyMaps::open(&folder, false)?,
            v6: FamilyMaps::open(&folder, false)?,
            paths,
        })
    }

    fn reader(&self) -> Reader<'_> {
        let Self { common, v4, v6, paths } = self;
        Reader { common, v4, v6, paths }
    }
}

impl Programmed for Pinned {
    fn flows(&self, query: &FlowQuery<'_>) -> Result<Option<Vec<FlowSnapshot>>, modes::Error> {
        let mut newest = Newest::new(query, clock::since_boot());
        newest.add(&self.common, &self.v4)?;
        newest.add(&self.common, &self.v6)?;
        Ok(Some(newest.finish()))
    }

    fn watch(&self, query: EventQuery) -> Result<Option<Box<dyn EventStream>>, modes::Error> {
        Ok(Some(Box::new(Events::begin(self.paths.clone(), query)?)))
    }

    fn snapshot(&self) -> Result<Snapshot, modes::Error> {
        Ok(self.reader().snapshot()?)
    }

    fn usage(&self) -> Result<Usage, modes::Error> {
        Ok(self.reader().usage()?)
    }
}

impl Reader<'_> {
    pub(crate) fn snapshot(&self) -> Result<Snapshot, Error> {
        let services = self.services()?;
        Ok(Snapshot {
            backends: self.backends(&services)?,
            services,
            node: self.node()?,
            hooks: self.hooks()?,
            lease: self.lease()?,
        })
    }

    fn lease(&self) -> Result<Option<Duration>, Error> {
        let Lease { end } = self.common.lease.get(&0)?.unwrap_or_default();
        Ok((end != 0).then(|| Duration::from_nanos(end.saturating_sub(clock::since_boot()))))
    }

    /// Returns the service ports, sorted by name.
    fn services(&self) -> Result<Vec<ServiceSnapshot>, Error> {
        let mut frontends = BTreeMap::new();
        read_frontends(self.v4, &mut frontends)?;
        read_frontends(self.v6, &mut frontends)?;
        let mut services = Vec::new();
        for (id, name) in self.common.names.read_all()? {
            let Some(name) = entries::port_name(&name) else { continue };
            let service = self.common.services.get(id as usize).unwrap_or_default();
            let endpoints = |set| match name.family {
                crate::model::objects::IpFamily::Ipv4 => read_set(self.v4, set),
                crate::model::objects::IpFamily::Ipv6 => read_set(self.v6, set),
            };
            let Service { cluster, internal, external, flags, affinity_seconds } = service;
            let (cluster, internal, external) =
                (endpoints(cluster), endpoints(internal), endpoints(external));
            let mut frontends = frontends.remove(&id).unwrap_or_default();
            frontends.sort_unstable();
            services.push(ServiceSnapshot {
                id,
                frontends,
                cluster,
                internal,
                external,
                secondary: None,
                any_endpoints: flags & SERVICE_HAS_ENDPOINTS != 0,
                internal_policy: policy(flags & SERVICE_INTERNAL_LOCAL != 0),
                external_policy: policy(flags & SERVICE_EXTERNAL_LOCAL != 0),
                affinity_seconds,
                algorithm: entries::algorithm(flags),
                forwarding: entries::forwarding(flags),
                name,
            });
        }
        services.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(services)
    }

    /// Returns the backends, sorted by address.
    fn backends(&self, services: &[ServiceSnapshot]) -> Result<Vec<BackendSnapshot>, Error> {
        let mut backends = Vec::new();
        read_backends(self.v4, &mut backends)?;
        read_backends(self.v6, &mut backends)?;
        let counted = self.v4.connections.read()?;
        let chosen: HashSet<u32> = services
            .iter()
            .filter(|service| service.algorithm == Algorithm::LeastConnection)
            .flat_map(|service| service.cluster.iter().chain(&service.internal).chain(&service.external))
            .map(|endpoint| endpoint.backend)
            .collect();
        for backend in backends.iter_mut().filter(|backend| chosen.contains(&backend.id)) {
            backend.connections = Some(counted.get(&backend.id).map_or(0, Counted::open));
        }
        backends.sort_unstable_by_key(|backend| (backend.address, backend.id));
        Ok(backends)
    }

    fn node(&self) -> Result<NodeSnapshot, Error> {
        let settings = self.common.settings.get(&0)?.unwrap_or_default();
        let mut node_port_addresses = Vec::new();
        read_addresses(self.v4, &mut node_port_addresses)?;
        read_addresses(self.v6, &mut node_port_addresses)?;
        node_port_addresses.sort_unstable();
        let masquerade = [V4::ip(settings.masquerade4), V6::ip(settings.masquerade6)];
        let targets = self.common.redirect_targets.read_all()?;
        Ok(NodeSnapshot {
            redirect_targets: targets.into_iter().map(|(_, target)| target.interface).collect(),
            node_port_addresses,
            masquerade_addresses: masquerade.into_iter().filter(|ip| !ip.is_unspecified()).collect(),
            masquerade_ports: runs(&masquerade_ports(self.common)?),
            host_namespace: settings.host_namespace,
            encapsulation: entries::encapsulation(settings.encapsulation),
        })
    }

    /// Returns how full the maps are, by counting their entries, and the counters.
    fn usage(&self) -> Result<Usage, Error> {
        let mut used = BTreeMap::new();
        count_family(self.v4, &mut used)?;
        count_family(self.v6, &mut used)?;
        let names = self.common.names.read_all()?.len() as u64;
        used.extend([(map_name::services, names), (map_name::service_names, names)]);
        used.extend([(map_name::settings, 1), (map_name::lease, 1), (map_name::event_control, 1)]);
        let ports = masquerade_ports(self.common)?.len().div_ceil(super::super::node::FOUR);
        used.insert(map_name::masquerade_ports, ports as u64);
        used.insert(map_name::interfaces, self.common.interfaces.read_all()?.len() as u64);
        used.insert(map_name::vlan_devices, self.common.vlan_devices.read_all()?.len() as u64);
        used.insert(map_name::pod_namespaces, self.common.pod_namespaces.read_all()?.len() as u64);
        used.insert(map_name::redirect_sources, self.common.redirect_sources.read_all()?.len() as u64);
        used.insert(map_name::redirect_targets, self.common.redirect_targets.read_all()?.len() as u64);
        used.extend(self.v4.connections.used()?);
        let services = self.services()?;
        let counters = self.common.service_counters.capacity();
        let counted = services.iter().filter(|service| service.id < counters).count();
        used.insert(map_name::service_counters, counted as u64);
        for (name, family) in [
            (V4::SLOTS, crate::model::objects::IpFamily::Ipv4),
            (V6::SLOTS, crate::model::objects::IpFamily::Ipv6),
        ] {
            let of_family = services.iter().filter(|service| service.name.family == family);
            let slots = of_family.map(|service| {
                let service = self.common.services.get(service.id as usize).unwrap_or_default();
                u64::from(entries::span([service.cluster, service.internal, service.external]).count)
            });
            used.insert(name, slots.sum());
        }
        // Only the controller knows which maps may grow, and up to which size.
        usage(&self.paths.maps(), &shapes(&Limits::default()), &[], &used, self.common)
    }

    fn hooks(&self) -> Result<Vec<Hook>, Error> {
        let links = super::super::maps::paths::names(&self.paths.links())?;
        let mut hooks: Vec<_> = links.iter().map(|link| hook(link)).collect();
        for hook in hooks.iter_mut().filter(|hook| hook.kind == "tcx") {
            hook.others = self.others_by_tcx(hook);
        }
        for index in super::super::maps::paths::names(&self.paths.clsact())? {
            let interface = index.parse().ok();
            let others = interface.map(others_by_clsact).unwrap_or_default();
            hooks.push(Hook { name: "ingress, egress".into(), interface, kind: "clsact", others });
        }
        hooks.sort_unstable();
        Ok(hooks)
    }

    /// Returns the programs of others at the hook of one of our links. What cannot be read is left
    /// out.
    fn others_by_tcx(&self, hook: &Hook) -> Vec<OtherProgram> {
        let Some(interface) = hook.interface else { return Vec::new() };
        let direction = Direction::ALL.into_iter().find(|direction| direction.name() == hook.name);
        let link = self.paths.links().join(format!("{interface}_{}", hook.name));
        let ours = bpf::pinned(&link).and_then(|link| bpf::link_info(link.as_fd())).map(|info| info.program);
        let (Some(direction), Ok(ours)) = (direction, ours) else { return Vec::new() };
        let programs = tc::tcx_programs(interface, direction).unwrap_or_default();
        others(direction, programs.into_iter().map(|one| (one.name, one.id == ours)).collect())
    }
}

/// Returns the programs of others among the filters of an interface. There are none if it is gone.
fn others_by_clsact(interface: u32) -> Vec<OtherProgram> {
    let of_direction = |direction: Direction| {
        let filters = tc::filters(interface, direction).unwrap_or_default();
        let programs = filters.iter().map(|filter| (filter.name.clone(), is_ours(filter))).collect();
        others(direction, programs)
    };
    Direction::ALL.into_iter().flat_map(of_direction).collect()
}

/// Returns the programs that are not ours. `programs` has the name of each in the order in which
/// they run, and true for ours.
fn others(direction: Direction, programs: Vec<(String, bool)>) -> Vec<OtherProgram> {
    let ours = programs.iter().position(|(_, is_ours)| *is_ours);
    let programs = programs.into_iter().enumerate().filter(|(_, (_, is_ours))| !is_ours);
    let other = |(position, (name, _))| OtherProgram {
        name,
        hook: direction.name(),
        is_before: ours.is_none_or(|ours| position < ours),
    };
    programs.map(other).collect()
}

/// Returns the hook that a link's name stands for: `cgroup_connect4`, `3_ingress`, `3_xdp_native`.
fn hook(link: &str) -> Hook {
    let (target, name) = link.split_once('_').unwrap_or(("", link));
    let (name, kind) = match name.split_once('_') {
        Some(("xdp", mode)) => (mode, "xdp"),
        _ if target == "cgroup" => (name, "cgroup"),
        _ => (name, "tcx"),
    };
    Hook { name: name.to_owned(), interface: target.parse().ok(), kind, others: Vec::new() }
}

fn policy(is_local: bool) -> TrafficPolicy {
    if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster }
}

fn read_frontends<F: MapFamily>(
    maps: &FamilyMaps<F>,
    of_service: &mut BTreeMap<u32, Vec<FrontendSnapshot>>,
) -> Result<(), Error> {
    let found = maps.frontends.read_all()?;
    for (key, frontend) in found.into_iter().filter(|(key, _)| !key.is_cluster_ip()) {
        of_service.entry(frontend.service).or_default().push(FrontendSnapshot {
            address: (key.scope != SCOPE_NODE_PORT).then(|| F::ip(key.address)),
            port: key.port().number(),
            external: frontend.flags & FRONTEND_EXTERNAL != 0,
        });
    }
    Ok(())
}

fn read_set<F: MapFamily>(maps: &FamilyMaps<F>, set: EndpointSet) -> Vec<EndpointSnapshot> {
    let range = set.first..set.first.saturating_add(set.count());
    let slots = range.map_while(|index| maps.slots.get(index as usize));
    slots
        .map(|slot| EndpointSnapshot {
            address: SocketAddr::new(F::ip(slot.address()), slot.port().number()),
            local: slot.flags() & BACKEND_LOCAL != 0,
            backend: slot.backend(),
        })
        .collect()
}

fn read_backends<F: MapFamily>(maps: &FamilyMaps<F>, into: &mut Vec<BackendSnapshot>) -> Result<(), Error> {
    let found = maps.backends.read_all()?;
    into.extend(found.into_iter().map(|(id, backend)| BackendSnapshot {
        id,
        address: SocketAddr::new(F::ip(backend.address), backend.port),
        protocol: entries::protocol(backend.protocol),
        local: backend.flags & BACKEND_LOCAL != 0,
        terminating: backend.state == BACKEND_TERMINATING,
        uses: backend.uses,
        connections: None,
    }));
    Ok(())
}

fn read_addresses<F: MapFamily>(maps: &FamilyMaps<F>, into: &mut Vec<(IpAddr, bool)>) -> Result<(), Error> {
    let found = maps.node_addresses.read_all()?;
    into.extend(
        found.into_iter().map(|(address, value)| (F::ip(address), value.flags & NODE_ADDRESS_LOOPBACK != 0)),
    );
    Ok(())
}

fn count_family<F: MapFamily>(
    maps: &FamilyMaps<F>,
    used: &mut BTreeMap<&'static str, u64>,
) -> Result<(), Error> {
    used.extend([
        (F::FRONTENDS, maps.frontends.read_all()?.len() as u64),
        (F::BACKENDS, maps.backends.read_all()?.len() as u64),
        (F::FLOWS, maps.flows.read_all()?.len() as u64),
        (F::OPENING_FLOWS, maps.opening_flows.read_all()?.len() as u64),
        (F::AFFINITY, maps.affinity.read_all()?.len() as u64),
        (F::SOURCE_RANGES, maps.source_ranges.read_all()?.len() as u64),
        (F::SERVICE_CIDRS, maps.service_cidrs.read_all()?.len() as u64),
        (F::NODE_ADDRESSES, maps.node_addresses.read_all()?.len() as u64),
    ]);
    Ok(())
}

/// The maps that always have all their entries, and those whose entries evict each other. Socket
/// storage has no size of its own, so it needs no mention.
const NEVER_FULL: [&str; 12] = [
    map_name::frontend_addresses4,
    map_name::frontend_addresses6,
    map_name::settings,
    map_name::lease,
    map_name::event_control,
    map_name::counters,
    map_name::masquerade_ports,
    map_name::remapped_ports,
    map_name::fragments4,
    map_name::fragments6,
    map_name::host_connections4,
    map_name::host_connections6,
];

/// Returns the capacities and sizes of the maps in `folder`, their known use, and the counters.
/// A map of a limit in `may_grow` has the capacity that it can grow to.
pub(crate) fn usage(
    folder: &Path,
    shapes: &[Shape],
    may_grow: &[Limit],
    used: &BTreeMap<&'static str, u64>,
    common: &CommonMaps,
) -> Result<Usage, Error> {
    let mut usage = Usage { reasons: reasons(common)?, maps: Vec::new() };
    for shape in shapes.iter().filter(|shape| shape.has_entries()) {
        let failed = |source: CallError| Error::Map { name: shape.name, source };
        let Some(fd) = open_pinned(&folder.join(shape.name)).map_err(failed)? else { continue };
        let info = bpf::map_info(std::os::fd::AsFd::as_fd(&fd)).map_err(failed)?;
        let most = if shape.limit.is_some_and(|limit| may_grow.contains(&limit)) { shape.most } else { 0 };
        usage.maps.push(MapUsage {
            name: shape.name,
            used: used.get(shape.name).copied().unwrap_or(0),
            capacity: u64::from(info.max_entries.max(most)),
            can_fill_up: info.max_entries > 0 && !NEVER_FULL.contains(&shape.name),
            bytes: bytes(&fd),
        });
    }
    Ok(usage)
}

fn reasons(common: &CommonMaps) -> Result<Vec<ReasonUsage>, Error> {
    let usage = |reason: &Reason| {
        Ok(ReasonUsage { name: reason.name(), verdict: verdict(*reason), count: common.counted(*reason)? })
    };
    Reason::ALL.iter().map(usage).collect()
}

pub(crate) fn verdict(reason: Reason) -> &'static str {
    match reason.verdict() {
        Verdict::Pass => "pass",
        Verdict::Refuse => "refuse",
        Verdict::Drop => "drop",
    }
}

/// Returns the counters of the service ports, and the number of service ports without room for
/// counters.
pub(crate) fn service_usage<'a>(
    common: &CommonMaps,
    ports: impl Iterator<Item = (u32, &'a ServicePortName)>,
) -> Result<(Vec<ServiceUsage>, u64), Error> {
    let failed = |source| Error::Map { name: map_name::service_counters, source };
    let (mut counted, mut uncounted) = (Vec::new(), 0);
    for (id, name) in ports {
        if id >= common.service_counters.capacity() {
            uncounted += 1;
            continue;
        }
        let mut usage = ServiceUsage { name: name.clone(), connections: 0, packets: 0, bytes: 0 };
        for counters in common.service_counters.get(id).map_err(failed)?.iter() {
            usage.connections = usage.connections.wrapping_add(counters.connections);
            usage.packets = usage.packets.wrapping_add(counters.packets);
            usage.bytes = usage.bytes.wrapping_add(counters.bytes);
        }
        counted.push(usage);
    }
    Ok((counted, uncounted))
}

/// Returns the bytes of kernel memory that a map takes, as the kernel accounts them. Returns 0 if
/// the kernel does not report them.
fn bytes(fd: &OwnedFd) -> u64 {
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    std::fs::read_to_string(path).map_or(0, |text| memlock(&text))
}

fn memlock(fdinfo: &str) -> u64 {
    fdinfo
        .lines()
        .find_map(|line| line.strip_prefix("memlock:"))
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, thread};

    use nix::unistd::{Uid, setfsuid};
    use rstest::rstest;
    use tempfile::TempDir;

    use super::*;
    use crate::modes::ebpf::cleanup::cleanup;

    /// Gives up the rights that root has over files, in the calling thread alone.
    fn become_nobody() {
        setfsuid(Uid::from_raw(65_534));
    }

    #[test]
    fn maps_that_may_not_be_looked_for_are_not_absent_ones() {
        let bpffs = TempDir::new().unwrap();
        let open = || modes::Error::from(Pinned::open(bpffs.path()).unwrap_err());
        assert!(!open().is_denied(), "nothing is there");
        let ours = bpffs.path().join("proxy-ctl");
        fs::create_dir(&ours).unwrap();
        fs::set_permissions(&ours, fs::Permissions::from_mode(0o000)).unwrap();
        let of_nobody = || {
            become_nobody();
            (open(), cleanup(bpffs.path()).map_err(modes::Error::from))
        };
        let (opened, cleaned) = thread::scope(|scope| scope.spawn(of_nobody).join()).unwrap();
        assert!(opened.is_denied() && opened.to_string().contains("Permission denied"), "{opened}");
        assert!(cleaned.unwrap_err().is_denied());
    }

    #[rstest]
    #[case::alone(&["ours"], &[])]
    #[case::behind(&["ours", "cil_to_netdev"], &[("cil_to_netdev", false)])]
    #[case::around(&["a", "ours", "b"], &[("a", true), ("b", false)])]
    #[case::ours_is_gone(&["a"], &[("a", true)])]
    fn programs_of_others_have_a_position(#[case] names: &[&str], #[case] expected: &[(&str, bool)]) {
        let programs = names.iter().map(|name| ((*name).to_owned(), *name == "ours")).collect();
        let found = others(Direction::Egress, programs);
        assert!(found.iter().all(|other| other.hook == "egress"));
        let found: Vec<_> = found.iter().map(|other| (other.name.as_str(), other.is_before)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn hooks_are_known_by_the_names_of_their_links() {
        let hook_of =
            |name: &str, interface, kind| Hook { name: name.into(), interface, kind, others: Vec::new() };
        assert_eq!(hook("cgroup_connect4"), hook_of("connect4", None, "cgroup"));
        assert_eq!(hook("7_egress"), hook_of("egress", Some(7), "tcx"));
        assert_eq!(hook("7_xdp_native"), hook_of("native", Some(7), "xdp"));
    }

    #[test]
    fn memory_is_read_from_fdinfo() {
        assert_eq!(memlock("pos:\t0\nmap_type:\t1\nmemlock:\t8912\nmap_id:\t4\n"), 8912);
        assert_eq!(memlock("pos:\t0\n"), 0);
    }
}
