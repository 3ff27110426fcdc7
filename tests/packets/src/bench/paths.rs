//! The paths of a packet that are measured.

use anyhow::Result;
use proxy_common::{
    layout::*,
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{
    At, DIRECT, DIRECT_HERE, Devices, FEW, FLOOD, FROM, Known, MANY_NEW, MASQUERADED, NODES, OF_NODE, PLAIN,
    Packet, Path, Runs, SIZES, STRANGER, Step, TO_POD,
};
use crate::{
    cases::{
        choice::{balance, connections},
        forwarding::{direct, forward::Uplink, redirect},
        scene::*,
    },
    wire::{KnownAddress, tcp, udp},
    world::{Globals, Maps, Verdict},
};

/// Returns every path of a packet that is measured.
pub(super) fn paths<W: Maps + 'static>() -> Vec<Path<W>> {
    let mut paths = of_no_flow::<W>();
    paths.extend(translated::<W>());
    paths.extend(of_new_flows::<W>());
    paths.extend(direct_paths::<W>());
    paths.extend(skip_stack::<W>());
    paths
}

fn of_no_flow<W: Maps + 'static>() -> Vec<Path<W>> {
    let stranger = Packet::alone::<W>(&tcp(FROM, STRANGER, TCP_ACK));
    let mut neither = stranger.clone();
    neither.bytes[12] = 0x88;
    let leaving = [
        ("leaves, SYN of the node", tcp(NODES[0], STRANGER, TCP_SYN)),
        ("leaves, datagram of the node", udp(NODES[0], STRANGER)),
        ("leaves, datagram from a port for flows", udp(NODES[1], STRANGER)),
    ];
    let mut paths = vec![
        Path::new("neither IPv4 nor IPv6", Step::passes("workload_ingress", neither)),
        Path::new("of no service", Step::passes("workload_ingress", stranger.clone())),
        Path::new("leaves, of no flow", Step::passes("workload_egress", stranger.clone())),
        Path::new(
            "XDP: of no service",
            Step { is_changed: false, ..Step::forwards(stranger, Verdict::GoesOn) },
        )
        .with(with_uplink),
    ];
    for (name, segment) in leaving {
        let step = Step::passes("uplink_egress", Packet::alone::<W>(&segment));
        paths.push(Path::new(name, step).with(|s| {
            let mut settings = Settings { reserved_ports: [[20_000, 29_999], [1, 0]], ..Settings::default() };
            W::set_masquerade(&mut settings, W::address(KnownAddress::Node));
            s.world.set_settings(settings)?;
            Ok(Devices::default())
        }));
    }
    paths
}

fn translated<W: Maps + 'static>() -> Vec<Path<W>> {
    let known = |name, known: Known, program, packet: Packet| {
        Path::known(name, known, Step::translates(program, packet))
    };
    let leased = Globals { lease: 1, ..Globals::default() };
    let host = Globals { host_packets: 1, ..Globals::default() };
    let with_many = |name, of, program, packet| Path { sizes: &SIZES, ..known(name, of, program, packet) };
    let mut leaves =
        with_many("masqueraded, leaves", MASQUERADED, "uplink_egress", MASQUERADED.to_backend::<W>());
    leaves.step.at = At::Forwarded;
    let (first, later) = (Packet::fragment::<W>(0), Packet::fragment::<W>(1));
    vec![
        with_many("known flow, translated", PLAIN, "workload_ingress", PLAIN.to_frontend::<W>()),
        Path {
            globals: leased,
            ..known("known flow, with a lease", PLAIN, "workload_ingress", PLAIN.to_frontend::<W>())
        },
        known("its answer, to a pod", PLAIN, "workload_egress", PLAIN.answer::<W>()),
        with_many("its answer, by the uplink", TO_POD, "uplink_egress", TO_POD.answer::<W>()),
        with_many("masqueraded, comes in", MASQUERADED, "uplink_ingress", MASQUERADED.to_frontend::<W>()),
        leaves,
        with_many("its answer comes in", MASQUERADED, "uplink_ingress", MASQUERADED.answer::<W>()),
        with_many("its answer leaves", MASQUERADED, "uplink_egress", MASQUERADED.answer_inside::<W>()),
        Path {
            globals: host,
            ..known("of the node itself", OF_NODE, "uplink_egress", OF_NODE.to_frontend::<W>())
        },
        Path {
            globals: host,
            ..known("its answer, to the node", OF_NODE, "uplink_ingress", OF_NODE.answer::<W>())
        },
        known("first fragment", PLAIN, "workload_ingress", first.clone()),
        Path {
            before: vec![Step::translates("workload_ingress", first)],
            ..known("later fragment", PLAIN, "workload_ingress", later)
        },
    ]
}

