//! The test's side of the connection to an agent.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, anyhow, bail};
use serde::de::DeserializeOwned;

use super::protocol::{Bench, Dial, Load, Outcome, Protocol, Reply, Request, Side, Tally};

/// Running `lab-agent`. It ends when this is dropped, or with the lab.
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
    fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let mut wires = self.wires.lock().unwrap_or_else(PoisonError::into_inner);
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        let gone = || format!("agent {} is gone", self.name);
        wires.requests.write_all(line.as_bytes()).with_context(gone)?;
        line.clear();
        if wires.replies.read_line(&mut line).with_context(gone)? == 0 {
            bail!(gone());
        }
        let reply: Reply =
            serde_json::from_str(&line).with_context(|| format!("reply of agent {}", self.name))?;
        let reply = reply.map_err(|text| anyhow!("{}: {text}", self.name))?;
        serde_json::from_value(reply).with_context(|| format!("agent {} answered something else", self.name))
    }

    pub fn serve(&self, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::Serve { name: self.name.clone(), addresses: addresses.to_vec() })
    }

    /// Starts a server under another name than the agent's.
    pub fn serve_as(&self, name: &str, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::Serve { name: name.to_owned(), addresses: addresses.to_vec() })
    }

    /// Starts an SCTP server. Returns an error if the kernel has no SCTP.
    pub fn serve_sctp(&self, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::ServeSctp { name: self.name.clone(), addresses: addresses.to_vec() })
    }

    pub fn serve_bytes(&self, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::ServeBytes { addresses: addresses.to_vec() })
    }

    pub fn serve_bulk(&self, addresses: &[SocketAddr]) -> Result<()> {
        self.ask(&Request::ServeBulk { addresses: addresses.to_vec() })
    }

    pub fn dial(&self, dial: &Dial) -> Result<Vec<Outcome>> {
        self.ask(&Request::Dial(dial.clone()))
    }

    /// Dials the dials of a group one after another, and the groups at the same time. A dial ends
    /// with the first request that is not answered. The outcomes are in the order of the dials.
    pub fn dial_groups(&self, groups: Vec<Vec<Dial>>) -> Result<Vec<Vec<Vec<Outcome>>>> {
        self.ask(&Request::DialGroups(groups))
    }

    pub fn dial_shared(&self, targets: &[SocketAddr], rounds: u32, mapped: bool) -> Result<Vec<Outcome>> {
        self.ask(&Request::DialShared { targets: targets.to_vec(), rounds, mapped })
    }

    /// Sends one datagram of `payload` bytes from this address, its fragments of 1,400 bytes in
    /// this order, and waits for the answer for `timeout_ms`.
    pub fn dial_in_fragments(
        &self,
        source: IpAddr,
        target: SocketAddr,
        payload: usize,
        order: &[usize],
        timeout_ms: u64,
    ) -> Result<Outcome> {
        self.ask(&Request::DialInFragments { source, target, payload, order: order.to_vec(), timeout_ms })
    }

    /// Opens a connection that stays open. Returns its number and the outcome of the first request.
    pub fn hold(&self, protocol: Protocol, target: SocketAddr) -> Result<(usize, Outcome)> {
        self.hold_as(&Dial::new(protocol, target))
    }

    /// Opens a connection that stays open, as the dial asks.
    pub fn hold_as(&self, dial: &Dial) -> Result<(usize, Outcome)> {
        self.ask(&Request::Hold(dial.clone()))
    }

    /// Opens `count` connections to the targets in turn, each with one request, and returns their
    /// numbers. Returns an error if one fails.
    pub fn hold_many(&self, protocol: Protocol, targets: &[SocketAddr], count: usize) -> Result<Vec<usize>> {
        self.ask(&Request::HoldMany { targets: targets.to_vec(), protocol, count })
    }

    /// Makes one request over each connection. Returns ends and outcome of those that were not
    /// answered.
    pub fn ping_many(&self, connections: &[usize]) -> Result<Vec<(String, Outcome)>> {
        self.ask(&Request::PingMany { connections: connections.to_vec() })
    }

    pub fn ping(&self, connection: usize) -> Result<Outcome> {
        self.ask(&Request::Ping { connection })
    }

    pub fn release(&self, connection: usize) -> Result<()> {
        self.ask(&Request::Release { connection })
    }

    pub fn start_load(&self, load: &Load) -> Result<usize> {
        self.ask(&Request::StartLoad(load.clone()))
    }

    pub fn peek_load(&self, load: usize) -> Result<Tally> {
        self.ask(&Request::PeekLoad { load })
    }

    /// Has all loads make no further requests. [`Self::stop_load`] waits for those under way.
    pub fn end_loads(&self) -> Result<()> {
        self.ask(&Request::EndLoads)
    }

    pub fn stop_load(&self, load: usize) -> Result<Tally> {
        self.ask(&Request::StopLoad { load })
    }

    /// Runs a benchmark, and returns the results of each side.
    pub fn bench(&self, bench: &Bench) -> Result<Vec<Side>> {
        self.ask(&Request::Bench(bench.clone()))
    }

    /// Returns status and body of `GET http://address/path`.
    pub fn http_get(&self, address: SocketAddr, path: &str) -> Result<(u16, String)> {
        self.ask(&Request::HttpGet { address, path: path.to_owned() })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The agent may have ended already.
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}
