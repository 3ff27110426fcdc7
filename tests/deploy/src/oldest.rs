//! The oldest version of Kubernetes that the chart is for, with the types of its API.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use control_plane::go::Module;
use serde_json::Value;

use super::files;

/// Returns the version that the chart names, such as `1.25.0`.
pub fn version() -> Result<String> {
    let chart = files::documents(&files::text("chart/Chart.yaml")?)?.pop().context("Chart.yaml is empty")?;
    let version = chart["kubeVersion"].as_str().context("kubeVersion")?;
    let version = version.strip_prefix(">=").and_then(|version| version.strip_suffix("-0"));
    let version = version.with_context(|| format!("kubeVersion: {}", chart["kubeVersion"]))?;
    let (_, minor) = version.split_once('.').context("kubeVersion")?;
    let minor = minor.split('.').next().unwrap_or_default();
    let types = module().required("k8s.io/api")?;
    ensure!(types.starts_with(&format!("v0.{minor}.")), "the chart is for {version}, k8s.io/api is {types}");
    Ok(version.to_owned())
}

/// Reads objects as this version does. The error names a field that it does not know.
pub fn read(objects: &[Value]) -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder")?;
    let file = folder.path().join("objects.json");
    fs::write(&file, serde_json::to_vec(objects)?).with_context(|| format!("writing {}", file.display()))?;
    module().run(&["run", ".", file.to_str().context("a folder whose name is no text")?]).map(drop)
}

/// Downloads what is needed. Returns an error without Go or, for the first time, without the
/// network.
pub fn ready() -> Result<()> {
    module().download(&["build", "-o", "/dev/null", "."]).map(drop)
}

fn module() -> Module {
    Module::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("oldest"), "deploy-oldest")
}
