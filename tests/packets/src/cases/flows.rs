//! Flows over time: which of them keep their backend, and which get another one.

use anyhow::{Context as _, Result, ensure};
use proxy_common::{
    flow::{FlowLifetimes, Stage},
    layout::*,
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
    reason::Reason,
};

use super::{Group, Scene, WorldKind, scene::*};
use crate::{
    wire::{Endpoint, KnownAddress, Segment},
    world::{FLOWS, Maps},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.tcp::<W>("in the middle of a connection that is not ours", |s| {
        s.cluster_ip()?;
        s.send("workload_ingress", &s.packet(CLIENT, CLUSTER_IP, TCP_ACK), Expect::Untouched)?;
        s.send("workload_ingress", &s.packet(CLIENT, CLUSTER_IP, TCP_SYN | TCP_ACK), Expect::Untouched)?;
        s.send("workload_ingress", &s.packet(CLIENT, CLUSTER_IP, TCP_RST), Expect::Untouched)?;
        s.counted(&[])
    });
    group.tcp::<W>("opens nothing while packets are held, and known ones go on", |s| {
        establish(s)?;
        s.change_settings(|settings| settings.packets_held = 1)?;
        sends(s, CLIENT, TCP_ACK)?;
        answered(s, CLIENT, TCP_ACK)?;
        let other = (CLIENT.0, CLIENT.1 + 1);
        s.send("workload_ingress", &s.first(other, CLUSTER_IP), Expect::Untouched)?;
        s.change_settings(|settings| settings.packets_held = 0)?;
        s.opens("workload_ingress", other, CLUSTER_IP, LOCAL).map(drop)
    });
    group.tcp::<W>("opens nothing while openings are held, and known ones go on", |s| {
        s.cluster_ip()?;
        let known = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        s.world.hold_openings(u64::MAX)?;
        s.send("workload_ingress", &known, Expect::Becomes(&known.to(LOCAL)))?;
        let other = (CLIENT.0, CLIENT.1 + 1);
        s.send("workload_ingress", &s.first(other, CLUSTER_IP), Expect::Dropped)?;
        s.send("workload_ingress", &s.first(other, LOCAL), Expect::Untouched)?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::OpeningsHeld, 1)])?;
        // The time is over, as after the end of a process that has not let flows open again.
        s.world.hold_openings(1)?;
        s.opens("workload_ingress", other, CLUSTER_IP, LOCAL).map(drop)
    });
    group.tcp::<W>("goes on when the service and its backend are gone", |s| {
        establish(s)?;
        move_service(s)?;
        sends(s, CLIENT, TCP_ACK)?;
        answered(s, CLIENT, TCP_ACK).map(drop)
    });
    group.resetting::<W>("reset when its backend is gone", |s| {
        establish(s)?;
        move_service(s)?;
        let data = Segment { payload: vec![0xa5; 333], ..s.packet(CLIENT, CLUSTER_IP, TCP_ACK) };
        s.send("workload_ingress", &data, reset_by::<W>(&data))?;
        ensure!(s.flow_counts()? == (2, 0), "a flow that was reset leaves the map that does not evict");
        // The answer may be lost. A RST gets no answer.
        s.send("workload_ingress", &data, reset_by::<W>(&data))?;
        sends(s, CLIENT, TCP_RST)?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::BackendGone, 2)])?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, OTHER).map(drop)
    });
    group.add::<W>(
        "reset of a process of the node when its backend is gone",
        PROTOCOL_TCP,
        WorldKind::HostPackets,
        |s| {
            s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
            s.cluster_ip()?;
            s.world.run("uplink_egress", &s.first(PROCESS, CLUSTER_IP).bytes::<W>())?;
            move_service(s)?;
            let data = s.packet(PROCESS, CLUSTER_IP, TCP_ACK);
            s.send("uplink_egress", &data, reset_by::<W>(&data))
        },
    );
    group.resetting::<W>("not reset when its frontend or another backend is gone", |s| {
        establish(s)?;
        s.service(1, &[(21, OTHER, true)])?;
        s.frontend(CLUSTER_IP, 2, 0)?;
        s.world.raise_epoch()?;
        let data = sends(s, CLIENT, TCP_ACK)?;
        ensure!(s.flow_of(Stage::Established, CLIENT)?.epoch == 1, "it was not compared with the maps");
        W::remove_backend(&mut s.world.ebpf, 21)?;
        s.world.raise_epoch()?;
        s.send("workload_ingress", &data, Expect::Becomes(&data.to(LOCAL)))
    });
    group.resetting::<W>("not reset: what opens or resets, or acknowledges nothing", |s| {
        establish(s)?;
        move_service(s)?;
        // A SYN may be forged. The connection is established, and its backend still has it.
        for flags in [TCP_SYN, TCP_SYN | TCP_ACK, TCP_FIN, TCP_RST, TCP_RST | TCP_ACK] {
            sends(s, CLIENT, flags)?;
        }
        Ok(())
    });
    group.resetting::<W>("not reset when its backend has closed it", |s| {
        establish(s)?;
        answered(s, CLIENT, TCP_FIN | TCP_ACK)?;
        move_service(s)?;
        sends(s, CLIENT, TCP_ACK).map(drop)
    });
    group.tcp::<W>("SYN again while opening keeps the backend", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        s.service(1, &[(21, OTHER, true)])?;
        s.send("workload_ingress", &first, Expect::Becomes(&first.to(LOCAL)))?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.tcp::<W>("SYN while opening to a backend that is gone", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        move_service(s)?;
        s.send("workload_ingress", &first, Expect::Becomes(&first.to(OTHER)))?;
        ensure!(s.flow_counts()? == (2, 0));
        s.counted(&[(Reason::FlowOpened, 2), (Reason::FlowReplaced, 1)])
    });
    group.tcp::<W>("SYN after both have closed", |s| {
        establish(s)?;
        close(s)?;
        ensure!(s.flow_counts()? == (2, 0), "what has ended leaves the map that does not evict");
        // The last segments are sent again.
        close(s)?;
        new_connection_moves(s)
    });
    group.tcp::<W>("SYN after one has closed", |s| {
        establish(s)?;
        answered(s, CLIENT, TCP_FIN | TCP_ACK)?;
        let ack = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        let ack = Segment { acknowledgement: ack.acknowledgement + 1, ..ack };
        s.send("workload_ingress", &ack, Expect::Becomes(&ack.to(LOCAL)))?;
        ensure!(s.flow_of(Stage::Established, CLIENT)?.state.backend_fin == FIN_ACKNOWLEDGED);
        syn_stays(s)
    });
    group.tcp::<W>("SYN after a reset of either", |s| {
        establish(s)?;
        sends(s, CLIENT, TCP_RST)?;
        ensure!(s.flow_counts()? == (2, 0), "what has ended leaves the map that does not evict");
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        answered(s, CLIENT, TCP_SYN | TCP_ACK)?;
        sends(s, CLIENT, TCP_ACK)?;
        answered(s, CLIENT, TCP_RST)?;
        ensure!(s.flow_counts()? == (2, 0), "what has ended leaves the map that does not evict");
        s.counted(&[(Reason::FlowOpened, 2), (Reason::FlowReplaced, 1)])
    });
    group.tcp::<W>("a thousand connections one after another take the room of one", |s| {
        const CONNECTIONS: u16 = 1_000;
        s.cluster_ip()?;
        for port in 1..=CONNECTIONS {
            establish_from(s, (CLIENT.0, port))?;
            close_from(s, (CLIENT.0, port))?;
        }
        s.counted(&[(Reason::FlowOpened, CONNECTIONS.into())])
    });
    group.tcp::<W>("forged FIN, RST and SYN break nothing", forged);
    // Each forged segment acknowledges what the other side's next forged one sends.
    group.tcp::<W>("forged segments of both sides that agree break nothing", |s| {
        const CLIENTS: u32 = 0x1111_2222;
        const BACKENDS: u32 = 0x9999_aaaa;
        establish(s)?;
        for flags in [TCP_ACK, TCP_FIN | TCP_ACK, TCP_RST | TCP_ACK, TCP_RST] {
            let packet = s.packet(CLIENT, CLUSTER_IP, flags);
            let packet = Segment { sequence: CLIENTS, acknowledgement: BACKENDS, ..packet };
            s.send("workload_ingress", &packet, Expect::Becomes(&packet.to(LOCAL)))?;
            let answer = s.answer(LOCAL, CLIENT, flags);
            let answer = Segment { sequence: BACKENDS, acknowledgement: CLIENTS, ..answer };
            s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))?;
        }
        let state = s.flow_of(Stage::Established, CLIENT)?.state;
        ensure!(FlowLifetimes::default().of(PROTOCOL_TCP, state).as_secs() == 86_400, "{state:?}");
        syn_stays(s)
    });
    group.tcp::<W>("a forged FIN does not hide a true one", |s| {
        establish(s)?;
        let fin = answered(s, CLIENT, TCP_FIN | TCP_ACK)?;
        let forged = Segment { sequence: fin.sequence.wrapping_add(1 << 22), ..fin };
        s.send("workload_egress", &forged, Expect::Becomes(&forged.from(CLUSTER_IP)))?;
        let ack = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        let ack = Segment { acknowledgement: ack.acknowledgement + 1, ..ack };
        s.send("workload_ingress", &ack, Expect::Becomes(&ack.to(LOCAL)))?;
        let state = s.flow_of(Stage::Established, CLIENT)?.state;
        ensure!(state.backend_fin == FIN_ACKNOWLEDGED, "{state:?}");
        Ok(())
    });
    // The entry of one side knows numbers that the other side's entry does not know.
    group.tcp::<W>("a gap that is filled, or was never seen, and then a reset", |s| {
        const STEP: u32 = 1 << 18;
        const STEPS: u32 = 64;
        establish(s)?;
        let data = s.answer(LOCAL, CLIENT, TCP_ACK);
        let ack = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        let data_at = |steps: u32| Segment { sequence: data.sequence + steps * STEP, ..data.clone() };
        let ack_of = |steps: u32| Segment { acknowledgement: data.sequence + steps * STEP, ..ack.clone() };
        // The first segment was lost, so the client acknowledges all of them at once.
        for steps in 1..=STEPS {
            s.send("workload_egress", &data_at(steps), Expect::Becomes(&data_at(steps).from(CLUSTER_IP)))?;
        }
        s.send("workload_ingress", &ack_of(STEPS), Expect::Becomes(&ack_of(STEPS).to(LOCAL)))?;
        // The backend's segments have taken another way.
        for steps in STEPS..=2 * STEPS {
            s.send("workload_ingress", &ack_of(steps), Expect::Becomes(&ack_of(steps).to(LOCAL)))?;
        }
        let reset = Segment { tcp_flags: TCP_RST | TCP_ACK, ..data_at(2 * STEPS) };
        s.send("workload_egress", &reset, Expect::Becomes(&reset.from(CLUSTER_IP)))?;
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.tcp::<W>("a loss with six mebibytes under way, and then a reset", |s| {
        const STEP: u32 = 1 << 18;
        const UNDER_WAY: u32 = 24;
        establish(s)?;
        let data = s.answer(LOCAL, CLIENT, TCP_ACK);
        let ack = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        // The first segment is lost. Its copy arrives after as many bytes again were sent.
        for steps in (1..=UNDER_WAY).chain([0]).chain(UNDER_WAY..=2 * UNDER_WAY) {
            let data = Segment { sequence: data.sequence + steps * STEP, ..data.clone() };
            s.send("workload_egress", &data, Expect::Becomes(&data.from(CLUSTER_IP)))?;
        }
        let waits_at = data.sequence + UNDER_WAY * STEP;
        let ack = Segment { acknowledgement: waits_at, ..ack };
        s.send("workload_ingress", &ack, Expect::Becomes(&ack.to(LOCAL)))?;
        let reset = Segment { tcp_flags: TCP_RST | TCP_ACK, sequence: waits_at, ..data };
        s.send("workload_egress", &reset, Expect::Becomes(&reset.from(CLUSTER_IP)))?;
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.tcp::<W>("a reset behind data under way leaves no entry", |s| {
        const PAYLOAD: u32 = 1_000;
        establish(s)?;
        let data = Segment { payload: vec![0x5a; PAYLOAD as usize], ..s.answer(LOCAL, CLIENT, TCP_ACK) };
        s.send("workload_egress", &data, Expect::Becomes(&data.from(CLUSTER_IP)))?;
        let reset = s.answer(LOCAL, CLIENT, TCP_RST | TCP_ACK);
        let reset = Segment { sequence: data.sequence + PAYLOAD, ..reset };
        s.send("workload_egress", &reset, Expect::Becomes(&reset.from(CLUSTER_IP)))?;
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.tcp::<W>("segments with forged numbers take no end back", |s| {
        establish(s)?;
        sends(s, CLIENT, TCP_RST)?;
        for _ in 0..2 {
            for (key, mut flow) in s.flows(Stage::Opening)? {
                flow.last_seen = 0;
                W::put_flow(&mut s.world.ebpf, Stage::Opening, key, flow)?;
            }
            let data = Segment { payload: vec![0x5a; 100], ..s.packet(CLIENT, CLUSTER_IP, TCP_ACK) };
            let forged = Segment { sequence: data.sequence.wrapping_add(1 << 30), ..data };
            s.send("workload_ingress", &forged, Expect::Becomes(&forged.to(LOCAL)))?;
            let data = Segment { payload: vec![0x5a; 100], ..s.answer(LOCAL, CLIENT, TCP_ACK) };
            let forged = Segment { sequence: data.sequence.wrapping_add(1 << 30), ..data };
            s.send("workload_egress", &forged, Expect::Becomes(&forged.from(CLUSTER_IP)))?;
        }
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.tcp::<W>("forged clients establish nothing", |s| {
        s.cluster_ip()?;
        for (port, flags) in (1u16..).zip([TCP_ACK, 0, TCP_RST, TCP_RST | TCP_ACK, TCP_FIN | TCP_ACK]) {
            let first = s.opens("workload_ingress", (KnownAddress::Client, port), CLUSTER_IP, LOCAL)?;
            answered(s, (KnownAddress::Client, port), TCP_SYN | TCP_ACK)?;
            let forged = first.flags(flags);
            let forged = Segment { acknowledgement: forged.acknowledgement.wrapping_sub(1 << 20), ..forged };
            s.send("workload_ingress", &forged, Expect::Becomes(&forged.to(LOCAL)))?;
        }
        ensure!(s.flow_counts()? == (10, 0), "entries {:?}", s.flow_counts()?);
        Ok(())
    });
    group.tcp::<W>("SYN after the backend refused", |s| {
        s.cluster_ip()?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        answered(s, CLIENT, TCP_RST | TCP_ACK)?;
        ensure!(s.flow_counts()? == (2, 0), "a refused connection is not established");
        new_connection_moves(s)
    });
    group.udp::<W>("stays with its backend", |s| {
        establish(s)?;
        s.service(1, &[(21, OTHER, true)])?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.udp::<W>("backend gone: another one", |s| {
        establish(s)?;
        move_service(s)?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, OTHER)?;
        ensure!(s.flow_counts()? == (2, 0));
        s.counted(&[(Reason::FlowOpened, 2), (Reason::FlowReplaced, 1)])
    });
    group.both::<W>("established by the client's packet after an answer", |s| {
        s.cluster_ip()?;
        let first = s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        s.send("workload_ingress", &first, Expect::Becomes(&first.to(LOCAL)))?;
        let answer = answered(s, CLIENT, TCP_SYN | TCP_ACK)?;
        // Nothing has shown yet that the client really has its address.
        ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
        sends(s, CLIENT, TCP_ACK)?;
        sustain(s, &first, &answer)?;
        ensure!(s.flow_counts()? == (2, 2), "entries {:?}", s.flow_counts()?);
        s.counted(&[(Reason::FlowOpened, 1)])
    });
    group.tcp::<W>("no room among the established flows", |s| {
        s.cluster_ip()?;
        let flows = FLOWS as u16 / 2 + 1;
        for port in 1..=flows {
            s.opens("workload_ingress", (KnownAddress::Client, port), CLUSTER_IP, LOCAL)?;
            let answer = answered(s, (KnownAddress::Client, port), TCP_SYN | TCP_ACK)?;
            // The second packet of a client must not try again to establish the flow.
            for _ in 0..2 {
                sends(s, (KnownAddress::Client, port), TCP_ACK)?;
            }
            s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))?;
        }
        ensure!(
            s.flow_counts()? == (usize::from(flows) * 2, FLOWS as usize),
            "entries {:?}",
            s.flow_counts()?
        );
        s.counted(&[(Reason::FlowOpened, flows.into()), (Reason::FlowsFull, 1)])
    });
    // Each flow takes two of the 65,536 entries. A batch is answered once all its flows are
    // open.
    group.tcp::<W>("new flows outlive old ones in a map that is full of busy flows", |s| {
        const BUSY: u16 = 32_700;
        const BATCH: u16 = 100;
        s.cluster_ip()?;
        let first = |s: &Scene<W>, port: u16| s.first((KnownAddress::Client, port), CLUSTER_IP);
        for _round in 0..2 {
            for port in 1..=BUSY {
                s.send("workload_ingress", &first(s, port), Expect::Becomes(&first(s, port).to(LOCAL)))?;
            }
        }
        for batch in 0..20 {
            let ports = BUSY + 1 + batch * BATCH..=BUSY + (batch + 1) * BATCH;
            for port in ports.clone() {
                s.send("workload_ingress", &first(s, port), Expect::Becomes(&first(s, port).to(LOCAL)))?;
            }
            for port in ports {
                let answer = first(s, port).to(LOCAL).answer(TCP_SYN | TCP_ACK);
                s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))?;
            }
        }
        Ok(())
    });
    group.both::<W>("an old entry refreshes and restores its partners", |s| {
        establish(s)?;
        let mut flow = s.flow_of(Stage::Established, CLIENT)?;
        flow.last_seen = 0;
        // The flow was seen long ago, and each of its entries is lost once.
        for is_client in [true, false] {
            let (key, lost) = if is_client {
                (flow.client_key(), flow.backend_key())
            } else {
                (flow.backend_key(), flow.client_key())
            };
            W::put_flow(&mut s.world.ebpf, Stage::Established, key, flow)?;
            W::remove_flow(&mut s.world.ebpf, Stage::Established, lost)?;
            if is_client {
                sends(s, CLIENT, TCP_ACK)?;
            } else {
                answered(s, CLIENT, TCP_ACK)?;
            }
            let entries = s.flows(Stage::Established)?;
            ensure!(entries.len() == 2 && entries.iter().all(|(_, f)| f.last_seen > 0), "{entries:?}");
        }
        s.counted(&[(Reason::FlowOpened, 1), (Reason::FlowRestored, 2)])
    });
    group.both::<W>("one client port through two frontends to one backend", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        s.cluster_ip()?;
        let other = (KnownAddress::OtherClusterIp, 443);
        s.frontend(other, 1, 0)?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
        let second = s.first(CLIENT, other);
        let output = s.world.run("workload_ingress", &second.bytes::<W>())?;
        let mut aliases = Vec::new();
        for (key, flow) in s.flows(Stage::Opening)? {
            if key == flow.backend_key() && flow.frontend == W::address(other.0) {
                aliases.push(flow.alias_port().number());
            }
        }
        ensure!(aliases.len() == 1 && aliases[0] != CLIENT.1, "{aliases:?}");
        let client_inside = (CLIENT.0, aliases[0]);
        ensure!(output.packet == second.to(LOCAL).from(client_inside).bytes::<W>());
        // Each answer must go to the connection that it belongs to.
        let answer = answered(s, CLIENT, TCP_SYN | TCP_ACK)?;
        let answer = answer.to(client_inside);
        s.send("workload_egress", &answer, Expect::Becomes(&answer.from(other).to(CLIENT)))?;
        s.counted(&[(Reason::FlowOpened, 2)])
    });
    group.both::<W>("a client's own connection to the backend of its flow, which ends first", |s| {
        s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
        s.cluster_ip()?;
        // No other case uses this port: packets from ports of such connections take the slow path.
        let client = (CLIENT.0, 39_998);
        s.opens("workload_ingress", client, CLUSTER_IP, LOCAL)?;
        let flow: Vec<_> = s.flows(Stage::Opening)?.into_iter().map(|(key, _)| key).collect();
        let first = s.first(client, LOCAL);
        let output = s.world.run("workload_ingress", &first.bytes::<W>())?;
        let own = s.flows(Stage::Opening)?.into_iter().find(|(_, one)| one.flags & FLOW_OVERLAPPING != 0);
        let (_, own) = own.context("there is no flow for the client's own connection")?;
        let inside = (client.0, own.alias_port().number());
        ensure!(output.packet == first.from(inside).bytes::<W>(), "it does not reach the backend");
        let goes_on = |s: &mut Scene<W>| {
            let next = s.packet(client, LOCAL, TCP_ACK);
            s.send("workload_ingress", &next, Expect::Becomes(&next.from(inside)))?;
            let answer = s.answer(LOCAL, inside, TCP_ACK);
            s.send("workload_egress", &answer, Expect::Becomes(&answer.to(client)))
        };
        goes_on(s)?;
        flow.into_iter().try_for_each(|key| W::remove_flow(&mut s.world.ebpf, Stage::Opening, key))?;
        goes_on(s)?;
        // Another flow may take the same ends.
        s.opens("workload_ingress", client, CLUSTER_IP, LOCAL)?;
        goes_on(s)
    });
}

const OTHER: (KnownAddress, u16) = (KnownAddress::RemoteBackend, 9090);

/// Sends the client's segment, which must reach the backend.
fn sends<W: Maps>(s: &mut Scene<W>, client: Endpoint, flags: u8) -> Result<Segment> {
    let packet = s.packet(client, CLUSTER_IP, flags);
    s.send("workload_ingress", &packet, Expect::Becomes(&packet.to(LOCAL)))?;
    Ok(packet)
}

/// Sends the backend's segment, which must reach the client.
fn answered<W: Maps>(s: &mut Scene<W>, client: Endpoint, flags: u8) -> Result<Segment> {
    let answer = s.answer(LOCAL, client, flags);
    s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP)))?;
    Ok(answer)
}

