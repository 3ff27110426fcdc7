//! A proxy as a process: its log, its servers and its end.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
};

use anyhow::{Context, Result, ensure};
use lab::http;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::until::{LIMIT, until};

/// Proxy process that is killed when this is dropped.
pub(crate) struct Proxy {
    child: Child,
    log: Arc<Mutex<String>>,
    /// Thread that reads the log, and ends with it.
    reader: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) fn start(program: &Path, arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let log = Arc::new(Mutex::new(String::new()));
        let (of_reader, stderr) = (Arc::clone(&log), child.stderr.take());
        let reader = std::thread::spawn(move || {
            for line in
                stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).lines()).map_while(Result::ok)
            {
                let mut log = of_reader.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        Ok(Self { child, log, reader: Some(reader) })
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the log contains `text`.
    pub(crate) fn says(&self, text: &str) -> Result<()> {
        let what = format!("{text:?} in the log");
        until(&what, || Ok(self.log().contains(text).then_some(())), || format!("the log:\n{}", self.log()))
    }

    pub(crate) fn runs(&mut self) -> Result<()> {
        let ended = self.child.try_wait().context("waiting for a proxy")?;
        ensure!(ended.is_none(), "it has ended ({ended:?}):\n{}", self.log());
        Ok(())
    }

    pub(crate) fn send(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.child.id()).context("process id")?;
        kill(Pid::from_raw(id), signal).with_context(|| format!("sending {signal}"))
    }

    /// Returns how readily the kernel ends the process when memory is short.
    pub(crate) fn oom_score(&self) -> Result<String> {
        let file = format!("/proc/{}/oom_score_adj", self.child.id());
        let text = std::fs::read_to_string(&file).with_context(|| format!("reading {file}"))?;
        Ok(text.trim().to_owned())
    }

    /// Waits for the end of the process.
    pub(crate) fn ends(&mut self) -> Result<End> {
        let Self { child, log, reader } = self;
        let log = || log.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ended = || child.try_wait().context("waiting for a proxy");
        let status = until("the end of the process", ended, || format!("the log:\n{}", log()))?;
        if let Some(reader) = reader.take() {
            // A reader that has panicked has read what it could.
            let _ = reader.join();
        }
        Ok(End { status, log: log() })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Errors mean that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Exit status and log of a process that has ended.
pub(crate) struct End {
    pub(crate) status: ExitStatus,
    pub(crate) log: String,
}

impl End {
    /// Expects this exit code, and this text in the log.
    pub(crate) fn is(&self, code: i32, text: &str) -> Result<()> {
        let Self { status, log } = self;
        ensure!(status.code() == Some(code), "it ended with {status}, not with {code}:\n{log}");
        ensure!(log.contains(text), "{text:?} is not in the log:\n{log}");
        Ok(())
    }

    pub(crate) fn is_by(&self, signal: Signal) -> bool {
        self.status.signal() == Some(signal as i32)
    }
}

/// Returns status and body of an answer, or `None` if nobody listens.
pub(crate) fn get(address: &str, path: &str) -> Result<Option<(u16, String)>> {
    let address = address.parse().with_context(|| format!("{address} is no address"))?;
    let answer = http::get(address, path, LIMIT).ok();
    Ok(answer.map(|(status, body)| (status, String::from_utf8_lossy(&body).into_owned())))
}

/// Waits until `address` answers `path` with `status`.
pub(crate) fn answers(address: &str, path: &str, status: u16) -> Result<()> {
    let is_it = || Ok(get(address, path)?.is_some_and(|(found, _)| found == status).then_some(()));
    until(&format!("{status} of {address}{path}"), is_it, String::new)
}

/// Returns the value of a metric, which is named with its labels.
pub(crate) fn metric(address: &str, name: &str) -> Result<f64> {
    let (_, body) = get(address, "/metrics")?.with_context(|| format!("nobody listens on {address}"))?;
    let value = body.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = value.with_context(|| format!("no {name} in\n{body}"))?;
    value.parse().with_context(|| format!("{name} is {value:?}"))
}
