//! Seccomp profiles for which `RuntimeDefault` stands, from the Go modules of the projects that
//! make them.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use control_plane::go::Module;
use serde_json::Value;

/// Container runtime whose profile is used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Runtime {
    Containerd,
    /// Docker's runtime, by way of cri-dockerd.
    Moby,
}

impl Runtime {
    const fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Moby => "moby",
        }
    }

    /// Returns the field `linux.seccomp` for a container with this OCI configuration, which is
    /// written to `folder`.
    pub fn profile(self, configuration: &Value, folder: &Path) -> Result<Value> {
        let file = folder.join("seccomp-of.json");
        fs::write(&file, serde_json::to_vec(configuration)?)
            .with_context(|| format!("writing {}", file.display()))?;
        let file = file.to_str().context("a folder whose name is no text")?;
        let profile = module().run(&["run", ".", self.name(), file])?;
        serde_json::from_str(&profile).context("the profile")
    }
}

/// Downloads what is needed. Returns an error without Go or, for the first time, without the
/// network.
pub fn ready() -> Result<()> {
    module().download(&["build", "-o", "/dev/null", "."]).map(drop)
}

fn module() -> Module {
    Module::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("seccomp"), "deploy-seccomp")
}
