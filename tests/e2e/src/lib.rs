//! Kubernetes's own tests of sig-network against a Service proxy, on one machine and without
//! registries.
//!
//! [`cluster::Cluster`] is a control plane and nodes with real kubelets and containerd. Each node
//! has its own network, mounts, processes, host name and cgroups ([`node`]). [`image`] makes the
//! images that the tests name, from Go modules and programs of this machine. [`ginkgo`] runs the
//! tests and reads their results, and [`table`] writes them to `docs/conformance.md`.

pub mod addresses;
pub mod cgroups;
pub mod cluster;
mod control_plane;
pub mod ginkgo;
pub mod home;
pub mod image;
mod network;
pub mod node;
pub mod programs;
pub mod proxy;
pub mod selection;
pub mod table;
