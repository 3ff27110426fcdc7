//! Two clients with the same address and port. One is in a pod of the node, the other outside, so
//! one of them has forged its address. The packets of one decide nothing for the other.

use anyhow::{Context as _, Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::*,
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::{
    Group, Scene,
    forwarding::forward::{Uplink, opened_with_neighbours},
    scene::*,
};
use crate::{
    wire::{Endpoint, KnownAddress, Segment},
    world::{LOOPBACK, Maps, Verdict},
};

const LOAD_BALANCER: Endpoint = (KnownAddress::External, 80);

/// Side of the node on which a client is.
#[derive(Clone, Copy)]
enum Origin {
    Pod,
    Outside,
}

impl Origin {
    const BOTH: [Self; 2] = [Self::Pod, Self::Outside];

    const fn other(self) -> Self {
        match self {
            Self::Pod => Self::Outside,
            Self::Outside => Self::Pod,
        }
    }

    const fn ingress(self) -> &'static str {
        match self {
            Self::Pod => "workload_ingress",
            Self::Outside => "uplink_ingress",
        }
    }

    const fn egress(self) -> &'static str {
        match self {
            Self::Pod => "workload_egress",
            Self::Outside => "uplink_egress",
        }
    }
}

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("a forged first packet decides nothing for another client", |s| {
        for (origin, port) in Origin::BOTH.into_iter().zip(1..) {
            s.node_port_elsewhere()?;
            let client = (CLIENT.0, port);
            reaches(s, origin.other(), client)?;
            Connection::opens(s, origin, client)?.goes_on(s)?;
        }
        Ok(())
    });
    group.both::<W>("a forged packet moves no client that was there first", |s| {
        for (origin, port) in Origin::BOTH.into_iter().zip(1..) {
            s.node_port_elsewhere()?;
            let connection = Connection::opens(s, origin, (CLIENT.0, port))?;
            for _ in 0..2 {
                reaches(s, origin.other(), connection.client)?;
                connection.goes_on(s)?;
            }
        }
        Ok(())
    });
    group.both::<W>("a flow goes on when the one with the same ends is gone", |s| {
        for (origin, port) in Origin::BOTH.into_iter().zip(1..) {
            s.node_port_elsewhere()?;
            let client = (CLIENT.0, port);
            reaches(s, origin.other(), client)?;
            let forged: Vec<_> = s.flows(Stage::Opening)?.into_iter().map(|(key, _)| key).collect();
            let connection = Connection::opens(s, origin, client)?;
            forged.into_iter().try_for_each(|key| W::remove_flow(&mut s.world.ebpf, Stage::Opening, key))?;
            connection.goes_on(s)?;
        }
        Ok(())
    });
    group.tcp::<W>("segments of another client are not translated before the client is confirmed", |s| {
        s.node_port_elsewhere()?;
        for (origin, port) in Origin::BOTH.into_iter().zip(1..) {
            let client = (CLIENT.0, port);
            reaches(s, origin.other(), client)?;
            s.send(origin.ingress(), &s.packet(client, NODE_PORT, TCP_ACK), Expect::Untouched)?;
        }
        Ok(())
    });
    group.both::<W>("policy Local holds for a client outside whose address a pod has forged", |s| {
        let uplink = Uplink::new::<W>(s.world)?;
        s.change_settings(|settings| {
            (settings.pods4, settings.pods6) = (PODS_BY_INTERFACE, PODS_BY_INTERFACE);
        })?;
        let of_pods = InterfaceSettings { flags: INTERFACE_OF_PODS, ..InterfaceSettings::default() };
        s.world.set_interface(LOOPBACK, of_pods)?;
        let cluster = s.set(&[(12, REMOTE, false)])?;
        let service = Service { cluster, flags: SERVICE_HAS_ENDPOINTS, ..Service::default() };
        s.world.set_service(1, service)?;
        s.frontend(LOAD_BALANCER, 1, FRONTEND_EXTERNAL | FRONTEND_LOCAL_POLICY)?;
        let first = s.opens("workload_ingress", CLIENT, LOAD_BALANCER, REMOTE)?;
        let output = s.world.leaves_by(uplink.index, "uplink_ingress", &first.bytes::<W>())?;
        ensure!(output.verdict == Verdict::Dropped, "{:?}", output.verdict);
        s.send("workload_ingress", &first, Expect::Becomes(&first.to(REMOTE)))?;
        s.counted(&[(Reason::FlowOpened, 1), (Reason::NoLocalEndpoints, 1)])
    });
    group.both::<W>("XDP sends a client's packets on whose address a pod has forged later", |s| {
        let (uplink, node) = opened_with_neighbours(s)?;
        reaches(s, Origin::Pod, CLIENT)?;
        let first = s.first(CLIENT, NODE_PORT);
        let answer = first.to(REMOTE).from(node).answer(TCP_SYN | TCP_ACK);
        uplink.sends(s, &answer, &answer.to(CLIENT).from(NODE_PORT))?;
        let second = first.flags(TCP_ACK);
        uplink.sends(s, &second, &second.to(REMOTE).from(node))
    });
    group.both::<W>("XDP leaves a client to the stack whose address a pod has forged before", |s| {
        let uplink = Uplink::new::<W>(s.world)?.and_neighbours::<W>()?;
        s.node_port_elsewhere()?;
        reaches(s, Origin::Pod, CLIENT)?;
        uplink.passes(s, &s.first(CLIENT, NODE_PORT).bytes::<W>())?;
        let connection = Connection::opens(s, Origin::Outside, CLIENT)?;
        uplink.passes(s, &s.packet(CLIENT, NODE_PORT, TCP_ACK).bytes::<W>())?;
        connection.goes_on(s)
    });
}

