//! Ports: as decisions pass them around, as packets have them, and as tables hold them.

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

/// Ports for translated sources and aliases: up to two ranges, as [`crate::layout::Settings::masquerade_ports`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PortRanges(pub [[u16; 2]; 2]);

impl PortRanges {
    pub const EMPTY: Self = Self([[1, 0]; 2]);

    #[inline(always)]
    pub fn contain(&self, Port(port): Port) -> bool {
        let [first, second] = &self.0;
        (first[0] <= port && port <= first[1]) || (second[0] <= port && port <= second[1])
    }

    /// The `attempt`th port after a random one; [`Port::NONE`] if the ranges are empty.
    #[inline(always)]
    pub fn choose(&self, random: u32, attempt: u32) -> Port {
        let [first, second] = &self.0;
        let (in_first, total) = (length(*first), length(*first) + length(*second));
        if total == 0 {
            return Port::NONE;
        }
        // Scales 32 random bits to 0..total without a division.
        let mut place = ((u64::from(random) * u64::from(total)) >> 32) as u32 + attempt;
        if place >= total {
            place -= total;
        }
        // A range shorter than the attempts is tried in part twice.
        if place >= total {
            place = 0;
        }
        Port(if place < in_first {
            first[0].wrapping_add(place as u16)
        } else {
            second[0].wrapping_add((place - in_first) as u16)
        })
    }
}

#[inline(always)]
fn length(range: [u16; 2]) -> u32 {
    if range[0] > range[1] { 0 } else { u32::from(range[1]) - u32::from(range[0]) + 1 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const RANGES: PortRanges = PortRanges([[10, 12], [20, 21]]);

    #[test]
    fn both_ends_of_both_ranges_are_contained() {
        let contained: Vec<u16> = (0..100).filter(|port| RANGES.contain(Port::new(*port))).collect();
        assert_eq!(contained, [10, 11, 12, 20, 21]);
    }

    #[rstest]
    #[case::first(0, 0, 10)]
    #[case::last_of_the_first_range(0, 2, 12)]
    #[case::second_range(0, 3, 20)]
    #[case::round_the_end(0, 5, 10)]
    #[case::more_attempts_than_ports(u32::MAX, 7, 10)]
    #[case::a_random_half(1 << 31, 0, 12)]
    #[case::the_highest_random(u32::MAX, 0, 21)]
    fn attempts_go_through_both_ranges(#[case] random: u32, #[case] attempt: u32, #[case] port: u16) {
        assert_eq!(RANGES.choose(random, attempt), Port::new(port));
    }

    #[test]
    fn a_range_of_one_port_is_not_empty() {
        assert_eq!(PortRanges([[5, 5], [1, 0]]).choose(u32::MAX, 0), Port::new(5));
    }

    #[test]
    fn bytes_of_a_packet_are_in_network_order() {
        assert_eq!(Port::from_network([0x1f, 0x90]), Port::new(8080));
        assert_eq!(Port::new(8080).to_network(), [0x1f, 0x90]);
    }

    proptest! {
        #[test]
        fn ports_come_from_the_ranges(ranges: [[u16; 2]; 2], random: u32, attempt in 0u32..16) {
            let is_empty = ranges.iter().all(|[first, last]| first > last);
            let port = PortRanges(ranges).choose(random, attempt);
            let is_right = if is_empty { port == Port::NONE } else { PortRanges(ranges).contain(port) };
            prop_assert!(is_right);
        }

        #[test]
        fn attempts_try_different_ports(first in 1u16..60_000, random: u32) {
            let ranges = PortRanges([[first, first + 9], [first + 100, first + 109]]);
            let mut ports: Vec<_> = (0..16).map(|attempt| ranges.choose(random, attempt)).collect();
            ports.sort_unstable();
            ports.dedup();
            prop_assert_eq!(ports.len(), 16);
        }
    }
}
