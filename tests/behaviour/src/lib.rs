//! One table of scenarios for every proxy: ours on each of its paths, and the real kube-proxy as oracle.
//!
//! A [`World`](world::World) is a lab with a proxy on each node and a fixed set of pods and services; a
//! [`Case`](case::Case) dials in it and judges what it sees.

pub mod case;
pub mod cases;
pub mod check;
pub mod fixtures;
pub mod flood;
pub mod not_yet;
pub mod proxy;
pub mod random;
pub mod selection;
pub mod setting;
pub mod state;
pub mod table;
pub mod watch;
pub mod way_back;
pub mod world;
