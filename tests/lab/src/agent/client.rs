//! The test's side of an agent.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, anyhow, bail};

use super::protocol::{Bench, Dial, Load, Outcome, Protocol, Rate, Reply, Request, Tally};

/// A running `lab-agent`. It ends when this is dropped, or with the lab.
pub struct Agent {
    name: String,
    wires: Mutex<Wires>,
    child: Child,
}

struct Wires {
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Agent {
    /// Starts an agent with a command that runs it in its network namespace.
    pub fn start(name: &str, mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let (Some(requests), Some(replies)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("agent {name} has no pipes")
        };
        let wires = Mutex::new(Wires { requests, replies: BufReader::new(replies) });
        Ok(Self { name: name.to_owned(), wires, child })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends one request and waits for its reply.
    pub fn ask(&self, request: &Request) -> Result<Reply> {
        let mut wires = self.wires.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        let gone = || format!("agent {} is gone", self.name);
        wires.requests.write_all(line.as_bytes()).with_context(gone)?;
        line.clear();
        if wires.replies.read_line(&mut line).with_context(gone)? == 0 {
            bail!(gone());
        }
        let reply = serde_json::from_str(&line).with_context(|| format!("reply of agent {}", self.name))?;
        if let Reply::Error(text) = reply {
            bail!("{}: {text}", self.name);
        }
        Ok(reply)
    }

    pub fn serve(&self, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::Serve { name: self.name.clone(), addresses: addresses.to_vec() }).map(drop)
    }

    pub fn serve_bytes(&self, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::ServeBytes { addresses: addresses.to_vec() }).map(drop)
    }

    pub fn dial(&self, dial: &Dial) -> Result<Vec<Outcome>> {
        self.outcomes(&Request::Dial(dial.clone()))
    }

    pub fn dial_shared(&self, targets: &[SocketAddr], rounds: u32, mapped: bool) -> Result<Vec<Outcome>> {
        self.outcomes(&Request::DialShared { targets: targets.to_vec(), rounds, mapped })
    }

    fn outcomes(&self, request: &Request) -> Result<Vec<Outcome>> {
        let Reply::Outcomes(outcomes) = self.ask(request)? else {
            bail!("agent {} answered something else", self.name)
        };
        Ok(outcomes)
    }

    /// Opens a connection that stays open; returns its number and what the first request met.
    pub fn hold(&self, protocol: Protocol, target: SocketAddr) -> Result<(usize, Outcome)> {
        let Reply::Held { connection, outcome } = self.ask(&Request::Hold { target, protocol })? else {
            bail!("agent {} answered something else", self.name)
        };
        Ok((connection, outcome))
    }

    pub fn ping(&self, connection: usize) -> Result<Outcome> {
        self.outcomes(&Request::Ping { connection })?
            .pop()
            .ok_or_else(|| anyhow!("agent {} sent no outcome", self.name))
    }

    pub fn release(&self, connection: usize) -> Result<()> {
        self.ask(&Request::Release { connection }).map(drop)
    }

    pub fn start_load(&self, load: &Load) -> Result<usize> {
        let Reply::Number(number) = self.ask(&Request::StartLoad(load.clone()))? else {
            bail!("agent {} answered something else", self.name)
        };
        Ok(number)
    }

    pub fn peek_load(&self, load: usize) -> Result<Tally> {
        self.tally(&Request::PeekLoad { load })
    }

    pub fn stop_load(&self, load: usize) -> Result<Tally> {
        self.tally(&Request::StopLoad { load })
    }

    fn tally(&self, request: &Request) -> Result<Tally> {
        let Reply::Tally(tally) = self.ask(request)? else {
            bail!("agent {} answered something else", self.name)
        };
        Ok(tally)
    }

    pub fn bench(&self, bench: &Bench) -> Result<Rate> {
        let Reply::Rate(rate) = self.ask(&Request::Bench(bench.clone()))? else {
            bail!("agent {} answered something else", self.name)
        };
        Ok(rate)
    }

    /// Status and body of `GET http://address/path`.
    pub fn http_get(&self, address: SocketAddr, path: &str) -> Result<(u16, String)> {
        let Reply::Http { status, body } = self.ask(&Request::HttpGet { address, path: path.to_owned() })?
        else {
            bail!("agent {} answered something else", self.name)
        };
        Ok((status, body))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended already.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}
