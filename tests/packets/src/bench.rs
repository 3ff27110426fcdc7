//! Nanoseconds a packet takes: `cargo test -p packets -- --bench`.
//!
//! BPF_PROG_TEST_RUN does not restore the packet between runs, so a program meets its own output. Here each of two
//! frontends has the other as its backend: every run translates a known flow, there and back.

use anyhow::{Context as _, Result};
use aya::{TestRun as _, TestRunOptions, programs::SchedClassifier};
use proxy_common::{
    family::{V4, V6},
    layout::PROTOCOL_TCP,
    packet::{TCP_ACK, TCP_SYN},
};

use crate::{
    cases::scene::{CLIENT, CLUSTER_IP, Scene},
    wire::{KnownAddress, tcp},
    world::{Tables, World},
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

fn family<W: Tables>(world: &mut World) -> Result<()> {
    const OTHER: (KnownAddress, u16) = (KnownAddress::OtherClusterIp, 8080);
    world.clear()?;
    let mut scene = Scene::<W>::new(world, PROTOCOL_TCP);
    scene.service(1, &[(1, OTHER, true)])?;
    scene.service(2, &[(2, CLUSTER_IP, true)])?;
    scene.frontend(CLUSTER_IP, 1, 0)?;
    scene.frontend(OTHER, 2, 0)?;
    for frontend in [CLUSTER_IP, OTHER] {
        scene.world.run("workload_ingress", &tcp(CLIENT, frontend, TCP_SYN).bytes::<W>())?;
    }
    let mut foreign = tcp(CLIENT, CLUSTER_IP, TCP_ACK).bytes::<W>();
    foreign[12] = 0x88;
    let packets = [
        ("neither IPv4 nor IPv6", "workload_ingress", foreign),
        (
            "not a service",
            "workload_ingress",
            tcp(CLIENT, (KnownAddress::Stranger, 80), TCP_ACK).bytes::<W>(),
        ),
        ("known flow, translated", "workload_ingress", tcp(CLIENT, CLUSTER_IP, TCP_ACK).bytes::<W>()),
        (
            "leaving, no flow",
            "workload_egress",
            tcp(CLIENT, (KnownAddress::Stranger, 80), TCP_ACK).bytes::<W>(),
        ),
    ];
    for (name, program, packet) in packets {
        let mut rounds =
            (0..ROUNDS).map(|_| nanoseconds(scene.world, program, &packet)).collect::<Result<Vec<_>>>()?;
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
