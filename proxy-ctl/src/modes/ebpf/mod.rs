//! The eBPF mode, which writes the desired state into maps that kernel programs read.
//!
//! [`EbpfDataplane`] ties these modules together:
//!
//! - [`maps`] opens the maps and restores their pins.
//! - [`services`] computes what the maps must hold, and writes it in an order that leaves no hole.
//! - [`hooks`] puts the programs where packets and system calls pass.
//! - [`connections`] ends what has expired, and whatever refers to backends that are gone.
//!
//! [`view`] and [`cleanup`] work on the pins alone, with the controller down.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, UdpSocket},
    os::fd::AsFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use aya::Pod;
use aya_obj::generated::bpf_attach_type;
use ipnet::IpNet;
use proxy_common::{
    family::{V4, V6},
    flow::{self, FlowLifetimes},
    inventory::{program, table},
    layout::{
        Address as _, FourPorts, INTERFACE_OF_BRIDGE, INTERFACE_OF_PODS, INTERFACE_OF_UPLINK,
        INTERFACE_WITHOUT_LINK_HEADERS, InterfaceSettings, NODE_ADDRESS_LOOPBACK, NodeAddress,
        PODS_BY_INTERFACE, PODS_BY_SOURCE, PODS_UNKNOWN, Settings,
    },
};

use self::{
    connections::{
        affinity::AffinityCollector,
        count::SocketCounter,
        expire::Collector,
        moved_ports::MovedPorts,
        netfilter_ports::{KeepPorts, ListRest},
        stale_sockets::StaleSockets,
        unknown::Circumstances,
    },
    flow_maps::{FlowMaps, HELD_FOR},
    growth::{Demand, Growth, Larger, load_beside, make_larger},
    hooks::{
        attach::{Cgroup, Hooks},
        lease::LeaseRenewal,
        program_log::KernelLog,
        xdp::attach::{Redirects, Transit, vlan_devices},
    },
    left_to_node::LeftToNode,
    maps::{
        family::TableFamily,
        filling::Filling,
        paths::Paths,
        pins::TablePins,
        tables::{CommonTables, FamilyTables, Shape, Table},
    },
    services::{
        addresses::service_cidrs::ServiceCidrs,
        adopt::Stray,
        allocate::{Range, Ranges},
        programmed::Entries,
        publish::remove_service,
        writer::{Common, Failures, FamilyWriter, Writes},
    },
    view::status::{Pinned, Reader},
};
use super::{
    Applied, Dataplane, HookProblems, MetricFamily, PacketPrograms, Programmed, Snapshot, Unsupported, Usage,
    entry::{Entry, TrackedFlows},
    source_ports::SourcePorts,
};
use crate::{
    config::{Ebpf, SocketLoadBalancing},
    model::{
        desired::{Changes, DesiredPort, ServicePortName},
        node::{Host, Interface, LocalTraffic, Role},
        objects::Algorithm,
    },
    sys::{
        CallError,
        bpf::grace::GracePeriod,
        net::{conntrack::Conntrack, namespace, socket_diag::Transport},
        proc::{clock, filesystem, limits, machine::Machine},
    },
};

pub mod cleanup;
mod connections;
mod error;
mod flow_maps;
mod growth;
pub mod hooks;
mod left_to_node;
mod maps;
pub(super) mod probe;
mod services;
mod supports;
pub mod view;

#[cfg(test)]
pub(crate) use self::view::metrics::sample_metrics;
pub use self::{
    error::{Difference, Error},
    hooks::load::{OBJECT, OBJECT_BUILT_WITH},
};

/// The maps and hooks of this node. Dropping it leaves all of them in place.
#[derive(Debug)]
pub struct EbpfDataplane {
    shared: Common,
    v4: FamilyWriter<V4>,
    v6: FamilyWriter<V6>,
    flows4: Collector<V4>,
    flows6: Collector<V6>,
    moved_ports: MovedPorts,
    affinity: AffinityCollector,
    flow_lifetimes: FlowLifetimes,
    /// The node's interfaces as of the last `set_host`.
    interfaces: Vec<Interface>,
    /// True if CNI's bandwidth plugin was seen on the node.
    is_beside_plugin: bool,
    /// True if [`Dataplane::attach`] attaches to interfaces, because nothing is attached there yet.
    ///
    /// Programs of a predecessor are replaced in `set_host` instead, because they must not meet
    /// what this version writes.
    attaches_later: bool,
    hooks: Hooks,
    host_namespace: u64,
    shapes: Vec<Shape>,
    config: Ebpf,
    bpffs: PathBuf,
    paths: Paths,
    pins: TablePins,
    log: KernelLog,
    lease: LeaseRenewal,
    /// The number of calls of [`Dataplane::collect_garbage`] so far. Some work is done only once in
    /// several calls.
    collections: u32,
    /// True while the mode drains.
    retiring: bool,
    flow_maps: FlowMaps,
    growth: Growth,
    /// True if all hooks run programs of the maps in use.
    is_swapped: bool,
    keep_ports: KeepPorts,
    /// The pause after the last list of
    /// [`keep_netfilter_ports`](EbpfDataplane::keep_netfilter_ports).
    list_rest: ListRest,
    /// True if the ends of all connections that netfilter translates are reserved, and the
    /// connections were listed after the last moment at which it may have taken one.
    are_netfilters_kept: bool,
    /// The number of garbage collections since that moment.
    since_netfilter: u32,
    /// True if another mode serves all frontends too, for pods without packet programs.
    are_frontends_shared: bool,
    stale_sockets: StaleSockets,
    service_cidrs: ServiceCidrs,
    /// The counts of connections. `None` if no service port uses least connection.
    connections: Option<ConnectionCount>,
    /// The maps of flows that are nearly full.
    filling: Filling,
    /// True if the desired state is known. Before, a predecessor's service ports are served.
    is_synced: bool,
}

/// The state of counting the connections of backends.
#[derive(Debug, Default)]
struct ConnectionCount {
    /// The counter of sockets. `None` if it was not tried yet, or if the kernel cannot load it.
    sockets: Option<SocketCounter>,
    is_tried: bool,
}

pub(super) const ENTRY: Entry = Entry {
    tracked_flows: TrackedFlows::Former,
    retires: true,
    reads_service_cidrs: |config| services::addresses::service_cidrs::are_read(&config.ebpf),
    hands_over: true,
    serves_beside: false,
    probe: |config, host| probe::probe(&config.ebpf, host),
    prepare: |config| {
        maps::paths::provide_bpffs(&config.ebpf.bpffs)?;
        provide_cgroup2()?;
        Ok(())
    },
    open: |config| {
        let ebpf = maps::sizes::sized(config, machine());
        Ok(Box::new(LeftToNode::new(Box::new(EbpfDataplane::open(&ebpf)?))))
    },
    read: |bpffs| match Pinned::open(bpffs) {
        Ok(pinned) => Ok(Some(Box::new(pinned))),
        Err(error) if error.is_not_there() => Ok(None),
        Err(error) if error.is_missing_tables() && view::status::controller(bpffs).is_some() => Ok(None),
        Err(error) => Err(error.into()),
    },
    controller: view::status::controller,
    cleanup: |bpffs, _| Ok(cleanup::cleanup(bpffs)?),
};

const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;
/// The number of garbage collections, about one a second, after which the connections that
/// netfilter translates are listed once more. It counts from the last moment at which netfilter may
/// have taken one. Until then, some may be in their handshake, and lists leave these out.
const COLLECTIONS_OF_HANDSHAKES: u32 = 60;
/// Label of the failures to copy what former flow maps have.
const FORMER_FLOWS: &str = "former tables of flows";
/// The number of ports in a [`FourPorts`].
const FOUR: usize = 4;

