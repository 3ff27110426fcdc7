//! Computes the sizes of flow maps from the machine, for users who name none.

use proxy_common::inventory::{Limit, Limits};

use crate::{
    config::{Config, Ebpf},
    sys::proc::machine::Machine,
};

/// The part of the machine's memory that the flow maps take before they are filled: one fiftieth.
const PARTS_OF_MEMORY: u64 = 50;
/// The part of a container's memory limit that the flow maps take when they are full: one quarter.
/// Since Linux 5.11, the memory of maps counts towards that limit.
const PARTS_OF_LIMIT: u64 = 4;
/// The most bytes that an entry takes while it is used.
const USED_BYTES: u64 = 300;
/// The number of maps with the same size: one for each IP family.
const FAMILIES: u64 = 2;

/// The number of entries that correspond to one of conntrack: a masqueraded flow takes three.
const ENTRIES_OF_CONNECTION: u64 = 3;
/// The bytes that an entry of `flows4` and one of `flows6` take before they are used: a bucket
/// each. The kernel allocates all buckets with the map, and rounds their number up to a power of
/// two.
const BUCKET_BYTES: u64 = 2 * 16;
/// The least size of `flows4` and `flows6`, on a machine with hardly any memory.
const FEWEST_FLOWS: u64 = 1 << 16;

/// The bytes that one entry in each map of opening flows takes. These maps are allocated whole.
const OPENING_BYTES: u64 = 640;
/// The least size of the maps of opening flows, and the step in which they become larger.
const OPENING_STEP: u64 = 1 << 13;

/// The greatest size of the maps of opening flows: that for 16 cores, as few cards have more
/// queues.
const MOST_OPENING: u64 = 1 << 20;

/// The greatest size that a configuration may ask for.
const MOST_ENTRIES: u64 = 1 << 26;

/// Returns the section `ebpf` with a size for each map. If the machine is unknown, the sizes are
/// those of a small one.
pub(crate) fn sized(config: &Config, machine: Option<Machine>) -> Ebpf {
    let mut ebpf = config.ebpf.clone();
    let of_machine = machine.map_or_else(FlowMapSizes::default, |machine| {
        FlowMapSizes::of(&machine, config.conntrack.max_per_core)
    });
    if let Some(Machine { memory_limit: Some(limit), .. }) = machine {
        tracing::info!(
            limit,
            flows = of_machine.flows,
            opening_flows = of_machine.opening_flows,
            "this process has a memory limit, and the default sizes of the flow maps keep to it"
        );
    }
    let Limits { flows, opening_flows, .. } = &mut ebpf.limits;
    for (limit, entries) in [(flows, of_machine.flows), (opening_flows, of_machine.opening_flows)] {
        if *limit == 0 {
            *limit = entries;
        }
    }
    ebpf
}

/// The sizes of the maps whose limit is 0 in the configuration.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct FlowMapSizes {
    flows: u32,
    opening_flows: u32,
}

impl Default for FlowMapSizes {
    fn default() -> Self {
        Self { flows: Limit::Flows.default_entries(), opening_flows: Limit::OpeningFlows.default_entries() }
    }
}

impl FlowMapSizes {
    /// Returns the sizes for this machine. `per_core` is `conntrack.maxPerCore`.
    fn of(machine: &Machine, per_core: u32) -> Self {
        let Machine { cores, memory, memory_limit } = *machine;
        let least = Self::default();
        let quarter = memory_limit.map_or(u64::MAX, |limit| limit / PARTS_OF_LIMIT);
        let budget = (memory / PARTS_OF_MEMORY).min(quarter);
        let of_conntrack = ENTRIES_OF_CONNECTION * u64::from(per_core) * u64::from(cores);
        let wanted = of_conntrack.clamp(u64::from(least.flows), MOST_ENTRIES);
        let buckets = budget.saturating_sub(OPENING_STEP * OPENING_BYTES) / BUCKET_BYTES;
        let buckets = buckets.min(quarter / (FAMILIES * USED_BYTES));
        let flows = wanted.min(power_of_two_up_to(buckets).max(FEWEST_FLOWS));

        let wanted = (u64::from(least.opening_flows) * u64::from(cores)).min(MOST_OPENING);
        let of_machine = budget.saturating_sub(flows.next_power_of_two() * BUCKET_BYTES);
        let left = of_machine.min(quarter.saturating_sub(flows * FAMILIES * USED_BYTES));
        let most = left / OPENING_BYTES / OPENING_STEP * OPENING_STEP;
        let opening_flows = wanted.min(most.max(OPENING_STEP));
        let entries = |entries: u64| u32::try_from(entries).unwrap_or(u32::MAX);
        Self { flows: entries(flows), opening_flows: entries(opening_flows) }
    }
}

