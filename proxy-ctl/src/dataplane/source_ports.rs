//! Which ports the sources that this node translates get. The programs of mode ebpf and netfilter beside them do not know each
//! other's flows: where both used one port towards one endpoint, the programs would take the answers of netfilter's flow. So they
//! have no port in common.

use std::fs;

use crate::config::PortRange;

/// `first > last`: empty.
type TablePortRange = [u16; 2];

const EMPTY: TablePortRange = [1, 0];
/// Ports below are of services with a well-known number.
const FIRST: u16 = 1_024;
/// Fewer would be used up by few clients of one backend.
const ENOUGH: u32 = 4_096;
/// Of the programs although sockets may be given them too, where a node leaves fewer than [`ENOUGH`] others to them or to netfilter.
const LAST_RESORT: TablePortRange = [61_440, u16::MAX];

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct SourcePorts {
    /// None that the kernel gives to a socket of this node.
    pub(super) programs: [TablePortRange; 2],
    /// Those that the kernel gives to sockets too: their connections netfilter knows.
    pub(super) netfilter: PortRange,
}

impl SourcePorts {
    /// By the node's `net.ipv4.ip_local_port_range`, which IPv6 sockets share.
    pub(super) fn read() -> Self {
        let local = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
        Self::around(local.ok().as_deref().and_then(parse))
    }

    /// The programs get the ports above and below the local ones; without knowledge of these, as if they were the kernel's default.
    fn around(local: Option<TablePortRange>) -> Self {
        let [first, last] = local.unwrap_or([32_768, 60_999]);
        let above = last.checked_add(1).map_or(EMPTY, |next| [next.max(FIRST), u16::MAX]);
        let below = if first > FIRST { [FIRST, first - 1] } else { EMPTY };
        let local = [first.max(FIRST), last];
        if count(above) + count(below) < ENOUGH || count(local) < ENOUGH {
            let netfilter = PortRange { first: FIRST, last: LAST_RESORT[0] - 1 };
            return Self { programs: [LAST_RESORT, EMPTY], netfilter };
        }
        Self { programs: [above, below], netfilter: PortRange { first: local[0], last } }
    }
}

/// Two numbers with a tab between them.
fn parse(text: &str) -> Option<TablePortRange> {
    let mut words = text.split_whitespace();
    Some([words.next()?.parse().ok()?, words.next()?.parse().ok()?])
}

fn count([first, last]: TablePortRange) -> u32 {
    (u32::from(last) + 1).saturating_sub(u32::from(first))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::kernel_default(Some([32_768, 60_999]), [[61_000, 65_535], [1_024, 32_767]], [32_768, 60_999])]
    #[case::unreadable(None, [[61_000, 65_535], [1_024, 32_767]], [32_768, 60_999])]
    #[case::up_to_the_end(Some([10_000, 65_535]), [EMPTY, [1_024, 9_999]], [10_000, 65_535])]
    #[case::from_the_start(Some([1, 50_000]), [[50_001, 65_535], EMPTY], [1_024, 50_000])]
    #[case::nearly_all(Some([1_024, 65_000]), [LAST_RESORT, EMPTY], [1_024, 61_439])]
    #[case::all(Some([1, 65_535]), [LAST_RESORT, EMPTY], [1_024, 61_439])]
    #[case::few(Some([60_000, 60_999]), [LAST_RESORT, EMPTY], [1_024, 61_439])]
    #[case::well_known_ones(Some([100, 200]), [LAST_RESORT, EMPTY], [1_024, 61_439])]
    fn ports_around_the_local_ones(
        #[case] local: Option<TablePortRange>,
        #[case] programs: [TablePortRange; 2],
        #[case] netfilter: TablePortRange,
    ) {
        let [first, last] = netfilter;
        assert_eq!(
            SourcePorts::around(local),
            SourcePorts { programs, netfilter: PortRange { first, last } }
        );
    }

    proptest! {
        #[test]
        fn programs_and_netfilter_have_no_port_in_common(first in 1..=u16::MAX, last in FIRST..=u16::MAX) {
            prop_assume!(first <= last);
            let SourcePorts { programs, netfilter } = SourcePorts::around(Some([first, last]));
            prop_assert!(netfilter.first <= netfilter.last);
            for [first, last] in programs {
                prop_assert!(first > last || last < netfilter.first || netfilter.last < first);
            }
        }
    }

    #[test]
    fn the_file_of_the_kernel_is_read() {
        assert_eq!(parse("32768\t60999\n"), Some([32_768, 60_999]));
        assert_eq!(parse("32768"), None);
    }
}
