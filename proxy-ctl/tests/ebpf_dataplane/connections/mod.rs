//! Tests of connections and flows, which the controller keeps, counts, ends and forgets.

mod affinity;
mod count;
mod flows;
mod former_flows;
mod ports;
mod sockets;
mod unknown;
