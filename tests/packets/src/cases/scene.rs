//! The maps that a case fills, and the packets that it sends.

use std::marker::PhantomData;

use anyhow::{Result, bail, ensure};
use proxy_common::{flow::Stage, layout::*, port::Port, reason::Reason};

use crate::{
    wire::{Endpoint, KnownAddress, Segment, tcp, udp},
    world::{FlowKeyOf, FlowOf, Maps, Verdict, World},
};

pub(crate) const CLIENT: Endpoint = (KnownAddress::Client, 40_000);
pub(crate) const CLUSTER_IP: Endpoint = (KnownAddress::ClusterIp, 80);
pub(crate) const LOCAL: Endpoint = (KnownAddress::LocalBackend, 8080);
pub(crate) const REMOTE: Endpoint = (KnownAddress::RemoteBackend, 8080);
pub(crate) const NODE_PORT: Endpoint = (KnownAddress::Node, 30_080);
/// Process of the node itself.
pub(crate) const PROCESS: Endpoint = (KnownAddress::Node, 45_000);
pub(crate) const MASQUERADE_PORTS: [[u16; 2]; 2] = [[20_000, 20_003], [20_010, 20_013]];

/// Programs for devices with Ethernet headers.
pub(crate) const PROGRAMS: [&str; 4] =
    ["workload_ingress", "workload_egress", "uplink_ingress", "uplink_egress"];

pub(crate) enum Expect<'a> {
    /// The packet goes on, and not a byte is changed.
    Untouched,
    /// The packet goes on as this one.
    Becomes(&'a Segment),
    /// The packet goes on as these bytes.
    BecomesBytes(Vec<u8>),
    /// These bytes are sent back.
    Answered(Vec<u8>),
    Dropped,
}

pub(crate) struct Scene<'w, W: Maps> {
    pub(crate) world: &'w mut World,
    pub(crate) protocol: u8,
    slots: u32,
    family: PhantomData<W>,
}

impl<'w, W: Maps> Scene<'w, W> {
    pub(crate) fn new(world: &'w mut World, protocol: u8) -> Self {
        Self { world, protocol, slots: 0, family: PhantomData }
    }

    /// Makes the first packet of a connection.
    pub(crate) fn first(&self, source: Endpoint, destination: Endpoint) -> Segment {
        self.packet(source, destination, proxy_common::packet::TCP_SYN)
    }

    /// Makes a packet of a connection. `flags` are used only where the protocol has them.
    pub(crate) fn packet(&self, source: Endpoint, destination: Endpoint, flags: u8) -> Segment {
        if self.protocol == PROTOCOL_TCP { tcp(source, destination, flags) } else { udp(source, destination) }
    }

    /// Makes a packet of a backend.
    pub(crate) fn answer(&self, source: Endpoint, destination: Endpoint, flags: u8) -> Segment {
        self.packet(destination, source, 0).answer(flags)
    }

    /// Sends a client's first packet through this program, and expects it to go on to this backend.
    pub(crate) fn opens(
        &mut self,
        program: &str,
        client: Endpoint,
        frontend: Endpoint,
        backend: Endpoint,
    ) -> Result<Segment> {
        let first = self.first(client, frontend);
        self.send(program, &first, Expect::Becomes(&first.to(backend)))?;
        Ok(first)
    }

    pub(crate) fn backend(&mut self, id: u32, endpoint: Endpoint, local: bool) -> Result<()> {
        let backend = Backend {
            address: W::address(endpoint.0),
            port: endpoint.1,
            protocol: self.protocol,
            state: BACKEND_ACTIVE,
            uses: 1,
            flags: if local { BACKEND_LOCAL } else { 0 },
            owner: 0,
        };
        W::put_backend(&mut self.world.ebpf, id, backend)
    }

    pub(crate) fn set(&mut self, backends: &[(u32, Endpoint, bool)]) -> Result<EndpointSet> {
        let first = self.slots;
        for one in backends {
            self.backend(one.0, one.1, one.2)?;
            self.slot(*one)?;
        }
        Ok(EndpointSet::new(first, backends.len() as u32))
    }

    fn slot(&mut self, (id, endpoint, local): (u32, Endpoint, bool)) -> Result<()> {
        let flags = if local { BACKEND_LOCAL } else { 0 };
        W::put_slot(&mut self.world.ebpf, self.slots, endpoint, id, flags)?;
        self.slots += 1;
        Ok(())
    }

