//! Next hops of packets in transit. The routing tables are asked once in a while for each direction of a flow, and the answer is kept in the
//! entry that the direction's packets are found by.

use super::{Change, FlowEntry as _, FlowTables, Found, Scratch, Step};
use crate::{family::Family, layout::KnownHop};

/// Where a packet that a driver sends on goes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NextHop {
    /// Of the Ethernet header that the packet gets.
    pub destination: [u8; 6],
    pub source: [u8; 6],
    /// Index; 0: there is no next hop.
    pub interface: u32,
    /// Bytes of the longest packet that goes there, network header included.
    pub longest: u16,
}

impl KnownHop {
    #[inline(always)]
    fn new(hop: &NextHop, stamp: u32) -> Self {
        let [destination, source] = [link_word(hop.destination), link_word(hop.source)];
        let target = u64::from(hop.interface) << 32 | u64::from(hop.longest) << 16;
        let [first, second, third] = parts(stamp);
        Self { words: [destination | first, source | second, target | third] }
    }

    /// None: there is none with this stamp.
    #[inline(always)]
    fn get(&self, stamp: u32) -> Option<NextHop> {
        let [destination, source, target] = self.words;
        let [first, second, third] = parts(stamp);
        let differs = (destination ^ first) | (source ^ second) | (target ^ third);
        let interface = (target >> 32) as u32;
        if differs & STAMP != 0 || interface == 0 {
            return None;
        }
        Some(NextHop {
            destination: link_address(destination),
            source: link_address(source),
            interface,
            longest: (target >> 16) as u16,
        })
    }
}

/// Bits of each word.
const STAMP: u64 = 0xffff;

#[inline(always)]
fn parts(stamp: u32) -> [u64; 3] {
    let (lower, upper) = (u64::from(stamp), u64::from(stamp >> 16));
    [lower & STAMP, upper, (lower ^ upper) & STAMP]
}

#[inline(always)]
fn link_word([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_be_bytes([a, b, c, d, e, f, 0, 0])
}

#[inline(always)]
fn link_address(word: u64) -> [u8; 6] {
    let [a, b, c, d, e, f, ..] = word.to_be_bytes();
    [a, b, c, d, e, f]
}

/// Valid until an epoch or a window of time is over: nobody may be there to raise the epoch. `now`: nanoseconds since boot.
///
/// An entry may be rebuilt from the flow's other one, so that the directions differ too.
#[inline(always)]
fn stamp(step: Step, epoch: u32, now: u64) -> u32 {
    /// Binary logarithm of the nanoseconds of a window: about a second.
    const WINDOW: u32 = 30;
    const WINDOW_BITS: u32 = 15;
    let window = (now >> WINDOW) as u32 & ((1 << WINDOW_BITS) - 1);
    epoch << (WINDOW_BITS + 1) | window << 1 | u32::from(step == Step::ToFrontend)
}

/// What sends packets in transit on.
pub trait Driver<F: Family> {
    /// Bytes of the packet, network header included.
    fn packet_length(&self, scratch: &Scratch<F::Address>) -> u32;

    /// Asks the routing tables where the stack would send a packet with the ends of `scratch.action`, and sets `scratch.next_hop`. False: it
    /// is for the stack.
    fn look_up(&self, scratch: &mut Scratch<F::Address>) -> bool;

    /// Can it be sent to `scratch.next_hop` as it has come?
    fn can_send(&self, scratch: &Scratch<F::Address>) -> bool;
}

/// Can `driver` send the packet, with the ends of `scratch.action`, where the stack would? Sets `scratch.next_hop`.
#[inline(always)]
pub(super) fn leaves<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    found: &Found<T::Entry>,
    driver: &impl Driver<F>,
) -> bool {
    let stamp = stamp(found.step, tables.route_epoch(), tables.recently(&mut scratch.clock));
    let length = driver.packet_length(scratch);
    match scratch.flow.next_hop.get(stamp) {
        Some(hop) if length <= hop.longest.into() => scratch.next_hop = hop,
        _ => {
            if !driver.look_up(scratch) {
                return false;
            }
            found.entry.write(Change::NextHop(KnownHop::new(&scratch.next_hop, stamp)));
        }
    }
    driver.can_send(scratch)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const HOP: NextHop = NextHop {
        destination: [2, 0xfe, 3, 4, 5, 0xff],
        source: [6, 7, 8, 9, 0xa0, 0xb1],
        interface: u32::MAX,
        longest: 1_500,
    };
    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_hop_is_known_by_its_stamp() {
        for stamp in [0, 1, 0x8000, 0x1_0000, 0xffff_ffff] {
            let known = KnownHop::new(&HOP, stamp);
            assert_eq!(known.get(stamp), Some(HOP), "{stamp:#x}");
            for bit in 0..u32::BITS {
                assert_eq!(known.get(stamp ^ 1 << bit), None, "{stamp:#x}, bit {bit}");
            }
        }
        assert_eq!(KnownHop::default().get(0), None, "an entry of which nothing was sent yet");
    }

    #[test]
    fn words_of_two_writers_do_not_belong_together() {
        let (old, new) = (KnownHop::new(&HOP, 7), KnownHop::new(&HOP, 0x1_0008));
        for mixed in 1..7 {
            let word =
                |place: usize| if mixed >> place & 1 == 0 { old.words[place] } else { new.words[place] };
            let known = KnownHop { words: [word(0), word(1), word(2)] };
            assert_eq!((known.get(7), known.get(0x1_0008)), (None, None), "{mixed:03b}");
        }
    }

    #[rstest]
    #[case::at_once(Step::ToFrontend, 5, 100 * SECOND, true)]
    #[case::the_epoch_is_over(Step::ToFrontend, 6, 100 * SECOND, false)]
    #[case::two_seconds_later(Step::ToFrontend, 5, 102 * SECOND, false)]
    #[case::another_epoch_before_the_window(Step::ToFrontend, 6, 99 * SECOND, false)]
    #[case::the_other_direction(Step::FromBackendMasqueraded, 5, 100 * SECOND, false)]
    fn stamps(#[case] step: Step, #[case] epoch: u32, #[case] now: u64, #[case] is_same: bool) {
        let noted = stamp(Step::ToFrontend, 5, 100 * SECOND);
        assert_eq!(stamp(step, epoch, now) == noted, is_same);
    }
}
