//! A flow's ends as keys and as translations.

use crate::{
    layout::*,
    packet::{End, Packet, Rewrite},
    port::Port,
};

/// A TCP connection that netfilter translates.
#[derive(Clone, Copy, Debug)]
pub struct NetfilterConnection<A> {
    pub client: End<A>,
    pub frontend: End<A>,
    pub backend: End<A>,
    /// The client, or what stands for it.
    pub answers_to: End<A>,
}

impl FlowState {
    /// No segment of this connection is expected any more, but for copies of old ones.
    pub const fn has_ended(&self) -> bool {
        self.reset == RESET_CONFIRMED
            || (self.client_fin == FIN_ACKNOWLEDGED && self.backend_fin == FIN_ACKNOWLEDGED)
    }

    /// What two entries of a flow know together.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self {
            progress: self.progress.max(other.progress),
            client_fin: self.client_fin.max(other.client_fin),
            backend_fin: self.backend_fin.max(other.backend_fin),
            reset: self.reset.max(other.reset),
        }
    }
}

/// The position of a packet of a flow on its way through the node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Position {
    ToFrontend,
    ToBackend,
    ToBackendMasqueraded,
    FromBackendMasqueraded,
    FromBackend,
    FromFrontend,
}

impl<A: Address> Flow<A> {
    /// Returns the flow that stands for a connection which netfilter translates.
    pub fn of_netfilter(connection: &NetfilterConnection<A>, now: u64) -> Self {
        let NetfilterConnection { client, frontend, backend, answers_to } = *connection;
        let mut flow = Self::default();
        (flow.client, flow.frontend, flow.backend) = (client.0, frontend.0, backend.0);
        flow.set_client_port(client.1);
        flow.set_alias_port(client.1);
        flow.set_frontend_port(frontend.1);
        flow.set_backend_port(backend.1);
        (flow.protocol, flow.service) = (PROTOCOL_TCP, NO_SERVICE);
        (flow.opened, flow.last_seen) = (now, now);
        (flow.flags, flow.state.progress) = (FLOW_OF_NETFILTER, PROGRESS_CONFIRMED);
        if answers_to != client {
            flow.masquerade = answers_to.0;
            flow.set_masquerade_port(answers_to.1);
        }
        flow
    }

    /// Returns the keys of a [`FLOW_OF_NETFILTER`]: that of the client's packets, and that of the
    /// answers.
    pub fn netfilter_keys(&self) -> [FlowKey<A>; 2] {
        let answers = if self.is_masqueraded() { self.masquerade_key() } else { self.backend_key() };
        [self.client_key(), answers]
    }

    #[inline(always)]
    fn client_end(&self) -> End<A> {
        (self.client, self.client_port())
    }

    #[inline(always)]
    fn frontend_end(&self) -> End<A> {
        (self.frontend, self.frontend_port())
    }

    #[inline(always)]
    fn backend_end(&self) -> End<A> {
        (self.backend, self.backend_port())
    }

    /// The client, as the backend's side of this node sees it.
    #[inline(always)]
    fn alias_end(&self) -> End<A> {
        (self.client, self.alias_port())
    }

    #[inline(always)]
    fn masquerade_end(&self) -> End<A> {
        (self.masquerade, self.masquerade_port())
    }

    #[inline(always)]
    pub fn is_masqueraded(&self) -> bool {
        self.masquerade_port() != Port::NONE
    }

    /// Returns true if a forged client could have brought the flow as far as it is. Datagrams
    /// prove nothing, as a backend answers whoever sends them. With direct server return no
    /// answer is seen, so that none tells a number that the client must know.
    #[inline(always)]
    pub fn proves_no_client(&self) -> bool {
        self.protocol != PROTOCOL_TCP || self.flags & FLOW_DSR != 0
    }

    /// Returns how many entries the flow has in one map.
    #[inline(always)]
    pub fn entries(&self) -> u32 {
        if self.is_masqueraded() { 3 } else { 2 }
    }

