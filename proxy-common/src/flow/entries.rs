//! Copies, refreshes and removes all entries of a flow together.

use super::{FlowEntry as _, FlowTables, InsertError, Scratch, Stage, lookup};
use crate::{
    family::Family,
    layout::{FLOW_ANSWERED, FLOW_FROM_HOST, FLOW_MASQUERADED, Flow, FlowKey},
    reason::Reason,
};

/// Nanoseconds. An entry older than this is refreshed, together with its partners.
pub(super) const REFRESH_AFTER: u64 = 1_000_000_000;
/// The flags that are copied with an entry. The others record what one side has sent, in the entry of that side.
const COPIED_FLAGS: u32 = FLOW_ANSWERED | FLOW_MASQUERADED | FLOW_FROM_HOST;

/// Copies `scratch.flow` to the established ones. False: a key by which its answers were told has passed to another flow
/// after the table evicted it, and the flow is removed.
#[inline(never)]
pub(super) fn establish<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> bool {
    let Scratch { key, flow } = scratch;
    flow.last_seen = tables.now();
    *key = flow.reply_key();
    let mut copied = copy(tables, key, flow);
    if copied == Copied::Whole && flow.is_masqueraded() {
        *key = flow.masqueraded_reply_key();
        copied = copy(tables, key, flow);
    }
    if copied == Copied::Whole {
        *key = flow.forward_key();
        copied = copy(tables, key, flow);
    }
    if copied == Copied::Whole {
        return true;
    }
    remove_entries(tables, Stage::Established, scratch);
    if copied == Copied::KeyTaken {
        remove_entries(tables, Stage::Opening, scratch);
        tables.count(Reason::FlowReplaced);
        return false;
    }
    tables.count(Reason::FlowsFull);
    true
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Copied {
    Whole,
    TableFull,
    /// The key is another flow's.
    KeyTaken,
}

#[inline(always)]
fn copy<F: Family, T: FlowTables<F>>(
    tables: &T,
    key: &FlowKey<F::Address>,
    flow: &Flow<F::Address>,
) -> Copied {
    if let Some((_, entry)) = lookup(tables, key)
        && !entry.read().same_client_and_frontend(flow)
    {
        return Copied::KeyTaken;
    }
    match tables.insert(Stage::Established, key, flow) {
        Ok(()) | Err(InsertError::Exists) => Copied::Whole,
        Err(InsertError::Full) => Copied::TableFull,
    }
}

/// Removes a flow. Opening entries go first: what is found in their table alone would be established anew.
#[inline(always)]
pub(super) fn remove<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    remove_entries(tables, Stage::Opening, scratch);
    remove_entries(tables, Stage::Established, scratch);
}

/// Removes the entries of `scratch.flow` from one table, but for those that are another flow's. The forward entry goes
/// first: while it is found its partners are.
#[inline(never)]
fn remove_entries<F: Family, T: FlowTables<F>>(tables: &T, stage: Stage, scratch: &mut Scratch<F::Address>) {
    let Scratch { key, flow } = scratch;
    for step in 0..3 {
        *key = match step {
            0 => flow.forward_key(),
            1 => flow.reply_key(),
            _ if flow.is_masqueraded() => flow.masqueraded_reply_key(),
            _ => return,
        };
        if let Some(entry) = tables.flow(stage, key)
            && entry.read().same_client_and_frontend(flow)
        {
            tables.remove(stage, key);
        }
    }
}

#[inline(always)]
pub(super) fn is_stale<F: Family, T: FlowTables<F>>(tables: &T, entry: T::Entry) -> bool {
    // Another CPU's clock may be a little ahead.
    tables.now().saturating_sub(entry.last_seen()) > REFRESH_AFTER
}

/// Updates `last_seen` of every entry of the flow, and restores missing entries.
#[inline(never)]
pub(super) fn refresh<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    stage: Stage,
    entry: T::Entry,
) {
    scratch.flow = entry.read();
    scratch.flow.last_seen = tables.now();
    scratch.flow.flags &= COPIED_FLAGS;
    scratch.key = scratch.flow.forward_key();
    refresh_entry(tables, scratch, stage);
    scratch.key = scratch.flow.reply_key();
    refresh_entry(tables, scratch, stage);
    if scratch.flow.is_masqueraded() {
        scratch.key = scratch.flow.masqueraded_reply_key();
        refresh_entry(tables, scratch, stage);
    }
}

#[inline(always)]
fn refresh_entry<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>, stage: Stage) {
    match tables.flow(stage, &scratch.key) {
        Some(entry) => entry.set_last_seen(scratch.flow.last_seen),
        None => {
            if tables.insert(stage, &scratch.key, &scratch.flow) == Ok(()) {
                tables.count(Reason::FlowRestored);
            }
        }
    }
}
