//! Nanoseconds a packet takes: `cargo test -p packets -- --bench`.
//!
//! BPF_PROG_TEST_RUN does not restore the packet between runs, so a program meets its own output. Here each of two
//! flows translates into what the other one's client sends: every run translates a known flow.

use anyhow::{Context as _, Result};
use aya::{TestRun as _, TestRunOptions, programs::SchedClassifier};
use proxy_common::{
    family::{V4, V6},
    flow::Stage,
    layout::{Flow, PROGRESS_CONFIRMED, PROTOCOL_TCP},
    packet::TCP_ACK,
    port::Port,
};

use crate::{
    cases::scene::{CLIENT, CLUSTER_IP},
    wire::{Endpoint, KnownAddress, tcp},
    world::{FlowOf, Tables, World},
};

const RUNS: u32 = 1_000_000;
const ROUNDS: usize = 5;

pub(crate) fn run(object: &[u8]) -> Result<()> {
    for (lease, name) in [(0, "without lease"), (1, "with a lease")] {
        println!("{name}");
        let mut world = World::load(object, 0, lease)?;
        family::<V4>(&mut world)?;
        family::<V6>(&mut world)?;
    }
    Ok(())
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
    flow
}

fn family<W: Tables>(world: &mut World) -> Result<()> {
    const OTHER: (KnownAddress, u16) = (KnownAddress::OtherClusterIp, 8080);
    const ALIAS: u16 = CLIENT.1 + 1;
    world.clear()?;
    for flow in [flow::<W>(CLIENT.1, ALIAS, CLUSTER_IP, OTHER), flow::<W>(ALIAS, CLIENT.1, OTHER, CLUSTER_IP)]
    {
        W::put_flow(&mut world.ebpf, Stage::Established, flow.client_key(), flow)?;
    }
    let mut foreign = tcp(CLIENT, CLUSTER_IP, TCP_ACK).bytes::<W>();
    foreign[12] = 0x88;
    let stranger = tcp(CLIENT, (KnownAddress::Stranger, 80), TCP_ACK).bytes::<W>();
    let packets = [
        ("neither IPv4 nor IPv6", "workload_ingress", foreign),
        ("not a service", "workload_ingress", stranger.clone()),
        ("known flow, translated", "workload_ingress", tcp(CLIENT, CLUSTER_IP, TCP_ACK).bytes::<W>()),
        ("leaving, no flow", "workload_egress", stranger),
    ];
    for (name, program, packet) in packets {
        let mut rounds =
            (0..ROUNDS).map(|_| nanoseconds(world, program, &packet)).collect::<Result<Vec<_>>>()?;
        rounds.sort_unstable();
        println!("{} {name}: {} ns/packet (least {})", W::NAME, rounds[ROUNDS / 2], rounds[0]);
    }
    Ok(())
}

fn nanoseconds(world: &World, program: &str, packet: &[u8]) -> Result<u128> {
    let program: &SchedClassifier =
        world.ebpf.program(program).with_context(|| format!("no program {program}"))?.try_into()?;
    let options = TestRunOptions { data_in: Some(packet), repeat: RUNS, ..TestRunOptions::default() };
    Ok(program.test_run(options)?.duration.as_nanos())
}
