//! Segments of connections that no map knows. The programs run on `lo`, which forwards here as an
//! uplink does, and all that is not the node's own has a route out.

use std::fs;

use anyhow::{Result, bail, ensure};
use lab::namespace::ip;
use proxy_common::{
    flow::{Stage, frontend_address_bit},
    layout::*,
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
    port::Port,
    reason::Reason,
};

use super::{
    BOTH, Group, Scene,
    choice::affinity,
    choice::balance,
    forwarding::forward::{Uplink, address},
    scene::*,
};
use crate::{
    wire::{Cut, Endpoint, Extra, KnownAddress, Link, Segment},
    world::{LOOPBACK, Maps, Verdict},
};

const SERVICE: u32 = 1;
const EXTERNAL: Endpoint = (KnownAddress::External, 80);
const FROM_OUTSIDE: &str = "uplink_ingress";
const FROM_POD: &str = "workload_ingress";

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    for (name, program, frontend, flags) in [
        ("load-balancer IP from outside", FROM_OUTSIDE, EXTERNAL, FRONTEND_EXTERNAL),
        ("load-balancer IP from a pod", FROM_POD, EXTERNAL, FRONTEND_EXTERNAL),
        ("ClusterIP from outside", FROM_OUTSIDE, CLUSTER_IP, 0),
        ("ClusterIP from a pod", FROM_POD, CLUSTER_IP, 0),
        (
            "source ranges that allow the client",
            FROM_OUTSIDE,
            EXTERNAL,
            FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES,
        ),
    ] {
        tcp::<W>(group, &format!("reset: {name}"), move |s| {
            serve(s, frontend, flags)?;
            W::put_source_range(&mut s.world.ebpf, SERVICE, W::address(CLIENT.0), W::Address::BITS)?;
            expect_reset(s, program, &s.packet(CLIENT, frontend, TCP_ACK))
        });
    }
    for (name, change) in [
        ("data", (|packet| Segment { payload: vec![7; 333], ..packet }) as fn(Segment) -> Segment),
        ("FIN", |packet| packet.flags(TCP_FIN | TCP_ACK)),
        ("options", |packet| Segment { extra: Extra::ManyOptions, ..packet }),
        ("numbers at their end", |packet| Segment {
            acknowledgement: u32::MAX,
            sequence: u32::MAX,
            ..packet
        }),
    ] {
        tcp::<W>(group, &format!("reset: {name}"), move |s| {
            serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
            expect_reset(s, FROM_OUTSIDE, &change(s.packet(CLIENT, EXTERNAL, TCP_ACK)))
        });
    }
    tcp::<W>(group, "reset: device without Ethernet header", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        let packet = Segment { link: Link::Bare, ..s.packet(CLIENT, EXTERNAL, TCP_ACK) };
        expect_reset(s, "uplink_ingress_l3", &packet)
    });
    for (name, flags) in [
        ("SYN|ACK", TCP_SYN | TCP_ACK),
        ("RST", TCP_RST),
        ("RST|ACK", TCP_RST | TCP_ACK),
        ("no ACK", TCP_FIN),
    ] {
        tcp::<W>(group, &format!("untouched: {name}"), move |s| {
            serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
            expect_untouched(s, &s.packet(CLIENT, EXTERNAL, flags))
        });
    }
    for (name, change) in [
        ("switched off", (|s| s.change_settings(|settings| settings.answers_unknown = 0)) as Change<W>),
        ("packets are held", |s| s.change_settings(|settings| settings.packets_held = 1)),
        ("the bit of the address is not set", |s| set_bit(s, EXTERNAL, false)),
        ("no frontend at the address", |s| {
            let key = FrontendKey::of_address(W::address(EXTERNAL.0), Port::new(EXTERNAL.1), PROTOCOL_TCP);
            W::remove_frontend(&mut s.world.ebpf, &key)
        }),
        ("the node's own address", |_| own_address::<W>(EXTERNAL.0)),
    ] {
        tcp::<W>(group, &format!("untouched: {name}"), move |s| {
            serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
            change(s)?;
            // No other case uses this port: remapped ports take the slow path.
            expect_untouched(s, &s.packet((CLIENT.0, 39_999), EXTERNAL, TCP_ACK))
        });
    }
    // The stack shows such a frame to the programs of a device that is promiscuous. Frames of these
    // tests have another link address than the loopback, by which they seem to come.
    tcp::<W>(group, "untouched: a frame to another host, by a port of a bridge", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        let flags = INTERFACE_OF_UPLINK | INTERFACE_OF_BRIDGE;
        s.world.set_interface(LOOPBACK, InterfaceSettings { flags, ..InterfaceSettings::default() })?;
        let outcome = s.send(FROM_OUTSIDE, &s.packet(CLIENT, EXTERNAL, TCP_ACK), Expect::Untouched);
        s.world.set_interface(LOOPBACK, InterfaceSettings::default())?;
        outcome
    });
    tcp::<W>(group, "untouched: another port of the address", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        s.cluster_ip_entry(EXTERNAL.0)?;
        expect_untouched(s, &s.packet(CLIENT, (EXTERNAL.0, 81), TCP_ACK))
    });
    tcp::<W>(group, "untouched: node port", |s| {
        serve(s, NODE_PORT, FRONTEND_EXTERNAL)?;
        let key = FrontendKey::of_address(W::address(NODE_PORT.0), Port::new(NODE_PORT.1), PROTOCOL_TCP);
        W::remove_frontend(&mut s.world.ebpf, &key)?;
        s.node_port(SERVICE)?;
        expect_untouched(s, &s.packet(CLIENT, NODE_PORT, TCP_ACK))
    });
    tcp::<W>(group, "untouched: what a process of the node sends", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        s.send("uplink_egress", &s.packet(PROCESS, EXTERNAL, TCP_ACK), Expect::Untouched)
    });
    for (name, reason, change) in [
        (
            "in no source range",
            Reason::SourceNotAllowed,
            (|s| s.frontend(EXTERNAL, SERVICE, FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES)) as Change<W>,
        ),
        ("policy Local without local endpoint", Reason::NoLocalEndpoints, |s| {
            s.service_without_local_endpoint(SERVICE)
        }),
    ] {
        tcp::<W>(group, &format!("dropped: {name}"), move |s| {
            serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
            change(s)?;
            s.send(FROM_OUTSIDE, &s.packet(CLIENT, EXTERNAL, TCP_ACK), Expect::Dropped)?;
            s.counted(&[(reason, 1)])
        });
    }
    tcp::<W>(group, "reset: no endpoints", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        s.service(SERVICE, &[])?;
        let packet = s.packet(CLIENT, EXTERNAL, TCP_ACK);
        s.send(FROM_OUTSIDE, &packet, Expect::Answered(reset::<W>(&packet)))?;
        s.counted(&[(Reason::NoEndpoints, 1)])
    });
    tcp::<W>(group, "dropped: a flood, beyond a number in a second", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        let packet = s.packet(CLIENT, EXTERNAL, TCP_ACK).bytes::<W>();
        let (mut answered, mut dropped, sent) = (0, 0, 3 * RESETS_PER_SECOND);
        for _ in 0..sent {
            match s.world.run(FROM_OUTSIDE, &packet)?.verdict {
                Verdict::Redirected => answered += 1,
                Verdict::Dropped => dropped += 1,
                other @ (Verdict::GoesOn | Verdict::SentBack) => bail!("{other:?}"),
            }
        }
        // A new second may begin meanwhile.
        ensure!(answered >= RESETS_PER_SECOND && dropped > 0, "{answered} answered, {dropped} dropped");
        s.counted(&[(Reason::UnknownConnection, sent), (Reason::RefusalsLimited, dropped)])
    });
    tcp::<W>(group, "goes on by its hash, and is never established", goes_on_by_hash);
    tcp::<W>(group, "goes on by its hash until its endpoint resets it", |s| {
        serve_by_hash(s, FRONTEND_MAGLEV)?;
        let segment = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        s.world.run(FROM_POD, &segment.bytes::<W>())?;
        let (_, backend, _) = affinity::BOTH[usize::from(is_remote(s)?)];
        let reset = Segment {
            sequence: segment.acknowledgement,
            acknowledgement: 0,
            ..segment.to(backend).answer(TCP_RST)
        };
        s.send("workload_egress", &reset, Expect::Becomes(&reset.from(CLUSTER_IP)))?;
        ensure!(s.flow_of(Stage::Opening, CLIENT)?.state.reset == RESET_CONFIRMED);
        s.world.run(FROM_POD, &s.first(CLIENT, CLUSTER_IP).bytes::<W>())?;
        ensure!(s.flow_of(Stage::Opening, CLIENT)?.flags & FLOW_RESUMED == 0, "a SYN begins anew");
        Ok(())
    });
    tcp::<W>(group, "goes on by its hash with direct server return", |s| {
        serve_by_hash(s, FRONTEND_MAGLEV | FRONTEND_EXTERNAL | FRONTEND_DSR)?;
        let set = s.set(&[(12, REMOTE, false)])?;
        let flags = SERVICE_HAS_ENDPOINTS;
        let service = Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 };
        s.world.set_service(SERVICE, service)?;
        let segment = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        for _ in 0..10 {
            s.send(FROM_OUTSIDE, &segment, Expect::Becomes(&segment.to(REMOTE)))?;
            for (key, mut flow) in s.flows(Stage::Opening)? {
                // This looks as if a second had gone by.
                flow.last_seen = 1;
                W::put_flow(&mut s.world.ebpf, Stage::Opening, key, flow)?;
            }
        }
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    tcp::<W>(group, "untouched: in fragments, and by XDP", |s| {
        serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
        let packet = s.packet(CLIENT, EXTERNAL, TCP_ACK);
        let long = Segment { payload: vec![7; 64], ..packet.clone() };
        for fragment in long.fragments::<W>(Cut { id: 7, piece: 32 }) {
            s.send_bytes(FROM_OUTSIDE, &fragment, Expect::Untouched)?;
        }
        let uplink = Uplink::new::<W>(s.world)?;
        let bytes = packet.bytes::<W>();
        let output = s.world.run_xdp(uplink.index, &bytes)?;
        ensure!((output.verdict, output.packet) == (Verdict::GoesOn, bytes), "XDP leaves it to TC");
        Ok(())
    });
    tcp::<W>(group, "goes on by its hash within the flood limit", |s| {
        serve_by_hash(s, FRONTEND_MAGLEV)?;
        s.change_settings(|settings| settings.openings_per_window = 1)?;
        let sent = 200;
        for port in 0..sent {
            s.world.run(FROM_POD, &s.packet((CLIENT.0, 1_024 + port), CLUSTER_IP, TCP_ACK).bytes::<W>())?;
        }
        let counted = s.world.counted()?;
        let of = |wanted| counted.iter().find(|(reason, _)| *reason == wanted).map_or(0, |(_, count)| *count);
        let (opened, limited) = (of(Reason::FlowOpened), of(Reason::ConnectionsLimited));
        ensure!(opened > 0 && limited > 0 && opened + limited == u64::from(sent), "{counted:?}");
        Ok(())
    });
    tcp::<W>(group, "reset: by its hash, and masqueraded", |s| {
        serve_by_hash(s, FRONTEND_MAGLEV | FRONTEND_EXTERNAL)?;
        let set = s.set(&[(12, REMOTE, false)])?;
        let flags = SERVICE_HAS_ENDPOINTS;
        let service = Service { cluster: set, internal: set, external: set, flags, affinity_seconds: 0 };
        s.world.set_service(SERVICE, service)?;
        expect_reset(s, FROM_OUTSIDE, &s.packet(CLIENT, CLUSTER_IP, TCP_ACK))
    });
    for protocol in BOTH {
        group.add::<W>("of no connection, as ever", protocol, super::WorldKind::Usual, |s| {
            with_routes(s, |s| {
                serve(s, EXTERNAL, FRONTEND_EXTERNAL)?;
                s.opens(FROM_OUTSIDE, CLIENT, EXTERNAL, LOCAL).map(drop)
            })
        });
    }
}

