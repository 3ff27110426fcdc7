//! Connections that run: removes flows and affinities that have expired, counts connections for
//! least connection, ends sockets whose backend is gone, and reserves the ports of connections that
//! netfilter translates.

pub(super) mod affinity;
pub(super) mod count;
pub(super) mod expire;
pub(super) mod moved_ports;
pub(super) mod netfilter_ports;
pub(super) mod stale_sockets;
pub(super) mod unknown;
