//! Copies, refreshes and removes all entries of a flow together.

pub mod collect;
pub mod copy;
pub(super) mod lifetimes;

use super::{Change, FlowEntry, FlowMaps, InsertError, Routine, Scratch, Side, Stage};
use crate::{
    family::Family,
    layout::{Address, FLOW_COUNTED, Flow, PROGRESS_CONFIRMED, unproven_entries},
    reason::Reason,
};

/// Nanoseconds. An entry older than this is refreshed, together with its partners.
pub(super) const REFRESH_AFTER: u64 = 1_000_000_000;

/// The kinds of keys that a flow has. The client's entry is the last to come and the first to go: while it is found its partners are.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum KeyKind {
    #[default]
    Backend,
    Masquerade,
    Client,
}

const INSERTION: [KeyKind; 3] = [KeyKind::Backend, KeyKind::Masquerade, KeyKind::Client];
/// Twice: where the controller takes an entry while it is stamped, the second look finds it gone.
const REFRESH: [KeyKind; 6] = [
    KeyKind::Backend,
    KeyKind::Masquerade,
    KeyKind::Client,
    KeyKind::Backend,
    KeyKind::Masquerade,
    KeyKind::Client,
];
const REMOVAL: [KeyKind; 3] = [KeyKind::Client, KeyKind::Backend, KeyKind::Masquerade];

impl KeyKind {
    /// Sets `scratch.key`. False: the flow has no such entry.
    #[inline(always)]
    pub(super) fn set_key<F: Family, T: FlowMaps<F>>(
        self,
        maps: &T,
        scratch: &mut Scratch<F::Address>,
    ) -> bool {
        if self == Self::Masquerade && !scratch.flow.is_masqueraded() {
            return false;
        }
        scratch.key_kind = self;
        maps.run(scratch, Routine::SetKey);
        true
    }
}

/// Does this entry of a flow stand for it, where connections are counted?
#[inline(always)]
fn is_counted(stage: Stage, key_kind: KeyKind) -> bool {
    stage == Stage::Established && key_kind == KeyKind::Client
}

/// Counts a flow that is established from now on.
#[inline(always)]
fn count_opened<F: Family, T: FlowMaps<F>>(maps: &T, flow: &Flow<F::Address>) {
    maps.count_opened(flow.backend_id, flow.flags);
    if flow.proves_no_client() {
        for _entry in 0..flow.entries() {
            maps.count_opened(unproven_entries::<F::Address>(), FLOW_COUNTED);
        }
    }
}

/// It is no more.
#[inline(always)]
fn count_closed<F: Family, T: FlowMaps<F>>(maps: &T, flow: &Flow<F::Address>) {
    maps.count_closed(flow.backend_id, flow.flags);
    if flow.proves_no_client() {
        for _entry in 0..flow.entries() {
            maps.count_closed(unproven_entries::<F::Address>(), FLOW_COUNTED);
        }
    }
}

/// Returns false where `flow` proves no client, and those that prove none have as many entries
/// among the established ones as they may have: clients that are forged must not fill the map.
/// Where two CPUs ask at once, it may be one flow too many.
#[inline(always)]
fn may_be_established<F: Family, T: FlowMaps<F>>(maps: &T, flow: &Flow<F::Address>) -> bool {
    let most = maps.most_unproven_entries();
    if most == 0 || !flow.proves_no_client() {
        return true;
    }
    let taken = maps.open_connections(unproven_entries::<F::Address>());
    taken.saturating_add(flow.entries().into()) <= u64::from(most)
}

/// The key of the entry of `scratch.flow` for `scratch.key_kind`.
#[inline(always)]
pub(super) fn set_key<A: Address>(Scratch { key_kind, key, flow, .. }: &mut Scratch<A>) {
    *key = match key_kind {
        KeyKind::Client => flow.client_key(),
        KeyKind::Backend => flow.backend_key(),
        KeyKind::Masquerade => flow.masquerade_key(),
    };
}