impl EbpfDataplane {
    /// Takes over the pinned maps or makes new ones, and swaps this version's programs in. The
    /// service ports in the maps are not changed before the first [`Dataplane::resync`].
    ///
    /// Needs Linux 5.10, and `CAP_BPF`, `CAP_PERFMON` and `CAP_NET_ADMIN`, or root.
    pub fn open(config: &Ebpf) -> Result<Self, Error> {
        if let Err(error) = limits::raise_locked_memory() {
            tracing::debug!(%error, "BPF memory stays limited if the kernel counts it as locked");
        }
        let paths = Paths::new(&config.bpffs);
        paths.create(&config.bpffs)?;
        let lock = paths.lock()?;
        let mut shapes = maps::tables::shapes(&config.limits);
        let flow_maps = FlowMaps::adopt(&paths, &mut shapes)?;
        maps::resize::set_aside(&paths, &mut shapes)?;

        let probe = UdpSocket::bind("127.0.0.1:0")
            .map_err(|e| Error::Namespace(CallError::new("binding a UDP socket to 127.0.0.1", e)))?;
        let cookie = match namespace::netns_cookie(&probe) {
            Ok(cookie) => Some(cookie),
            Err(e) if e.errno() == libc::ENOPROTOOPT => None,
            Err(e) => return Err(Error::Namespace(e)),
        };
        let balancing = config.sockets();
        let (mut programs, log) = hooks::load::load(&shapes, |_| paths.maps(), config, cookie.is_none())?;
        maps::resize::transfer(&paths, &shapes)?;

        let pins = TablePins::hold(&paths, &shapes, lock)?;
        let common = CommonTables::open(&paths.maps(), true)?;
        let v4 = family_writer::<V4>(&paths)?;
        let v6 = family_writer::<V6>(&paths)?;
        let host_namespace = match cookie {
            Some(cookie) => cookie,
            None => {
                let own = filesystem::own_cgroup()
                    .map_err(|source| Error::Folder { path: "/proc/self/cgroup".into(), source })?
                    .ok_or(Error::NoCgroup)?;
                let connect4 = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
                let link = Cgroup::open(own)?.attach(&mut programs, program::learn_namespace, connect4)?;
                let learned = learn_namespace(&common, &probe);
                drop(link);
                learned?
            }
        };
        let cgroup = match balancing {
            SocketLoadBalancing::Off => None,
            SocketLoadBalancing::All | SocketLoadBalancing::Host => {
                Some(Cgroup::open(cgroup_folder(config)?)?)
            }
        };
        let lease = LeaseRenewal::begin(config.withdraw_after, &common)?;
        let grace = GracePeriod::new().map_err(Error::Grace)?;
        let stale_sockets = StaleSockets::begin(&paths, config);
        let ids = Ranges::new(common.services.len() as u32);
        let shared = Common {
            tables: common,
            ids,
            next_backend: 0,
            backends_set_aside: 0,
            grace,
            is_epoch_over: true,
            algorithm: config.algorithm,
            forwarding: config.forwarding(),
            // A predecessor may have been killed before it ended the sockets of lost backends.
            lost_backends: BTreeSet::from([Transport::Tcp, Transport::Udp]),
        };
        let mut dataplane = Self {
            shared,
            v4,
            v6,
            flows4: Collector::default(),
            flows6: Collector::default(),
            moved_ports: MovedPorts::default(),
            affinity: AffinityCollector::default(),
            flow_lifetimes: FlowLifetimes::default(),
            interfaces: Vec::new(),
            is_beside_plugin: false,
            attaches_later: false,
            hooks: Hooks::new(paths.clone(), programs, cgroup, Transit::new(config.xdp)),
            host_namespace,
            shapes,
            config: config.clone(),
            bpffs: config.bpffs.clone(),
            paths,
            pins,
            log,
            lease,
            collections: 0,
            retiring: false,
            flow_maps,
            growth: Growth::default(),
            is_swapped: true,
            keep_ports: KeepPorts::BeforePackets,
            list_rest: ListRest::default(),
            are_netfilters_kept: false,
            since_netfilter: 0,
            are_frontends_shared: false,
            stale_sockets,
            service_cidrs: ServiceCidrs::begin(config),
            connections: None,
            filling: Filling::default(),
            is_synced: false,
        };
        // A predecessor has counted connections, and its service ports are served until the first
        // resync.
        if dataplane.hooks.is_release_pinned() || !dataplane.v4.tables.connections.read()?.is_empty() {
            dataplane.begin_to_count();
        }
        // Programs may still read the ids and slots that a predecessor gave back at its end.
        dataplane.shared.grace.wait().map_err(Error::Grace)?;
        dataplane.write_settings(|settings| {
            settings.host_namespace = host_namespace;
            // Since the predecessor's end, rules of others may have opened connections.
            settings.answers_unknown = 0;
        })?;
        // If sockets are left alone now, a predecessor's hooks are detached in `set_host`, when the
        // packet programs can take over.
        if balancing != SocketLoadBalancing::Off {
            dataplane.hooks.attach_sockets()?;
        }
        // The sources are still listing objects, so loading costs no time now. Without programs at
        // interfaces, `attach` loads them, once service ports are served to sockets.
        if dataplane.hooks.are_at_interfaces() {
            dataplane.hooks.load_ahead()?;
        }
        Ok(dataplane)
    }

    /// Attaches to interfaces by clsact filters, as before Linux 6.6, even if this kernel has tcx.
    #[must_use]
    pub fn without_tcx(mut self) -> Self {
        self.hooks.without_tcx();
        self
    }

    /// Lets maps that could not grow try it again at once, without the rest of a minute.
    pub fn stop_growth_rest(&mut self) {
        self.growth = Growth::default();
    }

    /// Writes the settings if `change` makes them different, and returns true if it did.
    fn write_settings(&self, change: impl FnOnce(&mut Settings)) -> Result<bool, Error> {
        let table = &self.shared.tables.settings;
        let current = table.get(&0)?.unwrap_or_default();
        let mut wanted = current;
        wanted.probe_socket = 0;
        change(&mut wanted);
        if wanted != current {
            table.set(&0, &wanted)?;
        }
        Ok(wanted != current)
    }

    /// Notes how full the maps of established flows were at the end of the last walks.
    fn see_filling(&mut self) {
        let (_, flows4) = self.flows4.counted();
        self.filling.see(table::flows4, flows4, self.v4.tables.flows.map().capacity().into());
        let (_, flows6) = self.flows6.counted();
        self.filling.see(table::flows6, flows6, self.v6.tables.flows.map().capacity().into());
    }

    fn write_node(&self, host: &Host) -> Result<bool, Error> {
        let (masquerade4, masquerade6) = masquerade(&host.masquerade_addresses);
        let ports = self.write_masquerade_ports()?;
        let settings = self.write_settings(|settings| {
            settings.host_namespace = self.host_namespace;
            settings.masquerade4 = masquerade4;
            settings.masquerade6 = masquerade6;
            settings.masquerade_all = u8::from(host.masquerade_all);
            settings.openings_per_window = flow::openings_per_window(host.new_connections_per_core);
            settings.most_unproven_entries = self.most_unproven_entries();
            settings.encapsulation = services::entries::encapsulation_number(host.encapsulation);
            (settings.pods4, settings.pod_range4, settings.pod_range4_bits) = pods::<V4>(&host.local_traffic);
            (settings.pods6, settings.pod_range6, settings.pod_range6_bits) = pods::<V6>(&host.local_traffic);
        })?;
        Ok(ports || settings)
    }

