//! What the tests of deploy/ have in common: the files, the tools that others check such files with, and what kubelet,
//! container runtime and runc make of a pod of them.

pub mod api;
mod capabilities;
pub mod files;
pub mod image;
pub mod kubelet;
pub mod node;
pub mod oci;
pub mod oldest;
pub mod promql;
pub mod runc;
pub mod seccomp;
pub mod tools;

/// What is missing, as the reason to skip what needs it.
pub fn skip(missing: impl Into<anyhow::Error>) -> anyhow::Error {
    scenario::Skip(format!("{:#}", missing.into())).into()
}