/// Sends the client's first packet, and returns it as it leaves the node.
fn reaches<W: Maps>(s: &mut Scene<W>, origin: Origin, client: Endpoint) -> Result<Segment> {
    let first = s.first(client, NODE_PORT);
    let output = s.world.run(origin.ingress(), &first.bytes::<W>())?;
    let inside = first.to(REMOTE).from((client.0, source_port::<W>(&output.packet)?));
    ensure!(
        output.verdict == Verdict::GoesOn && output.packet == inside.bytes::<W>(),
        "{:?}",
        output.verdict
    );
    let output = s.world.leaves("uplink_egress", &inside.bytes::<W>())?;
    let left = match origin {
        Origin::Pod => inside,
        Origin::Outside => inside.from((KnownAddress::Node, source_port::<W>(&output.packet)?)),
    };
    ensure!(
        output.verdict == Verdict::GoesOn && output.packet == left.bytes::<W>(),
        "it does not leave as {left:?}, but as {:02x?}",
        output.packet
    );
    Ok(left)
}

fn source_port<W: Maps>(packet: &[u8]) -> Result<u16> {
    const LINK: usize = 14;
    let ports = LINK + if size_of::<W::Address>() == 4 { 20 } else { 40 };
    let port = packet.get(ports..ports + 2).context("a packet without ports")?;
    Ok(u16::from_be_bytes([port[0], port[1]]))
}

/// Connection of a client that the backend has answered.
struct Connection {
    origin: Origin,
    client: Endpoint,
    /// First packet as the backend gets it.
    left: Segment,
}

impl Connection {
    fn opens<W: Maps>(s: &mut Scene<W>, origin: Origin, client: Endpoint) -> Result<Self> {
        let left = reaches(s, origin, client)?;
        let connection = Self { origin, client, left };
        connection.is_answered(s)?;
        Ok(connection)
    }

    fn is_answered<W: Maps>(&self, s: &mut Scene<W>) -> Result<()> {
        let answer = self.left.answer(TCP_SYN | TCP_ACK);
        let output = s.world.run("uplink_ingress", &answer.bytes::<W>())?;
        let output = s.world.leaves(self.origin.egress(), &output.packet)?;
        let expected = answer.from(NODE_PORT).to(self.client);
        ensure!(output.packet == expected.bytes::<W>(), "the answer comes as {:02x?}", output.packet);
        Ok(())
    }

    /// Expects packets of both directions to take the same way again.
    fn goes_on<W: Maps>(&self, s: &mut Scene<W>) -> Result<()> {
        let packet = s.packet(self.client, NODE_PORT, TCP_ACK);
        let output = s.world.run(self.origin.ingress(), &packet.bytes::<W>())?;
        let output = s.world.leaves("uplink_egress", &output.packet)?;
        let expected = self.left.flags(TCP_ACK);
        ensure!(
            output.packet == expected.bytes::<W>(),
            "the client's packet leaves as {:02x?}",
            output.packet
        );
        self.is_answered(s)
    }
}
