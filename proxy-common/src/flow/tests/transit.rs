//! A packet in transit is decided as by the two hooks that it passes on the way through the stack, whichever way others of its flow take.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// What happens to one packet, or to none.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// Of the client with this port; offset of its sequence number.
    Client(u16, u8, u32),
    /// Of the backend, to the source that the node gave the client of this port.
    Backend(u16, u8, u32),
    Seconds(u64),
    /// An endpoint goes, and new flows go to the other.
    EndpointGone,
}

fn event() -> impl Strategy<Value = Event> {
    let flags = prop::sample::select(vec![
        TCP_SYN,
        TCP_SYN | TCP_ACK,
        TCP_ACK,
        TCP_ACK,
        TCP_FIN | TCP_ACK,
        TCP_RST,
        TCP_RST | TCP_ACK,
    ]);
    let port = 40_000u16..40_002;
    prop_oneof![
        5 => (port.clone(), flags.clone(), 0u32..3).prop_map(|(p, f, n)| Event::Client(p, f, n)),
        5 => (port, flags, 0u32..3).prop_map(|(p, f, n)| Event::Backend(p, f, n)),
        1 => prop::sample::select(vec![2u64, 70]).prop_map(Event::Seconds),
        1 => Just(Event::EndpointGone),
    ]
}

/// A node, and the sources that it has given to clients.
struct Node {
    host: Host,
    sources: BTreeMap<u16, ((A, Port), A)>,
}

impl Node {
    fn new() -> Self {
        Self { host: Host::new(), sources: BTreeMap::new() }
    }

    fn packet(&self, protocol: u8, event: Event) -> Option<Packet<A>> {
        let (mut packet, offset) = match event {
            Event::Client(port, flags, offset) => {
                (packet((CLIENT.0, Port::new(port)), FRONTEND, flags), offset)
            }
            Event::Backend(port, flags, offset) => {
                let (source, backend) = *self.sources.get(&port)?;
                (answer((backend, PORT), source, flags), offset)
            }
            Event::Seconds(_) | Event::EndpointGone => return None,
        };
        packet.protocol = protocol;
        if protocol == PROTOCOL_UDP {
            packet.segment = Segment::default();
        } else {
            packet.segment.sequence = packet.segment.sequence.wrapping_add(offset);
            packet.segment.next = packet.segment.next.wrapping_add(offset);
        }
        Some(packet)
    }

    /// By the stack: the ends that it leaves with.
    fn through_the_stack(&self, packet: &Packet<A>) -> Result<Rewrite<A>, Reason> {
        let entered = self.host.arriving(packet, Origin::Outside)?;
        let inside = Packet {
            source: entered.source,
            source_port: entered.source_port,
            destination: entered.destination,
            destination_port: entered.destination_port,
            ..*packet
        };
        let left = self.host.leaving(&inside)?;
        Ok(Rewrite { service: entered.service.min(left.service), ..left })
    }

    /// `leaves`: the driver can send it where the stack would; otherwise the stack sends it.
    fn in_transit(&self, packet: &Packet<A>, leaves: bool) -> Result<Rewrite<A>, Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        let decided = in_transit(&self.host, &mut scratch, |_| leaves);
        assert_eq!(scratch.packet, *packet, "it is not changed");
        match decided {
            Ok(()) => Ok(scratch.action.rewrite),
            Err(_) => self.through_the_stack(packet),
        }
    }

    fn learn(&mut self, event: Event, outcome: &Result<Rewrite<A>, Reason>) {
        if let (Event::Client(port, ..), Ok(left)) = (event, outcome) {
            self.sources.insert(port, ((left.source, left.source_port), left.destination));
        }
    }

    fn pass(&mut self, event: Event) {
        match event {
            Event::Seconds(seconds) => self.host.wait(seconds * SECOND),
            Event::EndpointGone => {
                self.host.tables.backends.remove(&1);
                self.host.tables.slots.insert(0, Slot4::new(BACKENDS[1], PORT, 2, 0));
                self.host.epoch.set(self.host.epoch.get() + 1);
            }
            Event::Client(..) | Event::Backend(..) => {}
        }
    }

    /// All but times, of which each look at the clock is another.
    fn known(&self) -> BTreeMap<String, String> {
        let flows = self.host.flows.borrow();
        let known = flows.iter().map(|(key, flow)| {
            let mut flow = flow.get();
            (flow.opened, flow.last_seen) = (0, 0);
            (format!("{key:?}"), format!("{flow:?}"))
        });
        known.collect()
    }
}

proptest! {
    #[test]
    fn both_ways_are_one(
        is_tcp: bool,
        resets_gone: bool,
        events in prop::collection::vec((event(), any::<bool>()), 1..24),
    ) {
        let protocol = if is_tcp { PROTOCOL_TCP } else { PROTOCOL_UDP };
        let (mut stack, mut transit) = (Node::new(), Node::new());
        (stack.host.resets_gone, transit.host.resets_gone) = (resets_gone, resets_gone);
        for (event, leaves) in events {
            stack.pass(event);
            transit.pass(event);
            let Some(packet) = stack.packet(protocol, event) else { continue };
            let by_stack = stack.through_the_stack(&packet);
            let by_transit = transit.in_transit(&packet, leaves);
            prop_assert_eq!(&by_stack, &by_transit, "{:?}, leaves: {}", event, leaves);
            stack.learn(event, &by_stack);
            transit.learn(event, &by_transit);
            prop_assert_eq!(stack.known(), transit.known(), "after {:?}, leaves: {}", event, leaves);
            prop_assert_eq!(&*stack.host.connections.borrow(), &*transit.host.connections.borrow());
        }
    }
}
