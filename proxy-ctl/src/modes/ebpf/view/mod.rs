//! What people and metrics are shown of the maps. It works on the pins alone, with the controller
//! down.

mod events;
mod flows;
mod frontend_names;
pub(super) mod metrics;
pub mod status;
pub(super) mod usage;
