//! The programs that the cases run, loaded together with their maps.

mod maps;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, Result, anyhow, bail};
use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunOptions,
    maps::{Map, PerCpuValues, RingBuf},
    programs::{ProgramType, SchedClassifier, Xdp, XdpMode},
    sys::{BpfHelper, is_helper_supported},
};
use proxy_common::{
    family::{V4, V6},
    flow::Stage,
    inventory::{Limit, map_name, program},
    layout::*,
    reason::Reason,
};
use proxy_ctl::sys::bpf::{map::Map as TypedMap, pod};
use scenario::Skip;

pub(crate) use self::maps::{FlowKeyOf, FlowOf, Maps};
use self::maps::{array, clear, hash, map_data, open, per_cpu};

/// Number of entries of a map of established flows in most cases.
pub(crate) const FLOWS: u32 = 8;
/// Number of fragmented packets that a map of fragments holds in most cases.
pub(crate) const FRAGMENTS: u32 = 1_024;
/// Number of clients that a map of affinity holds.
const CLIENTS: u32 = 1_024;
const SERVICES: u32 = 512;
/// Map that is not pinned, so `proxy_common::inventory` does not name it.
const ICMP_ERRORS: &str = "icmp_errors";

const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;
const XDP_REDIRECT: u32 = 4;
const TC_ACT_UNSPEC: u32 = u32::MAX;
const TC_ACT_SHOT: u32 = 2;
const TC_ACT_REDIRECT: u32 = 7;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Verdict {
    GoesOn,
    Dropped,
    Redirected,
    /// The packet leaves by the interface that it has come by, before the stack sees it.
    SentBack,
}

impl Verdict {
    pub(crate) fn of_tc(returned: u32) -> Result<Self> {
        Ok(match returned {
            TC_ACT_UNSPEC => Self::GoesOn,
            TC_ACT_SHOT => Self::Dropped,
            TC_ACT_REDIRECT => Self::Redirected,
            other => bail!("verdict {other}"),
        })
    }

    pub(crate) fn of_xdp(returned: u32) -> Result<Self> {
        Ok(match returned {
            XDP_PASS => Self::GoesOn,
            XDP_TX => Self::SentBack,
            XDP_REDIRECT => Self::Redirected,
            other => bail!("verdict {other}"),
        })
    }
}

/// Verdict of a program, and the packet that it leaves.
pub(crate) struct Output {
    pub(crate) verdict: Verdict,
    pub(crate) packet: Vec<u8>,
}

/// Sizes of the maps of flows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sizes {
    /// Maps have few entries: they are made quickly, and are soon full.
    Small,
    /// Maps have as many entries as on a node.
    Default,
}

impl Sizes {
    const fn flows(self) -> u32 {
        match self {
            Self::Small => FLOWS,
            Self::Default => Limit::Flows.default_entries(),
        }
    }
}

/// Load-time constants of the programs, named as there. The value 1 switches one on.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Globals {
    pub(crate) host_packets: u32,
    pub(crate) resets_gone: u32,
    pub(crate) masquerade_as_kube_proxy: u32,
    pub(crate) lease: u32,
    pub(crate) drop_unallocated: u32,
    pub(crate) answer_ping: u32,
    pub(crate) skip_stack: u32,
}

pub(crate) struct World {
    pub(crate) ebpf: Ebpf,
}

/// Returns the context (`xdp_md`) of a frame that comes by the interface with this index. Its
/// fields are data, data_end, data_meta, ingress_ifindex, rx_queue_index and egress_ifindex.
pub(crate) fn frame_context(interface: u32, frame: &[u8]) -> Vec<u8> {
    [0, frame.len() as u32, 0, interface, 0, 0].map(u32::to_ne_bytes).concat()
}

