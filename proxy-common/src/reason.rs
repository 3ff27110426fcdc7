//! The reasons for the datapath's decisions. Each has one number, one counter and one verdict.

/// The fate of a packet or a system call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The packet or call goes on as it is.
    Pass,
    /// The client is told at once: ECONNREFUSED, RST, or ICMP port unreachable.
    Refuse,
    /// The packet or call is dropped, and the client is not told.
    Drop,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal, $verdict:ident, $text:literal;)+) => {
        /// The reason for a decision. Its number is the index into the map `counters`. Numbers are
        /// stable, because dashboards and the maps of former versions know them.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u32)]
        pub enum Reason { $($(#[doc = $doc])+ $name = $number,)+ }

        impl Reason {
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// Returns the verdict. This is the one place where a reason becomes a verdict.
            #[inline(always)]
            pub const fn verdict(self) -> Verdict {
                match self { $(Self::$name => Verdict::$verdict,)+ }
            }

            /// Returns the label of the counter in metrics, and in output for people.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }

            /// Returns the sentences that explain the reason.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),+).trim_ascii_start(),)+ }
            }
        }
    };
}

/// The size of the map `counters`.
pub const REASONS: u32 = 64;

reasons! {
    /// The packet is not for a Service. It is not counted, because that is most of the traffic.
    NotAService = 0, Pass, "not_a_service";
    /// A connect() was sent to a backend.
    SocketConnected = 1, Pass, "socket_connected";
    /// A first sendmsg() to a service was sent to a backend.
    SocketSent = 2, Pass, "socket_sent";
    /// No endpoint is usable anywhere.
    NoEndpoints = 3, Refuse, "no_endpoints";
    /// The traffic policy is Local, and only other nodes have usable endpoints.
    NoLocalEndpoints = 4, Drop, "no_local_endpoints";
    /// The frontend has no service: it is being removed at this moment.
    ServiceGone = 5, Refuse, "service_gone";
    /// The endpoint set points at no slot in use.
    SlotGone = 6, Refuse, "slot_gone";
    /// The socket's origin could not be stored, so answers would show the wrong address.
    SocketStorageFull = 7, Refuse, "socket_storage_full";
    /// The address is a ClusterIP, and no service has the port.
    UnknownPort = 8, Refuse, "unknown_port";
    /// The address is in a ServiceCIDR, and no service has it
    /// (`ebpf.unallocatedServiceAddresses: drop`).
    UnallocatedAddress = 9, Drop, "unallocated_address";
    /// A ping of a ClusterIP was answered (`ebpf.answerPing`).
    PingAnswered = 10, Pass, "ping_answered";
    /// XDP has forwarded a packet by the interface that it came by.
    ForwardedByXdp = 11, Pass, "forwarded_by_xdp";
    /// XDP has forwarded a packet by another interface than it came by.
    RedirectedByXdp = 12, Pass, "redirected_by_xdp";
    /// A pod's answer has skipped the stack, because XDP sends packets to that
    /// pod.
    AnswerSkippedStack = 14, Pass, "answer_skipped_stack";
    /// A packet from outside has skipped the stack, for a backend on another node
    /// or back from there.
    SkippedStack = 15, Pass, "skipped_stack";
    /// The frame has no room before it for the outer headers that XDP should write, so the stack
    /// sends it.
    NoHeadroom = 46, Pass, "no_headroom";
    /// A packet opened a flow.
    FlowOpened = 16, Pass, "flow_opened";
    /// A SYN on a connection that ended, or a datagram whose backend is gone, gave the client a new
    /// backend.
    FlowReplaced = 17, Pass, "flow_replaced";
    /// An entry that was evicted or lost was inserted again.
    FlowRestored = 18, Pass, "flow_restored";
    /// The map of established flows has no room, so the flow stays among the opening ones.
    FlowsFull = 19, Pass, "flows_full";
    /// The first fragment of a later one is not known: it has not come yet, or its record was
    /// evicted.
    Fragment = 21, Pass, "fragment";
    /// The headers are invalid or truncated, and the packet is passed to the stack.
    Malformed = 22, Pass, "malformed";
    /// The packet has more IPv6 extension headers than the programs follow.
    ExtensionHeaders = 23, Pass, "extension_headers";
    /// The flow's entries could not be created.
    FlowNotCreated = 24, Drop, "flow_not_created";
    /// The packet must be masqueraded, and the node has no address for that.
    NoMasqueradeAddress = 25, Drop, "no_masquerade_address";
    /// No free port was found for this backend among those tried.
    MasqueradePortsExhausted = 26, Drop, "masquerade_ports_exhausted";
    /// The client's port is taken at the backend, and so was every alias tried.
    AliasPortsExhausted = 27, Drop, "alias_ports_exhausted";
    /// The kernel would not write to the packet.
    RewriteFailed = 28, Drop, "rewrite_failed";
    /// The answer to a refused packet could not be built.
    RefusalFailed = 29, Drop, "refusal_failed";
    /// The CPU has sent as many ICMP errors or RSTs in this second as it may.
    RefusalsLimited = 30, Drop, "refusals_limited";
    /// A TCP segment of a masqueraded flow's backend does not go to the address that the backend
    /// knows, so it is forged.
    ForgedAnswer = 31, Drop, "forged_answer";
    /// A client for which the affinity map had no entry opened a connection to a service with
    /// affinity.
    ClientRemembered = 38, Pass, "client_remembered";
    /// The backend of a segment's connection is gone, and such connections are reset.
    BackendGone = 37, Refuse, "backend_gone";
    /// No map knows the connection of a segment: its address has come from another node, or its
    /// flow was lost.
    UnknownConnection = 47, Refuse, "unknown_connection";
    /// The client is in none of the source ranges that the service has for its load-balancer
    /// addresses.
    SourceNotAllowed = 39, Drop, "source_not_allowed";
    /// An event that somebody watches for found the ring buffer full.
    EventLost = 40, Pass, "event_lost";
    /// This CPU may open no more connections now (`ebpf.newConnectionsPerCore`), and the service
    /// has used up its share.
    ConnectionsLimited = 45, Drop, "connections_limited";
    /// The flow maps are being copied to maps of another size, and no TCP flow opens meanwhile.
    OpeningsHeld = 48, Drop, "openings_held";
    /// With direct server return, the packet is longer than what fits into a packet to the backend.
    /// The client is told.
    PacketTooBig = 44, Drop, "packet_too_big";
    /// The first fragment of a later one was dropped or refused.
    FragmentOfDropped = 36, Drop, "fragment_of_dropped";
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_and_names_are_unique_and_fit_the_counters() {
        let numbers: HashSet<u32> = Reason::ALL.iter().map(|r| *r as u32).collect();
        let names: HashSet<&str> = Reason::ALL.iter().map(|r| r.name()).collect();
        assert_eq!(numbers.len(), Reason::ALL.len());
        assert_eq!(names.len(), Reason::ALL.len());
        assert!(numbers.iter().all(|n| *n < REASONS));
    }
}
