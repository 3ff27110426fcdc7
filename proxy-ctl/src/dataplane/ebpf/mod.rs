//! The eBPF mode.

#[derive(Debug, thiserror::Error)]
pub enum Error {}
