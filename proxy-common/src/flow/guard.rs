//! The guard against floods: how many flows a CPU opens, and what each service may have of that.
//!
//! Time is cut into short windows. In each of them a CPU has room for its limit of new flows, and for those that it has not opened in the
//! windows before: so many at once are no flood. When the room is used up, a service may go on to its equal share of the limit, together
//! with the others at most as many flows again. So whoever floods a service takes the room, and not the shares of other services.
//!
//! What a CPU counts is its own. Nothing is counted of packets that open no flow.

use super::{FlowTables, Scratch};
use crate::{family::Family, select::Origin};

/// A window lasts two to the power of this many nanoseconds: 17 ms. Short, so that what a flood opens is spread over time, and evicts no
/// flow between its first packet and the second.
const WINDOW_BITS: u32 = 24;
/// How many windows' room is kept: that of a quarter of a second.
const KEPT_WINDOWS: u32 = 16;

/// How many services are counted apart. Of those that have a place in common, each has a smaller share.
pub const OPENING_SERVICES: u32 = 4_096;

/// What a service has opened on a CPU in a window.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceOpenings {
    window: u32,
    opened: u32,
}

/// What a CPU has opened in a window, in one family: each has tables of its own.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub(super) struct Openings {
    window: u32,
    opened: u32,
    /// How many may be opened before services are held to their shares.
    room: u32,
    /// That have opened any in this window, and in the one before it.
    services: u32,
    services_before: u32,
}

/// As many as a CPU may open in a second, for one window. 0: it may open any number.
pub const fn openings_per_window(per_second: u32) -> u32 {
    ((per_second as u64) << WINDOW_BITS).div_ceil(1_000_000_000) as u32
}

/// May the packet open a flow to the service of `scratch.frontend`? Then it counts as one.
// Not inlined, for its stack.
#[inline(never)]
pub(super) fn admits<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> bool {
    let limit = tables.openings_per_window();
    if limit == 0 || scratch.origin == Origin::Host {
        return true;
    }
    let window = (tables.recently(&mut scratch.clock) >> WINDOW_BITS) as u32;
    let Scratch { openings, frontend, .. } = scratch;
    openings.begin(window, limit);
    tables.count_opening(frontend.service, |of_service| openings.admit(of_service, limit))
}

impl Openings {
    #[inline(always)]
    fn begin(&mut self, window: u32, limit: u32) {
        let elapsed = window.wrapping_sub(self.window);
        if elapsed == 0 {
            return;
        }
        let most = limit.wrapping_mul(KEPT_WINDOWS);
        let left = self.room.saturating_sub(self.opened);
        let room = left.saturating_add(limit.wrapping_mul(elapsed.min(KEPT_WINDOWS))).min(most);
        let services_before = if elapsed == 1 { self.services } else { 0 };
        *self = Self { window, opened: 0, room, services: 0, services_before };
    }

    #[inline(always)]
    fn admit(&mut self, of_service: &mut ServiceOpenings, limit: u32) -> bool {
        if of_service.window != self.window {
            *of_service = ServiceOpenings { window: self.window, opened: 0 };
            self.services = self.services.wrapping_add(1);
        }
        if self.opened >= self.room && !self.lacks_share(of_service, limit) {
            return false;
        }
        self.opened = self.opened.wrapping_add(1);
        of_service.opened = of_service.opened.wrapping_add(1);
        true
    }

