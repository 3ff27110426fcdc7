//! All orders in which several CPUs can get at the maps.
//!
//! An access is what the kernel does at once: a lookup, the copy of an element, a field that is written, an insertion, a removal. Between two
//! accesses of a CPU any number of accesses of the others can come. A CPU that waits is not kept: its work is done anew, with the answers
//! that it got, up to the access at which it waits. Orders that lead to the same maps and have been told the same are one.

mod cpu;

use std::{
    collections::HashSet,
    convert::Infallible,
    hash::{BuildHasher as _, RandomState},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use self::cpu::*;
use super::{
    collect::{Entry, StoredFlows, is_expired, remove_if},
    *,
};
use crate::map_access::AffinityEntry;

impl Answer {
    fn entry(self) -> Option<Flow<A>> {
        let Self::Entry(entry) = self else { unreachable!("another access") };
        entry
    }
}

/// What a CPU does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// A packet enters the node.
    Arrives(Packet<A>, Origin),
    /// A packet leaves the node.
    Leaves(Packet<A>),
    /// A client's packet, through both hooks.
    Passes(Packet<A>, Origin),
    /// The controller removes a flow that has expired, as one of its entries was.
    Collects(Flow<A>),
}

/// The packet as it goes on; of what collects, none.
pub(super) type Outcome = Option<Result<Packet<A>, Reason>>;

impl Work {
    pub(super) fn on<T: FlowMaps<V4> + StoredFlows<A>>(&self, maps: &T) -> Outcome {
        match self {
            Self::Arrives(packet, origin) => Some(arrive(maps, packet, *origin)),
            Self::Leaves(packet) => Some(leave(maps, packet)),
            Self::Passes(packet, origin) => {
                Some(arrive(maps, packet, *origin).and_then(|inside| match leave(maps, &inside) {
                    Err(Reason::NotAService) => Ok(inside),
                    outcome => outcome,
                }))
            }
            Self::Collects(flow) => {
                let now = maps.now();
                let is_over = |entries: &[Entry<A>]| is_expired(entries, &FlowLifetimes::default(), now);
                remove_if(maps, flow, is_over).ok();
                None
            }
        }
    }
}

fn arrive<T: FlowMaps<V4>>(maps: &T, packet: &Packet<A>, origin: Origin) -> Result<Packet<A>, Reason> {
    let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
    decide_arriving(maps, &mut scratch, origin).map(|()| rewritten(packet, scratch.action.rewrite))
}

fn leave<T: FlowMaps<V4>>(maps: &T, packet: &Packet<A>) -> Result<Packet<A>, Reason> {
    let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
    decide_leaving(maps, &mut scratch, false).map(|()| rewritten(packet, scratch.action.rewrite))
}

#[derive(Clone)]
struct Moment {
    shared: Shared,
    answers: Vec<Vec<Answer>>,
    outcomes: Vec<Option<Outcome>>,
    order: String,
}

/// How it ended.
pub(super) struct End {
    pub(super) host: Host,
    pub(super) works: Vec<(Work, Outcome)>,
    /// Numbers of the CPUs, one for each access.
    pub(super) order: String,
}

/// Lets each CPU do its work, with dice of its own, in every order. Answers how many ends there are.
pub(super) fn in_every_order(
    before: impl Fn() -> Host,
    works: &[(Work, &[u32])],
    check: impl Fn(&End),
) -> usize {
    let host = before();
    let start = Moment {
        shared: Shared::of(&host),
        answers: vec![Vec::new(); works.len()],
        outcomes: vec![None; works.len()],
        order: String::new(),
    };
    let hasher = RandomState::new();
    let (mut seen, mut open, mut ends) = (HashSet::new(), vec![start], 0);
    while let Some(moment) = open.pop() {
        let waiting: Vec<usize> = (0..works.len()).filter(|cpu| moment.outcomes[*cpu].is_none()).collect();
        if waiting.is_empty() {
            ends += 1;
            let host = before();
            moment.shared.write_to(&host);
            let outcomes = moment.outcomes.into_iter().flatten();
            let works: Vec<_> = works.iter().map(|(work, _)| *work).zip(outcomes).collect();
            let counted = host.established_and_counted();
            let are_right = counted.values().all(|(established, counted)| established == counted);
            assert!(are_right, "{}: established flows and what is counted: {counted:?}", moment.order);
            check(&End { host, works, order: moment.order });
            continue;
        }
        for cpu in waiting {
            let next = step(&host, &moment, cpu, &works[cpu]);
            if seen.insert(hasher.hash_one((&next.shared, &next.answers))) {
                open.push(next);
            }
        }
    }
    ends
}

/// One access of one CPU.
fn step(host: &Host, moment: &Moment, number: usize, (work, dice): &(Work, &[u32])) -> Moment {
    let mut next = moment.clone();
    let cpu = Cpu {
        host,
        number,
        shared: RefCell::new(next.shared),
        answers: RefCell::new(std::mem::take(&mut next.answers[number])),
        accesses: Cell::default(),
        is_spent: Cell::default(),
        // Clocks of CPUs differ a little.
        clock: Cell::new(host.clock.get() + number as u64),
        dice: RefCell::new(dice.iter().copied().collect()),
    };
    next.outcomes[number] = match catch_unwind(AssertUnwindSafe(|| work.on(&&cpu))) {
        Ok(outcome) => Some(outcome),
        Err(reason) if reason.is::<Waits>() => None,
        Err(failure) => resume_unwind(failure),
    };
    next.shared = cpu.shared.into_inner();
    next.answers[number] = cpu.answers.into_inner();
    next.order.push_str(&number.to_string());
    next
}
