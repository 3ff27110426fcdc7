//! The tables of endpoint sets: which endpoint each place leads to. Pure, and the same on every node, whatever the order of endpoints.

use proxy_common::{balance, layout::EndpointSet, port::Port};

use super::family::TableFamily;
use crate::model::{
    desired::{Endpoint, weigh_alike},
    objects::{Algorithm, DEFAULT_WEIGHT, Protocol, Weight},
};

/// Places of an endpoint, on average, of the one with the lowest weight: so that shares are off by a hundredth at most.
const PLACES: u64 = 100;

/// Binary logarithm of the number of places for these endpoints; 0: they need no table.
pub(super) fn table_bits<'e>(
    algorithm: Algorithm,
    endpoints: impl Iterator<Item = &'e Endpoint> + Clone,
) -> u32 {
    let is_equal = weigh_alike(endpoints.clone());
    if (is_equal && algorithm != Algorithm::Maglev) || endpoints.clone().nth(1).is_none() {
        return 0;
    }
    let weights = weights(endpoints);
    let sum: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let lowest = weights.iter().filter(|weight| **weight > 0).min().map_or(1, |weight| u64::from(*weight));
    let places = (sum.div_ceil(lowest) * PLACES).next_power_of_two();
    places.ilog2().min(EndpointSet::MOST_TABLE_BITS)
}

/// Where all have none, all are equal.
fn weights<'e>(endpoints: impl Iterator<Item = &'e Endpoint>) -> Vec<Weight> {
    let mut weights: Vec<Weight> = endpoints.map(|endpoint| endpoint.weight).collect();
    if weights.iter().all(|weight| *weight == 0) {
        weights.fill(DEFAULT_WEIGHT);
    }
    weights
}

/// An endpoint's places in the order in which it takes them.
struct Turn {
    index: u32,
    weight: u64,
    /// Places for which it has been its turn, times the highest weight.
    taken: u64,
    next: u64,
    /// Odd, so that it comes to each place of a table whose size is a power of two.
    step: u64,
}