type Change<W> = fn(&mut Scene<W>) -> Result<()>;

fn tcp<W: Maps + 'static>(
    group: &mut Group,
    name: &str,
    body: impl Fn(&mut Scene<W>) -> Result<()> + Send + 'static,
) {
    let name = format!("of an unknown connection, {name}");
    group.add::<W>(&name, PROTOCOL_TCP, super::WorldKind::Usual, move |s| with_routes(s, &body));
}

/// One backend of this node behind the frontend, and everything is listed.
fn serve<W: Maps>(s: &mut Scene<W>, frontend: Endpoint, flags: u32) -> Result<()> {
    s.service(SERVICE, &[(11, LOCAL, true)])?;
    s.frontend(frontend, SERVICE, flags)?;
    set_bit(s, frontend, true)?;
    s.change_settings(|settings| settings.answers_unknown = 1)
}

/// Two backends, both elsewhere or one, behind a ClusterIP that pods dial.
fn serve_by_hash<W: Maps>(s: &mut Scene<W>, flags: u32) -> Result<()> {
    balance::serve(s, &balance::TABLE, flags, 0)?;
    set_bit(s, CLUSTER_IP, true)?;
    s.change_settings(|settings| settings.answers_unknown = 1)
}

fn set_bit<W: Maps>(s: &mut Scene<W>, frontend: Endpoint, is_set: bool) -> Result<()> {
    let (word, bit) = frontend_address_bit(&W::address(frontend.0));
    W::put_frontend_addresses(&mut s.world.ebpf, word, if is_set { bit } else { 0 })
}

