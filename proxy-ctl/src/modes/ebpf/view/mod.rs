//! Shows people and metrics what the maps hold. Most of it works on the pins alone, with the
//! controller down.

mod events;
mod flows;
mod frontend_names;
pub(super) mod metrics;
pub mod status;
pub(super) mod usage;