/// For each of `2^bits` places an index of `endpoints`. Those of other families than `F` have none.
pub(super) fn table<'e, F: TableFamily>(
    protocol: Protocol,
    endpoints: impl Iterator<Item = &'e Endpoint> + Clone,
    bits: u32,
) -> Vec<u32> {
    let weights = weights(endpoints.clone());
    let mut turns: Vec<_> = (0..).zip(endpoints).zip(weights).filter(|(_, weight)| *weight > 0).collect();
    turns.sort_unstable_by_key(|((_, endpoint), _)| (endpoint.address, endpoint.port));
    let turn = |((index, endpoint), weight): ((u32, &Endpoint), Weight)| {
        let address = F::address(endpoint.address)?;
        let [next, step] = balance::endpoint_hashes(&address, Port::new(endpoint.port), protocol.number());
        Some(Turn { index, weight: weight.into(), taken: 0, next, step: step | 1 })
    };
    let mut turns: Vec<Turn> = turns.into_iter().filter_map(turn).collect();
    let highest = turns.iter().map(|turn| turn.weight).max().unwrap_or(1);
    let mask = (1_u64 << bits) - 1;
    let mut table: Vec<Option<u32>> = vec![None; 1 << bits];
    let mut free = if turns.is_empty() { 0 } else { table.len() };
    let mut round = 0;
    while free > 0 {
        round += 1;
        for turn in &mut turns {
            if free == 0 || round * turn.weight <= turn.taken {
                continue;
            }
            turn.taken += highest;
            while table[(turn.next & mask) as usize].is_some() {
                turn.next = turn.next.wrapping_add(turn.step);
            }
            table[(turn.next & mask) as usize] = Some(turn.index);
            free -= 1;
        }
    }
    table.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proxy_common::family::{V4, V6};
    use rstest::rstest;

    use super::*;

    fn endpoint(address: impl Into<IpAddr>, weight: Weight) -> Endpoint {
        Endpoint { address: address.into(), port: 8080, local: false, terminating: false, weight }
    }

    /// The n-th of weight 1.
    fn nth(number: u16) -> Endpoint {
        let [upper, lower] = number.to_be_bytes();
        endpoint([10, 244, upper, lower], 1)
    }

    fn many(count: u16) -> Vec<Endpoint> {
        (0..count).map(nth).collect()
    }

    fn weighted(weights: &[Weight]) -> Vec<Endpoint> {
        (0..).zip(weights).map(|(number, weight)| Endpoint { weight: *weight, ..nth(number) }).collect()
    }

    /// Of TCP.
    fn indexes<F: TableFamily>(endpoints: &[Endpoint], bits: u32) -> Vec<u32> {
        table::<F>(Protocol::Tcp, endpoints.iter(), bits)
    }

    fn table_of(endpoints: &[Endpoint], bits: u32) -> Vec<IpAddr> {
        let table = indexes::<V4>(endpoints, bits);
        assert_eq!(table.len(), 1 << bits);
        table.into_iter().map(|index| endpoints[index as usize].address).collect()
    }

    fn bits(algorithm: Algorithm, endpoints: &[Endpoint]) -> u32 {
        table_bits(algorithm, endpoints.iter())
    }

    fn share(table: &[IpAddr], endpoint: &Endpoint) -> usize {
        table.iter().filter(|address| **address == endpoint.address).count()
    }

    #[rstest]
    #[case::no_endpoint(&[], 0, 0)]
    #[case::one(&[1], 0, 0)]
    #[case::one_with_a_weight(&[9], 0, 0)]
    #[case::two_alike(&[1, 1], 0, 8)]
    #[case::two_alike_with_weights(&[9, 9], 0, 8)]
    #[case::two_without_weight(&[0, 0], 0, 8)]
    #[case::one_of_two_without_weight(&[1, 0], 7, 7)]
    #[case::one_and_two(&[1, 2], 9, 9)]
    #[case::two_and_four(&[2, 4], 9, 9)]
    #[case::two_and_three(&[2, 3], 9, 9)]
    #[case::far_apart(&[1, 255], 15, 15)]
    #[case::farther_apart(&[1, 255, 255, 255], 16, 16)]
    fn sizes(#[case] weights: &[Weight], #[case] random: u32, #[case] maglev: u32) {
        let endpoints = weighted(weights);
        assert_eq!(bits(Algorithm::Random, &endpoints), random);
        assert_eq!(bits(Algorithm::Maglev, &endpoints), maglev);
    }

    #[rstest]
    #[case::ten(10, 10)]
    #[case::eleven(11, 11)]
    #[case::a_hundred(100, 14)]
    #[case::capped(656, 16)]
    #[case::very_many(10_000, 16)]
    fn size_follows_the_service(#[case] count: u16, #[case] expected: u32) {
        assert_eq!(bits(Algorithm::Maglev, &many(count)), expected);
    }

    #[rstest]
    #[case::two(2)]
    #[case::three(3)]
    #[case::ten(10)]
    #[case::a_hundred(100)]
    #[case::six_hundred(600)]
    #[case::more_than_there_is_room_for(10_000)]
    fn equal_endpoints_get_equal_shares(#[case] count: u16) {
        let endpoints = many(count);
        let table = indexes::<V4>(&endpoints, bits(Algorithm::Maglev, &endpoints));
        let mut shares = vec![0; endpoints.len()];
        table.iter().for_each(|index| shares[*index as usize] += 1);
        let least = table.len() / endpoints.len();
        assert!(shares.iter().all(|share| (least..=least + 1).contains(share)), "{shares:?}");
    }

    #[rstest]
    #[case::one_and_two(&[1, 2])]
    #[case::a_canary(&[1, 99])]
    #[case::several(&[1, 2, 3, 5, 8, 13])]
    #[case::one_drains(&[0, 1, 3])]
    #[case::only_one(&[0, 7])]
    #[case::far_apart(&[1, 255, 255])]
    fn shares_are_those_of_the_weights(#[case] weights: &[Weight]) {
        let endpoints = weighted(weights);
        let table = table_of(&endpoints, bits(Algorithm::Random, &endpoints));
        let sum: f64 = weights.iter().copied().map(f64::from).sum();
        for endpoint in &endpoints {
            let expected = table.len() as f64 * f64::from(endpoint.weight) / sum;
            let found = share(&table, endpoint) as f64;
            assert!((found - expected).abs() <= 0.02 * expected, "{found} places, not {expected}");
        }
    }

    #[test]
    fn every_node_makes_the_same_table() {
        let endpoints = weighted(&[3, 1, 1, 5, 0, 2]);
        let bits = bits(Algorithm::Maglev, &endpoints);
        let here = table_of(&endpoints, bits);
        // Another node has others of them, which are the first in its order.
        let there = |one: &Endpoint| Endpoint { local: true, terminating: true, ..*one };
        let mut there: Vec<_> = endpoints.iter().rev().map(there).collect();
        for _ in 0..there.len() {
            there.rotate_left(1);
            assert_eq!(table_of(&there, bits), here);
        }
    }

    /// Nodes of different versions serve the same connections.
    #[test]
    fn tables_are_as_they_were() {
        let expected = [
            [2, 2, 2, 2, 1, 3, 1, 0, 3, 1, 0, 3, 0, 3, 0, 1],
            [0, 2, 1, 1, 2, 0, 3, 3, 2, 0, 0, 3, 2, 3, 1, 1],
        ];
        let six: Vec<_> = (0..4).map(|n| endpoint([0xfd00, 0, 0, 0, 0, 0, 0, n], 1)).collect();
        assert_eq!([indexes::<V4>(&many(4), 4), indexes::<V6>(&six, 4)], expected);
    }

    /// Beyond the places of who goes, of whom there is no keeping them.
    #[rstest]
    #[case::of_three(3)]
    #[case::of_ten(10)]
    #[case::of_fifty(50)]
    #[case::of_three_hundred(300)]
    fn who_goes_moves_few_places_of_others(#[case] count: u16) {
        let all = many(count);
        let bits = bits(Algorithm::Maglev, &all);
        let before = table_of(&all, bits);
        let mut most = 0;
        for gone in (0..usize::from(count)).step_by(usize::from(count).div_ceil(10)) {
            let mut left = all.clone();
            let gone = left.remove(gone);
            let after = table_of(&left, bits);
            let both = before.iter().zip(&after);
            let moved = both.filter(|(one, other)| one != other && **one != gone.address).count();
            most = most.max(moved * 1_000 / before.len());
        }
        println!("of {count} endpoints one leaves: at most {most} of 1000 places of others lead elsewhere");
        assert!(most <= 30, "{most} of 1000 places of others lead elsewhere");
    }
}
