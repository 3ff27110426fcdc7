//! By what a new connection draws its backend: random bits, or a hash that is the same on every node.
//!
//! A set whose endpoints are not equal, or that each node is to draw from alike, has a table behind its slots: copies of them, as many of
//! each as its weight says ([`EndpointSet`]). The controller makes it by Google's Maglev: each endpoint takes places in an order of its own,
//! in turn with the others, so that when one leaves mostly its places alone get another. A drawn place is a slot like any other: a table
//! costs no lookup.

use crate::{
    layout::{Address, EndpointSet, FRONTEND_AFFINITY, FRONTEND_MAGLEV},
    port::Port,
};

/// The bits by which a place is drawn from a set.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Draw(
    /// One word, as functions of programs have few arguments: the bits, and above them whether they are fixed.
    u64,
);

const FIXED: u64 = 1 << 32;

impl Draw {
    /// To a frontend with these flags: by random bits or, with Maglev, by the hash of the connection; its argument says whether with the
    /// client's port.
    #[inline(always)]
    pub fn of(flags: u32, random: u32, hash: impl FnOnce(bool) -> u32) -> Self {
        if flags & FRONTEND_MAGLEV == 0 {
            return Self::random(random);
        }
        // With affinity, what all of the client's connections have in common: it is the same on nodes that do not know the client.
        Self::fixed(hash(flags & FRONTEND_AFFINITY == 0))
    }

    #[inline(always)]
    pub const fn random(bits: u32) -> Self {
        Self(bits as u64)
    }

    /// Of what draws alike whenever it draws.
    #[inline(always)]
    pub const fn fixed(bits: u32) -> Self {
        Self(bits as u64 | FIXED)
    }

    /// Another draw, where the first one's place is not taken: by these bits unless they are fixed.
    #[inline(always)]
    pub const fn again_by(self, bits: u32) -> Self {
        if self.0 & FIXED == 0 { Self::random(bits) } else { self }
    }

    /// An index of the set, which is not empty.
    #[inline(always)]
    pub const fn place(self, set: EndpointSet) -> u32 {
        set.place(self.0 as u32)
    }
}

/// Changes half of its bits, on average, when any of `word` changes.
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

/// Of a new connection: the same on every node and in every version of the proxy, or connections that change their node would change their
/// backend. The frontend's address is left out: that of a node port is each node's own.
#[inline(always)]
pub fn connection_hash<A: Address>(client: (&A, Port), frontend_port: Port, protocol: u8) -> u32 {
    let numbers = (client.1.number() as u64) << 32 | (frontend_port.number() as u64) << 8 | protocol as u64;
    (mix_end(0, client.0, numbers) >> 32) as u32
}

/// Two of an endpoint, for where its places in a table begin and how far they lie apart: the same on every node.
pub fn endpoint_hashes<A: Address>(address: &A, port: Port, protocol: u8) -> [u64; 2] {
    let first = mix_end(0, address, (port.number() as u64) << 8 | protocol as u64);
    [first, mix(first, 1)]
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::layout::{PROTOCOL_TCP, PROTOCOL_UDP};

    #[rstest]
    #[case::slots_lowest(EndpointSet::new(10, 3), 0, 10)]
    #[case::slots_end_of_first_third(EndpointSet::new(10, 3), 0x5555_5555, 10)]
    #[case::slots_start_of_second_third(EndpointSet::new(10, 3), 0x5555_5556, 11)]
    #[case::slots_highest(EndpointSet::new(10, 3), u32::MAX, 12)]
    #[case::table_lowest(EndpointSet::new(10, 3).with_table(2), 0, 13)]
    #[case::table_second(EndpointSet::new(10, 3).with_table(2), 1 << 30, 14)]
    #[case::table_highest(EndpointSet::new(10, 3).with_table(2), u32::MAX, 16)]
    #[case::largest_table(EndpointSet::new(10, 3).with_table(EndpointSet::MOST_TABLE_BITS), u32::MAX, 13 + 0xffff)]
    fn places(#[case] set: EndpointSet, #[case] bits: u32, #[case] place: u32) {
        assert_eq!(Draw::random(bits).place(set), place);
        assert!(place < set.first + set.places());
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
    fn draws_as_the_frontend_says(#[case] flags: u32, #[case] expected: Draw) {
        assert_eq!(Draw::of(flags, 7, u32::from), expected);
    }

    #[rstest]
    #[case::random(Draw::random(1), Draw::random(2))]
    #[case::fixed(Draw::fixed(1), Draw::fixed(1))]
    fn draws_again(#[case] first: Draw, #[case] second: Draw) {
        assert_eq!(first.again_by(2), second);
    }

    /// Nodes of different versions serve the same connections.
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
        // A thousand each, and five times its root.
        assert!(counts.iter().all(|count| (840..1_160).contains(count)), "{counts:?}");
    }
}
