//! Tests of the flows and events that people are shown.

mod events;
mod listing;
