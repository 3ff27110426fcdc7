//! Packets that are refused or dropped.

pub(super) mod refusals;
pub(super) mod source_ranges;
pub(super) mod unserved;
