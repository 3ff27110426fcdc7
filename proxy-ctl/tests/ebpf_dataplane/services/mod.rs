//! What the maps have of service ports, and what is reached by that.

mod balance;
mod faults;
mod sequences;
mod source_ranges;
mod state;
mod unserved;