/// Returns the context (`__sk_buff`) of a packet that another interface has received and that is
/// now at the interface with this index. Index 0 means `lo`. `size` is the size of merged segments.
pub(crate) fn packet_context(interface: u32, size: u32) -> Vec<u8> {
    const CONTEXT: usize = 192;
    /// Offsets of the fields `ingress_ifindex`, `ifindex` and `gso_size`.
    const INGRESS_INTERFACE: usize = 36;
    const INTERFACE: usize = 40;
    const SEGMENT_SIZE: usize = 176;
    let mut context = vec![0; CONTEXT];
    context[INGRESS_INTERFACE] = 1;
    context[INTERFACE..INTERFACE + 4].copy_from_slice(&interface.to_ne_bytes());
    context[SEGMENT_SIZE..SEGMENT_SIZE + 4].copy_from_slice(&size.to_ne_bytes());
    context
}

/// Index of `lo`, the interface that BPF_PROG_TEST_RUN uses by default.
pub(crate) const LOOPBACK: u32 = 1;

/// Returns true if the kernel passes frames in fragments to XDP programs (Linux 5.18).
pub(crate) fn has_xdp_fragments() -> Result<bool> {
    Ok(is_helper_supported(ProgramType::Xdp, BpfHelper::BPF_FUNC_xdp_get_buff_len)?)
}

impl World {
    pub(crate) fn load(object: &[u8], globals: Globals, sizes: Sizes) -> Result<Self> {
        Self::load_with(object, globals, program::ON_INTERFACES, |loader| {
            for name in [map_name::flows4, map_name::flows6] {
                loader.map_max_entries(name, sizes.flows());
            }
        })
    }

    /// Loads the uplinks' programs, with room for `entries` entries of opening flows of one family.
    pub(crate) fn with_room<W: Maps>(object: &[u8], entries: u32) -> Result<Self> {
        let programs = [program::uplink_ingress, program::uplink_egress];
        Self::load_with(object, Globals::default(), &programs, |loader| {
            loader.map_max_entries(W::OPENING_FLOWS, entries);
        })
    }

    /// Loads programs with room for `entries` entries of established flows of one family, and a map
    /// of fragments as large as on a node.
    pub(crate) fn with_flows<W: Maps>(
        object: &[u8],
        globals: Globals,
        programs: &[&str],
        entries: u32,
    ) -> Result<Self> {
        Self::load_with(object, globals, programs, |loader| {
            loader.map_max_entries(W::FLOWS, entries);
            loader.map_max_entries(W::FRAGMENTS, Limit::Fragments.default_entries());
        })
    }

