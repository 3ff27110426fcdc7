//! What an event tells of a packet.

use super::Scratch;
use crate::{
    event::is_of_a_flow,
    layout::{Address, Event},
};

impl<A: Address> Scratch<A> {
    /// Says in `event` whose packet it is, for the reason with this number: the flow's ends where it is one's, else those of the packet.
    #[inline(always)]
    pub fn describe(&self, reason: u32, event: &mut Event) {
        let Self { packet, flow, .. } = self;
        event.set_family::<A>();
        event.protocol = packet.protocol;
        if is_of_a_flow(reason) {
            event.set_client(&flow.client, flow.client_port());
            event.set_frontend(&flow.frontend, flow.frontend_port());
            event.set_backend(&flow.backend, flow.backend_port());
            (event.backend_id, event.service) = (flow.backend_id, flow.service);
        } else {
            event.set_client(&packet.source, packet.source_port);
            event.set_frontend(&packet.destination, packet.destination_port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{layout::NO_SERVICE, port::Port, reason::Reason};

    fn scratch() -> Scratch<[u8; 4]> {
        let mut scratch = Scratch::default();
        let packet = &mut scratch.packet;
        (packet.source, packet.destination, packet.protocol) = ([10, 0, 0, 1], [10, 0, 0, 2], 17);
        (packet.source_port, packet.destination_port) = (Port::new(1), Port::new(2));
        let flow = &mut scratch.flow;
        (flow.client, flow.frontend, flow.backend) = ([10, 0, 0, 3], [10, 0, 0, 4], [10, 0, 0, 5]);
        flow.set_client_port(Port::new(3));
        flow.set_frontend_port(Port::new(4));
        flow.set_backend_port(Port::new(5));
        (flow.backend_id, flow.service) = (6, 7);
        scratch
    }

    fn described(reason: Reason) -> (Event, [u8; 4]) {
        let mut event = Event::new(1, reason as u32);
        scratch().describe(reason as u32, &mut event);
        (event, [event.client[3], event.frontend[3], event.backend[3], event.family])
    }

    #[test]
    fn a_flow_is_told_with_all_of_its_ends() {
        let (event, last_bytes) = described(Reason::FlowOpened);
        assert_eq!(last_bytes, [3, 4, 5, 4]);
        assert_eq!([event.client_port, event.frontend_port, event.backend_port], [3, 4, 5]);
        assert_eq!((event.backend_id, event.service, event.protocol), (6, 7, 17));
    }

    #[test]
    fn a_packet_without_a_flow_is_told_with_its_own() {
        let (event, last_bytes) = described(Reason::NoEndpoints);
        assert_eq!(last_bytes, [1, 2, 0, 4]);
        assert_eq!([event.client_port, event.frontend_port, event.backend_port], [1, 2, 0]);
        assert_eq!((event.backend_id, event.service, event.protocol), (0, NO_SERVICE, 17));
    }
}
