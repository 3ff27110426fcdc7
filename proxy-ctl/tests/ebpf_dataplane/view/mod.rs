//! What people see: flows and events.

mod events;
mod listing;
