//! Connections of backends, for least connection: the maps `connections` and `collected`.

use super::Address;

/// The id under which `connections` counts the entries of `flows4` whose flows [prove no
/// client](super::Flow::proves_no_client). Ids of backends are lower.
const UNPROVEN_ENTRIES4: u32 = u32::MAX;
/// The id under which `connections` counts the entries of `flows6` in the same way.
const UNPROVEN_ENTRIES6: u32 = u32::MAX - 1;

/// Returns the id under which `connections` has the entries of one family's established flows that
/// [prove no client](super::Flow::proves_no_client).
#[inline(always)]
pub const fn unproven_entries<A: Address>() -> u32 {
    if A::BITS == u32::BITS { UNPROVEN_ENTRIES4 } else { UNPROVEN_ENTRIES6 }
}

/// Returns false for the ids under which `connections` counts something other than a backend.
pub const fn is_backend(id: u32) -> bool {
    id < UNPROVEN_ENTRIES6
}

/// Value of the map `connections` (hash, key: backend id): what the programs have seen of a
/// backend's connections through frontends with `FRONTEND_LEAST_CONNECTION`.
///
/// Only the programs write it, until the backend is gone. The difference to [`Collected`] is what
/// is open.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Connections {
    /// The number of flows with `FLOW_COUNTED` that have begun.
    pub flows_opened: u64,
    pub flows_closed: u64,
    /// The number of sockets that [are counted](super::SocketOrigin::is_counted).
    pub sockets_opened: u64,
    pub sockets_closed: u64,
}

/// Value of the map `collected` (hash, key: backend id): the connections of [`Connections`] that
/// have ended without the programs. Only the controller writes it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Collected {
    /// The number of flows. It may fall below 0, and wraps then, because the programs may miss a
    /// flow that begins.
    pub flows: u64,
    /// The number of sockets, which may wrap for the same reason.
    pub sockets: u64,
}

impl Connections {
    /// Returns how many flows and sockets are open now. `collected` is [`Collected::sum`].
    #[inline(always)]
    pub const fn open(&self, collected: u64) -> u64 {
        let begun = self.flows_opened.wrapping_add(self.sockets_opened);
        let ended = self.flows_closed.wrapping_add(self.sockets_closed).wrapping_add(collected);
        let open = begun.wrapping_sub(ended);
        // Missed connections may make the difference negative. The mask then has all bits set,
        // which needs no branch.
        let is_negative = 0_u64.wrapping_sub(open >> (u64::BITS - 1));
        open & !is_negative
    }
}

impl Collected {
    #[inline(always)]
    pub const fn sum(&self) -> u64 {
        self.flows.wrapping_add(self.sockets)
    }
}

const _: () = {
    assert!(size_of::<Connections>() == 32);
    assert!(size_of::<Collected>() == 16);
};
