//! `lab-agent`, a process in a network namespace of the lab. It dials and serves as it is told, by
//! one JSON line a request.

pub mod bench;
pub mod client;
pub mod dial;
pub mod fragments;
pub mod load;
pub mod protocol;
pub mod serve;
pub mod session;
pub mod socket;
