//! Nanoseconds a packet takes: `cargo test -p packets -- --bench [part of a name]`.
//!
//! BPF_PROG_TEST_RUN does not restore the packet between runs, so a program meets its own output. Here each flow translates into what the
//! next one's client sends, and the last one into what the first one's does: every run translates a known flow.

use anyhow::{Context as _, Result, ensure};
use aya::{
    TestRun as _, TestRunOptions,
    programs::{SchedClassifier, Xdp},
};
use proxy_common::{
    family::{V4, V6},
    flow::Stage,
    inventory::program,
    layout::{EventControl, FLOW_MASQUERADE, Flow, PROGRESS_CONFIRMED, PROTOCOL_TCP, Settings},
    packet::{TCP_ACK, TCP_SYN},
    port::Port,
    reason::Reason,
};

use crate::{
    cases::{
        scene::{CLIENT, CLUSTER_IP, Scene},
        transit::{OWN, Uplink},
    },
    wire::{Endpoint, KnownAddress, tcp, udp},
    world::{FlowOf, Globals, Sizes, Tables, World, frame_context},
};

const RUNS: u32 = 1_048_576;
const ROUNDS: usize = 5;
/// How many flows packets come from in turn.
const FLOWS: [u32; 4] = [2, 1_024, 65_536, 1_048_576];

/// Takes the figures whose names have this part.
pub(crate) fn run(object: &[u8], filter: &str) -> Result<()> {
    single_packets(object, filter)?;
    let mut world = World::load(object, Globals::default(), Sizes::Small)?;
    first_packets::<V4>(&mut world, filter)?;
    first_packets::<V6>(&mut world, filter)?;
    limited::<V4>(&mut world, filter)?;
    limited::<V6>(&mut world, filter)?;
    for count in FLOWS {
        let name = format!("known flow, translated, {count} flows in turn");
        if name.contains(filter) {
            known_flows::<V4>(object, count, &name)?;
            known_flows::<V6>(object, count, &name)?;
        }
    }
    for count in FLOWS {
        let name = format!("XDP: known flow, sent on, {count} flows in turn");
        if name.contains(filter) {
            transit::<V4>(object, count, &name)?;
            transit::<V6>(object, count, &name)?;
        }
    }
    Ok(())
}

fn single_packets(object: &[u8], filter: &str) -> Result<()> {
    let nobody = EventControl::default();
    for (lease, watched, name) in
        [(0, nobody, "without lease"), (1, nobody, "with a lease"), (0, watched(1), "while somebody watches")]
    {
        println!("{name}");
        let mut world = World::load(object, Globals { lease, ..Globals::default() }, Sizes::Small)?;
        family::<V4>(&mut world, watched, filter)?;
        family::<V6>(&mut world, watched, filter)?;
    }
    Ok(())
}

/// As [`known_flows`], masqueraded flows of which XDP sends each packet on, to the interface itself as the next hop.
fn transit<W: Tables>(object: &[u8], count: u32, name: &str) -> Result<()> {
    /// A packet goes so far, and then begins anew.
    const HOPS: u32 = 60;
    const CLIENT_PORTS: u32 = 50_000;
    const FIRST: u32 = 1_024;
    // Neighbours differ in both ports, so that no flow's way to its backend is another's to its frontend.
    let ends = |number: u32| {
        let frontend = FIRST + number / CLIENT_PORTS * 2 + number % 2;
        anyhow::Ok((u16::try_from(FIRST + number % CLIENT_PORTS)?, u16::try_from(frontend)?))
    };
    let mut world = World::with_flows::<W>(object, 2 * count)?;
    let uplink = Uplink::new::<W>(&mut world)?;
    for neighbour in [CLIENT.0, CLUSTER_IP.0] {
        uplink.knows::<W>(neighbour, OWN)?;
    }
    for number in 0..count {
        let (client, frontend) = ends(number)?;
        let (masquerade, backend) = ends((number + 1) % count)?;
        let mut flow = flow::<W>(client, client, (CLUSTER_IP.0, frontend), (CLUSTER_IP.0, backend));
        (flow.flags, flow.masquerade) = (FLOW_MASQUERADE, W::address(CLIENT.0));
        flow.set_masquerade_port(Port::new(masquerade));
        for key in [flow.client_key(), flow.backend_key()] {
            W::put_flow(&mut world.ebpf, Stage::Established, key, flow)?;
        }
    }
    let program: &Xdp = world.ebpf.program(program::uplink_transit).context("no program")?.try_into()?;
    let time = |number: u32, hops: u32, port: Endpoint| {
        let packet = tcp((CLIENT.0, ends(number)?.0), port, TCP_ACK).bytes::<W>();
        let context = frame_context(uplink.index, &packet);
        let options = TestRunOptions {
            data_in: Some(&packet),
            ctx_in: Some(&context),
            repeat: hops,
            ..TestRunOptions::default()
        };
        anyhow::Ok(program.test_run(options)?.duration.as_nanos())
    };
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let begins = (0..RUNS / HOPS).map(|run| run * HOPS % count);
        let sum: u128 =
            begins.map(|begin| time(begin, HOPS, (CLUSTER_IP.0, ends(begin)?.1))).sum::<Result<u128>>()?;
        rounds.push(sum / u128::from(RUNS / HOPS));
    }
    print_rounds::<W>(name, rounds);
    if count == FLOWS[0] {
        let stranger = (KnownAddress::Stranger, 80);
        let rounds = (0..ROUNDS).map(|_| time(0, RUNS, stranger)).collect::<Result<_>>()?;
        print_rounds::<W>("XDP: not a service", rounds);
    }
    Ok(())
}