/// Sends the first packets of a connection, until its flow is established.
fn establish<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.cluster_ip()?;
    establish_from(s, CLIENT)
}

fn establish_from<W: Maps>(s: &mut Scene<W>, client: Endpoint) -> Result<()> {
    let first = s.opens("workload_ingress", client, CLUSTER_IP, LOCAL)?;
    let answer = answered(s, client, TCP_SYN | TCP_ACK)?;
    sends(s, client, TCP_ACK)?;
    sustain(s, &first, &answer)?;
    let (_, established) = s.flow_counts()?;
    ensure!(established == 2, "{established} entries of established flows");
    Ok(())
}

/// Sends more packets where a flow needs them: datagrams establish a flow once both sides have sent
/// for some seconds.
fn sustain<W: Maps>(s: &mut Scene<W>, first: &Segment, answer: &Segment) -> Result<()> {
    if s.protocol == PROTOCOL_UDP {
        s.age(Stage::Opening)?;
        s.send("workload_egress", answer, Expect::Becomes(&answer.from(CLUSTER_IP)))?;
        s.send("workload_ingress", first, Expect::Becomes(&first.to(LOCAL)))?;
    }
    Ok(())
}

/// Gives the service another backend, and removes the old one.
fn move_service<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.service(1, &[(21, OTHER, true)])?;
    W::remove_backend(&mut s.world.ebpf, 11)?;
    s.world.raise_epoch()
}

