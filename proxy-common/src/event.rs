//! The events that programs write for `proxy-ctl monitor`: which decisions make one, and what it
//! contains.
//!
//! An event tells of a flow that opens, a socket that is sent to a backend, or a packet or system
//! call that is refused or dropped. Packets of existing flows, and traffic that concerns no
//! Service, make no event.

use crate::{
    layout::{Address, EVENT_OF_SOCKET, Event, EventControl, NO_SERVICE, SocketOrigin},
    port::Port,
    reason::{REASONS, Reason, Verdict},
};

/// The kind of an event. Each reason that makes events has one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EventKind {
    /// A flow was opened.
    Opened,
    /// A flow is gone, because its client, or the key of its answers, gets another flow. The event
    /// shows the backend that the former flow had.
    Rebound,
    /// A socket was connected to a backend.
    Connected,
    /// A socket's first datagram to a service was sent to a backend.
    Sent,
    /// The client was told that nobody serves it.
    Refused,
    Dropped,
}

impl EventKind {
    /// Returns the kind of this reason's events, or `None` if the reason makes no events.
    #[inline(always)]
    pub const fn of(reason: Reason) -> Option<Self> {
        match (reason, reason.verdict()) {
            (Reason::FlowOpened, _) => Some(Self::Opened),
            (Reason::FlowReplaced, _) => Some(Self::Rebound),
            (Reason::SocketConnected, _) => Some(Self::Connected),
            (Reason::SocketSent, _) => Some(Self::Sent),
            (_, Verdict::Refuse) => Some(Self::Refused),
            (_, Verdict::Drop) => Some(Self::Dropped),
            (_, Verdict::Pass) => None,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Rebound => "rebound",
            Self::Connected => "connected",
            Self::Sent => "sent",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
        }
    }
}

/// Returns a mask with one bit for each of these reasons, at its number.
const fn bits(reasons: &[Reason]) -> u64 {
    const { assert!(REASONS == u64::BITS) };
    let (mut bits, mut index) = (0, 0);
    while index < reasons.len() {
        bits |= bit(reasons[index] as u32);
        index += 1;
    }
    bits
}

#[inline(always)]
const fn bit(reason: u32) -> u64 {
    1 << (reason % u64::BITS)
}

/// The reasons whose packet is known to belong to a flow, so that the event can tell all of the
/// flow's ends.
const OF_FLOWS: u64 = bits(&[
    Reason::FlowOpened,
    Reason::FlowReplaced,
    Reason::FlowNotCreated,
    Reason::NoMasqueradeAddress,
    Reason::MasqueradePortsExhausted,
    Reason::AliasPortsExhausted,
    Reason::ForgedAnswer,
    Reason::BackendGone,
]);

/// The reasons whose client is refused or dropped.
const REFUSALS: u64 = {
    let (mut bits, mut index) = (0, 0);
    while index < Reason::ALL.len() {
        let reason = Reason::ALL[index];
        if !matches!(reason.verdict(), Verdict::Pass) {
            bits |= bit(reason as u32);
        }
        index += 1;
    }
    bits
};

/// Returns true if the packet or call with this reason was refused or dropped.
#[inline(always)]
pub const fn is_refusal(reason: u32) -> bool {
    REFUSALS & bit(reason) != 0
}

#[inline(always)]
pub(crate) const fn is_of_a_flow(reason: u32) -> bool {
    OF_FLOWS & bit(reason) != 0
}

impl EventControl {
    /// Returns the value that asks the programs for events of these reasons until the time `until`.
    /// They tell one of `one_of` events, at random.
    pub fn new(until: u64, reasons: impl IntoIterator<Item = Reason>, one_of: u64) -> Self {
        let reasons = reasons.into_iter().fold(0, |bits, reason| bits | bit(reason as u32));
        Self { until, reasons, one_of }
    }

    /// Returns the time if an event with this reason is to be told now.
    #[inline(always)]
    pub fn admits(
        &self,
        reason: u32,
        random: impl FnOnce() -> u32,
        now: impl FnOnce() -> u64,
    ) -> Option<u64> {
        let is_left_out = || self.one_of > 1 && !u64::from(random()).is_multiple_of(self.one_of);
        if self.reasons & bit(reason) == 0 || is_left_out() {
            return None;
        }
        // The clock is read last, because it takes longest.
        let now = now();
        (now < self.until).then_some(now)
    }
}

impl Event {
    #[inline(always)]
    pub fn new(time: u64, reason: u32) -> Self {
        Self { time, reason, service: NO_SERVICE, ..Self::default() }
    }

