//! The draw by which a new connection chooses its backend: random bits, or a hash that is the same
//! on every node.
//!
//! Two kinds of endpoint sets have a lookup table behind their slots: those whose endpoints have
//! different weights, and those from which each node is to draw alike. A lookup table is copies of
//! the slots, as many of each as its weight says ([`EndpointSet`]).
//!
//! The controller makes it by Google's Maglev: each endpoint takes indexes in an order of its own,
//! in turn with the others. If one leaves, mostly its indexes alone get another endpoint. What is
//! drawn is a slot like any other, so a lookup table costs no additional map lookup.
//!
//! Least connection draws two indexes at random, and takes the one whose backend has fewer
//! connections for its weight. That is mostly as good as the least of all, and connections that
//! begin at once do not all go to one backend.

use crate::{
    family::{Family, Slot as _},
    layout::{Address, EndpointSet, FRONTEND_AFFINITY, FRONTEND_LEAST_CONNECTION, FRONTEND_MAGLEV},
    map_access::AffinityMaps,
    port::Port,
};

/// The bits by which an index is drawn from an endpoint set, and how they are used.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Draw(
    /// The bits are in the lower half, and `FIXED` and `LEAST` above them. It is one word, because
    /// functions of BPF programs have few arguments.
    u64,
);

const FIXED: u64 = 1 << 32;
/// The bits choose two indexes, and the one with fewer connections is taken.
const LEAST: u64 = (FRONTEND_LEAST_CONNECTION as u64) << 32;

impl Draw {
    /// Returns the draw of a connection to a frontend with these flags. It draws by random bits or,
    /// with Maglev, by the hash of the connection.
    ///
    /// The argument of `hash` says whether the hash includes the client's port.
    #[inline(always)]
    pub fn of(flags: u32, random: u32, hash: impl FnOnce(bool) -> u32) -> Self {
        if flags & FRONTEND_MAGLEV == 0 {
            return Self::without_ends(flags, random);
        }
        // Session affinity leaves the client's port out of the hash, so that all connections of the
        // client share it. Nodes that do not know the client then choose the same backend.
        Self::fixed(hash(flags & FRONTEND_AFFINITY == 0))
    }

    /// Returns the same as [`of`](Self::of) for a connection whose ends are not known.
    #[inline(always)]
    pub const fn without_ends(flags: u32, random: u32) -> Self {
        Self(random as u64 | ((flags & FRONTEND_LEAST_CONNECTION) as u64) << 32)
    }

    #[inline(always)]
    pub const fn random(bits: u32) -> Self {
        Self(bits as u64)
    }

    /// Returns a draw that gives the same result each time, also in [`again_by`](Self::again_by).
    #[inline(always)]
    pub const fn fixed(bits: u32) -> Self {
        Self(bits as u64 | FIXED)
    }

    /// Returns another draw, for when the index of the first one is not taken. It uses these bits,
    /// unless the bits of this draw are fixed.
    #[inline(always)]
    pub const fn again_by(self, bits: u32) -> Self {
        if self.0 & FIXED == 0 { Self(self.0 & LEAST | bits as u64) } else { self }
    }

    /// Returns an index of the set, which is not empty.
    #[inline(always)]
    pub(crate) fn pick<F: Family>(self, maps: &impl AffinityMaps<F>, set: EndpointSet) -> u32 {
        let bits = self.0 as u32;
        if self.0 & LEAST == 0 { set.index(bits) } else { maps.less_busy(set, bits) }
    }
}

/// Returns the one of two indexes that `bits` choose whose backend has fewer connections for its
/// weight. If both have as many, it returns the first.
#[inline(always)]
pub fn less_busy<F: Family>(maps: &impl AffinityMaps<F>, set: EndpointSet, bits: u32) -> u32 {
    let first = set.index(bits);
    let second = set.other_index(first, (mix(0, bits.into()) >> 32) as u32);
    let Some(one) = load_at(maps, first) else { return first };
    let Some(other) = load_at(maps, second) else { return first };
    if other.is_less_than(one) { second } else { first }
}

/// The open connections of a backend, and its weight.
///
/// It is one word to save stack: the weight less 1 is in the lowest `WEIGHT_BITS` bits, and the
/// connections are above them.
#[derive(Clone, Copy)]
struct Load(u64);

#[inline(always)]
fn load_at<F: Family>(maps: &impl AffinityMaps<F>, index: u32) -> Option<Load> {
    let slot = maps.slot(index)?;
    let more_weight = u64::from(slot.more_weight());
    Some(Load(maps.open_connections(slot.backend()) << WEIGHT_BITS | more_weight))
}