    /// Loads the uplinks' programs with the maps that a controller has pinned in a folder.
    pub(crate) fn with_maps_in(object: &[u8], folder: &Path) -> Result<Self> {
        let programs = [program::uplink_ingress, program::uplink_egress];
        Self::load_with(object, Globals::default(), &programs, |loader| {
            macro_rules! pins {
                ($($(#[doc = $doc:literal])* $name:ident: $kind:ident $types:tt, $entries:tt;)+) => {
                    $(loader.map_pin_path(stringify!($name), folder.join(stringify!($name)));)+
                };
            }
            proxy_common::maps!(pins);
        })
    }

    fn load_with(
        object: &[u8],
        globals: Globals,
        programs: &[&str],
        size: impl FnOnce(&mut EbpfLoader<'_>),
    ) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        loader
            .override_global("HOST_PACKETS", &globals.host_packets, true)
            .override_global("RESETS_GONE", &globals.resets_gone, true)
            .override_global("MASQUERADE_AS_KUBE_PROXY", &globals.masquerade_as_kube_proxy, true)
            .override_global("LEASE", &globals.lease, true)
            .override_global("DROP_UNALLOCATED", &globals.drop_unallocated, true)
            .override_global("ANSWER_PING", &globals.answer_ping, true)
            .override_global("SKIP_STACK", &globals.skip_stack, true);
        // These constants must not change what happens to a packet. They are set because another
        // constant with the same bytes once had the same address as one of them.
        loader.override_global("SOCKET_HOST_ONLY", &1u32, true);
        loader.override_global("CAN_REFUSE", &1u32, true);
        for name in [
            map_name::services,
            map_name::slots4,
            map_name::slots6,
            map_name::service_counters,
            map_name::connections,
            map_name::collected,
        ] {
            loader.map_max_entries(name, SERVICES);
        }
        for name in [map_name::affinity4, map_name::affinity6] {
            loader.map_max_entries(name, CLIENTS);
        }
        for name in [map_name::fragments4, map_name::fragments6] {
            loader.map_max_entries(name, FRAGMENTS);
        }
        size(&mut loader);
        let mut ebpf = loader.load(object).context("loading the object")?;
        for name in programs {
            let program: &mut SchedClassifier =
                ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?;
            program.load().with_context(|| format!("loading {name}"))?;
        }
        Ok(Self { ebpf })
    }

    /// Writes flows as [`Maps::put_flow`] does, but in a few system calls.
    pub(crate) fn put_flows<W: Maps>(
        &self,
        stage: Stage,
        keys: &[FlowKeyOf<W>],
        flows: &[FlowOf<W>],
    ) -> Result<()> {
        let map: TypedMap<FlowKeyOf<W>, FlowOf<W>> = open(map_data(&self.ebpf, W::flow_map_name(stage))?)?;
        map.set_all(keys, flows).map_err(|(_, error)| error.into())
    }

    /// Counts flows in a few system calls. Others may change the map meanwhile, unlike with
    /// [`Maps::flows`].
    pub(crate) fn count_flows<W: Maps>(&self, stage: Stage) -> Result<usize> {
        let map = map_data(&self.ebpf, W::flow_map_name(stage))?;
        Ok(open::<FlowKeyOf<W>, FlowOf<W>>(map)?.read_all()?.len())
    }

    /// Runs a program on a packet that a process of the node sends, or that comes in.
    pub(crate) fn run(&self, program: &str, packet: &[u8]) -> Result<Output> {
        self.run_with(program, packet, None)
    }

    /// Runs a program on a packet that another interface has received.
    pub(crate) fn leaves(&self, program: &str, packet: &[u8]) -> Result<Output> {
        self.leaves_by(0, program, packet)
    }

    /// Runs a program on a forwarded packet at the interface with this index.
    pub(crate) fn leaves_by(&self, interface: u32, program: &str, packet: &[u8]) -> Result<Output> {
        self.leaves_merged(interface, program, packet, 0)
    }

    /// Runs a program as [`leaves_by`](Self::leaves_by) does, on segments of this size that are
    /// merged into one packet. BPF_PROG_TEST_RUN does not set the type of such segments, so the
    /// kernel makes no room in them for more headers.
    pub(crate) fn leaves_merged(
        &self,
        interface: u32,
        program: &str,
        packet: &[u8],
        size: u32,
    ) -> Result<Output> {
        self.run_with(program, packet, Some(&packet_context(interface, size)))
    }

    fn run_with(&self, program: &str, packet: &[u8], context: Option<&[u8]>) -> Result<Output> {
        let program: &SchedClassifier =
            self.ebpf.program(program).with_context(|| format!("no program {program}"))?.try_into()?;
        let mut out = vec![0; packet.len() + 256];
        let result = program.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: context,
            ..TestRunOptions::default()
        })?;
        out.truncate(result.data_size_out as usize);
        Ok(Output { verdict: Verdict::of_tc(result.return_value)?, packet: out })
    }

    /// Attaches the XDP program to this interface, so that frames can come by it.
    pub(crate) fn attach_xdp(&mut self, interface: &str) -> Result<()> {
        let name = program::xdp_forward;
        self.load_xdp(name)?
            .attach(interface, XdpMode::Driver)
            .with_context(|| format!("attaching {name}"))?;
        Ok(())
    }

    fn load_xdp(&mut self, name: &str) -> Result<&mut Xdp> {
        let program: &mut Xdp =
            self.ebpf.program_mut(name).with_context(|| format!("no program {name}"))?.try_into()?;
        if program.fd().is_err() {
            program.load().with_context(|| format!("loading {name}"))?;
        }
        Ok(program)
    }

    /// Runs the XDP program on a frame that comes by the interface with this index, in one piece.
    pub(crate) fn run_xdp(&self, interface: u32, frame: &[u8]) -> Result<Output> {
        self.run_xdp_program(program::xdp_forward, &frame_context(interface, frame), frame)
    }

