//! Parts that the tests of deploy/ share: the files, the tools with which others check such files,
//! and the work of kubelet, container runtime and runc for a pod.

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

/// Returns an error that skips what needs the missing thing.
pub fn skip(missing: impl Into<anyhow::Error>) -> anyhow::Error {
    scenario::Skip(format!("{:#}", missing.into())).into()
}
