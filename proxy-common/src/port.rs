//! Ports, as decisions pass them around, as packets have them, and as maps hold them.

use core::ops::RangeInclusive;

/// The node ports that an API server gives to Services, unless `--service-node-port-range` says
/// otherwise.
pub const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// A port of TCP or UDP. A port in network order is never a number, only two bytes.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(transparent)]
pub struct Port(u16);

impl Port {
    /// The port that nobody has. It stands for a port that is not known, and for an element that is
    /// free.
    pub const NONE: Self = Self(0);

    /// Returns the port with this number in host byte order, as people and maps write it.
    #[inline(always)]
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Returns the number in host byte order.
    #[inline(always)]
    pub const fn number(self) -> u16 {
        self.0
    }

    /// Returns the port from its two bytes in network order, as packets and socket addresses have
    /// it.
    #[inline(always)]
    pub const fn from_network(bytes: [u8; 2]) -> Self {
        Self(u16::from_be_bytes(bytes))
    }

    #[inline(always)]
    pub const fn to_network(self) -> [u8; 2] {
        self.0.to_be_bytes()
    }
}

/// Two ranges of ports, as [`crate::layout::Settings::reserved_ports`] has them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PortRanges(pub [[u16; 2]; 2]);

impl PortRanges {
    #[inline(always)]
    pub fn contain(&self, Port(port): Port) -> bool {
        let [first, second] = &self.0;
        (first[0] <= port && port <= first[1]) || (second[0] <= port && port <= second[1])
    }
}

/// The number of ports in the map `masquerade_ports`, which are used as masquerade and alias ports.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PortPool {
    pub ports: u32,
    /// The number of reserved ports among them, which come first. The kernel gives them to no
    /// socket.
    pub reserved: u32,
}

/// The number of attempts with [reserved ports](PortPool::reserved).
const RESERVED_TRIES: u32 = 8;
/// The number of attempts at random, first those with reserved ports and then those with others.
/// Even if three of five ports are in use, only one in a million of sources finds none by them.
pub const RANDOM_TRIES: u32 = 36;
/// The number of all attempts. The last ones take one port after the other, so in a small pool each
/// is tried. The limit is low because the verifier goes through all attempts.
pub const PORT_TRIES: u32 = 48;

impl PortPool {
    /// Returns the index of the port for one of the [`PORT_TRIES`] attempts, or 0 if there is no
    /// port.
    ///
    /// Each of the [`RANDOM_TRIES`] has a random number of its own. The other attempts get the last
    /// one.
    #[inline(always)]
    pub const fn index(&self, random: u32, attempt: u32) -> u32 {
        let (first, among) = if self.reserved == 0 || self.reserved >= self.ports || attempt >= RANDOM_TRIES {
            (0, self.ports)
        } else if attempt < RESERVED_TRIES {
            (0, self.reserved)
        } else {
            (self.reserved, self.ports - self.reserved)
        };
        // Scales 32 random bits to 0..among without a division.
        let scaled = ((random as u64 * among as u64) >> 32) as u32;
        let mut index = first + scaled + attempt.saturating_sub(RANDOM_TRIES);
        if index >= self.ports {
            index -= self.ports;
        }
        if index >= self.ports { 0 } else { index }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const POOL: PortPool = PortPool { ports: 10, reserved: 4 };
    const HALF: u32 = 1 << 31;

    #[rstest]
    #[case::first(0, 0, 0)]
    #[case::a_random_half(HALF, 0, 2)]
    #[case::last_that_is_reserved(u32::MAX, RESERVED_TRIES - 1, 3)]
    #[case::first_of_the_others(0, RESERVED_TRIES, 4)]
    #[case::half_of_the_others(HALF, RANDOM_TRIES - 1, 7)]
    #[case::last_of_the_others(u32::MAX, RESERVED_TRIES, 9)]
    #[case::any(HALF, RANDOM_TRIES, 5)]
    #[case::last(u32::MAX, RANDOM_TRIES, 9)]
    #[case::next(HALF, RANDOM_TRIES + 1, 6)]
    #[case::round_the_end(u32::MAX, RANDOM_TRIES + 2, 1)]
    #[case::round_twice(u32::MAX, PORT_TRIES - 1, 0)]
    fn attempts_have_indexes(#[case] random: u32, #[case] attempt: u32, #[case] index: u32) {
        assert_eq!(POOL.index(random, attempt), index);
    }

    #[rstest]
    #[case::none_is_reserved(PortPool { ports: 10, reserved: 0 }, 9)]
    #[case::all_are_reserved(PortPool { ports: 10, reserved: 10 }, 9)]
    #[case::one(PortPool { ports: 1, reserved: 1 }, 0)]
    #[case::none(PortPool::default(), 0)]
    fn the_first_attempt_in_pools_of_all_sizes(#[case] pool: PortPool, #[case] index: u32) {
        assert_eq!(pool.index(u32::MAX, 0), index);
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
        fn indexes_are_of_the_pool(ports in 1..=65_536u32, reserved in 0..=65_536u32, random: u32, attempt in 0..PORT_TRIES) {
            let pool = PortPool { ports, reserved: reserved.min(ports) };
            prop_assert!(pool.index(random, attempt) < ports);
        }

        #[test]
        fn the_last_attempts_go_through_a_small_pool(ports in 1..=16u32, random: u32) {
            let pool = PortPool { ports, reserved: 0 };
            let mut indexes: Vec<u32> =
                (RANDOM_TRIES..PORT_TRIES).map(|attempt| pool.index(random, attempt)).collect();
            indexes.sort_unstable();
            indexes.dedup();
            // An attempt beyond two rounds tries the first port again.
            prop_assert!(indexes.len() as u32 >= ports.min(6));
        }
    }
}