/// One event of so many.
fn watched(one_of: u32) -> EventControl {
    EventControl::new(u64::MAX, Reason::ALL.iter().copied(), one_of.into())
}

fn known_flows<W: Tables>(object: &[u8], count: u32, name: &str) -> Result<()> {
    /// Each port of the client has as many flows at most, to as many ports of the service.
    const PER_PORT: u32 = 50_000;
    const FIRST: u32 = 1_024;
    let ends = |number: u32| {
        let port = |number: u32| u16::try_from(FIRST + number);
        anyhow::Ok((port(number / PER_PORT)?, (CLUSTER_IP.0, port(number % PER_PORT)?)))
    };
    let mut world = World::with_flows::<W>(object, count)?;
    for number in 0..count {
        let (client, frontend) = ends(number)?;
        let (alias, backend) = ends((number + 1) % count)?;
        let flow = flow::<W>(client, alias, frontend, backend);
        W::put_flow(&mut world.ebpf, Stage::Established, flow.client_key(), flow)?;
    }
    let (port, frontend) = ends(0)?;
    let packet = tcp((CLIENT.0, port), frontend, TCP_ACK).bytes::<W>();
    report::<W>(&world, name, program::uplink_ingress, &packet)
}

/// A flow of the port `client` to `frontend`, whose backend sees the port `alias`.
fn flow<W: Tables>(client: u16, alias: u16, frontend: Endpoint, backend: Endpoint) -> FlowOf<W> {
    let mut flow = Flow::default();
    (flow.client, flow.protocol, flow.service) = (W::address(CLIENT.0), PROTOCOL_TCP, 1);
    // In the future: nothing has to be refreshed.
    (flow.opened, flow.last_seen) = (1, u64::MAX);
    (flow.frontend, flow.backend) = (W::address(frontend.0), W::address(backend.0));
    flow.set_client_port(Port::new(client));
    flow.set_alias_port(Port::new(alias));
    flow.set_frontend_port(Port::new(frontend.1));
    flow.set_backend_port(Port::new(backend.1));
    flow.state.progress = PROGRESS_CONFIRMED;
    // The packets are of the middle of a connection.
    let segment = tcp(CLIENT, CLUSTER_IP, TCP_ACK);
    flow.backend_numbers.reached = segment.sequence;
    flow.client_numbers.reached = segment.acknowledgement;
    flow
}

fn family<W: Tables>(world: &mut World, watched: EventControl, filter: &str) -> Result<()> {
    const OTHER: (KnownAddress, u16) = (KnownAddress::OtherClusterIp, 8080);
    const STRANGER: Endpoint = (KnownAddress::Stranger, 80);
    const ALIAS: u16 = CLIENT.1 + 1;
    /// Of nobody's flow; the second at a port that flows are given.
    const NODES: [Endpoint; 2] = [(KnownAddress::Node, 40_000), (KnownAddress::Node, 20_000)];
    world.clear()?;
    let mut settings = Settings { apart_ports: [[20_000, 29_999], [1, 0]], ..Settings::default() };
    W::set_masquerade(&mut settings, W::address(KnownAddress::Node));
    world.set_settings(settings)?;
    for flow in [flow::<W>(CLIENT.1, ALIAS, CLUSTER_IP, OTHER), flow::<W>(ALIAS, CLIENT.1, OTHER, CLUSTER_IP)]
    {
        W::put_flow(&mut world.ebpf, Stage::Established, flow.client_key(), flow)?;
    }
    world.set_event_control(watched)?;
    let mut foreign = tcp(CLIENT, CLUSTER_IP, TCP_ACK).bytes::<W>();
    foreign[12] = 0x88;
    let stranger = tcp(CLIENT, STRANGER, TCP_ACK).bytes::<W>();
    let packets = [
        ("neither IPv4 nor IPv6", "workload_ingress", foreign),
        ("not a service", "workload_ingress", stranger.clone()),
        ("known flow, translated", "workload_ingress", tcp(CLIENT, CLUSTER_IP, TCP_ACK).bytes::<W>()),
        ("leaving, no flow", "workload_egress", stranger),
        ("leaving, SYN of the node", "uplink_egress", tcp(NODES[0], STRANGER, TCP_SYN).bytes::<W>()),
        ("leaving, datagram of the node", "uplink_egress", udp(NODES[0], STRANGER).bytes::<W>()),
        ("the same from a port for flows", "uplink_egress", udp(NODES[1], STRANGER).bytes::<W>()),
    ];
    let mut wanted = packets.iter().filter(|(name, ..)| name.contains(filter));
    wanted.try_for_each(|(name, program, packet)| report::<W>(world, name, program, packet))
}

