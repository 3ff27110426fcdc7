//! The agent's side of the connection to a test. It reads requests from standard input, and answers
//! on standard output.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, Write as _},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, to_value};

use super::{
    bench,
    dial::{self, Held},
    fragments,
    load::Running,
    protocol::{Dial, Outcome, Reply, Request},
    serve,
};
use crate::http;

/// Longest wait for an answer over HTTP.
const LIMIT: Duration = Duration::from_secs(5);

/// Serves requests until standard input ends.
pub fn run() -> Result<()> {
    let mut session = Session::default();
    for line in io::stdin().lock().lines() {
        let request =
            serde_json::from_str(&line.context("reading a request")?).context("parsing a request")?;
        let reply: Reply = session.carry_out(request).map_err(|error| format!("{error:#}"));
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &reply).context("writing a reply")?;
        out.write_all(b"\n").and_then(|()| out.flush()).context("writing a reply")?;
    }
    Ok(())
}

#[derive(Default)]
struct Session {
    held: BTreeMap<usize, Held>,
    loads: BTreeMap<usize, Running>,
    next: usize,
}

impl Session {
    fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    fn carry_out(&mut self, request: Request) -> Result<Value> {
        Ok(match request {
            Request::Serve { name, addresses } => {
                serve::describe(&name, &addresses).with_context(|| format!("serving on {addresses:?}"))?;
                to_value(())
            }
            Request::ServeSctp { name, addresses } => {
                serve::describe_sctp(&name, &addresses)
                    .with_context(|| format!("serving SCTP on {addresses:?}"))?;
                to_value(())
            }
            Request::ServeBytes { addresses } => {
                serve::bytes(&addresses).with_context(|| format!("serving on {addresses:?}"))?;
                to_value(())
            }
            Request::ServeBulk { addresses } => {
                serve::bulk(&addresses).with_context(|| format!("serving on {addresses:?}"))?;
                to_value(())
            }
            Request::Dial(dial) => to_value(dial::dial(&dial)),
            Request::DialGroups(groups) => to_value(dial::groups(&groups)?),
            Request::DialShared { targets, rounds, mapped } => {
                to_value(dial::shared(&targets, rounds, mapped)?)
            }
            Request::DialInFragments { source, target, payload, order, timeout_ms } => {
                let limit = Duration::from_millis(timeout_ms.max(1));
                to_value(fragments::dial(source, target, payload, &order, limit))
            }
            Request::Hold(dial) => {
                let opened = Held::open(&dial);
                let mut held = opened.with_context(|| format!("connecting to {}", dial.target))?;
                let outcome = held.ping();
                let connection = self.number();
                self.held.insert(connection, held);
                to_value((connection, outcome))
            }
            Request::HoldMany { targets, protocol, count } => {
                let mut connections = Vec::new();
                for target in targets.iter().cycle().take(count) {
                    let opened = Held::open(&Dial::new(protocol, *target));
                    let mut held = opened.with_context(|| format!("connecting to {target}"))?;
                    let outcome = held.ping();
                    ensure!(matches!(outcome, Outcome::Answered(_)), "{target}: {protocol}: {outcome}");
                    let connection = self.number();
                    self.held.insert(connection, held);
                    connections.push(connection);
                }
                to_value(connections)
            }
            Request::PingMany { connections } => {
                let mut failures = Vec::new();
                for connection in connections {
                    let held = self.held.get_mut(&connection);
                    let held = held.with_context(|| format!("no connection {connection}"))?;
                    let ends = held.ends();
                    let outcome = held.ping();
                    if !matches!(outcome, Outcome::Answered(_)) {
                        failures.push((ends, outcome));
                    }
                }
                to_value(failures)
            }
            Request::Ping { connection } => {
                let held = self.held.get_mut(&connection);
                to_value(held.with_context(|| format!("no connection {connection}"))?.ping())
            }
            Request::Release { connection } => {
                self.held.remove(&connection);
                to_value(())
            }
            Request::StartLoad(load) => {
                let number = self.number();
                self.loads.insert(number, Running::start(&load));
                to_value(number)
            }
            Request::PeekLoad { load } => {
                to_value(self.loads.get(&load).with_context(|| format!("no load {load}"))?.tally())
            }
            Request::EndLoads => {
                self.loads.values().for_each(Running::end);
                to_value(())
            }
            Request::StopLoad { load } => {
                to_value(self.loads.remove(&load).with_context(|| format!("no load {load}"))?.stop())
            }
            Request::Bench(bench) => to_value(bench::run(&bench)),
            Request::HttpGet { address, path } => {
                let (status, body) = http::get(address, &path, LIMIT)?;
                to_value((status, String::from_utf8_lossy(&body)))
            }
        }?)
    }
}
