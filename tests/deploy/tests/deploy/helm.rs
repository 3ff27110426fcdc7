//! Helm itself against a real API server. There are no controllers, so the test reports what these
//! would.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use control_plane::{ADMIN, ApiServer, objects as written};
use deploy::{api, files, skip, tools::Tool};
use lab::wait;
use serde_json::{Value, json};

use super::{chart, objects};

const RELEASE: &str = "proxy-ctl";
const PATIENCE: Duration = Duration::from_secs(120);

fn helm(server: &ApiServer, folder: &Path, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(Tool::Helm.path().map_err(skip)?);
    command.args(arguments).args(["--namespace", "kube-system", "--kubeconfig"]);
    command.arg(server.kubeconfig(ADMIN)).stdin(Stdio::null());
    for (name, what) in
        [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")]
    {
        command.env(name, folder.join(what));
    }
    Ok(command)
}

fn ensure_done(mut command: Command) -> Result<()> {
    let output = command.output().context("starting helm")?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Returns which of these objects the API server has, by kind and name.
fn there(server: &ApiServer, objects: &[Value]) -> Result<Vec<(String, String)>> {
    server.run(async |client| {
        let mut there = Vec::new();
        for object in objects {
            if api::get(&client, &written::path(object)?).await.is_ok() {
                there.push(files::identity(object));
            }
        }
        Ok(there)
    })
}

pub(super) fn helm_uninstall_waits_for_clean_nodes_and_leaves_nothing((): &mut ()) -> Result<()> {
    let (folder, server) = objects::start()?;
    let (installed, hooks) = chart::apart(chart::render(&[])?);
    let path = files::path("chart");
    let path = path.to_str().context("a path that is no text")?;
    ensure_done(helm(&server, folder.path(), &["install", RELEASE, path, "--set", chart::SERVER])?)?;
    ensure!(there(&server, &installed)?.len() == installed.len(), "{:?}", there(&server, &installed)?);
    ensure!(there(&server, &hooks)?.is_empty(), "{:?}", there(&server, &hooks)?);

    let mut uninstall = helm(&server, folder.path(), &["uninstall", RELEASE, "--timeout", "300s"])?;
    let mut uninstall = uninstall.stdout(Stdio::null()).spawn().context("starting helm")?;
    wait::until("all hooks are there", PATIENCE, || {
        let there = there(&server, &hooks).map_err(|error| format!("{error:#}"))?;
        if there.len() == hooks.len() { Ok(Some(())) } else { Err(format!("only {there:?}")) }
    })?;
    let left = there(&server, &installed)?;
    ensure!(left.is_empty(), "hooks are there beside {left:?}");
    ensure!(uninstall.try_wait()?.is_none(), "it has not waited for the Job");

    // This is how the controller of Jobs reports the end of a Job.
    let now = "2026-01-01T00:00:00Z";
    let condition = |kind| json!({"type": kind, "status": "True", "lastTransitionTime": now});
    let status = json!({
        "startTime": now, "completionTime": now, "succeeded": 1,
        "conditions": [condition("SuccessCriteriaMet"), condition("Complete")],
    });
    let mut job = files::of_kind(&hooks, "Job")?.clone();
    job["status"] = status;
    server.run(async |client| written::apply(&client, &job).await)?;
    let status = uninstall.wait().context("waiting for helm")?;
    ensure!(status.success(), "helm uninstall: {status}");
    let left = there(&server, &[installed, hooks].concat())?;
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}
