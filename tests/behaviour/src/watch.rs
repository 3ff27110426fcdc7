//! `proxy-ctl monitor` on a node of the lab.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, ChildStderr, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::address::NodeNumber;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::world::World;

/// Within which an event is told.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

/// `proxy-ctl monitor`, which runs until it is dropped.
pub struct Monitor {
    process: Child,
    complaints: BufReader<ChildStderr>,
}

impl Monitor {
    /// Returns when it watches.
    pub fn begin(world: &World, node: NodeNumber, options: &[&str], out: Stdio) -> Result<Self> {
        let arguments = [&["monitor", "--output", "json"], options].concat();
        let mut command = world.proxy_on(node)?.tool_command(&world.lab, &arguments)?;
        let mut process =
            command.stdout(out).stderr(Stdio::piped()).spawn().context("starting proxy-ctl monitor")?;
        let complaints = BufReader::new(process.stderr.take().context("no stderr")?);
        let mut monitor = Self { process, complaints };
        let mut first = String::new();
        monitor.complaints.read_line(&mut first)?;
        ensure!(first.starts_with("watching"), "monitor says {first:?}");
        Ok(monitor)
    }

    /// As Ctrl-C does. Answers with what it has written to stderr.
    pub fn end(mut self) -> Result<String> {
        kill(Pid::from_raw(self.process.id().try_into()?), Signal::SIGINT).context("ending monitor")?;
        let mut complaints = String::new();
        self.complaints.read_to_string(&mut complaints)?;
        let status = self.process.wait()?;
        ensure!(status.success(), "monitor ended with {status}: {complaints}");
        Ok(complaints)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // It has ended already, or is to end without more ado.
        let _ended = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// A monitor whose events are looked at.
pub struct Watch {
    monitor: Monitor,
    events: Receiver<Value>,
}

impl Watch {
    /// Returns when it watches.
    pub fn begin(world: &World, node: NodeNumber) -> Result<Self> {
        let mut monitor = Monitor::begin(world, node, &[], Stdio::piped())?;
        let out = monitor.process.stdout.take().context("no stdout")?;
        let (sender, events) = channel();
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if sender.send(event).is_err() {
                    break;
                }
            }
        });
        Ok(Self { monitor, events })
    }

    /// The next event that has all of what `expected` says and is `also` right; those before it are left out.
    pub fn find(&self, expected: &Value, also: impl Fn(&Value) -> bool) -> Result<Value> {
        let (begun, mut others) = (Instant::now(), Vec::new());
        loop {
            let left = TOLD_WITHIN.saturating_sub(begun.elapsed());
            match self.events.recv_timeout(left) {
                Ok(event) if has(&event, expected) && also(&event) => return Ok(event),
                Ok(event) => others.push(event),
                Err(_) => bail!("no event has {expected}; there were {others:?}"),
            }
        }
    }

    pub fn end(self) -> Result<()> {
        let complaints = self.monitor.end()?;
        ensure!(complaints.is_empty(), "monitor complains: {complaints}");
        Ok(())
    }
}

/// Does `value` have every field of `part`, and these all of theirs?
fn has(value: &Value, part: &Value) -> bool {
    match part.as_object() {
        Some(fields) => fields.iter().all(|(name, part)| has(&value[name], part)),
        None => value == part,
    }
}
