//! Computes the lookup tables of endpoint sets: the endpoint of each index. Pure, and the same on
//! every node, whatever the order of endpoints.

use std::cmp::Reverse;

use proxy_common::{balance, layout::EndpointSet, port::Port};

use crate::{
    model::{
        desired::{Endpoint, weigh_alike},
        objects::{Algorithm, DEFAULT_WEIGHT, Protocol, Weight},
    },
    modes::ebpf::maps::family::MapFamily,
};

/// The average number of indexes for an endpoint of the lowest weight. It keeps the error of shares
/// below a hundredth, unless the lookup table has its greatest size.
const INDEXES_OF_LOWEST: u64 = 100;
/// Binary logarithm of the number of indexes that endpoints take in turns. Larger lookup tables are
/// made by doubling one of this size.
const BITS_BY_TURNS: u32 = 9;

/// Returns the binary logarithm of the lookup table's size for these endpoints; 0 if they need
/// none.
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
    let size = (sum.div_ceil(lowest) * INDEXES_OF_LOWEST).next_power_of_two();
    // With Maglev, all nodes choose alike. Smaller tables would only add sizes, and connections
    // move with each change of size.
    let least = if algorithm == Algorithm::Maglev { BITS_BY_TURNS } else { 0 };
    size.ilog2().clamp(least, EndpointSet::MOST_TABLE_BITS)
}

/// Returns the weights of the endpoints. If all of them are 0, all endpoints count alike.
fn weights<'e>(endpoints: impl Iterator<Item = &'e Endpoint>) -> Vec<Weight> {
    let mut weights: Vec<Weight> = endpoints.map(|endpoint| endpoint.weight).collect();
    if weights.iter().all(|weight| *weight == 0) {
        weights.fill(DEFAULT_WEIGHT);
    }
    weights
}

/// An endpoint, and the order in which it takes indexes of the lookup table.
struct Taker {
    index: u32,
    weight: u64,
    first: u64,
    /// Distance from one index to the next. It is odd, so that the endpoint comes to each index of
    /// a table whose size is a power of two.
    step: u64,
}

impl Taker {
    /// Returns the indexes of a lookup table of this size in the endpoint's order. Each comes once,
    /// and then they start again.
    fn preferred(&self, size: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, step, mask) = (self.first, self.step, size as u64 - 1);
        (0_u64..).map(move |number| (first.wrapping_add(step.wrapping_mul(number)) & mask) as usize)
    }
}

/// Returns the lookup table of `2^bits` indexes of `endpoints`. Endpoints of families other than
/// `F` are in none.
pub(crate) fn table<'e, F: MapFamily>(
    protocol: Protocol,
    endpoints: impl Iterator<Item = &'e Endpoint> + Clone,
    bits: u32,
) -> Vec<u32> {
    let weights = weights(endpoints.clone());
    let mut weighted: Vec<_> = (0..).zip(endpoints).zip(weights).filter(|(_, weight)| *weight > 0).collect();
    weighted.sort_unstable_by_key(|((_, endpoint), _)| (endpoint.address, endpoint.port));
    let taker = |((index, endpoint), weight): ((u32, &Endpoint), Weight)| {
        let address = F::address(endpoint.address)?;
        let [first, step] = balance::endpoint_hashes(&address, Port::new(endpoint.port), protocol.number());
        Some(Taker { index, weight: weight.into(), first, step: step | 1 })
    };
    let takers: Vec<Taker> = weighted.into_iter().filter_map(taker).collect();
    if takers.is_empty() {
        return Vec::new();
    }
    let by_turns = bits.min(BITS_BY_TURNS);
    let table =
        (by_turns..bits).fold(taken_by_turns(&takers, 1 << by_turns), |half, _| doubled(&half, &takers));
    table.into_iter().map(|taker| takers[taker].index).collect()
}