fn of_new_flows<W: Maps + 'static>() -> Vec<Path<W>> {
    /// Watches one of `one_of` events.
    fn watched(one_of: u32) -> EventControl {
        EventControl::new(u64::MAX, Reason::ALL.iter().copied(), one_of.into())
    }
    let watched = [
        ("nobody watches", EventControl::default()),
        ("each is told", watched(1)),
        ("one of ten is", watched(10)),
    ];
    let mut paths = Vec::new();
    for (name, control) in watched {
        let opening = Path::opening(format!("SYN that opens a flow, {name}"), move |s| {
            s.cluster_ip()?;
            s.world.set_event_control(control)
        });
        paths.push(Path { sizes: MANY_NEW, ..opening });
    }
    paths.extend([
        Path::opening("SYN that opens a flow at random of two", |s| connections::serve(s, 0)),
        Path::opening("SYN that opens a flow by Maglev", |s| {
            balance::serve(s, &balance::TABLE, FRONTEND_MAGLEV, 0)
        }),
        Path::opening("SYN that opens a flow by leastConnection", |s| {
            connections::serve(s, FRONTEND_LEAST_CONNECTION)
        }),
        Path::opening("SYN that opens a flow by affinity", |s| {
            balance::serve(s, &balance::TABLE, FRONTEND_AFFINITY, 60)
        }),
    ]);
    for (name, control) in watched {
        let mut path = Path::opening(format!("SYN that is refused, {name}"), move |s| {
            s.without_endpoints()?;
            s.world.set_event_control(control)
        });
        path.step.verdict = Verdict::Redirected;
        paths.push(path);
    }
    let mut dropped = Path::opening("SYN that the flood limit drops", |s| {
        s.cluster_ip()?;
        s.change_settings(|settings| settings.openings_per_window = 1)
    });
    dropped.sizes = FLOOD;
    paths.push(dropped);
    paths
}

fn direct_paths<W: Maps + 'static>() -> Vec<Path<W>> {
    let mut paths = Vec::new();
    for (way, label) in direct::WAYS {
        let dialled = move |s: &mut Scene<W>| {
            direct::dialled(s, way)?;
            Ok(Devices::default())
        };
        let arrives = Step::translates("uplink_ingress", DIRECT.to_frontend::<W>());
        let leaves = Step::translates("uplink_egress", DIRECT.to_backend::<W>()).at(At::Forwarded);
        let tunnel = direct::tunnel(way);
        let carried = tcp(FROM, direct::LOAD_BALANCER, TCP_ACK).in_tunnel::<W>(tunnel);
        let ports = carried.len() - 20;
        let carried = Packet { bytes: carried, offsets: [Some(ports), Some(ports + 2)] };
        paths.extend([
            Path::known(format!("{label}: comes in"), DIRECT, arrives).with(dialled),
            Path { runs: Runs::Alone, ..Path::known(format!("{label}: leaves"), DIRECT, leaves.clone()) }
                .with(dialled),
            Path::known(
                format!("{label}: is taken out"),
                DIRECT_HERE,
                Step::translates("uplink_ingress", carried),
            )
            .with(|s| {
                direct::backends_node(s)?;
                Ok(Devices::default())
            }),
            Path {
                before: vec![leaves],
                ..Path::known(
                    format!("XDP: {label}"),
                    DIRECT,
                    Step::forwards(DIRECT.to_frontend::<W>(), Verdict::SentBack),
                )
            }
            .with(move |s| {
                direct::dialled(s, way)?;
                with_uplink(s)
            }),
        ]);
    }
    paths
}

fn skip_stack<W: Maps + 'static>() -> Vec<Path<W>> {
    let sent = |packet| Step::forwards(packet, Verdict::SentBack);
    // The stack forwards the first packets of a flow before XDP does.
    let first = tcp(FROM, NODE_PORT, TCP_SYN);
    let answer = first.to(LOCAL).answer(TCP_SYN | TCP_ACK);
    let begun = vec![
        Step::translates("uplink_ingress", Packet::from_client::<W>(&first)),
        Step::translates("uplink_egress", Packet::to_client::<W>(&answer)).at(At::Uplink),
    ];
    let to_pod = Step::forwards(TO_POD.to_frontend::<W>(), Verdict::Redirected);
    let skip_stack = Step {
        verdict: Verdict::Redirected,
        ..Step::translates("workload_ingress", TO_POD.answer::<W>()).at(At::Pod)
    };
    vec![
        Path {
            sizes: &SIZES,
            ..Path::known("XDP: masqueraded, sent on", MASQUERADED, sent(MASQUERADED.to_frontend::<W>()))
        }
        .with(with_uplink),
        Path {
            sizes: &SIZES,
            ..Path::known("XDP: its answer, sent on", MASQUERADED, sent(MASQUERADED.answer::<W>()))
        }
        .with(with_uplink),
        Path { before: begun.clone(), sizes: FEW, ..Path::new("XDP: to a pod", to_pod.clone()) }
            .with(with_pod),
        Path {
            before: [begun, vec![to_pod]].concat(),
            sizes: FEW,
            ..Path::new("a pod's answer that skips the stack", skip_stack)
        }
        .with(with_pod),
    ]
}

fn with_uplink<W: Maps>(s: &mut Scene<W>) -> Result<Devices> {
    let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
    Ok(Devices { uplink: Some(uplink), pod: None })
}

fn with_pod<W: Maps>(s: &mut Scene<W>) -> Result<Devices> {
    let (uplink, pod) = redirect::node_with_pod(s)?;
    Ok(Devices { uplink: Some(uplink), pod: Some(pod) })
}
