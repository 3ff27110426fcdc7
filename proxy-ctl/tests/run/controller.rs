//! A process of `proxy-ctl run`, with its log and its answers.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

/// The longest wait for a line of the log.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Controller {
    pub(crate) child: Child,
    /// The lines of the log. A thread reads them, because a read has no deadline.
    log: mpsc::Receiver<String>,
}

impl Controller {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (lines, log) = mpsc::channel();
        // The thread ends with the process or the receiver.
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
        Self { child, log }
    }

    /// Reads the log up to a line with `text`. The test fails if the log ends before, or after
    /// [`PATIENCE`].
    pub(crate) fn wait_for(&mut self, text: &str) {
        let mut seen = String::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let line = self.log.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|error| panic!("{text:?} is not in the log, {error}:\n{seen}"));
            if line.contains(text) {
                return;
            }
            seen.push_str(&line);
            seen.push('\n');
        }
    }

    pub(crate) fn end_by(mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Replaces a file atomically, so that readers see the old or the new one.
pub(crate) fn replace(folder: &Path, file: &str, text: &str) {
    let draft = folder.join("draft");
    fs::write(&draft, text).unwrap();
    fs::rename(draft, folder.join(file)).unwrap();
}

/// Returns the status of a controller that serves. Its record, which says that it has started, may
/// be written a moment after its log line.
pub(crate) fn once_started(status: impl Fn() -> Value) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let told = status();
        if told["controller"]["starting"] == false {
            return told;
        }
        assert!(Instant::now() < deadline, "{told}");
    }
}

/// Returns what a command with `--output json` shows.
pub(crate) fn shown(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}
