//! A flow's tuples as keys and as translations, and how long a flow is kept.

use crate::{
    layout::*,
    packet::{Rewrite, Side},
    port::Port,
};

/// How long a flow that nothing is heard of is kept, in seconds. `flags` is the union of its entries' flags.
pub const fn lifetime_seconds(protocol: u8, flags: u32) -> u64 {
    const CLOSED: u32 = FLOW_CLIENT_CLOSED | FLOW_BACKEND_CLOSED;
    if protocol != PROTOCOL_TCP {
        return if flags & FLOW_ANSWERED == 0 { 30 } else { 120 };
    }
    if flags & FLOW_RESET != 0 {
        10
    } else if flags & CLOSED == CLOSED {
        // TIME_WAIT of Linux.
        60
    } else if flags & CLOSED != 0 {
        // One side may go on sending for long: as CLOSE_WAIT of conntrack in Kubernetes (kube-proxy's default).
        3600
    } else if flags & FLOW_ANSWERED == 0 {
        60
    } else {
        // kube-proxy's conntrack.tcpEstablishedTimeout.
        86_400
    }
}

/// Which `TUPLE_*` the backend's answers to a flow with these `FLOW_*` are. An alias of the node's own is a port of
/// the same pool as a masqueraded source, at the same address: one key space, so that none is given twice.
#[inline(always)]
pub(super) const fn reply_tuple(flags: u32) -> u8 {
    if flags & FLOW_FROM_HOST != 0 { TUPLE_MASQUERADED_REPLY } else { TUPLE_REPLY }
}

impl<A: Address> Flow<A> {
    /// A TCP connection that netfilter translates, and the key of its entry: from where the backend answers, and where to.
    pub fn of_netfilter(
        backend: (A, Port),
        answers_to: (A, Port),
        is_masqueraded: bool,
        now: u64,
    ) -> (FlowKey<A>, Self) {
        let mut flow = Self::default();
        flow.backend = backend.0;
        flow.set_backend_port(backend.1);
        (flow.protocol, flow.service, flow.last_seen) = (PROTOCOL_TCP, NO_SERVICE, now);
        flow.flags = FLOW_ANSWERED | FLOW_OF_NETFILTER;
        if is_masqueraded {
            flow.flags |= FLOW_MASQUERADED;
            flow.masquerade = answers_to.0;
            flow.set_masquerade_port(answers_to.1);
            return (flow.masqueraded_reply_key(), flow);
        }
        flow.client = answers_to.0;
        flow.set_alias_port(answers_to.1);
        (flow.reply_key(), flow)
    }

    /// What the client sends.
    #[inline(always)]
    pub fn forward_key(&self) -> FlowKey<A> {
        let (client, frontend) = ((self.client, self.client_port()), (self.frontend, self.frontend_port()));
        FlowKey::new(client, frontend, self.protocol, TUPLE_FORWARD)
    }

    /// What the backend answers, as netfilter and routing see it.
    #[inline(always)]
    pub fn reply_key(&self) -> FlowKey<A> {
        self.answer_key((self.client, self.alias_port()), reply_tuple(self.flags))
    }

    /// What the backend answers, if the flow is `FLOW_MASQUERADED`.
    #[inline(always)]
    pub fn masqueraded_reply_key(&self) -> FlowKey<A> {
        self.answer_key((self.masquerade, self.masquerade_port()), TUPLE_MASQUERADED_REPLY)
    }

    #[inline(always)]
    fn answer_key(&self, to: (A, Port), tuple: u8) -> FlowKey<A> {
        FlowKey::new((self.backend, self.backend_port()), to, self.protocol, tuple)
    }

    #[inline(always)]
    pub(super) fn is_masqueraded(&self) -> bool {
        self.flags & FLOW_MASQUERADED != 0
    }

    #[inline(always)]
    pub(super) fn same_client_and_frontend(&self, other: &Self) -> bool {
        self.client_port() == other.client_port()
            && self.frontend_port() == other.frontend_port()
            && self.client == other.client
            && self.frontend == other.frontend
    }

    /// Of two flows of one client and frontend: do they have the same keys?
    #[inline(always)]
    pub(super) fn same_entries(&self, other: &Self) -> bool {
        self.backend_port() == other.backend_port()
            && self.alias_port() == other.alias_port()
            && self.masquerade_port() == other.masquerade_port()
            && self.backend == other.backend
    }

    /// Client to frontend becomes client to backend.
    #[inline(always)]
    pub(super) fn forward_rewrite(&self) -> Rewrite<A> {
        Rewrite {
            side: Side::Destination,
            address: self.backend,
            port: self.backend_port(),
            other_port: self.alias_port(),
            service: self.service,
        }
    }

    /// Backend to client becomes frontend to client.
    #[inline(always)]
    pub(super) fn reply_rewrite(&self) -> Rewrite<A> {
        Rewrite {
            side: Side::Source,
            address: self.frontend,
            port: self.frontend_port(),
            other_port: self.client_port(),
            service: self.service,
        }
    }
}