    /// Returns half of the entries that the maps of established flows have room for. These may have
    /// another size than the configuration says.
    fn most_unproven_entries(&self) -> u32 {
        self.v4.tables.flows.map().capacity().min(self.v6.tables.flows.map().capacity()) / 2
    }

    /// Writes the ports for translated sources, and returns true if they have changed.
    fn write_masquerade_ports(&self) -> Result<bool, Error> {
        let SourcePorts { programs, apart_ranges, .. } = SourcePorts::read();
        let table = &self.shared.tables.masquerade_ports;
        let mut changed = false;
        // The ports come before the settings, which say how many there are. A port that programs
        // read in between is one of the former or one of the new ports.
        for (index, chunk) in programs.ports.chunks(FOUR).enumerate() {
            let mut four = FourPorts::default();
            four.ports[..chunk.len()].copy_from_slice(chunk);
            if table.get(index) != Some(four) {
                table
                    .provide(index)
                    .map_err(|source| Error::Table { table: table::masquerade_ports, source })?;
                changed |= table.set(index, &four);
            }
        }
        changed |= self.write_settings(|settings| {
            settings.apart_ports = apart_ranges;
            settings.masquerade_ports = programs.ports.len() as u16;
            settings.masquerade_ports_apart = programs.apart as u16;
        })?;
        Ok(changed)
    }

    /// Attaches to the interfaces of the node, swaps the programs of what is attached, and then
    /// lets packets open flows. Otherwise a flow that one interface opens would get no answers
    /// while another has no programs.
    fn take_packets(&mut self) -> Failures {
        let is_first = self.keep_ports == KeepPorts::BeforePackets;
        if is_first {
            self.keep_netfilter_ports();
        }
        let mut failures = Failures::default();
        // A killed predecessor has left some hooks with programs of the former flow maps.
        failures.see(FORMER_FLOWS, self.flow_maps.copy(&self.paths));
        let unattached = self.hooks.follow(&self.interfaces, Instant::now());
        if !self.flow_maps.are_finished() && !unattached.is_empty() {
            self.is_swapped = false;
        }
        failures.merge(unattached);
        if is_first {
            self.keep_netfilter_ports();
            self.keep_ports = KeepPorts::AfterModeBeside;
        }
        if let Err(error) = self.write_redirects() {
            failures.add("uplinks for redirects", error);
        }
        if let Err(error) = self.hooks.attach_sockets() {
            failures.add("socket hooks", error);
        }
        if let Err(error) = self.write_settings(|settings| settings.packets_held = 0) {
            failures.add("settings", error);
        }
        // Former programs may have compared flows of this epoch with maps of the former size.
        self.shared.is_epoch_over = true;
        raise_epoch(&mut self.shared, &mut failures);
        failures
    }

    /// Attaches to new interfaces that have waited long enough.
    fn attach_to_settled(&mut self, failures: &mut Failures) {
        self.look_for_bandwidth_plugin(false);
        // The secondary mode may serve their pods, and its connections are listed after the
        // attachment. It goes on with them while no list may be made.
        let are_served_beside = self.lacks_programs();
        if are_served_beside && !self.list_rest.is_over() {
            return;
        }
        let (any, unattached) = self.hooks.attach_settled(Instant::now());
        failures.merge(unattached);
        if !any {
            return;
        }
        if are_served_beside {
            self.keep_netfilter_ports();
        }
        if let Err(error) = self.write_redirects() {
            failures.add("uplinks for redirects", error);
        }
    }

    /// Looks for CNI's bandwidth plugin. On a node that uses it, new interfaces wait longer.
    fn look_for_bandwidth_plugin(&mut self, is_seen: bool) {
        self.is_beside_plugin |= is_seen || self.hooks.meets_bandwidth_plugin();
        self.hooks.leave_new_interfaces(hooks::settling::pause(self.config.sockets(), self.is_beside_plugin));
    }

    /// Returns true if some pods have no packet programs, and may have no socket hooks either.
    fn lacks_programs(&self) -> bool {
        // If the plugin is in use, each new pod waits for its programs.
        let new_pods_wait = self.is_beside_plugin
            && self.hooks.uses_filters()
            && self.config.sockets() != SocketLoadBalancing::All;
        new_pods_wait || self.hooks.unattached_count() > 0
    }

    /// Writes the interfaces between which XDP may send. Call this after interfaces were attached
    /// to, because some can take frames only with a program on them.
    fn write_redirects(&mut self) -> Result<(), Error> {
        self.hooks.follow_routes();
        let Redirects { sources, targets } = self.hooks.redirects();
        replace(&self.shared.tables.redirect_sources, &sources)?;
        match replace(&self.shared.tables.redirect_targets, &targets) {
            // An uplink has vanished at this moment. The kernel's message about that comes next.
            Err(Error::Table { source, .. }) if source.errno() == libc::EINVAL => Ok(()),
            written => written.map(drop),
        }
    }

    fn keep_netfilter_ports(&mut self) {
        // A mode that drains opens no flow, and ends only when its maps are empty.
        if self.retiring {
            return;
        }
        self.note_netfilter();
        self.follow_circumstances_or_warn();
        let started = Instant::now();
        // This is no failure: all of these connections may go on even so, and new ones matter more.
        if let Err(error) = self.list_netfilters() {
            tracing::warn!(%error, "connections that netfilter translates may lose packets to new flows");
        }
        self.list_rest.begin_after(started);
    }

    /// Notes that netfilter may have taken connections up to now.
    fn note_netfilter(&mut self) {
        self.are_netfilters_kept = false;
        self.since_netfilter = 0;
    }

    /// Reserves the ends of the connections that netfilter translates. Returns true if there was
    /// room for all of them.
    fn list_netfilters(&mut self) -> Result<bool, Error> {
        self.flows4.ended.forget();
        self.flows6.ended.forget();
        let now = clock::since_boot();
        let conntrack = Conntrack::open().map_err(Error::Conntrack)?;
        let v4 = connections::netfilter_ports::keep(&self.v4.tables, &conntrack, now)?;
        let v6 = connections::netfilter_ports::keep(&self.v6.tables, &conntrack, now)?;
        let new = v4.new + v6.new;
        if new > 0 {
            tracing::info!(kept = new, "connections that netfilter translates are kept apart from flows");
        }
        Ok(v4.are_all && v6.are_all)
    }

    /// Lists the connections of netfilter once more when their last handshakes have ended.
    fn list_netfilters_after_handshakes(&mut self) {
        if self.hooks.has_waiting() || self.hooks.have_failed() {
            self.note_netfilter();
        }
        self.since_netfilter = self.since_netfilter.saturating_add(1);
        let is_due = !self.are_netfilters_kept && self.since_netfilter > COLLECTIONS_OF_HANDSHAKES;
        if !is_due || self.retiring || self.keep_ports != KeepPorts::Done {
            return;
        }
        match self.list_netfilters() {
            Ok(are_all) => self.are_netfilters_kept = are_all,
            Err(error) => tracing::debug!(%error, "connections that netfilter translates are not listed"),
        }
        // If this was in vain, the next attempt comes after the same time.
        self.since_netfilter = 0;
    }

    /// Lets the programs answer segments of unknown connections, or stops that.
    fn follow_circumstances(&self) -> Result<(), Error> {
        let circumstances = Circumstances {
            is_synced: self.is_synced,
            has_taken_over: self.keep_ports == KeepPorts::Done && !self.attaches_later,
            is_retiring: self.retiring,
            lacks_programs: self.lacks_programs(),
            are_frontends_shared: self.are_frontends_shared,
            are_netfilters_kept: self.are_netfilters_kept,
            are_netfilters_gone: self.flows4.ended.are_gone() && self.flows6.ended.are_gone(),
            are_flows_whole: self.flow_maps.are_finished(),
        };
        let answers = circumstances.allow_answers();
        if self.write_settings(|settings| settings.answers_unknown = answers.into())? {
            let told = if answers { "are answered by RST" } else { "pass" };
            tracing::info!("segments of connections that no map knows {told}");
        }
        Ok(())
    }

