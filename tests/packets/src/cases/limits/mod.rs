//! Floods, and what the programs do in a second at most.

pub(super) mod flood_limit;
pub(super) mod floods;
pub(super) mod sustained;
