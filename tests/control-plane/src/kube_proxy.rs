//! The real kube-proxy: the oracle of the behaviour scenarios and the peer of the benchmarks.

use std::path::PathBuf;

use anyhow::Result;

use crate::binaries::Program;

#[derive(Clone, Copy, Debug)]
pub struct KubeProxy;

impl KubeProxy {
    /// Finds or builds it, as [`Program::path`] says. It is started in the namespace of a node with
    /// `--kubeconfig` of [`crate::PROXY`] and the mode under comparison.
    pub fn binary() -> Result<PathBuf> {
        Program::KubeProxy.path()
    }

    /// For those who can do without it where there is no Go to build it with, and have to say why: that is the inner
    /// error. A build that fails is the outer one.
    pub fn here() -> Result<Result<PathBuf, String>> {
        match Program::KubeProxy.absent() {
            Some(reason) => Ok(Err(reason)),
            None => Self::binary().map(Ok),
        }
    }
}
