//! Tests of mode ebpf against the real kernel: maps, hooks, restarts, faults. They need root. Each
//! test has a network namespace, a bpffs folder and a cgroup of its own.
#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it must be")]
#![expect(unreachable_pub, reason = "a test has no users")]

mod connections;
mod desired;
mod hooks;
mod maps;
mod sandbox;
mod services;
mod view;