    /// Runs the XDP program on a frame whose first `first` bytes are in one piece. The rest is in
    /// fragments.
    pub(crate) fn run_xdp_in_fragments(
        &mut self,
        interface: u32,
        first: usize,
        frame: &[u8],
    ) -> Result<Output> {
        if !has_xdp_fragments()? {
            bail!(Skip("the kernel has no frames in fragments (5.18)".to_owned()));
        }
        let name = program::xdp_forward_frags;
        self.load_xdp(name)?;
        let output = self.run_xdp_program(name, &frame_context(interface, &frame[..first]), frame);
        // Kernels before 6.18 fill a page before they begin a fragment.
        output.map_err(|error| {
            Skip(format!("the kernel cuts no frames as it is told (6.18): {error:#}")).into()
        })
    }

    fn run_xdp_program(&self, name: &str, context: &[u8], frame: &[u8]) -> Result<Output> {
        let program: &Xdp =
            self.ebpf.program(name).with_context(|| format!("no program {name}"))?.try_into()?;
        let mut out = vec![0; frame.len() + 256];
        let result = program.test_run(TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(context),
            ..TestRunOptions::default()
        })?;
        out.truncate(result.data_size_out as usize);
        Ok(Output { verdict: Verdict::of_xdp(result.return_value)?, packet: out })
    }

    /// Empties every map, and resets the settings, so that there is no masquerade address.
    pub(crate) fn clear(&mut self) -> Result<()> {
        V4::clear(&mut self.ebpf)?;
        V6::clear(&mut self.ebpf)?;
        clear(hash::<FlowKeyOf<V4>, HostConnection>(&mut self.ebpf, map_name::host_connections4)?)?;
        clear(hash::<FlowKeyOf<V6>, HostConnection>(&mut self.ebpf, map_name::host_connections6)?)?;
        clear(hash::<u32, InterfaceSettings>(&mut self.ebpf, map_name::interfaces)?)?;
        clear(hash::<VlanTag, u32>(&mut self.ebpf, map_name::vlan_devices)?)?;
        clear(hash::<u32, u32>(&mut self.ebpf, map_name::pod_namespaces)?)?;
        clear(hash::<u32, LinkAddress>(&mut self.ebpf, map_name::redirect_sources)?)?;
        let targets = self.redirect_targets()?;
        targets.read_all()?.iter().try_for_each(|(key, _)| targets.remove(key).map(drop))?;
        clear(hash::<u32, Connections>(&mut self.ebpf, map_name::connections)?)?;
        clear(hash::<u32, Collected>(&mut self.ebpf, map_name::collected)?)?;
        self.set_settings(Settings::default())?;
        self.hold_openings(0)?;
        self.set_lease_end(0)?;
        self.switch_log(false)?;
        self.logged()?;
        self.set_event_control(EventControl::default())?;
        self.events()?;
        let cpus = aya::util::nr_cpus().map_err(|(file, error)| anyhow::anyhow!("{file}: {error}"))?;
        let mut counters = per_cpu::<u64>(&mut self.ebpf, map_name::counters)?;
        for reason in Reason::ALL {
            counters.set(*reason as u32, PerCpuValues::try_from(vec![0; cpus])?, 0)?;
        }
        let mut errors = per_cpu(&mut self.ebpf, ICMP_ERRORS)?;
        for budget in IcmpBudget::ALL {
            errors.set(budget as u32, PerCpuValues::try_from(vec![IcmpErrorCount::default(); cpus])?, 0)?;
        }
        let mut services = per_cpu(&mut self.ebpf, map_name::service_counters)?;
        for id in 0..SERVICES {
            services.set(id, PerCpuValues::try_from(vec![ServiceCounters::default(); cpus])?, 0)?;
        }
        Ok(())
    }

    /// Returns what was counted for a service since the maps were cleared.
    pub(crate) fn service_counters(&mut self, id: u32) -> Result<ServiceCounters> {
        let mut sum = ServiceCounters::default();
        let counters = per_cpu::<ServiceCounters>(&mut self.ebpf, map_name::service_counters)?;
        for of_cpu in counters.get(&id, 0)?.iter() {
            sum.connections += of_cpu.connections;
            sum.packets += of_cpu.packets;
            sum.bytes += of_cpu.bytes;
        }
        Ok(sum)
    }

    /// Returns how many flows were opened and closed for each backend id that has had any.
    pub(crate) fn connections(&mut self) -> Result<BTreeMap<u32, (u64, u64)>> {
        let map = hash::<u32, Connections>(&mut self.ebpf, map_name::connections)?;
        let counted = |(id, counted): (u32, Connections)| (id, (counted.flows_opened, counted.flows_closed));
        let mut all = map.iter().map(|entry| entry.map(counted)).collect::<Result<BTreeMap<_, _>, _>>()?;
        all.retain(|id, _| is_backend(*id));
        Ok(all)
    }

    /// Makes the map say that the backend has `open` open connections.
    pub(crate) fn set_connections(&mut self, backend: u32, open: u64) -> Result<()> {
        let counted = Connections { flows_opened: open, ..Connections::default() };
        Ok(hash(&mut self.ebpf, map_name::connections)?.insert(backend, counted, 0)?)
    }

    /// Makes the map say that the controller has collected this many flows of the backend.
    pub(crate) fn collect_connections(&mut self, backend: u32, flows: u64) -> Result<()> {
        let collected = Collected { flows, sockets: 0 };
        Ok(hash(&mut self.ebpf, map_name::collected)?.insert(backend, collected, 0)?)
    }

    pub(crate) fn settings(&mut self) -> Result<Settings> {
        Ok(array(&mut self.ebpf, map_name::settings)?.get(&0, 0)?)
    }

    pub(crate) fn set_settings(&mut self, settings: Settings) -> Result<()> {
        Ok(array(&mut self.ebpf, map_name::settings)?.set(0, settings, 0)?)
    }

    /// Lets no flow open until this time, in nanoseconds since boot.
    pub(crate) fn hold_openings(&mut self, until: u64) -> Result<()> {
        Ok(array(&mut self.ebpf, map_name::openings_held_until)?.set(0, until, 0)?)
    }

    /// Raises the epoch as the controller does when a route, a neighbour or an interface has
    /// changed.
    pub(crate) fn raise_route_epoch(&mut self) -> Result<()> {
        let mut map = array::<RouteEpoch>(&mut self.ebpf, map_name::route_epoch)?;
        let RouteEpoch { number, .. } = map.get(&0, 0)?;
        Ok(map.set(0, RouteEpoch { number: number + 1, ..RouteEpoch::default() }, 0)?)
    }

    pub(crate) fn set_masquerade_ports(&mut self, ports: &[u16]) -> Result<()> {
        let mut map = array::<FourPorts>(&mut self.ebpf, map_name::masquerade_ports)?;
        for (index, chunk) in (0..).zip(ports.chunks(4)) {
            let mut four = FourPorts::default();
            four.ports[..chunk.len()].copy_from_slice(chunk);
            map.set(index, four, 0)?;
        }
        Ok(())
    }

    /// Raises the epoch as the controller does when a frontend or a backend is removed.
    pub(crate) fn raise_epoch(&mut self) -> Result<()> {
        let mut settings = self.settings()?;
        settings.epoch += 1;
        self.set_settings(settings)
    }

    pub(crate) fn set_interface(&mut self, index: u32, settings: InterfaceSettings) -> Result<()> {
        Ok(hash(&mut self.ebpf, map_name::interfaces)?.insert(index, settings, 0)?)
    }

    /// Makes packets that come by another interface with this tag belong to `interface`.
    pub(crate) fn put_vlan_device(&mut self, tag: VlanTag, interface: u32) -> Result<()> {
        Ok(hash(&mut self.ebpf, map_name::vlan_devices)?.insert(tag, interface, 0)?)
    }

    /// Makes the pod at the interface have its sockets in the network namespace of this process.
    pub(crate) fn put_pod_here(&mut self, interface: u32) -> Result<()> {
        const CURRENT: u32 = u32::MAX;
        Ok(hash(&mut self.ebpf, map_name::pod_namespaces)?.insert(interface, CURRENT, 0)?)
    }

    /// Allows frames that come by the interface, which has this link address, to leave by others.
    pub(crate) fn put_redirect_source(&mut self, interface: u32, address: [u8; 6]) -> Result<()> {
        let own = LinkAddress { bytes: address, ..LinkAddress::default() };
        Ok(hash(&mut self.ebpf, map_name::redirect_sources)?.insert(interface, own, 0)?)
    }

    pub(crate) fn remove_redirect_source(&mut self, interface: u32) -> Result<()> {
        Ok(hash::<u32, LinkAddress>(&mut self.ebpf, map_name::redirect_sources)?.remove(&interface)?)
    }

    /// Allows frames that have come by other interfaces to leave by this one.
    pub(crate) fn put_redirect_target(&mut self, key: u32, interface: u32) -> Result<()> {
        Ok(self.redirect_targets()?.set(&key, &RedirectTarget { interface, program: 0 })?)
    }

    pub(crate) fn remove_redirect_target(&mut self, key: u32) -> Result<()> {
        Ok(self.redirect_targets()?.remove(&key).map(drop)?)
    }

    fn redirect_targets(&self) -> Result<TypedMap<u32, RedirectTarget>> {
        match self.ebpf.map(map_name::redirect_targets) {
            Some(Map::DevMapHash(map)) => open(map),
            other => bail!("{} is {other:?}", map_name::redirect_targets),
        }
    }

    pub(crate) fn set_lease_end(&mut self, end: u64) -> Result<()> {
        Ok(array(&mut self.ebpf, map_name::lease)?.set(0, Lease { end }, 0)?)
    }

    pub(crate) fn set_service(&mut self, id: u32, service: Service) -> Result<()> {
        Ok(array(&mut self.ebpf, map_name::services)?.set(id, service, 0)?)
    }

    pub(crate) fn switch_log(&mut self, on: bool) -> Result<()> {
        let control = LogControl { enabled: on.into(), ..LogControl::default() };
        Ok(array(&mut self.ebpf, map_name::kernel_log)?.set(0, control, 0)?)
    }

    /// Returns how many lines the programs have logged since the last call.
    pub(crate) fn logged(&mut self) -> Result<usize> {
        const LINES: &str = "AYA_LOGS";
        let mut lines = RingBuf::try_from(self.ebpf.map_mut(LINES).context(LINES)?)?;
        Ok(std::iter::from_fn(|| lines.next().map(drop)).count())
    }

    pub(crate) fn set_event_control(&mut self, control: EventControl) -> Result<()> {
        Ok(array(&mut self.ebpf, map_name::event_control)?.set(0, control, 0)?)
    }

    /// Returns the events of the programs since the last call.
    pub(crate) fn events(&mut self) -> Result<Vec<Event>> {
        let mut ring = RingBuf::try_from(self.ebpf.map_mut(map_name::events).context(map_name::events)?)?;
        let mut events = Vec::new();
        while let Some(record) = ring.next() {
            events.push(pod(&record).context("a record that is no event")?);
        }
        Ok(events)
    }

    /// Returns the reasons that were counted since the maps were cleared.
    pub(crate) fn counted(&mut self) -> Result<Vec<(Reason, u64)>> {
        let counters = per_cpu::<u64>(&mut self.ebpf, map_name::counters)?;
        let mut counted = Vec::new();
        for reason in Reason::ALL {
            let count: u64 = counters.get(&(*reason as u32), 0)?.iter().sum();
            if count > 0 {
                counted.push((*reason, count));
            }
        }
        Ok(counted)
    }
}

/// Parses a link address such as `02:00:00:00:00:01`.
pub(crate) fn link_address(text: &str) -> Result<[u8; 6]> {
    let bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<_>, _>>();
    <[u8; 6]>::try_from(bytes?).map_err(|bytes| anyhow!("{text} has {} bytes", bytes.len()))
}
