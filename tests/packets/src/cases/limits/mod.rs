//! Floods, and what the programs do in a second at most.

pub(super) mod floods;
pub(super) mod guard;
pub(super) mod sustained;