    fn follow_circumstances_or_warn(&self) {
        if let Err(error) = self.follow_circumstances() {
            tracing::warn!(%error, "segments of unknown connections are answered as before");
        }
    }

    /// Pins again whatever is not pinned any more.
    fn restore_pins(&mut self) -> Result<(), Error> {
        let restored = self.pins.restore(&self.bpffs, &self.paths)?;
        if !restored.is_empty() {
            tracing::warn!(
                tables = restored.join(" "),
                "another program had removed pins of maps; they are pinned again"
            );
        }
        Ok(())
    }

    fn end_stale_sockets(&mut self) {
        for transport in std::mem::take(&mut self.shared.lost_backends) {
            self.stale_sockets.end(transport);
        }
    }

    /// Continues the walks through the flow maps, and removes flows that have expired.
    fn collect_flows(&mut self, failures: &mut Failures) {
        let Self { flows4, flows6, moved_ports, shared, v4, v6, .. } = self;
        let (lifetimes, now, table) = (&self.flow_lifetimes, clock::since_boot(), &shared.tables.moved_ports);
        let failed_before = failures.count();
        flows4.collect(&v4.tables, lifetimes, now, (&mut *moved_ports, table), failures);
        flows6.collect(&v6.tables, lifetimes, now, (&mut *moved_ports, table), failures);
        let ([first, second], [third, fourth]) = (flows4.walks(), flows6.walks());
        let walks = [first, second, third, fourth];
        if failures.count() > failed_before {
            moved_ports.begin(walks);
        } else {
            failures.see("ports of flows with another key", moved_ports.tend(table, walks));
        }
    }

    /// Frees the ids and slots that no program can read any more.
    fn free_retired(&mut self) -> Result<(), Error> {
        let Self { shared, v4, v6, .. } = self;
        if shared.ids.has_retired() || v4.entries.slots.has_retired() || v6.entries.slots.has_retired() {
            shared.grace.wait().map_err(Error::Grace)?;
            shared.ids.grace_period_over();
            v4.entries.slots.grace_period_over();
            v6.entries.slots.grace_period_over();
        }
        Ok(())
    }

    /// Repairs what others have changed. Fails only if another controller has the maps now.
    fn inspect(&mut self, failures: &mut Failures) -> Result<(), Error> {
        match self.restore_pins() {
            Err(error @ Error::Locked { .. }) => return Err(error),
            restored => failures.see("pins", restored),
        }
        failures.see("counting sockets", self.recount_sockets());
        match self.write_masquerade_ports() {
            Ok(true) => tracing::info!("the ports for translated sources follow the kernel's parameters"),
            Ok(false) => {}
            Err(error) => failures.add("ports for translated sources", error),
        }
        let refused = self.hooks.unattached_count();
        failures.merge(self.hooks.repair());
        if self.hooks.unattached_count() < refused {
            // The secondary mode has served the pod, and goes on translating its connections.
            self.keep_netfilter_ports();
        }
        failures.see("uplinks for redirects", self.write_redirects());
        failures.see("the order of programs", self.mend_order());
        Ok(())
    }

    fn mend_order(&mut self) -> Result<(), Error> {
        let misplaced = self.hooks.misplaced()?;
        if misplaced.is_empty() {
            return Ok(());
        }
        let maps = |_: &Shape| self.paths.maps();
        let (mut programs, log) = hooks::load::load(&self.shapes, maps, &self.config, false)?;
        self.hooks.load(&mut programs)?;
        self.log = log;
        self.hooks.mend(programs, &misplaced).into_result()
    }

    /// Follows the node's algorithm and forwarding, for all service ports that name none.
    fn use_choices(&mut self, host: &Host, applied: &mut Applied, failures: &mut Failures) {
        let chosen = (host.algorithm, host.forwarding);
        if (self.shared.algorithm, self.shared.forwarding) == chosen {
            return;
        }
        (self.shared.algorithm, self.shared.forwarding) = chosen;
        self.count_connections(host.algorithm == Algorithm::LeastConnection, failures);
        self.prepare(failures);
        finish(self.v4.publish_by_the_nodes_choices(&mut self.shared), applied, failures);
        finish(self.v6.publish_by_the_nodes_choices(&mut self.shared), applied, failures);
        self.publish_waiting(applied, failures);
    }

    /// Begins to count connections, if they are asked for, before a service port that needs them is
    /// published.
    fn count_connections(&mut self, are_asked_for: bool, failures: &mut Failures) {
        if !are_asked_for || self.connections.is_some() {
            return;
        }
        self.begin_to_count();
        if let Err(error) = self.hooks.attach_release() {
            failures.add("socket hooks", error);
        }
    }

    fn begin_to_count(&mut self) {
        self.connections = Some(ConnectionCount::default());
        self.hooks.count_sockets(true);
    }

    /// Stops counting connections if no service port uses least connection any more. Open flows and
    /// sockets stay marked as counted, in case counting begins again.
    fn stop_counting(&mut self) -> Result<(), Error> {
        let Self { shared, v4, v6, .. } = self;
        if !self.is_synced || v4.goes_by_connections(shared) || v6.goes_by_connections(shared) {
            return Ok(());
        }
        self.hooks.count_sockets(false);
        self.hooks.attach_release()?;
        (self.flows4.recount, self.flows6.recount) = (None, None);
        self.v4.tables.connections.forget_all()?;
        self.connections = None;
        Ok(())
    }

    /// Lets the next walks through the flows compare the counts with the flows that exist.
    fn recount_flows(&mut self) -> Result<(), Error> {
        if self.connections.is_none() {
            return Ok(());
        }
        self.flows4.count_connections(&self.v4.tables)?;
        self.flows6.count_connections(&self.v6.tables)
    }

    /// Counts the connections of sockets anew and at once. [`recount_flows`](Self::recount_flows)
    /// is its counterpart for flows.
    fn recount_sockets(&mut self) -> Result<(), Error> {
        let Some(ConnectionCount { sockets, is_tried }) = &mut self.connections else { return Ok(()) };
        connections::count::forget_gone(&self.v4.tables, &self.v6.tables)?;
        if !std::mem::replace(is_tried, true) {
            match SocketCounter::load() {
                Ok(counter) => *sockets = Some(counter),
                Err(error) => {
                    tracing::warn!(%error, "connections of sockets are not counted anew: what hooks have missed of them stays uncounted")
                }
            }
        }
        if let Some(counter) = sockets {
            counter.recount(&self.paths.maps(), &self.v4.tables, &self.v6.tables)?;
        }
        self.stop_counting()
    }

    /// Prepares a write: swaps programs that could not be swapped before, and notes which maps may
    /// grow.
    fn prepare(&mut self, failures: &mut Failures) {
        if !self.is_swapped {
            let unswapped = self.hooks.swap();
            self.is_swapped = unswapped.is_empty();
            failures.merge(unswapped);
            // Former programs may have compared flows of this epoch with the former maps.
            self.shared.is_epoch_over = true;
        }
        self.let_tables_grow();
    }

    /// Notes which maps may still grow. Nothing gives way to what waits for such a map.
    fn let_tables_grow(&mut self) {
        let may_grow = self.growth.may_grow(&self.shapes);
        self.v4.entries.without_room.may_grow.clone_from(&may_grow);
        self.v6.entries.without_room.may_grow = may_grow;
    }