fn expect_untouched<W: Maps>(s: &mut Scene<W>, packet: &Segment) -> Result<()> {
    for program in [FROM_OUTSIDE, FROM_POD] {
        s.send(program, packet, Expect::Untouched)?;
    }
    ensure!(s.flow_counts()? == (0, 0), "there is a flow");
    s.counted(&[])
}

fn expect_reset<W: Maps>(s: &mut Scene<W>, program: &str, packet: &Segment) -> Result<()> {
    s.send(program, packet, Expect::Answered(reset::<W>(packet)))?;
    ensure!(s.flow_counts()? == (0, 0), "there is a flow");
    s.counted(&[(Reason::UnknownConnection, 1)])
}

/// The answer of an endpoint that does not know the connection (RFC 9293, 3.10.7.1).
fn reset<W: Maps>(packet: &Segment) -> Vec<u8> {
    Segment {
        sequence: packet.acknowledgement,
        acknowledgement: 0,
        window: 0,
        hop_limit: 64,
        back: true,
        payload: Vec::new(),
        ..packet.answer(TCP_RST)
    }
    .bytes::<W>()
}

/// Returns true if the client's flow leads to the second of both backends.
fn is_remote<W: Maps>(s: &mut Scene<W>) -> Result<bool> {
    Ok(s.flow_of(Stage::Opening, CLIENT)?.backend == W::address(REMOTE.0))
}

