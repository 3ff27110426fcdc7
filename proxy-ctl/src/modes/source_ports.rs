//! The source ports to which this node translates. The programs of mode ebpf and the secondary mode
//! do not know each other's flows. If both used one port towards one endpoint, the programs would
//! take the answers of netfilter's flow. So they share no port until one endpoint has more flows
//! than the programs have reserved ports.

use std::{fs, ops::RangeInclusive};

use proxy_common::port::{NODE_PORTS, Port, PortRanges};

use crate::model::node::PortRange;

/// The first and the last port. The range is empty if `first > last`.
type TablePortRange = [u16; 2];

const EMPTY: TablePortRange = [1, 0];

/// The first port that is used. Ports below it belong to services with well-known numbers.
const FIRST: u16 = 1_024;
/// The smallest number of ports that is enough. Few clients of one backend would use up fewer
/// ports.
const ENOUGH: usize = 4_096;
/// Ports that belong to the programs although the kernel may give them to sockets. They are used
/// where a node leaves fewer than [`ENOUGH`] ports to the programs or to netfilter.
const LAST_RESORT: TablePortRange = [61_440, u16::MAX];

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct SourcePorts {
    pub(super) programs: ProgramPorts,
    /// The ranges that contain the reserved ports. They also contain node ports and the ports of
    /// `ip_local_reserved_ports`.
    pub(super) reserved_ranges: [TablePortRange; 2],
    /// The ports that the kernel gives to sockets. Netfilter knows the connections of these
    /// sockets.
    pub(super) netfilter: PortRange,
}

/// The source ports of the programs, without node ports and the ports of `ip_local_reserved_ports`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct ProgramPorts {
    /// The ports in the order in which the programs take them.
    pub(super) ports: Vec<u16>,
    /// The number of reserved ports, which come first. The kernel gives them to no socket, and
    /// netfilter does not use them.
    pub(super) reserved: usize,
}

impl SourcePorts {
    /// Reads the node's `net.ipv4.ip_local_port_range` and `net.ipv4.ip_local_reserved_ports`,
    /// which IPv6 sockets share. If the first cannot be read, the kernel's default is used.
    pub(super) fn read() -> Self {
        let read = |name| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
        let local = parse_range(&read("ip_local_port_range")).unwrap_or(32_768..=60_999);
        Self::around(&local, &parse_list(&read("ip_local_reserved_ports")))
    }

    fn around(local: &RangeInclusive<u16>, excluded: &[RangeInclusive<u16>]) -> Self {
        let (first, last) = (*local.start(), *local.end());
        let above = last.checked_add(1).map_or(EMPTY, |next| [next.max(FIRST), u16::MAX]);
        let below = if first > FIRST { [FIRST, first - 1] } else { EMPTY };
        let is_usable =
            |port: &u16| !NODE_PORTS.contains(port) && !excluded.iter().any(|range| range.contains(port));
        let usable: Vec<u16> = (FIRST..=u16::MAX).rev().filter(is_usable).collect();
        let split = |ranges: [TablePortRange; 2]| -> (Vec<u16>, Vec<u16>) {
            usable.iter().partition(|port| PortRanges(ranges).contain(Port::new(**port)))
        };
        let mut reserved_ranges = [above, below];
        let (mut reserved, mut others) = split(reserved_ranges);
        let mut netfilter = PortRange { first: first.max(FIRST), last };
        if reserved.len() < ENOUGH || (netfilter.first..=netfilter.last).len() < ENOUGH {
            reserved_ranges = [LAST_RESORT, EMPTY];
            (reserved, others) = split(reserved_ranges);
            netfilter = PortRange { first: FIRST, last: LAST_RESORT[0] - 1 };
        }
        let count = reserved.len();
        reserved.append(&mut others);
        Self { programs: ProgramPorts { ports: reserved, reserved: count }, reserved_ranges, netfilter }
    }
}

/// Parses two numbers with white space between them.
fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let mut words = text.split_whitespace();
    Some(words.next()?.parse().ok()?..=words.next()?.parse().ok()?)
}

/// Parses ports and ranges of ports, such as `8080,9000-9100`.
fn parse_list(text: &str) -> Vec<RangeInclusive<u16>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).collect()
}

