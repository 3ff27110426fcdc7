//! The flood limit: how many flows a CPU opens, and what each service may have of that.
//!
//! Time is cut into short windows. In each of them a CPU has room for its limit of new flows, and for those that it has not opened in the
//! windows before: so many at once are no flood. When the room is used up, a service may go on to its equal share of the limit, together
//! with the others at most as many flows again. So whoever floods a service takes the room, and not the shares of other services.
//!
//! If more services are flooded than a window has openings, a share is less than one opening. So
//! each service has credit as well, which grows with time, and each flow that it opens costs some.
//! The price is the number of services that have opened any lately, not only those of this window:
//! all of them earn in each window, also while a flood goes to others. So the flooded services
//! together earn what a window's limit costs, in whatever order they are flooded. One that has
//! opened little lately still has its credit, and may open flows beyond what they take.
//!
//! What a CPU counts is its own. Nothing is counted of packets that open no flow.

use crate::{
    family::Family,
    flow::{FlowMaps, Scratch},
    select::Origin,
};

/// A window lasts two to the power of this many nanoseconds: 17 ms. Short, so that what a flood opens is spread over time, and evicts no
/// flow between its first packet and the second.
const WINDOW_BITS: u32 = 24;
/// How many windows' room is kept: that of a quarter of a second.
const KEPT_WINDOWS: u32 = 16;

/// The number of windows whose credit a service keeps: those of half a second. A flood has spent
/// what its services had after as many windows. Services are counted over periods of this length
/// for what a flow costs.
const CREDITED_WINDOWS: u32 = 32;

/// How many services are counted apart. Of those that share a counter, each has a smaller share.
pub const OPENING_SERVICES: u32 = 4_096;

/// What a service has opened on a CPU in a window.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceOpenings {
    window: u32,
    opened: u32,
    /// The credit of the service. It grows by the limit in each window, and each flow costs as much
    /// as there are services in a period.
    credit: u32,
}

/// What a CPU has opened in a window, in one family: each has maps of its own.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub(in crate::flow) struct Openings {
    window: u32,
    opened: u32,
    /// How many may be opened before services are held to their shares.
    room: u32,
    /// That have opened any in this window, and in the one before it.
    services: u32,
    services_before: u32,
    /// The number of services that have opened any in the period of this window, and in the period
    /// before it.
    services_in_period: u32,
    services_in_period_before: u32,
}

/// Returns the number of the period that a window is in.
const fn period(window: u32) -> u32 {
    window / CREDITED_WINDOWS
}

/// As many as a CPU may open in a second, for one window. 0: it may open any number.
pub const fn openings_per_window(per_second: u32) -> u32 {
    ((per_second as u64) << WINDOW_BITS).div_ceil(1_000_000_000) as u32
}

/// May the packet open a flow to the service of `scratch.frontend`? Then it counts as one.
// Not inlined, for its stack.
#[inline(never)]
pub(in crate::flow) fn allows<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> bool {
    let limit = maps.openings_per_window();
    if limit == 0 || scratch.origin == Origin::Host {
        return true;
    }
    let window = (maps.recently(&mut scratch.clock) >> WINDOW_BITS) as u32;
    let Scratch { openings, frontend, .. } = scratch;
    openings.begin(window, limit);
    maps.count_opening(frontend.service, |of_service| openings.allow(of_service, limit))
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
        let (services_in_period, services_in_period_before) =
            match period(window).wrapping_sub(period(self.window)) {
                0 => (self.services_in_period, self.services_in_period_before),
                1 => (0, self.services_in_period),
                _ => (0, 0),
            };
        *self = Self {
            window,
            opened: 0,
            room,
            services: 0,
            services_before,
            services_in_period,
            services_in_period_before,
        };
    }

    #[inline(always)]
    fn allow(&mut self, of_service: &mut ServiceOpenings, limit: u32) -> bool {
        if of_service.window != self.window {
            let is_first_in_period = period(of_service.window) != period(self.window);
            of_service.begin(self.window, limit);
            self.services = self.services.wrapping_add(1);
            self.services_in_period = self.services_in_period.wrapping_add(u32::from(is_first_in_period));
        }
        let cost = self.services_in_period.max(self.services_in_period_before);
        if self.opened >= self.room && !self.may_exceed_room(of_service, limit, cost) {
            return false;
        }
        self.opened = self.opened.wrapping_add(1);
        of_service.opened = of_service.opened.wrapping_add(1);
        of_service.credit = of_service.credit.saturating_sub(cost);
        true
    }

    /// Returns true if the service may open one more flow although the room is used up. All
    /// services together may open the limit once more. If there are too many for shares, a service
    /// pays with its credit. One that has twice the cost may go beyond that, as flooded services
    /// mostly spend theirs before they have so much.
    #[inline(always)]
    fn may_exceed_room(&self, of_service: &ServiceOpenings, limit: u32, cost: u32) -> bool {
        let beyond = u64::from(self.opened.wrapping_sub(self.room));
        let opened = u64::from(of_service.opened);
        let (limit, cost, credit) = (u64::from(limit), u64::from(cost), u64::from(of_service.credit));
        let services = u64::from(self.services.max(self.services_before));
        if services <= limit {
            return beyond < limit && opened.wrapping_add(1).wrapping_mul(services) <= limit;
        }
        let most = limit.wrapping_mul(u64::from(CREDITED_WINDOWS));
        let has_some = credit >= cost.min(most);
        let has_plenty = credit >= cost.wrapping_mul(2).min(most);
        (beyond < limit && has_some) || (beyond < limit.wrapping_mul(2) && has_plenty)
    }
}