/// What watching costs: only packets that open a flow, or end with a reason, make events.
fn first_packets<W: Tables>(world: &mut World, filter: &str) -> Result<()> {
    /// As many as the ring of events has room for.
    const CLIENTS: u16 = 8_192;
    let controls = [EventControl::default(), watched(1), watched(10)];
    for (endpoints, name) in [(true, "SYN that opens a flow"), (false, "SYN that is refused")] {
        if !name.contains(filter) {
            continue;
        }
        let mut rounds = [const { Vec::new() }; 3];
        // By turns, so that all meet the same machine.
        for _ in 0..ROUNDS {
            for (control, rounds) in controls.iter().zip(&mut rounds) {
                world.clear()?;
                let mut scene = Scene::<W>::new(world, PROTOCOL_TCP);
                if endpoints {
                    scene.cluster_ip()?;
                } else {
                    scene.service(1, &[])?;
                    scene.frontend(CLUSTER_IP, 1, 0)?;
                }
                world.set_event_control(*control)?;
                let mut sum = 0;
                for port in 0..CLIENTS {
                    let packet = tcp((CLIENT.0, 1_024 + port), CLUSTER_IP, TCP_SYN).bytes::<W>();
                    sum += nanoseconds(world, "workload_ingress", &packet, 1)?;
                }
                rounds.push(sum / u128::from(CLIENTS));
                let told = world.events()?.len();
                ensure!(control.one_of != 1 || told == usize::from(CLIENTS), "{told} events");
            }
        }
        for (rounds, watched) in rounds.into_iter().zip(["nobody watches", "each is told", "one of ten is"]) {
            print_rounds::<W>(&format!("{name}, {watched}"), rounds);
        }
    }
    Ok(())
}

/// The guard against floods lets one SYN in each of its windows open a flow.
fn limited<W: Tables>(world: &mut World, filter: &str) -> Result<()> {
    const NAME: &str = "SYN that the guard drops";
    const CLIENTS: u16 = 4_096;
    const REPEATS: u32 = 256;
    if !NAME.contains(filter) {
        return Ok(());
    }
    world.clear()?;
    let mut scene = Scene::<W>::new(world, PROTOCOL_TCP);
    scene.cluster_ip()?;
    scene.change_settings(|settings| settings.openings_per_window = 1)?;
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        let mut times = Vec::new();
        for port in 0..CLIENTS {
            let packet = tcp((CLIENT.0, 1_024 + port), CLUSTER_IP, TCP_SYN).bytes::<W>();
            times.push(nanoseconds(world, "workload_ingress", &packet, REPEATS)?);
        }
        times.sort_unstable();
        rounds.push(times[times.len() / 2]);
    }
    print_rounds::<W>(NAME, rounds);
    Ok(())
}

fn report<W: Tables>(world: &World, name: &str, program: &str, packet: &[u8]) -> Result<()> {
    let rounds = (0..ROUNDS).map(|_| nanoseconds(world, program, packet, RUNS)).collect::<Result<_>>()?;
    print_rounds::<W>(name, rounds);
    Ok(())
}

fn print_rounds<W: Tables>(name: &str, mut rounds: Vec<u128>) {
    rounds.sort_unstable();
    println!("{} {name}: {} ns/packet (least {})", W::NAME, rounds[ROUNDS / 2], rounds[0]);
}

fn nanoseconds(world: &World, program: &str, packet: &[u8], runs: u32) -> Result<u128> {
    let program: &SchedClassifier =
        world.ebpf.program(program).with_context(|| format!("no program {program}"))?.try_into()?;
    let options = TestRunOptions { data_in: Some(packet), repeat: runs, ..TestRunOptions::default() };
    Ok(program.test_run(options)?.duration.as_nanos())
}