/// Returns the reset that the client gets for a segment with an acknowledgement.
fn reset_by<W: Maps>(segment: &Segment) -> Expect<'static> {
    let reset = segment.answer(TCP_RST);
    let number = segment.acknowledgement;
    let reset = Segment {
        sequence: number,
        acknowledgement: 0,
        window: 0,
        hop_limit: 64,
        back: true,
        payload: Vec::new(),
        ..reset
    };
    Expect::Answered(reset.bytes::<W>())
}

fn new_connection_moves<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.service(1, &[(21, OTHER, true)])?;
    s.opens("workload_ingress", CLIENT, CLUSTER_IP, OTHER)?;
    ensure!(s.flow_counts()? == (2, 0), "entries {:?}", s.flow_counts()?);
    s.counted(&[(Reason::FlowOpened, 2), (Reason::FlowReplaced, 1)])
}

fn close<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    close_from(s, CLIENT)
}

/// Closes the connection from both sides. Each side acknowledges the other's FIN.
pub(super) fn close_from<W: Maps>(s: &mut Scene<W>, client: Endpoint) -> Result<()> {
    sends(s, client, TCP_FIN | TCP_ACK)?;
    let fin = s.answer(LOCAL, client, TCP_FIN | TCP_ACK);
    let fin = Segment { acknowledgement: fin.acknowledgement + 1, ..fin };
    s.send("workload_egress", &fin, Expect::Becomes(&fin.from(CLUSTER_IP)))?;
    let last = s.packet(client, CLUSTER_IP, TCP_ACK);
    let last = Segment { acknowledgement: last.acknowledgement + 1, sequence: last.sequence + 1, ..last };
    s.send("workload_ingress", &last, Expect::Becomes(&last.to(LOCAL)))
}

fn syn_stays<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.service(1, &[(21, OTHER, true)])?;
    s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL)?;
    ensure!(s.flow_counts()? == (2, 2), "entries {:?}", s.flow_counts()?);
    s.counted(&[(Reason::FlowOpened, 1)])
}

/// Sends segments whose ports and addresses are right, but whose sequence numbers are not.
fn forged<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    establish(s)?;
    let forged = |packet: Segment| Segment { sequence: packet.sequence.wrapping_add(1 << 30), ..packet };
    for flags in [TCP_RST, TCP_RST | TCP_ACK, TCP_FIN, TCP_FIN | TCP_ACK] {
        let packet = forged(s.packet(CLIENT, CLUSTER_IP, flags));
        s.send("workload_ingress", &packet, Expect::Becomes(&packet.to(LOCAL)))?;
        let packet = forged(s.answer(LOCAL, CLIENT, flags));
        s.send("workload_egress", &packet, Expect::Becomes(&packet.from(CLUSTER_IP)))?;
        let state = s.flow_of(Stage::Established, CLIENT)?.state;
        ensure!(FlowLifetimes::default().of(PROTOCOL_TCP, state).as_secs() == 86_400, "{state:?}");
    }
    syn_stays(s)
}
