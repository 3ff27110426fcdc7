//! Runs kube-proxy's own table of endpoint sets (`TestCategorizeEndpoints` of its `pkg/proxy`)
//! against the model.
//!
//! kube-proxy's tests are built with `go test -overlay`. A file of this repository,
//! `tests/kubernetes/_overlay/topology.go`, replaces kube-proxy's implementation there.
//! It starts this program for each case, and gets the answer of the model.

mod sets;

use std::{
    env, io,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use control_plane::{binaries, go::Replaced};
use scenario::{Outcome, Scenario, Shared};

/// Set by the overlay if this program has to answer the question on its standard input.
const ANSWERS: &str = "ENDPOINT_SETS_OF_STDIN";
const OVERLAY: &str = "_overlay/topology.go";
const THEIRS: Replaced<'_> =
    Replaced { module: "k8s.io/kubernetes", file: "pkg/proxy/topology.go", by: OVERLAY };
const PROGRAM: &str = "topology.test";
/// The least number of cases in kube-proxy's table. A build that finds fewer tests something else.
const FEWEST_CASES: usize = 30;

fn main() -> ExitCode {
    if env::var_os(ANSWERS).is_some() {
        return match sets::answer(io::stdin(), io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let table = Scenario::new("the model gives the endpoint sets of kube-proxy's table", |(): &mut ()| run());
    scenario::run(scenario::Arguments::from_args(), Shared::new(|| Ok(Ok(()))).trials([table]))
}

fn run() -> Result<Outcome> {
    let module = binaries::module().with_sources(&[OVERLAY]);
    if module.built(PROGRAM).is_none() {
        if let Some(reason) = binaries::Program::KubeProxy.absent() {
            return Ok(Outcome::Skipped(reason));
        }
        module.build_tests(Some(&THEIRS), "k8s.io/kubernetes/pkg/proxy", PROGRAM)?;
    }
    let program = module.built(PROGRAM).context("kube-proxy's tests are not there after they were built")?;
    let output = Command::new(&program)
        .args(["-test.v", "-test.run", "^TestCategorizeEndpoints$"])
        .env("ENDPOINT_SETS", env::current_exe().context("finding the running program")?)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {text}{errors}", output.status);
    let passed = text.lines().filter(|line| line.starts_with("    --- PASS: ")).count();
    ensure!(passed >= FEWEST_CASES, "only {passed} cases were run: {text}");
    Ok(Outcome::Passed)
}
