//! Tests of mode ebpf against the real kernel: maps, hooks, restarts, faults. They need root. Each
//! test has a network namespace, a bpffs folder and a cgroup of its own.
#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it must be")]
#![expect(unreachable_pub, reason = "a test has no users")]

mod affinity;
mod balance;
mod bandwidth;
mod connections;
mod desired;
mod events;
mod faults;
mod flows;
mod former_flows;
mod grace;
mod growth;
mod hooks;
mod lease;
mod listing;
mod ports;
mod redirects;
mod resize;
mod room;
mod route_watch;
mod sandbox;
mod sequences;
mod sockets;
mod source_ranges;
mod state;
mod unknown;
mod unserved;
