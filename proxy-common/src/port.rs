//! Ports: as decisions pass them around, as packets have them, and as tables hold them.

use core::ops::RangeInclusive;

/// What an API server gives to Services of type NodePort, unless `--service-node-port-range` says otherwise.
pub const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// A port of TCP or UDP. A port in network order is never a number, only two bytes.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(transparent)]
pub struct Port(u16);

impl Port {
    /// Not a port of anybody: what is not known, or a place that is free.
    pub const NONE: Self = Self(0);

    /// Of a number in host byte order, as people and tables write it.
    #[inline(always)]
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Host byte order.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        self.0
    }

    /// As packets and the addresses of sockets have it.
    #[inline(always)]
    pub const fn from_network(bytes: [u8; 2]) -> Self {
        Self(u16::from_be_bytes(bytes))
    }

    #[inline(always)]
    pub const fn to_network(self) -> [u8; 2] {
        self.0.to_be_bytes()
    }
}

/// Ports as [`crate::layout::Settings::apart_ports`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PortRanges(pub [[u16; 2]; 2]);

impl PortRanges {
    #[inline(always)]
    pub fn contain(&self, Port(port): Port) -> bool {
        let [first, second] = &self.0;
        (first[0] <= port && port <= first[1]) || (second[0] <= port && port <= second[1])
    }
}

/// How many ports the table `masquerade_ports` has, for translated sources and aliases.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PortPool {
    pub ports: u32,
    /// How many of them, the first ones, the kernel gives to no socket.
    pub apart: u32,
}

/// Tries among the ports that are [`apart`](PortPool::apart).
const APART_TRIES: u32 = 8;
/// Tries at random, also those among the others. Where three of five are in use, one in a million of sources gets none by them.
pub const RANDOM_TRIES: u32 = 36;
/// In all. The last ones are one port after the other: in a small pool each is tried. The verifier goes through all of them.
pub const PORT_TRIES: u32 = 48;

impl PortPool {
    /// Index of the port for this of [`PORT_TRIES`] attempts. Each of the [`RANDOM_TRIES`] has a random number of its own, the others the
    /// last one. 0 if there is no port.
    #[inline(always)]
    pub const fn place(&self, random: u32, attempt: u32) -> u32 {
        let (first, among) = if self.apart == 0 || self.apart >= self.ports || attempt >= RANDOM_TRIES {
            (0, self.ports)
        } else if attempt < APART_TRIES {
            (0, self.apart)
        } else {
            (self.apart, self.ports - self.apart)
        };
        // Scales 32 random bits to 0..among without a division.
        let scaled = ((random as u64 * among as u64) >> 32) as u32;
        let mut place = first + scaled + attempt.saturating_sub(RANDOM_TRIES);
        if place >= self.ports {
            place -= self.ports;
        }
        if place >= self.ports { 0 } else { place }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const POOL: PortPool = PortPool { ports: 10, apart: 4 };
    const HALF: u32 = 1 << 31;

    #[rstest]
    #[case::first(0, 0, 0)]
    #[case::a_random_half(HALF, 0, 2)]
    #[case::last_that_is_apart(u32::MAX, APART_TRIES - 1, 3)]
    #[case::first_of_the_others(0, APART_TRIES, 4)]
    #[case::half_of_the_others(HALF, RANDOM_TRIES - 1, 7)]
    #[case::last_of_the_others(u32::MAX, APART_TRIES, 9)]
    #[case::any(HALF, RANDOM_TRIES, 5)]
    #[case::last(u32::MAX, RANDOM_TRIES, 9)]
    #[case::next(HALF, RANDOM_TRIES + 1, 6)]
    #[case::round_the_end(u32::MAX, RANDOM_TRIES + 2, 1)]
    #[case::round_twice(u32::MAX, PORT_TRIES - 1, 0)]
    fn attempts_have_places(#[case] random: u32, #[case] attempt: u32, #[case] place: u32) {
        assert_eq!(POOL.place(random, attempt), place);
    }

    #[rstest]
    #[case::nothing_apart(PortPool { ports: 10, apart: 0 }, 9)]
    #[case::all_apart(PortPool { ports: 10, apart: 10 }, 9)]
    #[case::one(PortPool { ports: 1, apart: 1 }, 0)]
    #[case::none(PortPool::default(), 0)]
    fn the_first_attempt_in_pools_of_all_sizes(#[case] pool: PortPool, #[case] place: u32) {
        assert_eq!(pool.place(u32::MAX, 0), place);
    }

    #[test]
    fn both_ends_of_both_ranges_are_contained() {
        let ranges = PortRanges([[10, 12], [20, 21]]);
        let contained: Vec<u16> = (0..100).filter(|port| ranges.contain(Port::new(*port))).collect();
        assert_eq!(contained, [10, 11, 12, 20, 21]);
    }

    #[test]
    fn bytes_of_a_packet_are_in_network_order() {
        assert_eq!(Port::from_network([0x1f, 0x90]), Port::new(8080));
        assert_eq!(Port::new(8080).to_network(), [0x1f, 0x90]);
    }

    proptest! {
        #[test]
        fn places_are_of_the_pool(ports in 1..=65_536u32, apart in 0..=65_536u32, random: u32, attempt in 0..PORT_TRIES) {
            let pool = PortPool { ports, apart: apart.min(ports) };
            prop_assert!(pool.place(random, attempt) < ports);
        }

        #[test]
        fn the_last_attempts_go_through_a_small_pool(ports in 1..=16u32, random: u32) {
            let pool = PortPool { ports, apart: 0 };
            let mut places: Vec<u32> =
                (RANDOM_TRIES..PORT_TRIES).map(|attempt| pool.place(random, attempt)).collect();
            places.sort_unstable();
            places.dedup();
            // Beyond two rounds the first is tried again.
            prop_assert!(places.len() as u32 >= ports.min(6));
        }
    }
}