    /// Fills in a system call that named `destination`, and the backend that it was sent to
    /// instead, if any.
    ///
    /// The client stays unspecified, because no hook knows what address the socket will have.
    #[inline(always)]
    pub fn set_socket<A: Address>(
        &mut self,
        destination: (&A, Port),
        protocol: u8,
        sent_to: Option<&SocketOrigin<A>>,
    ) {
        self.hook = EVENT_OF_SOCKET;
        self.protocol = protocol;
        self.set_family::<A>();
        self.set_frontend(destination.0, destination.1);
        if let Some(origin) = sent_to {
            self.set_backend(&origin.backend, origin.backend_port());
            (self.backend_id, self.service) = (origin.backend_id, origin.service());
        }
    }

    #[inline(always)]
    pub(crate) fn set_family<A: Address>(&mut self) {
        self.family = if A::BITS == u32::BITS { 4 } else { 6 };
    }

    #[inline(always)]
    pub(crate) fn set_client<A: Address>(&mut self, address: &A, port: Port) {
        copy(address, &mut self.client);
        self.client_port = port.number();
    }

    #[inline(always)]
    pub(crate) fn set_frontend<A: Address>(&mut self, address: &A, port: Port) {
        copy(address, &mut self.frontend);
        self.frontend_port = port.number();
    }

    #[inline(always)]
    pub(crate) fn set_backend<A: Address>(&mut self, address: &A, port: Port) {
        copy(address, &mut self.backend);
        self.backend_port = port.number();
    }
}

#[inline(always)]
fn copy<A: Address>(address: &A, to: &mut [u8; 16]) {
    for (to, from) in to.iter_mut().zip(address.as_ref()) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const REFUSED: u32 = Reason::NoEndpoints as u32;
    const OPENED: u32 = Reason::FlowOpened as u32;

    #[rstest]
    #[case::opened(Reason::FlowOpened, Some(EventKind::Opened))]
    #[case::replaced(Reason::FlowReplaced, Some(EventKind::Rebound))]
    #[case::connected(Reason::SocketConnected, Some(EventKind::Connected))]
    #[case::sent(Reason::SocketSent, Some(EventKind::Sent))]
    #[case::refused(Reason::NoEndpoints, Some(EventKind::Refused))]
    #[case::dropped(Reason::NoLocalEndpoints, Some(EventKind::Dropped))]
    #[case::not_ours(Reason::NotAService, None)]
    #[case::passed(Reason::Malformed, None)]
    #[case::kept(Reason::FlowsFull, None)]
    fn reasons_make_events(#[case] reason: Reason, #[case] expected: Option<EventKind>) {
        assert_eq!(EventKind::of(reason), expected);
        let is_refusal = matches!(expected, Some(EventKind::Refused | EventKind::Dropped));
        assert_eq!(super::is_refusal(reason as u32), is_refusal);
    }

    #[rstest]
    #[case::off(EventControl::default(), OPENED, 0, false)]
    #[case::on(EventControl::new(2, [Reason::FlowOpened], 0), OPENED, 1, true)]
    #[case::another_reason(EventControl::new(2, [Reason::FlowOpened], 0), REFUSED, 1, false)]
    #[case::nobody_has_prolonged_it(EventControl::new(2, [Reason::FlowOpened], 0), OPENED, 2, false)]
    fn events_are_told_while_somebody_watches(
        #[case] control: EventControl,
        #[case] reason: u32,
        #[case] now: u64,
        #[case] expected: bool,
    ) {
        assert_eq!(control.admits(reason, || 0, || now).is_some(), expected);
    }

    #[test]
    fn one_of_many_is_told() {
        let control = EventControl::new(u64::MAX, [Reason::FlowOpened], 10);
        let told = (0..1_000).filter(|random| control.admits(OPENED, || *random, || 0).is_some()).count();
        assert_eq!(told, 100);
    }

    #[test]
    fn a_socket_that_is_sent_to_a_backend() {
        let port = Port::new;
        let origin = SocketOrigin::new(([10, 96, 0, 1], port(80)), ([10, 1, 0, 1], port(8080)), 7, 3);
        let mut event = Event::new(1, 1);
        event.set_socket((&[10, 96, 0, 1], port(80)), 6, Some(&origin));
        assert_eq!((event.hook, event.family, event.protocol), (EVENT_OF_SOCKET, 4, 6));
        assert_eq!((&event.frontend[..4], event.frontend_port), (&[10, 96, 0, 1][..], 80));
        assert_eq!((&event.backend[..5], event.backend_port), (&[10, 1, 0, 1, 0][..], 8080));
        assert_eq!((event.client, event.backend_id, event.service), ([0; 16], 7, 3));
    }
}
