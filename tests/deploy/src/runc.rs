//! Containers that runc runs.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::wait;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// Container that is deleted when this is dropped.
pub struct Container {
    id: String,
    runc: Child,
    log: PathBuf,
}

impl Container {
    /// Starts a container. `bundle` has the image's files in `rootfs`, and `log` is appended to.
    pub fn start(bundle: &Path, id: &str, configuration: &Value, log: &Path) -> Result<Self> {
        let file = bundle.join("config.json");
        fs::write(file, serde_json::to_vec(configuration)?).context("writing config.json")?;
        let output = File::options().create(true).append(true).open(log).context("opening the log")?;
        let mut command = Command::new("runc");
        command.args(["run", "--bundle"]).arg(bundle).arg(id).stdin(Stdio::null());
        let runc = command.stdout(output.try_clone()?).stderr(output).spawn().context("starting runc")?;
        Ok(Self { id: id.to_owned(), runc, log: log.to_owned() })
    }

    /// Returns what the container has printed.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the container's process, as this machine numbers it.
    fn process(&self) -> Result<Pid> {
        let output = Command::new("runc").args(["state", &self.id]).output().context("starting runc")?;
        let state: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("runc state: {}", String::from_utf8_lossy(&output.stderr)))?;
        let id = state["pid"].as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id > 0);
        Ok(Pid::from_raw(id.with_context(|| format!("no process: {state}"))?))
    }

    /// Returns true if the container's system calls pass a seccomp profile.
    pub fn is_filtered(&self) -> Result<bool> {
        let path = format!("/proc/{}/status", self.process()?);
        let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).context("no Seccomp")?;
        Ok(mode.trim() == "2")
    }

    /// Runs a command in the container as `kubectl exec` does, and returns its output.
    pub fn exec(&self, command: &[&str]) -> Result<String> {
        let output =
            Command::new("runc").args(["exec", &self.id]).args(command).stdin(Stdio::null()).output();
        let output = output.context("starting runc")?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        ensure!(output.status.success(), "{command:?}: {}: {}", output.status, text(&output.stderr));
        Ok(text(&output.stdout))
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.process()?, signal).with_context(|| format!("sending {signal}"))
    }

    /// Waits for the container's end, but not longer than `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let runc = &mut self.runc;
        wait::until("the container's end", limit, || runc.try_wait().map_err(|error| error.to_string()))
            .with_context(|| self.log())
    }

    /// Asks until there is an answer. Returns an error when the time is over or the container has
    /// ended.
    pub fn until<T>(&mut self, limit: Duration, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            let error = match ask() {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let ended = self.runc.try_wait().context("waiting for runc")?;
            if ended.is_some() || start.elapsed() > limit {
                let state = ended.map_or_else(|| "running".to_owned(), |status| status.to_string());
                bail!("{error:#} ({state} after {:?})\n{}", start.elapsed(), self.log());
            }
            thread::sleep(BETWEEN_LOOKS);
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let mut delete = Command::new("runc");
        // An error means that the container is gone already.
        let _ = delete.args(["delete", "--force", &self.id]).stderr(Stdio::null()).status();
        let _ = self.runc.kill();
        let _ = self.runc.wait();
    }
}
