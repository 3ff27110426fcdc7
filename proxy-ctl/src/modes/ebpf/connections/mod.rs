//! Connections that run: removes flows and affinities that have expired, counts connections for
//! least connection, ends sockets whose backend is gone, reserves the ports of connections that
//! netfilter translates, and decides whether segments of unknown connections are answered.

pub(super) mod affinity;
pub(super) mod count;
pub(super) mod counting;
pub(super) mod expire;
pub(super) mod netfilter;
pub(super) mod netfilter_ports;
pub(super) mod remapped_ports;
pub(super) mod stale_sockets;
pub(super) mod tend;
pub(super) mod unknown;
