//! The masquerade ports of one address of the node, shared by as many flows as a large node has.

use std::{collections::HashSet, ops::Range, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::time::{ClockId, clock_gettime};
use proxy_common::{
    layout::{FRONTEND_EXTERNAL, Frontend, FrontendKey},
    port::Port,
    reason::Reason,
};

use crate::{
    cases::{Group, Scene, scene::*},
    wire::{Endpoint, KnownAddress},
    world::{Maps, Verdict, World},
};

/// All ports but those of node ports. The first range has the reserved ports.
const PORTS: [[u16; 2]; 2] = [[1_024, 29_999], [32_768, u16::MAX]];
const BACKENDS: [Endpoint; 4] = [
    (KnownAddress::RemoteBackend, 8080),
    (KnownAddress::RemoteBackend, 8081),
    (KnownAddress::OtherNode, 8080),
    (KnownAddress::OtherNode, 8081),
];
const FLOWS_OF_A_BACKEND: Range<u16> = 10_000..60_000;
/// Room for three entries of each of 200,000 flows, and for the entries that the kernel keeps free
/// on each CPU.
const ROOM: u32 = 700_000;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.udp::<W>("200,000 flows to 4 backends", |s| {
        let mut world = World::with_room::<W>(&crate::object()?, ROOM)?;
        let frontends = scene::<W>(&mut world, s.protocol, &BACKENDS)?;
        let mut scene = Scene::<W>::new(&mut world, s.protocol);
        let mut ports: Vec<HashSet<u16>> = vec![HashSet::new(); BACKENDS.len()];
        for client in FLOWS_OF_A_BACKEND {
            for (frontend, ports) in frontends.iter().zip(&mut ports) {
                let opened = open(&mut scene, (KnownAddress::Client, client), *frontend)?;
                let port =
                    opened.with_context(|| format!("flow {} to {frontend:?} has no port", ports.len()))?;
                ensure!(PORTS.iter().any(|[first, last]| (*first..=*last).contains(&port)), "port {port}");
                ensure!(ports.insert(port), "port {port} is given twice for {frontend:?}");
            }
        }
        scene.counted(&[(Reason::FlowOpened, 200_000)])
    });
    group.tcp::<W>("more flows to a backend than there are ports", |s| {
        /// Upper bound for a packet that finds no free port, in times of a packet that gets one.
        const AT_MOST: f64 = 10.0;
        let mut world = World::with_room::<W>(&crate::object()?, ROOM)?;
        let frontends = scene::<W>(&mut world, s.protocol, &BACKENDS[..1])?;
        let mut scene = Scene::<W>::new(&mut world, s.protocol);
        let mut ports = HashSet::new();
        let (mut dropped, mut refusing, mut opening) = (0_u32, Duration::ZERO, Duration::ZERO);
        for client in 1..=u16::MAX {
            let start = processor_time()?;
            match open(&mut scene, (KnownAddress::Client, client), frontends[0])? {
                Some(port) => {
                    opening += processor_time()? - start;
                    ensure!(ports.insert(port), "port {port} is given twice");
                }
                None => {
                    dropped += 1;
                    refusing += processor_time()? - start;
                }
            }
        }
        // A few ports stay free, because the last ones are tried at random.
        ensure!(ports.len() > 61_000, "only {} flows", ports.len());
        let ratio = refusing.div_duration_f64(opening) * ports.len() as f64 / f64::from(dropped);
        ensure!(
            ratio < AT_MOST,
            "a packet that is dropped takes {ratio:.1} times as long as one that gets a port"
        );
        let expected =
            [(Reason::FlowOpened, u16::MAX.into()), (Reason::MasqueradePortsExhausted, dropped.into())];
        scene.counted(&expected)
    });
}

/// Returns the processor time of the calling thread, which other processes of the machine do not
/// change.
fn processor_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// Writes one service with a node port for each backend.
fn scene<W: Maps>(world: &mut World, protocol: u8, backends: &[Endpoint]) -> Result<Vec<Endpoint>> {
    let mut scene = Scene::<W>::new(world, protocol);
    scene.masquerade_as(KnownAddress::Node, PORTS)?;
    let mut frontends = Vec::new();
    for (id, backend) in (1..).zip(backends) {
        scene.service(id, &[(10 + id, *backend, false)])?;
        let port = NODE_PORT.1 + id as u16;
        let key = FrontendKey::of_node_port(Port::new(port), protocol);
        W::put_frontend(&mut scene.world.ebpf, key, Frontend { service: id, flags: FRONTEND_EXTERNAL })?;
        frontends.push((NODE_PORT.0, port));
    }
    W::put_node_address(&mut scene.world.ebpf, W::address(NODE_PORT.0), 0)?;
    Ok(frontends)
}

/// Sends a client's first packet through the node. Returns its new source port, or `None` if it is
/// dropped.
fn open<W: Maps>(scene: &mut Scene<W>, client: Endpoint, frontend: Endpoint) -> Result<Option<u16>> {
    let first = scene.first(client, frontend).bytes::<W>();
    let inside = scene.world.run("uplink_ingress", &first)?;
    ensure!(inside.verdict == Verdict::GoesOn, "{client:?} was not let in");
    let outside = scene.world.run("uplink_egress", &inside.packet)?;
    Ok((outside.verdict == Verdict::GoesOn).then(|| source_port::<W>(&outside.packet)))
}

/// Returns the source port of a packet with Ethernet header and without options.
fn source_port<W: Maps>(packet: &[u8]) -> u16 {
    let transport = if size_of::<W::Address>() == 4 { 34 } else { 54 };
    u16::from_be_bytes([packet[transport], packet[transport + 1]])
}