/// Returns a lookup table of indexes of `takers`, which take one index each in turns by their
/// weights.
fn taken_by_turns(takers: &[Taker], size: usize) -> Vec<usize> {
    let highest = takers.iter().map(|taker| taker.weight).max().unwrap_or(1);
    // The number next to each endpoint is how often it has had its turn, times the highest weight.
    let mut turns: Vec<_> = takers.iter().map(|taker| (taker, taker.preferred(size), 0)).collect();
    let mut table: Vec<Option<usize>> = vec![None; size];
    let mut free = size;
    let mut round = 0;
    while free > 0 {
        round += 1;
        for (index, (taker, preferred, taken)) in turns.iter_mut().enumerate() {
            if free == 0 || round * taker.weight <= *taken {
                continue;
            }
            *taken += highest;
            take_one(&mut table, preferred, index);
            free -= 1;
        }
    }
    table.into_iter().flatten().collect()
}

/// Returns a lookup table with two indexes for each one of `half`. They lead to the same endpoint
/// as far as shares allow. So few connections move when a Service outgrows a table size, or shrinks
/// back to it.
fn doubled(half: &[usize], takers: &[Taker]) -> Vec<usize> {
    let mut table: Vec<_> = half.iter().flat_map(|taker| [Some(*taker); 2]).collect();
    let size = table.len();
    let mut missing: Vec<_> = shares(takers, size).into_iter().map(|share| share as isize).collect();
    for taker in half {
        missing[*taker] -= 2;
    }
    for entry in &mut table {
        if let Some(taker) = *entry
            && missing[taker] < 0
        {
            *entry = None;
            missing[taker] += 1;
        }
    }
    for (index, taker) in takers.iter().enumerate() {
        let mut preferred = taker.preferred(size);
        for _ in 0..missing[index] {
            take_one(&mut table, &mut preferred, index);
        }
    }
    table.into_iter().flatten().collect()
}

/// Gives the next free index of `preferred` to `taker`. The caller makes sure that one is free.
fn take_one(table: &mut [Option<usize>], preferred: &mut impl Iterator<Item = usize>, taker: usize) {
    if let Some(free) = preferred.find(|free| table[*free].is_none()) {
        table[free] = Some(taker);
    }
}

/// Returns how many of `size` indexes each endpoint gets by its weight. Indexes left over go, one
/// each, to the endpoints that lose most by rounding down.
fn shares(takers: &[Taker], size: usize) -> Vec<u64> {
    let sum: u64 = takers.iter().map(|taker| taker.weight).sum();
    let exact = |taker: &Taker| size as u64 * taker.weight;
    let mut shares: Vec<u64> = takers.iter().map(|taker| exact(taker) / sum).collect();
    let left = size as u64 - shares.iter().sum::<u64>();
    let mut cut: Vec<usize> = (0..takers.len()).collect();
    cut.sort_unstable_by_key(|index| (Reverse(exact(&takers[*index]) % sum), takers[*index].first));
    cut.into_iter().take(left as usize).for_each(|index| shares[index] += 1);
    shares
}

#[cfg(test)]
mod tests {
    use std::{iter, net::IpAddr};

    use proxy_common::family::{V4, V6};
    use rstest::rstest;

    use super::*;

    fn endpoint(address: impl Into<IpAddr>, weight: Weight) -> Endpoint {
        Endpoint { address: address.into(), port: 8080, local: false, terminating: false, weight }
    }

    /// Returns the endpoint of this number, with weight 1.
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

