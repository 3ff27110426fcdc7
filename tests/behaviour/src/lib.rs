//! Scenarios that every proxy must pass: proxy-ctl in each mode and on each path, and the real
//! kube-proxy as the oracle.
//!
//! A [`World`](world::World) is a lab with a proxy on each node and a fixed set of pods and
//! services. A [`Case`](case::Case) dials in it and judges what it sees.

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