    /// Writes an endpoint set with a lookup table. Each element of `table` is an index of
    /// `backends`.
    pub(crate) fn set_with_table(
        &mut self,
        backends: &[(u32, Endpoint, bool)],
        table: &[usize],
    ) -> Result<EndpointSet> {
        let set = self.set(backends)?;
        table.iter().try_for_each(|index| self.slot(backends[*index]))?;
        Ok(set.with_table(table.len().ilog2()))
    }

    /// Writes a service that has one endpoint set for all clients.
    pub(crate) fn service(&mut self, id: u32, backends: &[(u32, Endpoint, bool)]) -> Result<()> {
        let set = self.set(backends)?;
        let flags = if backends.is_empty() { 0 } else { SERVICE_HAS_ENDPOINTS };
        self.world.set_service(
            id,
            Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 },
        )
    }

    /// Writes a service that has endpoints elsewhere, but none in the set that policy Local asks
    /// for.
    pub(crate) fn service_without_local_endpoint(&mut self, id: u32) -> Result<()> {
        self.world.set_service(id, Service { flags: SERVICE_HAS_ENDPOINTS, ..Service::default() })
    }

    pub(crate) fn frontend(&mut self, endpoint: Endpoint, service: u32, flags: u32) -> Result<()> {
        let key = FrontendKey::of_address(W::address(endpoint.0), Port::new(endpoint.1), self.protocol);
        W::put_frontend(&mut self.world.ebpf, key, Frontend { service, flags })
    }

    /// Writes the entry that says that an address is a ClusterIP.
    pub(crate) fn cluster_ip_entry(&mut self, of: KnownAddress) -> Result<()> {
        let key = FrontendKey::of_cluster_ip(W::address(of));
        W::put_frontend(&mut self.world.ebpf, key, Frontend::NONE)
    }

    pub(crate) fn node_port(&mut self, service: u32) -> Result<()> {
        let key = FrontendKey::of_node_port(Port::new(NODE_PORT.1), self.protocol);
        W::put_frontend(&mut self.world.ebpf, key, Frontend { service, flags: FRONTEND_EXTERNAL })?;
        W::put_node_address(&mut self.world.ebpf, W::address(NODE_PORT.0), 0)
    }

    /// Makes one backend on another node serve `NODE_PORT`.
    pub(crate) fn node_port_elsewhere(&mut self) -> Result<()> {
        self.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        self.service(1, &[(12, REMOTE, false)])?;
        self.node_port(1)
    }

    /// Makes one backend on this node serve `NODE_PORT`.
    pub(crate) fn node_port_here(&mut self) -> Result<()> {
        self.service(1, &[(11, LOCAL, true)])?;
        self.node_port(1)
    }

    /// Makes `CLUSTER_IP` a frontend without endpoints.
    pub(crate) fn without_endpoints(&mut self) -> Result<()> {
        self.service(1, &[])?;
        self.frontend(CLUSTER_IP, 1, 0)
    }

    /// Returns the end that replaces a client outside once its first packet has left the node.
    pub(crate) fn masqueraded(&mut self, client: Endpoint) -> Result<Endpoint> {
        Ok((KnownAddress::Node, self.flow_of(Stage::Opening, client)?.masquerade_port().number()))
    }

    /// Makes one backend on this node serve `CLUSTER_IP`.
    pub(crate) fn cluster_ip(&mut self) -> Result<()> {
        self.service(1, &[(11, LOCAL, true)])?;
        self.frontend(CLUSTER_IP, 1, 0)
    }

    /// Sets the masquerade address and its two ranges of reserved ports. Ports of the first range
    /// are tried first.
    pub(crate) fn masquerade_as(&mut self, of: KnownAddress, ports: [[u16; 2]; 2]) -> Result<()> {
        let ranges = ports.map(|[first, last]| first..=last);
        let mut settings = Settings {
            reserved_ports: ports,
            masquerade_ports: ranges.iter().map(|range| range.len() as u16).sum(),
            masquerade_ports_reserved: ranges[0].len() as u16,
            ..Settings::default()
        };
        self.world.set_masquerade_ports(&ranges.into_iter().flatten().collect::<Vec<_>>())?;
        W::set_masquerade(&mut settings, W::address(of));
        self.world.set_settings(settings)
    }

    pub(crate) fn change_settings(&mut self, change: impl FnOnce(&mut Settings)) -> Result<()> {
        let mut settings = self.world.settings()?;
        change(&mut settings);
        self.world.set_settings(settings)
    }

    /// Sends a packet through a program, and compares what comes out.
    pub(crate) fn send(&mut self, program: &str, packet: &Segment, expected: Expect) -> Result<()> {
        self.send_bytes(program, &packet.bytes::<W>(), expected)
    }

    pub(crate) fn send_bytes(&mut self, program: &str, bytes: &[u8], expected: Expect) -> Result<()> {
        let output = self.world.run(program, bytes)?;
        let (verdict, wanted) = match &expected {
            Expect::Untouched => (Verdict::GoesOn, Some(bytes.to_vec())),
            Expect::Becomes(packet) => (Verdict::GoesOn, Some(packet.bytes::<W>())),
            Expect::BecomesBytes(bytes) => (Verdict::GoesOn, Some(bytes.clone())),
            Expect::Answered(bytes) => (Verdict::Redirected, Some(bytes.clone())),
            Expect::Dropped => (Verdict::Dropped, None),
        };
        let counted = self.world.counted()?;
        ensure!(
            output.verdict == verdict,
            "{program}: {:?}, expected {verdict:?}; counted {counted:?}",
            output.verdict
        );
        match wanted {
            Some(wanted) if wanted != output.packet => {
                bail!(
                    "{program} gave\n  {}\nexpected\n  {}\ncounted {counted:?}",
                    hex(&output.packet),
                    hex(&wanted)
                )
            }
            _ => Ok(()),
        }
    }

    /// Expects exactly these reasons to be counted, each this many times.
    pub(crate) fn counted(&mut self, expected: &[(Reason, u64)]) -> Result<()> {
        let mut expected = expected.to_vec();
        expected.sort_by_key(|(reason, _)| *reason as u32);
        let counted = self.world.counted()?;
        ensure!(counted == expected, "counted {counted:?}, expected {expected:?}");
        Ok(())
    }

    /// Expects one connection of service 1 to be counted, with these packets and bytes.
    pub(crate) fn counted_for_service(&mut self, packets: u64, bytes: usize) -> Result<()> {
        let counted = self.world.service_counters(1)?;
        let expected = ServiceCounters { connections: 1, packets, bytes: bytes as u64 };
        ensure!(counted == expected, "counted {counted:?}, expected {expected:?}");
        Ok(())
    }

    /// Expects the entries of one masqueraded flow. A flow of TCP is established.
    pub(crate) fn has_masqueraded_flow(&mut self) -> Result<()> {
        let established = if self.protocol == PROTOCOL_TCP { 3 } else { 0 };
        ensure!(self.flow_counts()? == (3, established), "entries {:?}", self.flow_counts()?);
        Ok(())
    }

    pub(crate) fn flows(&mut self, stage: Stage) -> Result<Vec<(FlowKeyOf<W>, FlowOf<W>)>> {
        W::flows(&mut self.world.ebpf, stage)
    }

    /// Changes the flows as if they had been opened long ago.
    pub(crate) fn age(&mut self, stage: Stage) -> Result<()> {
        for (key, mut flow) in self.flows(stage)? {
            flow.opened = 1;
            W::put_flow(&mut self.world.ebpf, stage, key, flow)?;
        }
        Ok(())
    }

    /// Returns the number of entries of opening flows, and of established flows.
    pub(crate) fn flow_counts(&mut self) -> Result<(usize, usize)> {
        Ok((self.flows(Stage::Opening)?.len(), self.flows(Stage::Established)?.len()))
    }

    /// Returns a client's flow, from its entry for client and frontend.
    pub(crate) fn flow_of(&mut self, stage: Stage, client: Endpoint) -> Result<FlowOf<W>> {
        for (key, flow) in self.flows(stage)? {
            let of_client = (flow.client, flow.client_port().number()) == (W::address(client.0), client.1);
            if of_client && key == flow.client_key() {
                return Ok(flow);
            }
        }
        bail!("no {stage:?} flow of {client:?}")
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ")
}