    /// Publishes what waits, after something has made room in either family: both share `services`.
    fn publish_waiting(&mut self, applied: &mut Applied, failures: &mut Failures) {
        loop {
            finish(self.v4.publish_waiting(&mut self.shared), applied, failures);
            finish(self.v6.publish_waiting(&mut self.shared), applied, failures);
            let demand = self.demand();
            if demand.is_empty() {
                return;
            }
            self.grow_or_rest(&demand, failures);
            self.v4.entries.without_room.plan_anew();
            self.v6.entries.without_room.plan_anew();
        }
    }

    /// Grows maps at the start, before anything is published. Later, changes would wait for it.
    fn grow_ahead(&mut self, desired: &[Arc<DesiredPort>], failures: &mut Failures) {
        let mut demand = growth::ahead(desired, |port| self.shared.algorithm_of(port), &self.shapes);
        demand.retain(|limit, _| self.v4.entries.without_room.may_grow.contains(limit));
        if demand.is_empty() {
            return;
        }
        // This is only logged: most service ports may have room nevertheless, and the others ask
        // for growth by themselves.
        if let Err(error) = self.grow(&demand, failures) {
            tracing::warn!(%error, "maps cannot grow ahead of later changes");
        }
        self.go_on_after_growth(failures);
    }

    fn grow_or_rest(&mut self, demand: &Demand, failures: &mut Failures) {
        if let Err(error) = self.grow(demand, failures) {
            tracing::warn!(%error, "maps cannot grow now; what has no room in them waits");
            self.growth.rest();
        }
        self.go_on_after_growth(failures);
    }

    fn go_on_after_growth(&mut self, failures: &mut Failures) {
        self.let_tables_grow();
        failures.see("lease", self.keep_lease());
    }

    /// Renews the lease if it is time for that. If it has ended before, packets have passed, and
    /// rules of others may have opened connections.
    fn keep_lease(&mut self) -> Result<(), Error> {
        if self.lease.has_lapsed(&self.shared.tables.lease)? {
            tracing::warn!(
                "the lease of ebpf.withdrawAfter had ended, so that nothing was served; it is renewed now"
            );
            self.keep_netfilter_ports();
        }
        self.lease.renew(&self.shared.tables.lease)
    }

    fn write_service_cidrs(&mut self, applied: &mut Applied, failures: &mut Failures) {
        match self.service_cidrs.write(&self.v4, &self.v6) {
            Ok(written) => *applied += written,
            Err(error) => failures.add("ServiceCIDRs", error),
        }
    }

    /// Returns how much room is needed in the maps that can still grow, by limit.
    fn demand(&self) -> Demand {
        let mut demand = Demand::new();
        self.v4.demand(&self.shared, &mut demand);
        self.v6.demand(&self.shared, &mut demand);
        demand.retain(|limit, _| self.v4.entries.without_room.may_grow.contains(limit));
        demand
    }

    fn grow(&mut self, demand: &Demand, failures: &mut Failures) -> Result<(), Error> {
        self.restore_pins()?;
        if let Err(error) = self.change_to_larger(demand, failures) {
            // The former maps stay in use, so they are pinned again.
            self.pins.restore(&self.bpffs, &self.paths)?;
            return Err(error);
        }
        self.shared.grace.wait().map_err(Error::Grace)
    }

    fn change_to_larger(&mut self, demand: &Demand, failures: &mut Failures) -> Result<(), Error> {
        let larger = make_larger(&self.paths, &self.shapes, demand, &self.config, &self.hooks)?;
        self.use_maps(larger, failures)
    }

    /// Uses the maps that are pinned now, and the programs that were loaded with them.
    fn use_maps(&mut self, made: Larger, failures: &mut Failures) -> Result<(), Error> {
        let Larger { shapes, programs, log } = made;
        let maps = self.paths.maps();
        let (common, v4, v6) = (
            CommonTables::open(&maps, true)?,
            FamilyTables::open(&maps, true)?,
            FamilyTables::open(&maps, true)?,
        );
        self.pins.hold_again(&self.paths, &shapes)?;
        self.shared.ids.grow(common.services.len() as u32);
        self.v4.entries.slots.grow(v4.slots.len() as u32);
        self.v6.entries.slots.grow(v6.slots.len() as u32);
        (self.shared.tables, self.v4.tables, self.v6.tables) = (common, v4, v6);
        (self.shapes, self.log) = (shapes, log);
        self.stale_sockets.tables_have_grown();
        let unswapped = self.hooks.mend(programs, &[]);
        self.is_swapped = unswapped.is_empty();
        failures.merge(unswapped);
        Ok(())
    }

    /// Gives the flow maps the size of the configuration, once everything is served, and finishes
    /// what this process or its predecessor has begun of that.
    fn follow_flow_limits(&mut self, failures: &mut Failures) {
        let is_taken_over = self.keep_ports == KeepPorts::Done && !self.attaches_later;
        let is_due = self.is_synced && is_taken_over && self.is_swapped && self.flow_maps.are_finished();
        if self.flow_maps.is_change_wanted() && is_due && !self.retiring {
            if let Err(error) = self.resize_flow_maps(failures) {
                tracing::warn!(%error, "the tables of flows keep their size until the next start");
            }
            if let Err(error) = self.hooks.let_open() {
                failures.add("flows that may open again", error);
            }
        }
        failures.see(FORMER_FLOWS, self.finish_flow_maps());
    }

    fn resize_flow_maps(&mut self, failures: &mut Failures) -> Result<(), Error> {
        let shapes = self.flow_maps.take_wanted(&self.paths, &self.shapes)?;
        if shapes == self.shapes {
            return Ok(());
        }
        self.restore_pins()?;
        maps::resize::remove_larger(&self.paths)?;
        let replaced = load_beside(&self.paths, &self.shapes, &shapes, &self.config, &self.hooks)
            .and_then(|(programs, log)| self.replace_flow_maps(Larger { shapes, programs, log }, failures));
        if replaced.is_err() {
            // The former maps stay in use, so they are pinned again.
            self.pins.restore(&self.bpffs, &self.paths)?;
            self.flow_maps.give_up(&self.paths)?;
        }
        replaced
    }

    /// Copies the flow maps, and swaps all programs. No flow opens until the caller lets it.
    fn replace_flow_maps(&mut self, made: Larger, failures: &mut Failures) -> Result<(), Error> {
        self.write_settings(|settings| settings.answers_unknown = 0)?;
        self.hooks.hold_openings(HELD_FOR)?;
        made.programs.hold_openings(HELD_FOR)?;
        // A program may have begun to open a flow before.
        self.shared.grace.wait().map_err(Error::Grace)?;
        self.flow_maps.replace(&self.paths, &self.shapes, &made.shapes)?;
        self.use_maps(made, failures)?;
        let most_unproven_entries = self.most_unproven_entries();
        let written = self.write_settings(|settings| settings.most_unproven_entries = most_unproven_entries);
        failures.see("settings", written.map(drop));
        Ok(())
    }

    /// Copies what is left in the former flow maps, if no program uses them any more.
    fn finish_flow_maps(&mut self) -> Result<(), Error> {
        if self.flow_maps.are_finished() || !self.is_swapped {
            return Ok(());
        }
        self.shared.grace.wait().map_err(Error::Grace)?;
        self.flow_maps.finish(&self.paths)?;
        // Former programs may have compared flows of this epoch with former maps.
        self.shared.is_epoch_over = true;
        // Walks through the former maps do not go on in the new ones.
        (self.flows4, self.flows6) = Default::default();
        let ([first, second], [third, fourth]) = (self.flows4.walks(), self.flows6.walks());
        self.moved_ports.begin([first, second, third, fourth]);
        Ok(())
    }

