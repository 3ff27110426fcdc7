//! Clients go on while something changes: Services, addresses, and the controller itself.

pub(super) mod change;
pub(super) mod moves;
pub(super) mod restart;
pub(super) mod start;
