//! Takeover from mode ipvs without ending connections: whose a virtual server is, and what its
//! clients need until it is gone.

pub(super) mod answers;
pub(super) mod own_sockets;
pub(super) mod owner;
