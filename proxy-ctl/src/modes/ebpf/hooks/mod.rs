//! The programs in the kernel: loads them (`load`), attaches them to the cgroup and to interfaces
//! (`attach`, `xdp`), and keeps them first (`order`). Some modules tell the programs what they need
//! to know while they run (`lease`, `route_watch`), or write what they log (`program_log`).

pub(super) mod attach;
pub(super) mod lease;
pub(super) mod load;
mod order;
mod packets;
pub(super) mod program_log;
mod refusal;
mod route_watch;
pub(super) mod settling;
pub mod xdp;
