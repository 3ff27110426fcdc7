//! A small cluster in network namespaces: two nodes, pods on both, a client outside, IPv4 and IPv6.
//!
//! [`Lab`] builds the cluster and removes it. [`Agent`] is a process in one of its network
//! namespaces that dials and serves as it is told. [`Objects`] are the Kubernetes objects that a
//! proxy under test reads.

pub mod address;
pub mod agent;
pub mod cgroup;
pub mod claims;
pub mod cluster;
pub mod http;
pub mod namespace;
pub mod objects;
pub mod programs;
pub mod signals;
pub mod taken;
pub mod wait;
pub mod xdp;

pub use agent::{
    client::Agent,
    protocol::{Answer, Dial, Outcome, Protocol, Tally},
};
pub use cluster::{Lab, Netns};
pub use objects::Objects;
pub use programs::{OwnFolders, program};
