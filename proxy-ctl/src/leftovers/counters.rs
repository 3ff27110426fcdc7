//! The packet counters that rules of mode iptables count into.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{Error, Found, Part, PartKind, Removal, Retained, names::PACKET_COUNTERS};
use crate::sys::{
    CallError,
    packet_counters::{PacketCounters, RemovedCounter},
};

const PLACE: &str = "nfacct";

/// nf_tables lets go of the counters of removed rules in a work queue, after the transaction has been answered.
const RULES_LET_GO_WITHIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

pub(super) fn find(found: &mut Found) {
    found.note(try_find());
}

fn try_find() -> Result<Vec<Part>, Error> {
    let counters = PacketCounters::open()?;
    let mut count = 0;
    for name in PACKET_COUNTERS {
        count += usize::from(counters.packets(name)?.is_some());
    }
    let parts = (count > 0).then(|| Part::new(PLACE.to_owned(), PartKind::PacketCounters, count));
    Ok(parts.into_iter().collect())
}

/// Must be called after the rules that count into them are removed.
pub(super) fn remove(removed: &mut Removal) {
    let result = try_remove(removed);
    removed.note(result);
}

fn try_remove(removed: &mut Removal) -> Result<(), Error> {
    let counters = PacketCounters::open()?;
    let deadline = Instant::now() + RULES_LET_GO_WITHIN;
    let mut count = 0;
    for name in PACKET_COUNTERS {
        match remove_one(&counters, name, deadline)? {
            RemovedCounter::Done => count += 1,
            RemovedCounter::NotThere => {}
            RemovedCounter::InUse => {
                let why = "a rule counts into it".to_owned();
                removed.retained.push(Retained::new(PLACE.to_owned(), name.to_owned(), why));
            }
        }
    }
    removed.part(PLACE.to_owned(), PartKind::PacketCounters, count);
    Ok(())
}

fn remove_one(counters: &PacketCounters, name: &str, deadline: Instant) -> Result<RemovedCounter, CallError> {
    loop {
        let outcome = counters.remove(name)?;
        if outcome != RemovedCounter::InUse || Instant::now() >= deadline {
            return Ok(outcome);
        }
        thread::sleep(PAUSE);
    }
}
