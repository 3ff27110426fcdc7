//! Next hops of packets that XDP forwards. The routing tables are asked once in a while for each direction of a flow, and the answer is kept in the
//! entry that the direction's packets are found by.

use crate::{
    balance::HASH_FACTOR,
    family::Family,
    flow::{Change, FlowEntry as _, FlowMaps, Scratch, find::Found, tuples::Position},
    layout::CachedHop,
};

/// Where a packet that XDP forwards goes.
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

impl CachedHop {
    #[inline(always)]
    pub(in crate::flow) fn new(hop: &NextHop, stamp: Stamp) -> Self {
        let [destination, source] = [link_word(hop.destination), link_word(hop.source)];
        let target = u64::from(hop.interface) << 32 | u64::from(hop.longest) << 16;
        let Stamp([first, second, third]) = stamp;
        Self { words: [destination | first, source | second, target | third] }
    }

    /// Has it this stamp?
    #[inline(always)]
    pub(in crate::flow) fn is_of(&self, stamp: Stamp) -> bool {
        self.get(stamp).is_some()
    }

    /// None: there is none with this stamp.
    #[inline(always)]
    fn get(&self, stamp: Stamp) -> Option<NextHop> {
        let [destination, source, target] = self.words;
        let Stamp([first, second, third]) = stamp;
        let differs = (destination ^ first) | (source ^ second) | (target ^ third);
        let interface = (target >> 32) as u32;
        if differs & PART != 0 || interface == 0 {
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

#[inline(always)]
fn link_word([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_be_bytes([a, b, c, d, e, f, 0, 0])
}

#[inline(always)]
fn link_address(word: u64) -> [u8; 6] {
    let [a, b, c, d, e, f, ..] = word.to_be_bytes();
    [a, b, c, d, e, f]
}

/// A part for each word of a [`CachedHop`]. Each part is a hash of all that a next hop depends on, so that of two stamps that differ in anything
/// each part differs, but for one in 65,536.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::flow) struct Stamp([u64; 3]);

/// Bits of each word that are of the stamp.
const PART: u64 = 0xffff;

impl Stamp {
    /// Of packets that a pod sends by this interface, as long as the flow lives. What a hop with it says is never used.
    #[inline(always)]
    pub(in crate::flow) fn of_answers(opened: u64, interface: u32) -> Self {
        Self::of(opened, Position::FromBackend, interface, 0, 0)
    }

    /// `opened` names the flow: the kernel may give the entry to another one. `position` names the direction: one of a flow's entries may be copied to
    /// another. `interface` is the one that the packet has come by. `now`, in nanoseconds since boot, ends what is known after a second at most,
    /// as there may be no controller that raises the epoch.
    #[inline(always)]
    fn of(opened: u64, position: Position, interface: u32, epoch: u32, now: u64) -> Self {
        /// Binary logarithm of the nanoseconds of a window.
        const WINDOW: u32 = 30;
        let mix = |hash: u64, input: u64| {
            let product = (hash ^ input).wrapping_mul(HASH_FACTOR);
            product ^ product >> 32
        };
        let direction = u64::from(position == Position::ToFrontend);
        let hash =
            mix(mix(opened, now >> WINDOW << 1 | direction), u64::from(interface) << 32 | u64::from(epoch));
        let hash = hash.wrapping_mul(HASH_FACTOR);
        Self([hash >> 16 & PART, hash >> 32 & PART, hash >> 48])
    }
}

/// Forwards packets. XDP implements it, and so does a stand-in of tests.
pub trait Forwarder<F: Family> {
    /// Bytes of the packet, network header included.
    fn packet_length(&self, scratch: &Scratch<F::Address>) -> u32;

    /// Asks the routing tables where the stack would send a packet with the ends of `scratch.action`, and sets `scratch.next_hop`. False: it
    /// is for the stack.
    fn look_up(&self, scratch: &mut Scratch<F::Address>) -> bool;

    /// Can it be sent to `scratch.next_hop` as it has come?
    fn can_send(&self, scratch: &Scratch<F::Address>) -> bool;
}

/// Can `forwarder` send the packet, with the ends of `scratch.action`, where the stack would? Sets `scratch.next_hop`, and answers whether the routing
/// tables were asked for it.
#[inline(always)]
pub(in crate::flow) fn leaves<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    found: &Found<T::Entry>,
    forwarder: &impl Forwarder<F>,
) -> Option<bool> {
    let now = maps.recently(&mut scratch.clock);
    let stamp = Stamp::of(scratch.flow.opened, found.position, scratch.interface, maps.route_epoch(), now);
    let length = forwarder.packet_length(scratch);
    let is_asked = match scratch.flow.next_hop.get(stamp) {
        Some(hop) if length <= hop.longest.into() => {
            scratch.next_hop = hop;
            false
        }
        _ => {
            if !forwarder.look_up(scratch) {
                return None;
            }
            found.entry.write(Change::NextHop(CachedHop::new(&scratch.next_hop, stamp)));
            true
        }
    };
    forwarder.can_send(scratch).then_some(is_asked)
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

    fn stamp() -> Stamp {
        Stamp::of(7, Position::ToFrontend, 2, 5, 100 * SECOND)
    }

    #[rstest]
    #[case::at_once(stamp(), true)]
    #[case::in_the_same_second(Stamp::of(7, Position::ToFrontend, 2, 5, 100 * SECOND + 1), true)]
    #[case::two_seconds_later(Stamp::of(7, Position::ToFrontend, 2, 5, 102 * SECOND), false)]
    #[case::a_route_has_changed(Stamp::of(7, Position::ToFrontend, 2, 6, 100 * SECOND), false)]
    #[case::it_has_changed_and_the_clock_is_behind(Stamp::of(7, Position::ToFrontend, 2, 6, 99 * SECOND), false)]
    #[case::by_another_interface(Stamp::of(7, Position::ToFrontend, 3, 5, 100 * SECOND), false)]
    #[case::of_another_flow(Stamp::of(8, Position::ToFrontend, 2, 5, 100 * SECOND), false)]
    #[case::in_the_other_direction(Stamp::of(7, Position::FromBackendMasqueraded, 2, 5, 100 * SECOND), false)]
    fn a_hop_is_found_by_its_stamp(#[case] other: Stamp, #[case] is_known: bool) {
        let cached = CachedHop::new(&HOP, stamp());
        assert_eq!(cached.get(other), is_known.then_some(HOP));
        let Stamp(parts) = stamp();
        let Stamp(others) = other;
        let differ = parts.iter().zip(others).filter(|(part, other)| **part != *other).count();
        assert_eq!(differ, if is_known { 0 } else { 3 }, "words of both do not go together");
    }

    #[test]
    fn a_new_entry_has_none() {
        assert_eq!(CachedHop::default().get(Stamp([0; 3])), None);
    }

    #[test]
    fn words_of_two_stamps_do_not_go_together() {
        let stamps = [stamp(), Stamp::of(7, Position::ToFrontend, 2, 6, 100 * SECOND)];
        let [old, new] = stamps.map(|stamp| CachedHop::new(&HOP, stamp));
        for mixed in 1..7 {
            let word =
                |index: usize| if mixed >> index & 1 == 0 { old.words[index] } else { new.words[index] };
            let cached = CachedHop { words: [word(0), word(1), word(2)] };
            assert_eq!(stamps.map(|stamp| cached.get(stamp)), [None, None], "{mixed:03b}");
        }
    }
}