/// Returns the first and the last port of each run of consecutive ports.
pub(super) fn runs(ports: &[u16]) -> Vec<(u16, u16)> {
    let mut ports = ports.to_vec();
    ports.sort_unstable();
    ports
        .chunk_by(|one, next| one.checked_add(1) == Some(*next))
        .map(|run| (run[0], run[run.len() - 1]))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const DEFAULT: RangeInclusive<u16> = 32_768..=60_999;
    type Runs<'a> = &'a [(u16, u16)];

    #[rstest]
    #[case::kernel_default(DEFAULT, "", &[(1_024, 29_999), (61_000, 65_535)], &[(32_768, 60_999)], (32_768, 60_999))]
    #[case::some_are_excluded(DEFAULT, "8080,9000-9099,35000",
        &[(1_024, 8_079), (8_081, 8_999), (9_100, 29_999), (61_000, 65_535)], &[(32_768, 34_999), (35_001, 60_999)], (32_768, 60_999))]
    #[case::excluded_ranges_meet(DEFAULT, "1-9999,29000-61000", &[(10_000, 28_999), (61_001, 65_535)], &[], (32_768, 60_999))]
    #[case::nearly_all_are_excluded(DEFAULT, "1-65500", &[(65_501, 65_535)], &[], (1_024, 61_439))]
    #[case::up_to_the_end(10_000..=65_535, "", &[(1_024, 9_999)], &[(10_000, 29_999), (32_768, 65_535)], (10_000, 65_535))]
    #[case::from_the_start(1..=50_000, "", &[(50_001, 65_535)], &[(1_024, 29_999), (32_768, 50_000)], (1_024, 50_000))]
    #[case::nearly_all(1_024..=65_000, "", &[(61_440, 65_535)], &[(1_024, 29_999), (32_768, 61_439)], (1_024, 61_439))]
    #[case::few(60_000..=60_999, "", &[(61_440, 65_535)], &[(1_024, 29_999), (32_768, 61_439)], (1_024, 61_439))]
    #[case::well_known_ones(100..=200, "", &[(61_440, 65_535)], &[(1_024, 29_999), (32_768, 61_439)], (1_024, 61_439))]
    fn ports_around_the_local_ones(
        #[case] local: RangeInclusive<u16>,
        #[case] excluded: &str,
        #[case] reserved: Runs<'_>,
        #[case] others: Runs<'_>,
        #[case] netfilter: (u16, u16),
    ) {
        let found = SourcePorts::around(&local, &parse_list(excluded));
        let (found_reserved, found_others) = found.programs.ports.split_at(found.programs.reserved);
        assert_eq!((runs(found_reserved).as_slice(), runs(found_others).as_slice()), (reserved, others));
        assert_eq!((found.netfilter.first, found.netfilter.last), netfilter);
    }

    /// The ports are enough for 50,000 flows to one endpoint.
    #[test]
    fn most_ports_can_be_used() {
        assert_eq!(SourcePorts::around(&DEFAULT, &[]).programs.ports.len(), 61_744);
    }

    proptest! {
        #[test]
        fn no_port_has_two_owners(
            first in 1..=u16::MAX,
            last in FIRST..=u16::MAX,
            excluded in proptest::collection::vec((1..=u16::MAX, 0..2_000u16), 0..5),
        ) {
            prop_assume!(first <= last);
            let excluded: Vec<_> =
                excluded.into_iter().map(|(first, length)| first..=first.saturating_add(length)).collect();
            let SourcePorts { programs, reserved_ranges, netfilter } =
                SourcePorts::around(&(first..=last), &excluded);
            prop_assert!(netfilter.first <= netfilter.last);
            let mut unique = programs.ports.clone();
            unique.sort_unstable();
            unique.dedup();
            prop_assert_eq!(unique.len(), programs.ports.len());
            for port in &programs.ports {
                prop_assert!(*port >= FIRST && !NODE_PORTS.contains(port));
                prop_assert!(!excluded.iter().any(|range| range.contains(port)));
            }
            for port in &programs.ports[..programs.reserved] {
                prop_assert!(*port < netfilter.first || netfilter.last < *port);
                prop_assert!(PortRanges(reserved_ranges).contain(Port::new(*port)));
            }
        }
    }

    #[rstest]
    #[case::nothing("\n", &[])]
    #[case::ports_and_ranges("8080,9000-9100\n", &[8080..=8080, 9000..=9100])]
    fn the_lists_of_the_kernel_are_read(#[case] text: &str, #[case] expected: &[RangeInclusive<u16>]) {
        assert_eq!(parse_list(text), expected);
    }

    #[test]
    fn the_range_of_the_kernel_is_read() {
        assert_eq!(parse_range("32768\t60999\n"), Some(DEFAULT));
        assert_eq!(parse_range("32768"), None);
    }
}
