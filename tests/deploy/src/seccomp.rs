//! The seccomp profiles that `RuntimeDefault` stands for, from the Go modules of those who make them.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use control_plane::go::Module;
use serde_json::Value;

/// Whose container runtime.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Runtime {
    Containerd,
    /// Docker's, by way of cri-dockerd.
    Moby,
}

impl Runtime {
    const fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Moby => "moby",
        }
    }

    /// `linux.seccomp` of a container with this OCI configuration, which is written to `folder`.
    pub fn profile(self, configuration: &Value, folder: &Path) -> Result<Value> {
        let file = folder.join("seccomp-of.json");
        fs::write(&file, serde_json::to_vec(configuration)?)
            .with_context(|| format!("writing {}", file.display()))?;
        let file = file.to_str().context("a folder whose name is no text")?;
        let profile = module().run(&["run", ".", self.name(), file])?;
        serde_json::from_str(&profile).context("the profile")
    }
}

/// An error without Go, or without the network for the first time.
pub fn ready() -> Result<()> {
    module().download(&["build", "-o", "/dev/null", "."]).map(drop)
}

fn module() -> Module {
    Module::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("seccomp"), "deploy-seccomp")
}
