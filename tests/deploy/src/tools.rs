//! Helm and promtool. Each is taken from the environment variable `HELM` or `PROMTOOL`, or from
//! PATH. Otherwise it is built once from the Go module beside this crate, and kept in the cache.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use control_plane::go::{self, Module};
use serde_json::Value;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tool {
    Helm,
    Promtool,
}

/// Go module with the definitions of prometheus-operator's custom resources.
const OPERATOR: &str = "github.com/prometheus-operator/prometheus-operator@v0.94.1";

impl Tool {
    const fn name(self) -> &'static str {
        match self {
            Self::Helm => "helm",
            Self::Promtool => "promtool",
        }
    }

    const fn package(self) -> &'static str {
        match self {
            Self::Helm => "helm.sh/helm/v4/cmd/helm",
            Self::Promtool => "github.com/prometheus/prometheus/cmd/promtool",
        }
    }

    fn installed(self) -> Option<PathBuf> {
        let named = env::var_os(self.name().to_uppercase()).map(PathBuf::from);
        named.or_else(|| go::on_path(self.name())).or_else(|| module().built(self.name()))
    }

    /// Returns the tool's file. Returns an error if it is not there and cannot be built.
    pub fn path(self) -> Result<PathBuf> {
        provide(&[self])?;
        self.installed().with_context(|| format!("{} is not there after it was built", self.name()))
    }
}

/// Builds the tools that are missing.
pub fn provide(tools: &[Tool]) -> Result<()> {
    let missing: Vec<&str> =
        tools.iter().filter(|tool| tool.installed().is_none()).map(|tool| tool.package()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    module().build(&missing).with_context(|| format!("not on PATH, so to be built: {}", missing.join(", ")))
}

/// Returns an error with the reason if there is no Go. Without Go, nothing here is built.
pub fn go() -> Result<(), String> {
    module().run(&["version"]).map(drop).map_err(|error| format!("{error:#}"))
}

fn module() -> Module {
    // Without the tag, promtool would have the clients of every cloud.
    Module::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tools"), "deploy-tools")
        .with_tags("remove_all_sd")
}

/// Returns the definitions of prometheus-operator's custom resources, as it publishes them. Returns
/// an error without Go or network.
pub fn operator_definitions() -> Result<Vec<Value>> {
    let answer = module().download(&["mod", "download", "-json", OPERATOR])?;
    let answer: Value = serde_json::from_str(&answer).context("the answer of go mod download")?;
    let folder = answer["Dir"].as_str().context("go mod download does not tell where")?;
    let folder = Path::new(folder).join("example/prometheus-operator-crd");
    let mut definitions = Vec::new();
    for kind in ["podmonitors", "prometheusrules"] {
        let file = folder.join(format!("monitoring.coreos.com_{kind}.yaml"));
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        definitions.extend(super::files::documents(&text)?);
    }
    Ok(definitions)
}
