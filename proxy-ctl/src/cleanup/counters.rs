//! The packet counters into which rules of mode iptables count.

use super::{Error, Found, Part, PartKind, Removal, Retained, let_go::LettingGo};
use crate::{
    names::PACKET_COUNTERS,
    sys::net::packet_counters::{PacketCounters, RemovedCounter},
};

const LOCATION: &str = "nfacct";

pub(super) fn find(found: &mut Found) {
    found.note(try_find());
}

fn try_find() -> Result<Vec<Part>, Error> {
    let counters = PacketCounters::open()?;
    let mut count = 0;
    for name in PACKET_COUNTERS {
        count += usize::from(counters.packets(name)?.is_some());
    }
    let parts = (count > 0).then(|| Part::new(LOCATION.to_owned(), PartKind::PacketCounters, count));
    Ok(parts.into_iter().collect())
}

/// Removes the counters. Must be called after the rules that count into them are removed.
pub(super) fn remove(removed: &mut Removal) {
    let result = try_remove(removed);
    removed.note(result);
}

fn try_remove(removed: &mut Removal) -> Result<(), Error> {
    let counters = PacketCounters::open()?;
    let letting_go = LettingGo::begin();
    let mut count = 0;
    for name in PACKET_COUNTERS {
        match letting_go.wait(RemovedCounter::InUse, || counters.remove(name))? {
            RemovedCounter::Done => count += 1,
            RemovedCounter::NotThere => {}
            RemovedCounter::InUse => {
                let why = "a rule counts into it".to_owned();
                removed.retained.push(Retained::new(LOCATION.to_owned(), name.to_owned(), why));
            }
        }
    }
    removed.part(LOCATION.to_owned(), PartKind::PacketCounters, count);
    Ok(())
}
