//! Algorithms and session affinity, by which a connection gets its backend.

pub(crate) mod affinity;
pub(crate) mod balance;
pub(crate) mod connections;
