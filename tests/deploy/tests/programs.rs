//! Builds and downloads once what the other suites need: programs that are Go modules, and files of
//! Go modules. Nothing can be downloaded from the network namespaces of the other suites.

use std::process::ExitCode;

use anyhow::Result;
use control_plane::binaries::{self, Program};
use deploy::{
    oldest, seccomp,
    tools::{self, Tool},
};
use scenario::{Outcome, scenarios};

fn main() -> ExitCode {
    scenario::main(
        || Ok(tools::go()),
        scenarios![kubernetes_is_built, helm_and_promtool_are_built, files_of_go_modules_are_here],
    )
}

fn kubernetes_is_built((): &mut ()) -> Result<Outcome> {
    let missing = binaries::provide(&[
        Program::Etcd,
        Program::KubeApiServer,
        Program::KubeProxy,
        Program::FeatureGates,
    ])?;
    Ok(missing.map_or(Outcome::Passed, Outcome::Skipped))
}

fn helm_and_promtool_are_built((): &mut ()) -> Result<()> {
    tools::provide(&[Tool::Helm, Tool::Promtool])
}

fn files_of_go_modules_are_here((): &mut ()) -> Result<()> {
    binaries::module().sources("k8s.io/kubernetes")?;
    tools::operator_definitions()?;
    seccomp::ready()?;
    oldest::ready()
}