    /// Returns the lookup table of these endpoints for TCP.
    fn indexes<F: MapFamily>(endpoints: &[Endpoint], bits: u32) -> Vec<u32> {
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
    #[case::two_alike(&[1, 1], 0, 9)]
    #[case::two_alike_with_weights(&[9, 9], 0, 9)]
    #[case::two_without_weight(&[0, 0], 0, 9)]
    #[case::one_of_two_without_weight(&[1, 0], 7, 9)]
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
    #[case::five(5, 9)]
    #[case::six(6, 10)]
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
            assert!((found - expected).abs() <= 0.02 * expected, "{found} indexes, not {expected}");
        }
    }

    #[test]
    fn every_node_makes_the_same_table() {
        let endpoints = weighted(&[3, 1, 1, 5, 0, 2]);
        let bits = bits(Algorithm::Maglev, &endpoints);
        let here = table_of(&endpoints, bits);
        // On another node, other endpoints are local, and local ones come first.
        let there = |one: &Endpoint| Endpoint { local: true, terminating: true, ..*one };
        let mut there: Vec<_> = endpoints.iter().rev().map(there).collect();
        for _ in 0..there.len() {
            there.rotate_left(1);
            assert_eq!(table_of(&there, bits), here);
        }
    }

    /// Tables must stay as they were, because nodes of different versions serve the same
    /// connections.
    #[test]
    fn tables_are_as_they_were() {
        let expected = [
            [2, 2, 2, 2, 1, 3, 1, 0, 3, 1, 0, 3, 0, 3, 0, 1],
            [0, 2, 1, 1, 2, 0, 3, 3, 2, 0, 0, 3, 2, 3, 1, 1],
        ];
        let six: Vec<_> = (0..4).map(|n| endpoint([0xfd00, 0, 0, 0, 0, 0, 0, n], 1)).collect();
        assert_eq!([indexes::<V4>(&many(4), 4), indexes::<V6>(&six, 4)], expected);
    }

    /// Returns how many thousandths of all indexes lead elsewhere, although their endpoint has the
    /// same weight before and after.
    fn moved(before: &[Endpoint], after: &[Endpoint]) -> usize {
        let tables = [before, after].map(|endpoints| table_of(endpoints, bits(Algorithm::Maglev, endpoints)));
        let size = tables.each_ref().map(Vec::len).into_iter().max().unwrap();
        let [before_of, after_of] = tables.map(|table| {
            let repeated = size / table.len();
            table.into_iter().flat_map(move |address| iter::repeat_n(address, repeated)).collect::<Vec<_>>()
        });
        let stays = |address: &IpAddr| {
            let weight = |endpoints: &[Endpoint]| {
                endpoints.iter().find(|endpoint| endpoint.address == *address).map(|endpoint| endpoint.weight)
            };
            weight(before) == weight(after)
        };
        let moved = before_of.iter().zip(&after_of).filter(|(one, other)| one != other && stays(one)).count();
        moved * 1_000 / size
    }

    /// The indexes of the endpoint that goes do not count, as they have to move. If one of 6, 11,
    /// 21, ... endpoints goes, the lookup table halves its size.
    #[rstest]
    #[case::of_three(3, 15)]
    #[case::of_five(5, 30)]
    #[case::of_six(6, 40)]
    #[case::of_eleven(11, 70)]
    #[case::of_twenty_one(21, 90)]
    #[case::of_forty_one(41, 120)]
    #[case::of_fifty(50, 120)]
    #[case::of_eighty_two(82, 120)]
    #[case::of_three_hundred(300, 120)]
    #[case::of_three_hundred_and_twenty_eight(328, 120)]
    #[case::of_a_thousand(1_000, 120)]
    fn who_goes_moves_few_indexes_of_others(#[case] count: u16, #[case] at_most: usize) {
        let all = many(count);
        let mut most = 0;
        for gone in (0..usize::from(count)).step_by(usize::from(count).div_ceil(10)) {
            let mut left = all.clone();
            left.remove(gone);
            most = most.max(moved(&all, &left));
        }
        println!("of {count} endpoints one leaves: at most {most} of 1000 indexes of others lead elsewhere");
        assert!(most <= at_most, "{most} of 1000 indexes of others lead elsewhere");
    }

    #[rstest]
    #[case::one_drains(&[10, 10, 10], &[10, 10, 1], 20)]
    #[case::it_is_gone(&[10, 10, 1], &[10, 10, 0], 20)]
    #[case::a_canary_grows(&[99, 1], &[90, 10], 0)]
    fn a_weight_moves_few_indexes_of_others(
        #[case] before: &[Weight],
        #[case] after: &[Weight],
        #[case] at_most: usize,
    ) {
        let moved = moved(&weighted(before), &weighted(after));
        assert!(moved <= at_most, "{moved} of 1000 indexes of others lead elsewhere");
    }
}
