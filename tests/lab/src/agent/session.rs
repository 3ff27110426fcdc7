//! The agent's side: reads requests from standard input, answers on standard output.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};

use super::{
    bench,
    dial::{self, Held},
    load::Running,
    protocol::{Reply, Request},
    serve,
};

/// Serves requests until standard input ends.
pub fn run() -> Result<()> {
    let mut session = Session::default();
    for line in io::stdin().lock().lines() {
        let request =
            serde_json::from_str(&line.context("reading a request")?).context("parsing a request")?;
        let reply = session.carry_out(request).unwrap_or_else(|error| Reply::Error(format!("{error:#}")));
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

    fn carry_out(&mut self, request: Request) -> Result<Reply> {
        Ok(match request {
            Request::Serve { name, addresses } => {
                serve::describe(&name, &addresses).with_context(|| format!("serving on {addresses:?}"))?;
                Reply::Done
            }
            Request::ServeBytes { addresses } => {
                serve::bytes(&addresses).with_context(|| format!("serving on {addresses:?}"))?;
                Reply::Done
            }
            Request::Dial(dial) => Reply::Outcomes(dial::dial(&dial)),
            Request::DialShared { targets, rounds, mapped } => {
                Reply::Outcomes(dial::shared(&targets, rounds, mapped)?)
            }
            Request::Hold { target, protocol } => {
                let mut held =
                    Held::open(target, protocol).with_context(|| format!("connecting to {target}"))?;
                let outcome = held.ping();
                let connection = self.number();
                self.held.insert(connection, held);
                Reply::Held { connection, outcome }
            }
            Request::Ping { connection } => {
                let held =
                    self.held.get_mut(&connection).ok_or_else(|| anyhow!("no connection {connection}"))?;
                Reply::Outcomes(vec![held.ping()])
            }
            Request::Release { connection } => {
                self.held.remove(&connection);
                Reply::Done
            }
            Request::StartLoad(load) => {
                let number = self.number();
                self.loads.insert(number, Running::start(&load));
                Reply::Number(number)
            }
            Request::PeekLoad { load } => {
                Reply::Tally(self.loads.get(&load).ok_or_else(|| anyhow!("no load {load}"))?.tally())
            }
            Request::StopLoad { load } => {
                Reply::Tally(self.loads.remove(&load).ok_or_else(|| anyhow!("no load {load}"))?.stop())
            }
            Request::Bench(bench) => Reply::Rate(bench::run(&bench)),
            Request::HttpGet { address, path } => http_get(address, &path)?,
        })
    }
}

fn http_get(address: SocketAddr, path: &str) -> Result<Reply> {
    let limit = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, limit)?;
    stream.set_read_timeout(Some(limit))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { bail!("no HTTP answer from {address}") };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Reply::Http {
        status: status.ok_or_else(|| anyhow!("no HTTP status from {address}"))?,
        body: body.to_owned(),
    })
}
