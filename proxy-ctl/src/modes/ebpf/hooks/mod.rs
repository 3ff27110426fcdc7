//! The programs in the kernel: loads them (`load`), attaches them to the cgroup and to interfaces
//! (`attach`, `xdp`), keeps them first (`order`), and follows what they need to be told.

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