/// Returns the largest power of two that is not above a number, and 0 for 0.
fn power_of_two_up_to(number: u64) -> u64 {
    number.checked_ilog2().map_or(0, |exponent| 1 << exponent)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const GIB: u64 = 1 << 30;

    #[rstest]
    #[case::half_a_gibibyte(1, GIB / 2, 32_768, 131_072, 8_192)]
    #[case::one_gibibyte(1, GIB, 32_768, 262_144, 16_384)]
    #[case::two_gibibytes(2, 2 * GIB, 32_768, 524_288, 32_768)]
    #[case::four_cores(4, 16 * GIB, 32_768, 524_288, 262_144)]
    #[case::eight_cores(8, 32 * GIB, 32_768, 786_432, 524_288)]
    #[case::thirty_two_cores(32, 128 * GIB, 32_768, 3_145_728, 1_048_576)]
    #[case::sixty_four_cores(64, 256 * GIB, 32_768, 6_291_456, 1_048_576)]
    #[case::many_cores_and_little_memory(64, 8 * GIB, 32_768, 4_194_304, 57_344)]
    #[case::conntrack_is_left_alone(16, 64 * GIB, 0, 524_288, 1_048_576)]
    #[case::conntrack_is_smaller(16, 64 * GIB, 1_024, 524_288, 1_048_576)]
    #[case::conntrack_is_larger(4, 16 * GIB, 262_144, 3_145_728, 262_144)]
    #[case::more_than_a_configuration_may_ask_for(1_024, 1_024 * 1_024 * GIB, 32_768, 67_108_864, 1_048_576)]
    fn entries(
        #[case] cores: u32,
        #[case] memory: u64,
        #[case] per_core: u32,
        #[case] flows: u32,
        #[case] opening_flows: u32,
    ) {
        let sizes = FlowMapSizes::of(&Machine { cores, memory, memory_limit: None }, per_core);
        assert_eq!(sizes, FlowMapSizes { flows, opening_flows });
        let bytes = u64::from(flows).next_power_of_two() * BUCKET_BYTES;
        let bytes = bytes + u64::from(opening_flows) * OPENING_BYTES;
        assert!(bytes <= memory / 50, "{bytes} bytes of {memory}");
    }

    const MIB: u64 = 1 << 20;

    /// The machine has eight cores and 32 GiB.
    #[rstest]
    #[case::of_64_mebibytes(64 * MIB, 65_536, 8_192)]
    #[case::of_128_mebibytes(128 * MIB, 65_536, 8_192)]
    #[case::of_512_mebibytes(512 * MIB, 131_072, 81_920)]
    #[case::of_two_gibibytes(2 * GIB, 524_288, 344_064)]
    #[case::of_the_whole_memory(32 * GIB, 786_432, 524_288)]
    fn entries_under_a_memory_limit(#[case] limit: u64, #[case] flows: u32, #[case] opening_flows: u32) {
        let machine = Machine { cores: 8, memory: 32 * GIB, memory_limit: Some(limit) };
        assert_eq!(FlowMapSizes::of(&machine, 32_768), FlowMapSizes { flows, opening_flows });
        let full = u64::from(flows) * FAMILIES * USED_BYTES + u64::from(opening_flows) * OPENING_BYTES;
        let least = FEWEST_FLOWS * FAMILIES * USED_BYTES + OPENING_STEP * OPENING_BYTES;
        assert!(full <= (limit / 4).max(least), "{full} bytes of {limit}");
    }

    #[rstest]
    #[case::none(0, 0, 786_432, 524_288)]
    #[case::flows(5_000, 0, 5_000, 524_288)]
    #[case::both(5_000, 1_000, 5_000, 1_000)]
    fn sizes_that_users_name_stay(
        #[case] flows: u32,
        #[case] opening_flows: u32,
        #[case] expected: u32,
        #[case] expected_opening: u32,
    ) {
        let mut config = Config::default();
        let limits = Limits { flows, opening_flows, ..config.ebpf.limits };
        config.ebpf.limits = limits;
        let sized = sized(&config, Some(Machine { cores: 8, memory: 32 * GIB, memory_limit: None }));
        let expected = Limits { flows: expected, opening_flows: expected_opening, ..limits };
        assert_eq!(sized.limits, expected);
    }

    #[test]
    fn a_machine_that_tells_nothing_has_the_sizes_of_a_small_one() {
        let limits = sized(&Config::default(), None).limits;
        assert_eq!(
            FlowMapSizes { flows: limits.flows, opening_flows: limits.opening_flows },
            FlowMapSizes::default()
        );
    }
}
