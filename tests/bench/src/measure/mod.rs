//! The measurements, one in each module, and how they make packets.

pub(crate) mod change;
mod cpu;
pub(crate) mod flood;
pub(crate) mod forward;
mod generator;
pub(crate) mod program;
pub(crate) mod rollout;
pub(crate) mod traffic;