    /// Has the service opened less than its share, and have all together not opened the limit beyond the room? Its first one of the window
    /// is not more than its share, however many services there are.
    #[inline(always)]
    fn lacks_share(&self, of_service: &ServiceOpenings, limit: u32) -> bool {
        let services = u64::from(self.services.max(self.services_before));
        let opened = u64::from(of_service.opened);
        let is_below = opened == 0 || (opened + 1).wrapping_mul(services) <= u64::from(limit);
        is_below && self.opened.wrapping_sub(self.room) < limit
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use rstest::rstest;

    use super::*;

    const LIMIT: u32 = 100;
    /// More than anything admits.
    const FLOOD: u32 = 100_000;

    #[rstest]
    #[case::off(0, 0)]
    #[case::least(1, 1)]
    #[case::a_second_has_60_windows(6_000, 101)]
    #[case::default(20_000, 336)]
    #[case::most(u32::MAX, 72_057_595)]
    fn limits(#[case] per_second: u32, #[case] per_window: u32) {
        assert_eq!(openings_per_window(per_second), per_window);
    }

    /// One CPU, long after it has opened anything.
    struct Cpu {
        openings: Openings,
        services: HashMap<u32, ServiceOpenings>,
        window: u32,
    }

    impl Cpu {
        fn new() -> Self {
            Self { openings: Openings::default(), services: HashMap::new(), window: 1_000 }
        }

        /// One that has no room left from windows before.
        fn busy() -> Self {
            let mut cpu = Self::new();
            cpu.send(0, FLOOD);
            cpu.wait(1);
            cpu
        }

        fn wait(&mut self, windows: u32) {
            self.window += windows;
        }

        /// How many of so many first packets to a service open flows.
        fn send(&mut self, service: u32, packets: u32) -> u32 {
            let of_service = self.services.entry(service).or_default();
            let openings = &mut self.openings;
            let mut admits = || {
                openings.begin(self.window, LIMIT);
                openings.admit(of_service, LIMIT)
            };
            (0..packets).filter(|_| admits()).count() as u32
        }
    }

    #[test]
    fn a_quiet_cpu_opens_many_at_once() {
        assert_eq!(Cpu::new().send(1, FLOOD), KEPT_WINDOWS * LIMIT);
    }

    #[rstest]
    #[case::each_window(1, LIMIT)]
    #[case::after_a_pause(3, 3 * LIMIT)]
    #[case::after_the_longest_pause_that_counts(KEPT_WINDOWS, KEPT_WINDOWS * LIMIT)]
    #[case::after_hours(1 << 20, KEPT_WINDOWS * LIMIT)]
    fn room_comes_back(#[case] windows: u32, #[case] expected: u32) {
        let mut cpu = Cpu::new();
        cpu.send(1, FLOOD);
        cpu.wait(windows);
        assert_eq!(cpu.send(1, FLOOD), expected);
    }

    #[test]
    fn room_that_is_not_used_is_kept() {
        let mut cpu = Cpu::busy();
        assert_eq!(cpu.send(1, LIMIT / 4), LIMIT / 4);
        cpu.wait(1);
        assert_eq!(cpu.send(1, FLOOD), LIMIT + LIMIT * 3 / 4);
    }

    #[test]
    fn nobody_is_held_back_below_the_limit() {
        let mut cpu = Cpu::busy();
        for _ in 0..1_000 {
            assert_eq!((cpu.send(1, LIMIT - 1), cpu.send(2, 1)), (LIMIT - 1, 1));
            cpu.wait(1);
        }
    }

    /// Packets to services in a window, after a flood to service 1 and before it in the one before; how many open flows.
    #[rstest]
    #[case::another_service_has_half(&[(1, FLOOD), (2, FLOOD)], &[LIMIT, LIMIT / 2])]
    #[case::a_third_of_each(&[(1, FLOOD), (2, FLOOD), (3, FLOOD)], &[LIMIT, LIMIT / 2, LIMIT / 3])]
    #[case::few_to_another(&[(1, FLOOD), (2, 7)], &[LIMIT, 7])]
    #[case::few_before_the_flood(&[(2, 7), (1, FLOOD), (2, 7)], &[7, LIMIT - 7, 7])]
    #[case::more_than_its_share_before_the_flood(&[(2, 60), (1, FLOOD), (2, 7)], &[60, 50, 0])]
    fn shares(#[case] packets: &[(u32, u32)], #[case] expected: &[u32]) {
        let mut cpu = Cpu::busy();
        let opened: Vec<_> = packets.iter().map(|(service, packets)| cpu.send(*service, *packets)).collect();
        assert_eq!(opened, expected);
    }

    /// In each window the flood comes first, as it is faster than anybody. How many services it is to, shows in the first one.
    #[rstest]
    #[case::of_one_service(1)]
    #[case::of_ten(10)]
    #[case::of_as_many_as_have_shares(LIMIT - 1)]
    #[case::of_a_thousand(1_000)]
    fn a_flood_is_bounded_and_leaves_others_their_shares(#[case] flooded: u32) {
        const QUIET: u32 = u32::MAX;
        let mut cpu = Cpu::busy();
        for window in 0..100 {
            let all: u32 = (0..flooded).map(|service| cpu.send(service, 1_000)).sum();
            let quiet = cpu.send(QUIET, 1);
            assert!(all + quiet <= 2 * LIMIT, "{all} in window {window}");
            assert!(window == 0 || quiet == u32::from(flooded < LIMIT), "{quiet} in window {window}");
            cpu.wait(1);
        }
    }

    /// What the room leaves is the same for each in the end.
    #[test]
    fn services_that_are_flooded_alike_open_alike() {
        let mut cpu = Cpu::busy();
        for _ in 0..2 {
            let opened: Vec<u32> = (0..FLOOD / 100).map(|packet| cpu.send(packet % 4, 1)).collect();
            let of_service = |service: usize| opened.iter().skip(service).step_by(4).sum::<u32>();
            assert_eq!([0, 1, 2, 3].map(of_service), [LIMIT / 4; 4]);
            cpu.wait(1);
        }
    }
}