    /// Returns true if the maps hold the desired state and nothing else.
    fn has_only(&self, desired: &[Arc<DesiredPort>]) -> Result<bool, Error> {
        let Self { shared, v4, v6, is_synced, .. } = self;
        let of = |family| desired.iter().filter(move |port| port.name.family == family);
        let mut published: Vec<_> = v4.published().chain(v6.published()).collect();
        published.sort_unstable_by_key(|(id, _)| *id);
        Ok(*is_synced
            && v4.has_only(shared, of(V4::FAMILY))?
            && v6.has_only(shared, of(V6::FAMILY))?
            && shared.has_only(&published)?)
    }

    /// Adopts what the maps hold, and writes what differs from the desired state.
    fn write_everything(
        &mut self,
        desired: &[Arc<DesiredPort>],
        applied: &mut Applied,
        failures: &mut Failures,
    ) -> Result<(), Error> {
        let strays = self.adopt()?;
        self.count_connections(self.shared.goes_by_connections(desired), failures);
        self.prepare(failures);
        if !self.is_synced {
            self.grow_ahead(desired, failures);
        }
        let Self { shared, v4, v6, .. } = self;
        finish(resync(v4, shared, desired), applied, failures);
        finish(resync(v6, shared, desired), applied, failures);
        for Stray { id, is_claimed } in strays {
            match remove_service(shared, id, applied) {
                // Programs may still be reading it.
                Ok(()) if is_claimed => shared.ids.retire(Range { first: id, count: 1 }),
                Ok(()) => {}
                Err(error) => failures.add(format_args!("service {id}, which is not desired"), error),
            }
        }
        self.publish_waiting(applied, failures);
        Ok(())
    }

    fn adopt(&mut self) -> Result<Vec<Stray>, Error> {
        let names = self.shared.adopt()?;
        let largest = self.v4.adopt(&self.shared, &names)?.max(self.v6.adopt(&self.shared, &names)?);
        self.shared.continue_backend_ids(largest)?;
        Ok(names.strays)
    }
}

fn family_writer<F: TableFamily>(paths: &Paths) -> Result<FamilyWriter<F>, Error> {
    let tables = FamilyTables::open(&paths.maps(), true)?;
    let entries = Entries::empty(tables.slots.len() as u32);
    Ok(FamilyWriter { tables, entries })
}

fn cgroup_folder(config: &Ebpf) -> Result<PathBuf, Error> {
    if let Some(folder) = &config.cgroup {
        return Ok(folder.clone());
    }
    provide_cgroup2()?.ok_or(Error::NoCgroup)
}

fn provide_cgroup2() -> Result<Option<PathBuf>, Error> {
    filesystem::provide_cgroup2()
        .map_err(|source| Error::Folder { path: "/proc/self/mountinfo".into(), source })
}

/// Returns the cookie of this network namespace. It asks the program on connect4, which must be
/// attached to a cgroup that this process is in.
fn learn_namespace(tables: &CommonTables, probe: &UdpSocket) -> Result<u64, Error> {
    let cookie = namespace::socket_cookie(probe.as_fd()).map_err(Error::Namespace)?;
    let mut settings = tables.settings.get(&0)?.unwrap_or_default();
    // The namespace that a predecessor has learned stays in force meanwhile.
    settings.probe_socket = cookie;
    tables.settings.set(&0, &settings)?;
    // Connecting a datagram socket sends nothing.
    probe
        .connect("127.0.0.1:9")
        .map_err(|e| Error::Namespace(CallError::new("connecting a UDP socket to 127.0.0.1", e)))?;
    let learned = tables.settings.get(&0)?.unwrap_or_default().host_namespace;
    if learned == 0 {
        let problem =
            std::io::Error::other("the hook on connect was not reached: is this process in the cgroup?");
        return Err(Error::Namespace(CallError::new("connecting a UDP socket to 127.0.0.1", problem)));
    }
    Ok(learned)
}

/// Raises the epoch, if need be, after all writes of a call.
fn raise_epoch(shared: &mut Common, failures: &mut Failures) {
    if let Err(error) = shared.raise_epoch() {
        failures.add("settings", error);
    }
}

fn finish<F: TableFamily>(writes: Writes<F>, applied: &mut Applied, failures: &mut Failures) {
    *applied += writes.applied;
    failures.merge(writes.failures);
}

impl Programmed for EbpfDataplane {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        let (v4, v6) = (&self.v4.tables, &self.v6.tables);
        Ok(Reader { common: &self.shared.tables, v4, v6, paths: &self.paths }.snapshot()?)
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        let mut used = BTreeMap::from([
            (table::services, u64::from(self.shared.ids.used().saturating_sub(1))),
            (table::service_names, (self.v4.entries.services.len() + self.v6.entries.services.len()) as u64),
            (table::interfaces, self.shared.tables.interfaces.read_all()?.len() as u64),
            (table::vlan_devices, self.shared.tables.vlan_devices.read_all()?.len() as u64),
            (table::pod_namespaces, self.shared.tables.pod_namespaces.read_all()?.len() as u64),
            (table::redirect_sources, self.shared.tables.redirect_sources.read_all()?.len() as u64),
            (table::redirect_targets, self.shared.tables.redirect_targets.read_all()?.len() as u64),
            (
                table::masquerade_ports,
                view::status::masquerade_ports(&self.shared.tables)?.len().div_ceil(FOUR) as u64,
            ),
            (table::settings, 1),
            (table::lease, 1),
        ]);
        used.extend(used_by(&self.v4, &self.flows4)?);
        used.extend(used_by(&self.v6, &self.flows6)?);
        used.extend(self.affinity.counted());
        used.extend(self.v4.tables.connections.used()?);
        let counted = self.shared.tables.service_counters.capacity();
        used.insert(table::service_counters, u64::from(counted.min(self.shared.ids.used())));
        let may_grow = self.growth.may_grow(&self.shapes);
        Ok(view::status::usage(&self.paths.maps(), &self.shapes, &may_grow, &used, &self.shared.tables)?)
    }
}