fn goes_on_by_hash<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    serve_by_hash(s, FRONTEND_MAGLEV)?;
    let mut met = [false; 2];
    for port in 1_024..1_044 {
        let client = (CLIENT.0, port);
        let first = s.first(client, CLUSTER_IP);
        let chosen = s.world.run(FROM_POD, &first.bytes::<W>())?.packet;
        let backend = affinity::BOTH.iter().position(|one| chosen == first.to(one.1).bytes::<W>());
        let Some(backend) = backend else { bail!("a SYN goes to none of the backends") };
        met[backend] = true;
        let backend = affinity::BOTH[backend].1;
        for (key, _) in s.flows(Stage::Opening)? {
            W::remove_flow(&mut s.world.ebpf, Stage::Opening, key)?;
        }
        let segment = s.packet(client, CLUSTER_IP, TCP_ACK);
        for _ in 0..10 {
            s.send(FROM_POD, &segment, Expect::Becomes(&segment.to(backend)))?;
            let answer = segment.to(backend).answer(TCP_ACK);
            s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))?;
        }
        s.age(Stage::Opening)?;
        s.send(FROM_POD, &segment, Expect::Becomes(&segment.to(backend)))?;
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
    }
    ensure!(met == [true; 2], "{met:?}");
    Ok(())
}

/// Leads to everybody.
const WAY_OUT: &str = "way-out";

/// Runs a case while packets that come by `lo` are forwarded.
fn with_routes<W: Maps>(s: &mut Scene<W>, body: impl Fn(&mut Scene<W>) -> Result<()>) -> Result<()> {
    let (version, all) = if size_of::<W::Address>() == 4 { ("ipv4", "0.0.0.0/0") } else { ("ipv6", "::/0") };
    let forwarding = format!("/proc/sys/net/{version}/conf/lo/forwarding");
    fs::write(&forwarding, "1")?;
    ip(
        None,
        &format!(
            "link add {WAY_OUT} type veth peer name beyond-way-out\n\
             link set {WAY_OUT} up\n\
             link set beyond-way-out up\n\
             route add {all} dev {WAY_OUT}\n"
        ),
    )?;
    let outcome = body(s);
    for frontend in [EXTERNAL, CLUSTER_IP, NODE_PORT] {
        set_bit(s, frontend, false)?;
    }
    ip(None, &format!("link del {WAY_OUT}\n"))?;
    fs::write(&forwarding, "0")?;
    outcome
}

/// The node has the address until the case ends.
fn own_address<W: Maps>(of: KnownAddress) -> Result<()> {
    let address = address::<W>(of);
    let rest = if address.is_ipv4() { "/32" } else { "/128 nodad" };
    ip(None, &format!("addr add {address}{rest} dev {WAY_OUT}\n"))
}