#[inline(always)]
pub(super) fn is_stale<A>(flow: &Flow<A>, now: u64) -> bool {
    // Another CPU's clock may be a little ahead.
    now.saturating_sub(flow.last_seen) > REFRESH_AFTER
}

/// Copies `scratch.flow` to the established ones, as one whose client is confirmed. Where there is no room it stays where it is. Fails
/// if a key by which its answers were told has passed to another flow after the map evicted it: the flow is removed.
#[inline(always)]
pub(super) fn establish<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    scratch.flow.last_seen = maps.now();
    scratch.flow.state.progress = PROGRESS_CONFIRMED;
    if !may_be_established(maps, &scratch.flow) {
        maps.count(Reason::FlowsFull);
        return Ok(());
    }
    for key_kind in INSERTION {
        if !key_kind.set_key(maps, scratch) {
            continue;
        }
        match copy(maps, scratch, key_kind) {
            Copied::Whole => {}
            Copied::MapFull => {
                remove_entries(maps, Stage::Established, scratch);
                maps.count(Reason::FlowsFull);
                return Ok(());
            }
            Copied::KeyTaken => {
                remove(maps, scratch);
                return Err(Reason::FlowReplaced);
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Copied {
    Whole,
    MapFull,
    /// The key is another flow's.
    KeyTaken,
}

/// Copies the entry of `scratch.flow` at `scratch.key`.
#[inline(always)]
fn copy<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>, key_kind: KeyKind) -> Copied {
    let Scratch { key, flow, entry, .. } = scratch;
    if maps.flow(Stage::Established, key).is_some_and(|found| found.opened() != flow.opened) {
        return Copied::KeyTaken;
    }
    let copy = match maps.flow(Stage::Opening, key) {
        Some(found) => {
            found.read_into(entry);
            if entry.opened != flow.opened {
                return Copied::KeyTaken;
            }
            (entry.last_seen, entry.state) = (flow.last_seen, entry.state.union(&flow.state));
            entry
        }
        None => flow,
    };
    match maps.insert(Stage::Established, key, copy) {
        Ok(()) => {
            if is_counted(Stage::Established, key_kind) {
                count_opened(maps, copy);
            }
            Copied::Whole
        }
        Err(InsertError::Exists) => Copied::Whole,
        Err(InsertError::Full) => Copied::MapFull,
    }
}

/// Moves `scratch.flow`, which has ended, from the established ones to those that are evicted: copies of its last segments may come.
#[inline(always)]
pub(super) fn demote<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    for key_kind in REMOVAL {
        if !key_kind.set_key(maps, scratch) {
            continue;
        }
        let Scratch { key, flow, entry, .. } = &mut *scratch;
        let Some(found) = maps.flow(Stage::Established, key) else { continue };
        found.read_into(entry);
        if entry.opened != flow.opened {
            continue;
        }
        // It is kept from its end on, however long it was silent before.
        entry.last_seen = maps.now();
        // The entry of the masquerade learns nothing, so that nothing would take the end back where the connection goes on.
        if key_kind != KeyKind::Masquerade {
            entry.state = entry.state.union(&flow.state);
        }
        match maps.flow(Stage::Opening, key) {
            // In place: a SYN on another CPU may be giving the key to a new flow.
            Some(copy) if copy.opened() == entry.opened => write_over(copy, entry),
            Some(_) => {}
            None => {
                // Another CPU was first, or there is no memory: then copies of the last segments go on untouched.
                let _there_already = maps.insert(Stage::Opening, key, entry);
            }
        }
        if key_kind == KeyKind::Client {
            maps.run(scratch, Routine::Leave);
        } else {
            maps.remove(Stage::Established, key);
        }
    }
}

/// Removes `scratch.entry`, which is that of a client, from `scratch.key` in the established ones.
#[inline(always)]
pub(super) fn leave<F: Family, T: FlowMaps<F>>(
    maps: &T,
    Scratch { key, entry, .. }: &mut Scratch<F::Address>,
) {
    if maps.remove(Stage::Established, key) {
        count_closed(maps, entry);
    }
}

/// Everything that changes while a flow lives, but for the next hop, which is looked up again, and the forward token, which is set again.
#[inline(always)]
fn write_over<A: Address>(copy: impl FlowEntry<A>, flow: &Flow<A>) {
    copy.write(Change::LastSeen(flow.last_seen));
    copy.write(Change::Reached(Side::Client, flow.client_numbers.reached));
    copy.write(Change::Reached(Side::Backend, flow.backend_numbers.reached));
    copy.write(Change::Awaited(Side::Client, flow.client_numbers.awaited));
    copy.write(Change::Awaited(Side::Backend, flow.backend_numbers.awaited));
    copy.write(Change::Progress(flow.state.progress));
    copy.write(Change::ClientFin(flow.state.client_fin));
    copy.write(Change::BackendFin(flow.state.backend_fin));
    copy.write(Change::Reset(flow.state.reset));
}

/// Removes `scratch.flow`, whose client gets another backend.
#[inline(always)]
pub(super) fn replace<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    remove(maps, scratch);
    maps.tell(scratch, Reason::FlowReplaced);
}