impl ServiceOpenings {
    #[inline(always)]
    fn begin(&mut self, window: u32, limit: u32) {
        let elapsed = window.wrapping_sub(self.window).min(CREDITED_WINDOWS);
        let most = limit.wrapping_mul(CREDITED_WINDOWS);
        let credit = self.credit.saturating_add(limit.wrapping_mul(elapsed)).min(most);
        *self = Self { window, opened: 0, credit };
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The default.
    const LIMIT: u32 = openings_per_window(20_000);
    /// More than any limit allows.
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
        services: Vec<ServiceOpenings>,
        window: u32,
    }

    impl Cpu {
        fn new() -> Self {
            Self {
                openings: Openings::default(),
                services: vec![ServiceOpenings::default(); OPENING_SERVICES as usize],
                window: 1_000,
            }
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
            let of_service = &mut self.services[(service % OPENING_SERVICES) as usize];
            let openings = &mut self.openings;
            let mut allows = || {
                openings.begin(self.window, LIMIT);
                openings.allow(of_service, LIMIT)
            };
            (0..packets).filter(|_| allows()).count() as u32
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
    #[case::more_than_its_share_before_the_flood(&[(2, LIMIT * 2 / 3), (1, FLOOD), (2, 7)], &[LIMIT * 2 / 3, LIMIT / 2, 0])]
    fn shares(#[case] packets: &[(u32, u32)], #[case] expected: &[u32]) {
        let mut cpu = Cpu::busy();
        let opened: Vec<_> = packets.iter().map(|(service, packets)| cpu.send(*service, *packets)).collect();
        assert_eq!(opened, expected);
    }

    /// The number of windows between two connections of the quiet service.
    const SPACING: u32 = 25;
    const CONNECTIONS: u32 = 100;

    /// No flooded service shares its counter.
    const QUIET: u32 = OPENING_SERVICES - 1;

    /// In each window it goes to so many services, and in the next one to as many others, of so
    /// many in all.
    struct Flood {
        in_a_window: u32,
        in_all: u32,
    }

    impl Flood {
        fn strikes(&self, cpu: &mut Cpu) -> u32 {
            let first = cpu.window * self.in_a_window;
            let services = (0..self.in_a_window).map(|service| (first + service) % self.in_all);
            let flooded = services.filter(|service| service % OPENING_SERVICES != QUIET);
            // The first service takes all of the room.
            let packets = |index| if index == 0 { 2 * LIMIT } else { 4 };
            flooded.enumerate().map(|(index, service)| cpu.send(service, packets(index))).sum()
        }
    }

    /// In each window the flood comes first, as it is faster than anybody. At its begin it spends
    /// the credit that its services have.
    #[rstest]
    #[case::of_one_service(1, 1)]
    #[case::of_ten(10, 10)]
    #[case::of_as_many_as_have_shares(LIMIT - 1, LIMIT - 1)]
    #[case::of_more_than_have_shares(LIMIT + 20, LIMIT + 20)]
    #[case::of_a_thousand(1_000, 1_000)]
    #[case::of_a_thousand_in_turn(LIMIT + 4, 1_000)]
    #[case::of_three_thousand_in_turn(LIMIT + 4, 3_000)]
    #[case::of_ten_thousand_in_turn(LIMIT + 4, 10_000)]
    #[case::of_ten_thousand_and_more_at_once(3 * LIMIT, 10_000)]
    #[case::of_fewer_than_have_shares_in_turn(LIMIT / 2, 3_000)]
    fn a_flood_is_bounded_and_a_quiet_service_opens_all_of_its_connections(
        #[case] in_a_window: u32,
        #[case] in_all: u32,
    ) {
        let mut cpu = Cpu::busy();
        let flood = Flood { in_a_window, in_all };
        for _ in 0..3 * CREDITED_WINDOWS {
            assert!(flood.strikes(&mut cpu) <= 3 * LIMIT);
            cpu.wait(1);
        }
        let (mut opened, mut of_quiet) = (0, 0);
        for window in 0..CONNECTIONS * SPACING {
            let of_flood = flood.strikes(&mut cpu);
            assert!(of_flood <= 3 * LIMIT, "{of_flood} in window {window}");
            opened += of_flood;
            of_quiet += if window % SPACING == 0 { cpu.send(QUIET, 1) } else { 0 };
            cpu.wait(1);
        }
        assert_eq!(of_quiet, CONNECTIONS);
        assert!(opened <= 2 * LIMIT * CONNECTIONS * SPACING, "{opened}");
    }

    /// A page that is asked for opens several connections at once. A service that goes on opens
    /// about what each of the flooded ones opens.
    #[rstest]
    #[case::of_four_hundred(400, 25, 503)]
    #[case::of_a_thousand(1_000, 9, 203)]
    #[case::of_as_many_as_have_counters(OPENING_SERVICES, 1, 50)]
    fn what_a_service_opens_that_was_quiet(
        #[case] flooded: u32,
        #[case] at_once: u32,
        #[case] in_ten_seconds: u32,
    ) {
        let flood = Flood { in_a_window: LIMIT + 4, in_all: flooded };
        let mut cpu = Cpu::busy();
        for _ in 0..3 * CREDITED_WINDOWS {
            flood.strikes(&mut cpu);
            cpu.wait(1);
        }
        flood.strikes(&mut cpu);
        assert_eq!(cpu.send(QUIET, FLOOD), at_once);
        let mut opened = 0;
        for _ in 0..600 {
            cpu.wait(1);
            flood.strikes(&mut cpu);
            opened += cpu.send(QUIET, 1);
        }
        assert_eq!(opened, in_ten_seconds);
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