    /// Between client and frontend.
    #[inline(always)]
    pub fn client_key(&self) -> FlowKey<A> {
        let mut key = FlowKey::between(self.client_end(), self.frontend_end(), self.protocol);
        key.overlapping = u8::from(self.flags & FLOW_OVERLAPPING != 0);
        if self.flags & FLOW_KEYED_BY_ORIGIN != 0 {
            key.overlapping |= FlowKey::<A>::origin_bits(self.flags);
        }
        key
    }

    /// Between client and backend.
    #[inline(always)]
    pub fn backend_key(&self) -> FlowKey<A> {
        FlowKey::between(self.alias_end(), self.backend_end(), self.protocol)
    }

    /// Between the node, for the client, and the backend, if the flow [is masqueraded](Self::is_masqueraded).
    #[inline(always)]
    pub fn masquerade_key(&self) -> FlowKey<A> {
        FlowKey::between(self.masquerade_end(), self.backend_end(), self.protocol)
    }

    /// None: the packet is not of this flow.
    #[inline(always)]
    pub(super) fn position_of(&self, packet: &Packet<A>) -> Option<Position> {
        let backend = self.backend_end();
        if packet.is_between(self.client_end(), self.frontend_end()) {
            Some(Position::ToFrontend)
        } else if packet.is_between(backend, self.alias_end()) {
            Some(Position::FromBackend)
        } else if packet.is_between(self.alias_end(), backend) {
            Some(Position::ToBackend)
        } else if packet.is_between(backend, self.masquerade_end()) {
            Some(Position::FromBackendMasqueraded)
        } else if packet.is_between(self.masquerade_end(), backend) {
            Some(Position::ToBackendMasqueraded)
        } else if packet.is_between(self.frontend_end(), self.client_end()) {
            Some(Position::FromFrontend)
        } else {
            None
        }
    }

    #[inline(always)]
    pub(super) fn same_client_and_frontend(&self, other: &Self) -> bool {
        (self.flags ^ other.flags) & (FLOW_FROM_POD | FLOW_FROM_HOST) == 0
            && self.client_port() == other.client_port()
            && self.frontend_port() == other.frontend_port()
            && self.client == other.client
            && self.frontend == other.frontend
    }

    /// Is the other an entry of the same flow?
    #[inline(always)]
    pub fn is_same(&self, other: &Self) -> bool {
        self.opened == other.opened && self.same_client_and_frontend(other)
    }

    /// What a packet of the client to the frontend gets.
    #[inline(always)]
    pub(super) fn dnat_rewrite(&self) -> Rewrite<A> {
        rewrite(self.alias_end(), self.backend_end(), self.service)
    }

    /// What a packet of the client to the backend gets where it leaves the node as the client has sent it.
    #[inline(always)]
    pub(super) fn undo_dnat_rewrite(&self) -> Rewrite<A> {
        rewrite(self.client_end(), self.frontend_end(), NO_SERVICE)
    }

    /// What a packet of the client to the backend gets where it leaves the node.
    #[inline(always)]
    pub(super) fn masquerade_rewrite(&self) -> Rewrite<A> {
        rewrite(self.masquerade_end(), self.backend_end(), NO_SERVICE)
    }

    /// What an answer to the masqueraded source gets.
    #[inline(always)]
    pub(super) fn unmasquerade_rewrite(&self) -> Rewrite<A> {
        rewrite(self.backend_end(), self.alias_end(), NO_SERVICE)
    }

    /// What an answer of the backend gets.
    #[inline(always)]
    pub(super) fn reply_rewrite(&self) -> Rewrite<A> {
        rewrite(self.frontend_end(), self.client_end(), self.service)
    }
}

#[inline(always)]
fn rewrite<A>(source: End<A>, destination: End<A>, service: u32) -> Rewrite<A> {
    Rewrite {
        source: source.0,
        destination: destination.0,
        source_port: source.1,
        destination_port: destination.1,
        service,
    }
}