/// Removes a flow. Opening entries go first: what is found in their map alone would be established anew.
// Inlined: its own frame would be one too many for 5.10.
#[inline(always)]
fn remove<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    remove_entries(maps, Stage::Opening, scratch);
    remove_entries(maps, Stage::Established, scratch);
}

/// Removes the entries of `scratch.flow` from one map, but for those that are another flow's.
#[inline(never)]
fn remove_entries<F: Family, T: FlowMaps<F>>(maps: &T, stage: Stage, scratch: &mut Scratch<F::Address>) {
    for key_kind in REMOVAL {
        if !key_kind.set_key(maps, scratch) {
            continue;
        }
        if let Some(found) = maps.flow(stage, &scratch.key)
            && found.opened() == scratch.flow.opened
            && maps.remove(stage, &scratch.key)
            && is_counted(stage, key_kind)
        {
            count_closed(maps, &scratch.flow);
        }
    }
}

/// Stamps every entry of the flow, which are in `scratch.stage`, and restores missing ones.
#[inline(always)]
pub(super) fn refresh<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let (stage, now) = (scratch.stage, maps.now());
    scratch.flow.last_seen = now;
    for key_kind in REFRESH {
        if !key_kind.set_key(maps, scratch) {
            continue;
        }
        match maps.flow(stage, &scratch.key) {
            Some(found) if found.opened() == scratch.flow.opened => found.write(Change::LastSeen(now)),
            // Its answers are another flow's by now.
            Some(_) => {
                remove(maps, scratch);
                maps.count(Reason::FlowReplaced);
                return;
            }
            None => maps.run(scratch, Routine::Restore),
        }
    }
}

/// Inserts the entry of `scratch.flow` for `scratch.key_kind`, at `scratch.key` in `scratch.stage`, which lacks it.
#[inline(always)]
pub(super) fn restore<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let stage = scratch.stage;
    if stage == Stage::Established && was_demoted(maps, scratch) {
        return;
    }
    if maps.insert(stage, &scratch.key, &scratch.flow) == Ok(()) {
        if is_counted(stage, scratch.key_kind) {
            count_opened(maps, &scratch.flow);
        }
        maps.count(Reason::FlowRestored);
    }
}

/// Has another CPU seen the end of `scratch.flow`, and taken its entry at `scratch.key` from the established ones?
#[inline(always)]
fn was_demoted<F: Family, T: FlowMaps<F>>(
    maps: &T,
    Scratch { key, flow, entry, .. }: &mut Scratch<F::Address>,
) -> bool {
    let Some(copy) = maps.flow(Stage::Opening, key) else { return false };
    copy.read_into(entry);
    entry.opened == flow.opened && entry.state.has_ended()
}