const WEIGHT_BITS: u32 = 8;

impl Load {
    #[inline(always)]
    const fn connections(self) -> u64 {
        self.0 >> WEIGHT_BITS
    }

    #[inline(always)]
    const fn weight(self) -> u64 {
        (self.0 & ((1 << WEIGHT_BITS) - 1)) + 1
    }

    /// Returns true if it has fewer connections for each unit of weight than `other`.
    #[inline(always)]
    const fn is_less_than(self, other: Self) -> bool {
        self.connections().wrapping_mul(other.weight()) < other.connections().wrapping_mul(self.weight())
    }
}

/// Returns a hash of both. If any bit of `word` changes, half of the result's bits change on
/// average.
#[inline(always)]
const fn mix(hash: u64, word: u64) -> u64 {
    const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;
    let mut mixed = (hash ^ word).wrapping_mul(FACTOR);
    mixed ^= mixed >> 32;
    mixed = mixed.wrapping_mul(FACTOR);
    mixed ^ mixed >> 32
}

#[inline(always)]
fn mix_end<A: Address>(hash: u64, address: &A, ports: u64) -> u64 {
    let [upper, lower] = address.halves();
    let hash = if A::BITS > u64::BITS { mix(hash, upper) } else { hash };
    mix(mix(hash, lower), ports)
}

/// A factor that spreads numbers: 2^64 divided by the golden ratio, which is odd and has bits all
/// over.
pub(crate) const HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the hash of a new connection. It is the same on every node and in every version of
/// proxy-ctl, or connections that change their node would change their backend.
///
/// The frontend's address is left out, because the address of a node port is each node's own.
#[inline(always)]
pub fn connection_hash<A: Address>(client: (&A, Port), frontend_port: Port, protocol: u8) -> u32 {
    let numbers = (client.1.number() as u64) << 32 | (frontend_port.number() as u64) << 8 | protocol as u64;
    (mix_end(0, client.0, numbers) >> 32) as u32
}