impl Dataplane for EbpfDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, super::Error> {
        let (mut applied, mut failures) = Default::default();
        self.count_connections(self.shared.goes_by_connections(&changes.changed), &mut failures);
        self.prepare(&mut failures);
        let Self { shared, v4, v6, .. } = self;
        finish(apply(v4, shared, changes), &mut applied, &mut failures);
        finish(apply(v6, shared, changes), &mut applied, &mut failures);
        self.publish_waiting(&mut applied, &mut failures);
        self.write_service_cidrs(&mut applied, &mut failures);
        raise_epoch(&mut self.shared, &mut failures);
        self.end_stale_sockets();
        failures.into_result()?;
        Ok(applied)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, super::Error> {
        let (mut applied, mut failures) = Default::default();
        // Fast path: an inspection usually finds nothing to repair.
        if self.has_only(desired)? {
            self.prepare(&mut failures);
        } else {
            self.write_everything(desired, &mut applied, &mut failures)?;
        }
        self.is_synced = true;
        if failures.is_empty() {
            self.service_cidrs.synced();
        }
        self.write_service_cidrs(&mut applied, &mut failures);
        raise_epoch(&mut self.shared, &mut failures);
        self.end_stale_sockets();
        self.shared.tables.services.forget();
        self.v4.tables.slots.forget();
        self.v6.tables.slots.forget();
        // The lease is resumed even if something could not be written, because the other service
        // ports are served as desired.
        match self.lease.resume(&self.shared.tables.lease) {
            Ok(true) => self.keep_netfilter_ports(),
            Ok(false) => {}
            Err(error) => failures.add("lease", error),
        }
        failures.into_result()?;
        Ok(applied)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, super::Error> {
        self.flow_lifetimes = host.flow_lifetimes;
        let (mut applied, mut failures): (Applied, Failures) = Default::default();
        self.use_choices(host, &mut applied, &mut failures);
        let addresses = [
            write_addresses(&self.v4.tables, host),
            write_addresses(&self.v6.tables, host),
            write_interfaces(&self.shared.tables, host),
            replace(&self.shared.tables.vlan_devices, &vlan_devices(&host.interfaces)),
            write_pod_namespaces(&self.shared.tables, host),
        ];
        match self.write_node(host) {
            Ok(written) => applied.written += u64::from(written),
            Err(error) => failures.add("settings", error),
        }
        match self.restore_pins() {
            Ok(()) => {}
            // Another controller's maps are pinned there now.
            Err(error @ Error::Locked { .. }) => return Err(error.into()),
            Err(error) => failures.add("pins", error),
        }
        self.interfaces.clone_from(&host.interfaces);
        self.look_for_bandwidth_plugin(host.limits_bandwidth);
        self.attaches_later = !self.hooks.are_at_interfaces();
        if !self.attaches_later {
            failures.merge(self.take_packets());
        } else if let Err(error) = self.write_settings(|settings| settings.packets_held = 1) {
            failures.add("settings", error);
        }
        self.service_cidrs.set(host.service_cidrs.as_deref());
        self.write_service_cidrs(&mut applied, &mut failures);
        failures.into_result()?;
        for written in addresses {
            applied += written.map_err(Error::of_node_addresses)?;
        }
        Ok(applied)
    }

    fn attach(&mut self) -> Result<(), super::Error> {
        if !std::mem::take(&mut self.attaches_later) {
            return Ok(());
        }
        Ok(self.take_packets().into_result()?)
    }

    fn renew_lease(&mut self) -> Result<(), super::Error> {
        Ok(self.keep_lease()?)
    }

    /// Does what is due about once a second. If one step fails, the others are still done.
    fn collect_garbage(&mut self) -> Result<(), super::Error> {
        let (mut applied, mut failures): (Applied, Failures) = Default::default();
        failures.see("lease", self.keep_lease());
        failures.see("retired elements", self.free_retired());
        self.prepare(&mut failures);
        self.publish_waiting(&mut applied, &mut failures);
        self.write_service_cidrs(&mut applied, &mut failures);
        raise_epoch(&mut self.shared, &mut failures);
        self.end_stale_sockets();
        if self.keep_ports == KeepPorts::AfterModeBeside {
            self.keep_netfilter_ports();
            self.keep_ports = KeepPorts::Done;
        }
        failures.see("the programs' log", self.log.follow());
        self.follow_flow_limits(&mut failures);
        // An entry that a walk does not meet may still be in the former map.
        if self.flow_maps.are_finished() {
            failures.see("counting connections", self.recount_flows());
            self.collect_flows(&mut failures);
            self.see_filling();
        }
        let affinity =
            self.affinity.collect(&self.shared.tables, &self.v4.tables, &self.v6.tables, clock::since_boot());
        failures.see("session affinity", affinity);
        failures.see("interfaces that are gone", self.hooks.tend());
        self.attach_to_settled(&mut failures);
        self.collections = self.collections.wrapping_add(1);
        if self.collections.is_multiple_of(COLLECTIONS_BETWEEN_INSPECTIONS) {
            self.inspect(&mut failures)?;
        }
        self.list_netfilters_after_handshakes();
        failures.see("answers to unknown connections", self.follow_circumstances());
        Ok(failures.into_result()?)
    }

    fn share_frontends(&mut self, are_shared: bool) -> Result<(), super::Error> {
        if std::mem::replace(&mut self.are_frontends_shared, are_shared) == are_shared {
            return Ok(());
        }
        if !are_shared {
            // The other mode may have opened connections up to the last moment.
            self.keep_netfilter_ports();
        }
        Ok(self.follow_circumstances()?)
    }

    /// Drains the mode. Without frontends, packets of known TCP flows are still translated, and all
    /// others pass.
    fn retire(&mut self) -> Result<bool, super::Error> {
        if !self.retiring {
            // From now on netfilter may translate connections to the same frontends.
            self.write_settings(|settings| settings.answers_unknown = 0)?;
            self.keep_ports = KeepPorts::Done;
            // These sockets are connected to endpoints, and go on without any frontend.
            self.stale_sockets = StaleSockets::none();
            self.service_cidrs.retire();
            let (mut applied, mut failures) = Default::default();
            self.write_service_cidrs(&mut applied, &mut failures);
            failures.into_result()?;
            self.resync(&[])?;
            // A program that has read a frontend before may still open a flow.
            self.shared.grace.wait().map_err(Error::Grace)?;
            Collector::end_for_retirement(&self.v4.tables)?;
            Collector::end_for_retirement(&self.v6.tables)?;
            (self.flows4, self.flows6) = Default::default();
            self.retiring = true;
        }
        self.collect_garbage()?;
        Ok(self.flow_maps.are_finished() && self.flows4.is_empty() && self.flows6.is_empty())
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, super::Error> {
        let v4 = self.v4.entries.services.iter().map(|(name, published)| (published.id, name));
        let v6 = self.v6.entries.services.iter().map(|(name, published)| (published.id, name));
        let (services, uncounted) = view::status::service_usage(&self.shared.tables, v4.chain(v6))?;
        let ended = self.stale_sockets.ended();
        let mut families =
            view::metrics::families(&self.usage()?, &services, uncounted, ended, self.affinity.evicted());
        families.push(view::metrics::unattached_interfaces(self.hooks.unattached_count()));
        Ok(families)
    }

    /// Returns zero. A change costs only what it writes, so each change is written at once.
    fn min_interval(&self, _configured: Duration) -> Duration {
        Duration::ZERO
    }

    /// Limits inspections to half a percent of a core. Repairs may come late, because nobody else
    /// writes these maps.
    fn inspection_share(&self) -> u32 {
        200
    }

    fn supports(&self, port: &DesiredPort) -> Vec<Unsupported> {
        supports::supports(port, self.config.sockets(), self.shared.forwarding)
    }

    fn take_without_room(&mut self) -> Option<BTreeMap<ServicePortName, Vec<Unsupported>>> {
        let v4 = std::mem::take(&mut self.v4.entries.without_room.changed);
        let v6 = std::mem::take(&mut self.v6.entries.without_room.changed);
        (v4 || v6).then(|| self.v4.without_room().into_iter().chain(self.v6.without_room()).collect())
    }

    fn packet_programs(&self) -> PacketPrograms {
        PacketPrograms {
            are_lacking: self.lacks_programs(),
            come_later: self.attaches_later,
            fit_nowhere: self.hooks.attached_nowhere(),
        }
    }

    fn hook_problems(&self) -> HookProblems {
        HookProblems {
            without_xdp: self.hooks.refusals().clone(),
            unattached: self.hooks.unattached(),
            filling: self.filling.tables().clone(),
        }
    }
}

/// Returns the size of the machine, or `None` if the kernel does not report it.
fn machine() -> Option<Machine> {
    Machine::read()
        .inspect_err(|error| tracing::warn!(%error, "the size of the machine is not known, so flow maps have the sizes for a small one"))
        .ok()
}

fn apply<F: TableFamily>(writer: &mut FamilyWriter<F>, shared: &mut Common, changes: &Changes) -> Writes<F> {
    let changed = changes.changed.iter().filter(|port| port.name.family == F::FAMILY);
    let removed = changes.removed.iter().filter(|name| name.family == F::FAMILY);
    writer.apply(shared, changed, removed)
}

fn resync<F: TableFamily>(
    writer: &mut FamilyWriter<F>,
    shared: &mut Common,
    desired: &[Arc<DesiredPort>],
) -> Writes<F> {
    let desired: Vec<_> = desired.iter().filter(|port| port.name.family == F::FAMILY).collect();
    writer.resync(shared, &desired)
}

fn used_by<F: TableFamily>(
    writer: &FamilyWriter<F>,
    flows: &Collector<F>,
) -> Result<[(&'static str, u64); 8], Error> {
    let (opening, established) = flows.counted();
    Ok([
        (F::FRONTENDS, writer.entries.frontends.len() as u64),
        (F::SLOTS, u64::from(writer.entries.slots.used())),
        (F::BACKENDS, writer.entries.backends.len() as u64),
        (F::FLOWS, established),
        (F::OPENING_FLOWS, opening),
        (F::SOURCE_RANGES, u64::from(writer.entries.source_ranges)),
        (F::SERVICE_CIDRS, writer.tables.service_cidrs.read_all()?.len() as u64),
        (F::NODE_ADDRESSES, writer.tables.node_addresses.read_all()?.len() as u64),
    ])
}

/// Makes `node_addresses4/6` hold exactly the host's addresses.
fn write_addresses<F: TableFamily>(tables: &FamilyTables<F>, host: &Host) -> Result<Applied, Error> {
    // A ClusterIP that the node has itself serves no node ports to others, unless it was chosen for
    // node ports.
    let own_cluster_ips = host.own_cluster_ips.iter().map(|ip| (ip, NODE_ADDRESS_LOOPBACK));
    let serving = host.node_port_addresses.iter();
    let serving = serving.map(|ip| (ip, if ip.is_loopback() { NODE_ADDRESS_LOOPBACK } else { 0 }));
    let wanted: BTreeMap<F::Address, NodeAddress> = own_cluster_ips
        .chain(serving)
        .filter_map(|(ip, flags)| Some((F::address(*ip)?, NodeAddress { flags })))
        .collect();
    let found: BTreeMap<_, _> = tables.node_addresses.read_all()?.into_iter().collect();
    let mut applied = Applied::default();
    // Removals come first, because the other addresses may need the room.
    for address in found.keys().filter(|address| !wanted.contains_key(*address)) {
        applied.removed += u64::from(tables.node_addresses.remove(address)?);
    }
    // The addresses of the Node come first, because there may not be room for all.
    let first: Vec<_> = host.masquerade_addresses.iter().filter_map(|ip| F::address(*ip)).collect();
    let (first, others): (Vec<_>, Vec<_>) = wanted.iter().partition(|(address, _)| first.contains(address));
    for (address, value) in first.into_iter().chain(others) {
        if found.get(address) != Some(value) {
            tables.node_addresses.set(address, value)?;
            applied.written += 1;
        }
    }
    Ok(applied)
}

/// Makes `interfaces` hold exactly the uplinks, and the interfaces that have sources of their own
/// or bring traffic of pods.
fn write_interfaces(tables: &CommonTables, host: &Host) -> Result<Applied, Error> {
    let settings = |interface: &Interface| {
        let (masquerade4, masquerade6) = masquerade(&interface.masquerade_addresses);
        let of_pods = if host.local_traffic.comes_in_by(interface) { INTERFACE_OF_PODS } else { 0 };
        let is_uplink = interface.role == Role::Uplink;
        let of_uplink = match (is_uplink, interface.ethernet) {
            (true, true) => INTERFACE_OF_UPLINK,
            (true, false) => INTERFACE_OF_UPLINK | INTERFACE_WITHOUT_LINK_HEADERS,
            (false, _) => 0,
        };
        // 0 stands for any length. No packet is too long for an MTU that does not fit.
        let mtu = if is_uplink { u16::try_from(interface.mtu).unwrap_or(0) } else { 0 };
        let of_bridge = if is_uplink && interface.bridge.is_some() { INTERFACE_OF_BRIDGE } else { 0 };
        InterfaceSettings { masquerade6, masquerade4, flags: of_pods | of_uplink | of_bridge, mtu }
    };
    let none = InterfaceSettings::default();
    let all = host.interfaces.iter().map(|interface| (interface.index, settings(interface)));
    let mut wanted: BTreeMap<_, _> = all.filter(|(_, settings)| *settings != none).collect();
    // If there is no room for all, entries with nothing but an MTU and flags of uplinks give way.
    // The other fields concern more packets.
    if wanted.len() > tables.interfaces.map().capacity() as usize {
        let others = |settings: &InterfaceSettings| InterfaceSettings {
            mtu: 0,
            flags: settings.flags & INTERFACE_OF_PODS,
            ..*settings
        };
        wanted.retain(|_, settings| others(settings) != none);
    }
    replace(&tables.interfaces, &wanted)
}

/// Makes `pod_namespaces` hold the namespaces of pods, as far as there is room.
fn write_pod_namespaces(tables: &CommonTables, host: &Host) -> Result<Applied, Error> {
    let pods = host.interfaces.iter().filter(|interface| interface.role == Role::Workload);
    let namespaces = pods.filter_map(|interface| Some((interface.index, interface.namespace?)));
    let room = tables.pod_namespaces.map().capacity() as usize;
    replace(&tables.pod_namespaces, &namespaces.take(room).collect())
}

/// Makes a map hold exactly these entries.
fn replace<K: Pod + Default + Ord, V: Pod + Default + PartialEq>(
    table: &Table<K, V>,
    wanted: &BTreeMap<K, V>,
) -> Result<Applied, Error> {
    let found: BTreeMap<_, _> = table.read_all()?.into_iter().collect();
    let mut applied = Applied::default();
    // Writes come before removals: from Linux 6.1 on, a new entry may get the memory of a removed
    // one, which a program may still be reading.
    for (key, value) in wanted.iter().filter(|(key, value)| found.get(key) != Some(value)) {
        table.set(key, value)?;
        applied.written += 1;
    }
    for key in found.keys().filter(|key| !wanted.contains_key(*key)) {
        applied.removed += u64::from(table.remove(key)?);
    }
    Ok(applied)
}

/// Returns how traffic of pods of a family is recognised (`PODS_*`), then a range and its prefix
/// length.
///
/// The range matters for `PODS_BY_SOURCE` alone. The configuration and the Node have at most one
/// range of each family.
fn pods<F: TableFamily>(local: &LocalTraffic) -> (u16, F::Address, u8) {
    match local {
        LocalTraffic::FromCidrs(cidrs) => {
            let by_source =
                |cidr: &IpNet| Some((PODS_BY_SOURCE, F::address(cidr.network())?, cidr.prefix_len()));
            cidrs.iter().find_map(by_source).unwrap_or((PODS_UNKNOWN, F::Address::UNSPECIFIED, 0))
        }
        LocalTraffic::FromBridge(_) | LocalTraffic::FromInterfacePrefix(_) => {
            (PODS_BY_INTERFACE, F::Address::UNSPECIFIED, 0)
        }
    }
}

/// Returns the first address of each family. It is unspecified if there is none.
fn masquerade(addresses: &[IpAddr]) -> ([u8; 4], [u8; 16]) {
    let v4 = addresses.iter().find_map(|ip| V4::address(*ip)).unwrap_or_default();
    let v6 = addresses.iter().find_map(|ip| V6::address(*ip)).unwrap_or_default();
    (v4, v6)
}
