//! Runs `proxy-ctl monitor` on a node of the lab.

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

/// Time within which an event is recorded.
const TOLD_WITHIN: Duration = Duration::from_secs(30);

/// Running `proxy-ctl monitor` with its events. It ends when this is dropped.
pub struct Watch {
    process: Child,
    complaints: BufReader<ChildStderr>,
    events: Receiver<Value>,
}

impl Watch {
    /// Starts `proxy-ctl monitor`, and returns when it watches.
    pub fn begin(world: &World, node: NodeNumber) -> Result<Self> {
        let mut command = world.proxy_on(node)?.tool_command(&world.lab, &["monitor", "--output", "json"])?;
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting proxy-ctl monitor")?;
        let complaints = BufReader::new(process.stderr.take().context("no stderr")?);
        let out = process.stdout.take().context("no stdout")?;
        let (sender, events) = channel();
        let mut watch = Self { process, complaints, events };
        let mut first = String::new();
        watch.complaints.read_line(&mut first)?;
        ensure!(first.starts_with("watching"), "monitor says {first:?}");
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if sender.send(event).is_err() {
                    break;
                }
            }
        });
        Ok(watch)
    }

    /// Returns the next event that has all fields of `expected` and for which `also` returns true.
    /// Events before it are lost.
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

    /// Ends the command as Ctrl-C does. It must have written nothing to stderr.
    pub fn end(mut self) -> Result<()> {
        kill(Pid::from_raw(self.process.id().try_into()?), Signal::SIGINT).context("ending monitor")?;
        let mut complaints = String::new();
        self.complaints.read_to_string(&mut complaints)?;
        let status = self.process.wait()?;
        ensure!(status.success(), "monitor ended with {status}: {complaints}");
        ensure!(complaints.is_empty(), "monitor complains: {complaints}");
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The process has ended already, or it is ended now.
        let _ended = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// Returns true if `value` has every field of `part`, down to the fields of these.
fn has(value: &Value, part: &Value) -> bool {
    match part.as_object() {
        Some(fields) => fields.iter().all(|(name, part)| has(&value[name], part)),
        None => value == part,
    }
}
