//! Why the datapath did what it did: one number, one counter, one verdict for each.

/// What becomes of a packet or a system call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Goes on as it is.
    Pass,
    /// The client is told at once: ECONNREFUSED, RST, or ICMP port unreachable.
    Refuse,
    /// Vanishes.
    Drop,
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal, $verdict:ident, $text:literal;)+) => {
        /// Index into the table `counters`. Numbers are stable: dashboards and older tables know them.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u32)]
        pub enum Reason { $($(#[doc = $doc])+ $name = $number,)+ }

        impl Reason {
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// The one place where a reason becomes a verdict.
            #[inline(always)]
            pub const fn verdict(self) -> Verdict {
                match self { $(Self::$name => Verdict::$verdict,)+ }
            }

            /// Label of the counter in metrics and tables for people.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

/// Size of the table `counters`.
pub const REASONS: u32 = 64;

reasons! {
    /// Not for us. Not counted: it is most of the traffic.
    NotAService = 0, Pass, "not_a_service";
    /// connect() was sent to a backend.
    SocketConnected = 1, Pass, "socket_connected";
    /// A first sendmsg() to a service was sent to a backend.
    SocketSent = 2, Pass, "socket_sent";
    /// No usable endpoint anywhere.
    NoEndpoints = 3, Refuse, "no_endpoints";
    /// Endpoints elsewhere only, and the traffic policy is Local.
    NoLocalEndpoints = 4, Drop, "no_local_endpoints";
    /// A frontend without its service: being removed at this moment.
    ServiceGone = 5, Refuse, "service_gone";
    /// An endpoint set that points at no slot in use.
    SlotGone = 6, Refuse, "slot_gone";
    /// The socket's origin could not be stored, so answers would show the wrong address.
    SocketStorageFull = 7, Refuse, "socket_storage_full";
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
