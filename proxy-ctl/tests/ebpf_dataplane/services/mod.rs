//! Tests of service ports: their entries in the maps, and the endpoints that sockets reach.

mod balance;
mod faults;
mod sequences;
mod source_ranges;
mod state;
mod unserved;
