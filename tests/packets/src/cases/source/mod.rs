//! The source address and port that a flow leaves with.

pub(super) mod masquerade;
pub(super) mod port_pool;
pub(super) mod source_address;
