//! XDP on uplinks: whether it forwards packets (`choice`), to which interfaces it may send them
//! (`redirect`), and how it is attached.

pub(in crate::modes::ebpf) mod attach;
pub mod choice;
pub mod redirect;
