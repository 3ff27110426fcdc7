//! Which ports translated sources get: none that a socket of this node is given by the kernel.

use std::fs;

/// `first > last`: empty.
type PortRange = [u16; 2];

const EMPTY: PortRange = [1, 0];
/// Ports below are of services with a well-known number.
const FIRST: u16 = 1_024;
/// Fewer would be used up by few clients of one backend.
const ENOUGH: u32 = 4_096;
/// Used although sockets may be given them too, where a node leaves fewer than [`ENOUGH`] others.
const LAST_RESORT: PortRange = [61_440, 65_535];

/// By the node's `net.ipv4.ip_local_port_range`, which IPv6 sockets share.
pub(super) fn read() -> [PortRange; 2] {
    let local = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    around(local.ok().as_deref().and_then(parse))
}

/// Two numbers with a tab between them.
fn parse(text: &str) -> Option<PortRange> {
    let mut words = text.split_whitespace();
    Some([words.next()?.parse().ok()?, words.next()?.parse().ok()?])
}

/// The ports above and below the local ones; without knowledge of them, as if they were the kernel's default.
fn around(local: Option<PortRange>) -> [PortRange; 2] {
    let [first, last] = local.unwrap_or([32_768, 60_999]);
    let above = last.checked_add(1).map_or(EMPTY, |next| [next.max(FIRST), u16::MAX]);
    let below = if first > FIRST { [FIRST, first - 1] } else { EMPTY };
    if count(above) + count(below) < ENOUGH { [LAST_RESORT, EMPTY] } else { [above, below] }
}

fn count([first, last]: PortRange) -> u32 {
    (u32::from(last) + 1).saturating_sub(u32::from(first))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::kernel_default(Some([32_768, 60_999]), [[61_000, 65_535], [1_024, 32_767]])]
    #[case::unreadable(None, [[61_000, 65_535], [1_024, 32_767]])]
    #[case::up_to_the_end(Some([10_000, 65_535]), [EMPTY, [1_024, 9_999]])]
    #[case::from_the_start(Some([1_024, 50_000]), [[50_001, 65_535], EMPTY])]
    #[case::nearly_all(Some([1_024, 65_000]), [LAST_RESORT, EMPTY])]
    #[case::all(Some([1, 65_535]), [LAST_RESORT, EMPTY])]
    fn ports_around_the_local_ones(#[case] local: Option<PortRange>, #[case] expected: [PortRange; 2]) {
        assert_eq!(around(local), expected);
    }

    #[test]
    fn the_file_of_the_kernel_is_read() {
        assert_eq!(parse("32768\t60999\n"), Some([32_768, 60_999]));
        assert_eq!(parse("32768"), None);
    }
}