/// Returns two hashes of an endpoint, which are the same on every node. They decide at which index
/// of a lookup table the endpoint's order begins, and what its step is.
pub fn endpoint_hashes<A: Address>(address: &A, port: Port, protocol: u8) -> [u64; 2] {
    let first = mix_end(0, address, (port.number() as u64) << 8 | protocol as u64);
    [first, mix(first, 1)]
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use rstest::rstest;

    use super::*;
    use crate::{
        family::V4,
        layout::{BACKEND_WEIGHT_SHIFT, PROTOCOL_TCP, PROTOCOL_UDP, Slot4},
        map_access::host::HostMaps,
    };

    #[rstest]
    #[case::slots_lowest(EndpointSet::new(10, 3), 0, 10)]
    #[case::slots_end_of_first_third(EndpointSet::new(10, 3), 0x5555_5555, 10)]
    #[case::slots_start_of_second_third(EndpointSet::new(10, 3), 0x5555_5556, 11)]
    #[case::slots_highest(EndpointSet::new(10, 3), u32::MAX, 12)]
    #[case::table_lowest(EndpointSet::new(10, 3).with_table(2), 0, 13)]
    #[case::table_second(EndpointSet::new(10, 3).with_table(2), 1 << 30, 14)]
    #[case::table_highest(EndpointSet::new(10, 3).with_table(2), u32::MAX, 16)]
    #[case::largest_table(EndpointSet::new(10, 3).with_table(EndpointSet::MOST_TABLE_BITS), u32::MAX, 13 + 0xffff)]
    fn indexes(#[case] set: EndpointSet, #[case] bits: u32, #[case] index: u32) {
        assert_eq!(Draw::random(bits).pick(&HostMaps::<V4>::default(), set), index);
        assert!(index < set.first + set.slot_count());
    }

    #[test]
    fn sizes_do_not_meet() {
        let set = EndpointSet::new(7, EndpointSet::MOST).with_table(EndpointSet::MOST_TABLE_BITS);
        assert_eq!((set.count(), set.table_bits()), (EndpointSet::MOST, EndpointSet::MOST_TABLE_BITS));
        assert_eq!(set.with_table(0), EndpointSet::new(7, EndpointSet::MOST));
        let sizes = u64::from(EndpointSet::MOST | EndpointSet::MOST_TABLE_BITS << 27);
        assert_eq!(EndpointSet::from_word(sizes << 32 | 7), set);
    }

    #[rstest]
    #[case::random(0, Draw::random(7))]
    #[case::random_with_affinity(FRONTEND_AFFINITY, Draw::random(7))]
    #[case::maglev(FRONTEND_MAGLEV, Draw::fixed(1))]
    #[case::maglev_with_affinity(FRONTEND_MAGLEV | FRONTEND_AFFINITY, Draw::fixed(0))]
    #[case::least_connection(FRONTEND_LEAST_CONNECTION, least(7))]
    #[case::least_connection_with_affinity(FRONTEND_LEAST_CONNECTION | FRONTEND_AFFINITY, least(7))]
    fn draws_as_the_frontend_says(#[case] flags: u32, #[case] expected: Draw) {
        assert_eq!(Draw::of(flags, 7, u32::from), expected);
    }

    #[rstest]
    #[case::random(Draw::random(1), Draw::random(2))]
    #[case::fixed(Draw::fixed(1), Draw::fixed(1))]
    #[case::least_connection(least(1), least(2))]
    fn draws_again(#[case] first: Draw, #[case] second: Draw) {
        assert_eq!(first.again_by(2), second);
    }

    const fn least(bits: u32) -> Draw {
        Draw::without_ends(FRONTEND_LEAST_CONNECTION, bits)
    }

    /// Slots from index 10 on, of backends 1, 2, …, with these weights and connections. Behind them
    /// are slots of the backends in `copies`, as a lookup table.
    fn maps(backends: &[(u32, i64)], copies: &[u32]) -> HostMaps<V4> {
        let mut maps = HostMaps::default();
        let slots = (1..).take(backends.len()).chain(copies.iter().copied());
        for (index, backend) in (10..).zip(slots) {
            let (weight, open) = backends[backend as usize - 1];
            let flags = (weight - 1) << BACKEND_WEIGHT_SHIFT;
            maps.slots.insert(index, Slot4::new([10, 244, 0, backend as u8], Port::new(80), backend, flags));
            maps.open.borrow_mut().insert(backend, open);
        }
        maps
    }

    /// The result is the same whatever the bits are.
    #[rstest]
    #[case::of_one(&[(1, 7)], 1)]
    #[case::fewer_than_the_other(&[(1, 7), (1, 6)], 2)]
    #[case::none(&[(1, 0), (1, 1)], 1)]
    #[case::most_that_can_be(&[(1, 1), (1, i64::from(u32::MAX))], 1)]
    #[case::more_than_none_is_missed(&[(1, 1), (1, -3)], 2)]
    #[case::fewer_for_its_weight(&[(3, 8), (1, 3)], 1)]
    #[case::more_for_its_weight(&[(3, 10), (1, 3)], 2)]
    #[case::of_the_highest_weight(&[(255, 254), (1, 1)], 1)]
    fn fewer_connections(#[case] backends: &[(u32, i64)], #[case] expected: u32) {
        let maps = maps(backends, &[]);
        let set = EndpointSet::new(10, backends.len() as u32);
        for bits in (0..=u32::MAX).step_by(1 << 20) {
            assert_eq!(least(bits).pick(&maps, set), 9 + expected, "{bits:#x}");
        }
    }

    #[rstest]
    #[case::without_connections(&[(1, 0), (1, 0), (1, 0)])]
    #[case::with_as_many(&[(1, 5), (1, 5), (1, 5)])]
    #[case::less_than_none_is_none(&[(1, 0), (1, -7), (1, -1)])]
    #[case::for_their_weights(&[(1, 5), (2, 10), (3, 15)])]
    fn of_equals_the_first(#[case] backends: &[(u32, i64)]) {
        let (maps, set) = (maps(backends, &[]), EndpointSet::new(10, 3));
        for bits in (0..=u32::MAX).step_by(1 << 20) {
            assert_eq!(least(bits).pick(&maps, set), Draw::random(bits).pick(&maps, set), "{bits:#x}");
        }
    }

    #[test]
    fn none_is_taken_from_an_empty_set() {
        let (maps, set) = (maps(&[], &[]), EndpointSet::new(10, 0));
        for bits in [0, 1 << 31, u32::MAX] {
            assert!(!maps.slots.contains_key(&least(bits).pick(&maps, set)));
        }
    }

    #[rstest]
    #[case::slots(EndpointSet::new(10, 5), 10..15)]
    #[case::two(EndpointSet::new(10, 2), 10..12)]
    #[case::table(EndpointSet::new(10, 5).with_table(4), 15..31)]
    #[case::largest(EndpointSet::new(10, 1 << 26), 10..10 + (1 << 26))]
    fn two_indexes_are_two(#[case] set: EndpointSet, #[case] indexes: Range<u32>) {
        for first in (0..=u32::MAX).step_by(1 << 24) {
            for bits in [0, 1, 0x5555_5555, 0x5555_5556, 1 << 31, u32::MAX] {
                let index = set.index(first);
                let beside = set.other_index(index, bits);
                assert!(beside != index && indexes.contains(&beside), "{index} and {beside}");
            }
        }
    }

    #[test]
    fn each_other_index_is_as_likely() {
        let set = EndpointSet::new(0, 4);
        let mut counts = [0_u32; 4];
        for number in 0..12_000_u32 {
            let bits = number.wrapping_mul(0x9e37_79b9);
            let first = set.index(bits);
            counts[(set.other_index(first, (mix(0, bits.into()) >> 32) as u32).wrapping_sub(first) & 3)
                as usize] += 1;
        }
        assert!(
            counts[0] == 0 && counts[1..].iter().all(|count| (3_700..4_300).contains(count)),
            "{counts:?}"
        );
    }

    /// A thousand connections that stay go to ten endpoints, so the mean is 100. The test compares
    /// the most connections that one endpoint has.
    #[test]
    fn connections_that_stay_are_balanced() {
        let set = EndpointSet::new(10, 10);
        let most = |draw: fn(u32) -> Draw| {
            let maps = maps(&[(1, 0); 10], &[]);
            let mut random = 1_u64;
            for _ in 0..1_000 {
                random = mix(random, 7);
                let index = draw(random as u32).pick(&maps, set);
                *maps.open.borrow_mut().entry(index - 9).or_default() += 1;
            }
            let open = maps.open.borrow();
            open.values().copied().max().unwrap()
        };
        let (by_least, by_random) = (most(least), most(Draw::random));
        println!(
            "most of 1000 connections to 10 endpoints: {by_least} by least connection, {by_random} at random"
        );
        assert!(by_least <= 103 && by_random > 110, "{by_least}, {by_random}");
    }

    /// The endpoint of weight 3 gets three quarters of the connections, however the draws from the
    /// lookup table fall.
    #[test]
    fn connections_that_stay_are_balanced_by_weight() {
        let maps = maps(&[(1, 0), (3, 0)], &[1, 2, 2, 2]);
        let set = EndpointSet::new(10, 2).with_table(2);
        let mut random = 1_u64;
        for _ in 0..1_000 {
            random = mix(random, 7);
            let slot = maps.slots[&least(random as u32).pick(&maps, set)];
            *maps.open.borrow_mut().entry(slot.backend).or_default() += 1;
        }
        let open = maps.open.borrow();
        assert!((740..760).contains(&open[&2]), "{open:?}");
    }

    /// Nodes with different versions of proxy-ctl serve the same connections.
    #[test]
    fn hashes_are_as_they_were() {
        let four = connection_hash(&[203, 0, 113, 1], Port::new(40_000));
        let six =
            connection_hash(&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], Port::new(40_000));
        assert_eq!((four, six), (1_238_303_894, 576_667_397));
        let endpoint = endpoint_hashes(&[10, 244, 0, 1], Port::new(8080), PROTOCOL_TCP);
        assert_eq!(endpoint, [6_789_953_649_091_880_537, 6_924_106_252_309_910_666]);

        fn connection_hash<A: Address>(client: &A, port: Port) -> u32 {
            super::connection_hash((client, port), Port::new(443), PROTOCOL_TCP)
        }
    }

    #[rstest]
    #[case::client_ports(|n| ([203, 0, 113, 1], n, 443, PROTOCOL_TCP))]
    #[case::client_addresses(|n| ([203, 0, (n >> 8) as u8, n as u8], 40_000, 443, PROTOCOL_TCP))]
    #[case::frontend_ports(|n| ([203, 0, 113, 1], 40_000, n, PROTOCOL_UDP))]
    fn connections_are_spread(#[case] connection: fn(u16) -> ([u8; 4], u16, u16, u8)) {
        let mut counts = [0_u32; 16];
        for number in 0..16_000 {
            let (address, port, frontend, protocol) = connection(number);
            let hash = connection_hash((&address, Port::new(port)), Port::new(frontend), protocol);
            counts[(hash >> 28) as usize] += 1;
        }
        // The mean is a thousand each, and the bounds are five standard deviations (square roots of
        // the mean) away.
        assert!(counts.iter().all(|count| (840..1_160).contains(count)), "{counts:?}");
    }
}
