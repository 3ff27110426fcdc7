//! Figures that need a real API server and many Services: how long a cold proxy takes until the first connection, what
//! it holds in memory at most, how long after the API server's acknowledgement of an endpoint change the first
//! connection follows it, what a restart writes, how long the clean-up takes. For each mode, and beside it the real
//! kube-proxy, in one run.

mod change;
mod metrics;
mod subject;

use std::{
    io::{self, Write as _},
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use behaviour::setting::ProxyKind;
use clap::Parser;
use control_plane::{ADMIN, ApiServer, Options, objects::Bulk};
use lab::{
    Agent, Lab,
    address::gateway,
    cluster::{FABRIC, PodProcesses, node_name},
};
use serde_json::json;

use crate::subject::Subject;

#[derive(Parser)]
#[command(
    about = "Endpoint changes, cold start, memory and clean-up with a real API server and many Services"
)]
struct Arguments {
    /// Services beside the one that is dialled
    #[arg(long, default_value_t = 10_000)]
    services: usize,
    /// Endpoints of each
    #[arg(long, default_value_t = 10)]
    endpoints: usize,
    /// Endpoint changes that are measured
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Who is measured; given again, one after the other in the same cluster
    #[arg(long = "proxy", value_enum, default_values_t = [ProxyKind::Ebpf])]
    proxies: Vec<ProxyKind>,
    /// Seconds until a proxy that has not served yet, or not cleaned up yet, is given up
    #[arg(long, default_value_t = 600)]
    patience: u64,
}

/// Times in milliseconds, memory in megabytes. `None`: not within [`Arguments::patience`].
struct Figures {
    cold_start: Option<f64>,
    memory: f64,
    change: Option<Change>,
    /// Entries that a process writes that starts after kill -9 with nothing changed.
    written_again: Option<f64>,
    clean_up: Option<f64>,
}

struct Change {
    median: f64,
    longest: f64,
}

struct Cluster {
    lab: Lab,
    client: Agent,
    server: ApiServer,
    addresses: [Ipv4Addr; 2],
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    lab::cluster::remove_on_signals()?;
    let mut lab = Lab::new()?;
    for (node, pod) in [(1, "client"), (1, "server-a"), (2, "server-b")] {
        lab.add_pod(node, pod, PodProcesses::InNodeCgroup)?;
    }
    let _servers = (lab.server("server-a")?, lab.server("server-b")?);
    let cluster = Cluster::start(lab, &arguments)?;
    let mut table = vec![
        ["", "cold start", "memory", "change p50", "change max", "written anew", "clean-up"]
            .map(str::to_owned),
    ];
    for proxy in &arguments.proxies {
        let figures = step(&proxy.to_string(), || cluster.measure(*proxy, &arguments))?;
        table.push(figures.row(proxy));
    }
    for row in table {
        let [name, cells @ ..] = row;
        let cells: String = cells.iter().map(|cell| format!("{cell:>14}")).collect();
        println!("{name:<20}{cells}");
    }
    Ok(())
}

impl Figures {
    fn row(&self, proxy: &ProxyKind) -> [String; 7] {
        let time = |time: Option<f64>| time.map_or_else(|| "given up".to_owned(), |ms| format!("{ms:.1} ms"));
        let change = |of: fn(&Change) -> f64| {
            self.change.as_ref().map_or_else(|| "-".to_owned(), |change| time(Some(of(change))))
        };
        [
            proxy.to_string(),
            time(self.cold_start),
            format!("{:.1} MB", self.memory),
            change(|change| change.median),
            change(|change| change.longest),
            self.written_again.map_or_else(|| "-".to_owned(), |count| format!("{count:.0}")),
            time(self.clean_up),
        ]
    }
}

impl Cluster {
    fn start(lab: Lab, arguments: &Arguments) -> Result<Self> {
        let client = lab.agent("client")?;
        let options = Options {
            address: gateway().v4.into(),
            namespace: Some(lab.netns(FABRIC)?.namespace.clone()),
            ..Options::default()
        };
        let server = step("starting etcd and kube-apiserver", || {
            ApiServer::start_with(&lab.directory().join("control-plane"), options)
        })?;
        let addresses = [lab.netns("server-a")?.addresses.v4, lab.netns("server-b")?.addresses.v4];
        server.run(async |api| change::create(&api, addresses).await)?;
        // A proxy whose Node is missing waits for it.
        let own = lab.netns(&node_name(1))?.addresses.v4.to_string();
        server.apply(&json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node_name(1)},
            "status": {"addresses": [{"type": "InternalIP", "address": own}]},
        }))?;
        let bulk = Bulk::new("many", arguments.services, arguments.endpoints);
        let Arguments { services, endpoints, .. } = arguments;
        let label = format!("creating {services} Services with {endpoints} endpoints each");
        step(&label, || server.run(async |api| bulk.create(&api).await.map(drop)))?;
        Ok(Self { lab, client, server, addresses })
    }

    /// Nothing of the proxy is left afterwards.
    fn measure(&self, proxy: ProxyKind, arguments: &Arguments) -> Result<Figures> {
        let Self { lab, client, server, addresses } = self;
        let patience = Duration::from_secs(arguments.patience);
        if change::is_served(client)? {
            bail!("the Service is served before {proxy} runs");
        }
        let mut subject = Subject::new(lab, proxy, &server.kubeconfig(ADMIN))?;
        let started = Instant::now();
        subject.start(lab)?;
        let cold_start = change::wait_for_any(client, patience)?.then(|| millis(started.elapsed()));
        let mut change = None;
        if cold_start.is_some() {
            let rounds = arguments.rounds;
            let times = server.run(async |api| change::measure(&api, client, *addresses, rounds).await)?;
            let median = times.get(times.len() / 2).copied().unwrap_or_default();
            let longest = times.last().copied().unwrap_or_default();
            change = Some(Change { median: millis(median), longest: millis(longest) });
        }
        let memory = subject.peak_resident_bytes()? / 1e6;
        subject.kill()?;
        let mut written_again = None;
        if !proxy.is_kube_proxy() && cold_start.is_some() {
            subject.start(lab)?;
            written_again = Some(subject.written_by_the_first_sync()?);
            subject.kill()?;
        }
        let started = Instant::now();
        let clean_up = subject.clean_up(lab, patience)?.then(|| millis(started.elapsed()));
        Ok(Figures { cold_start, memory, change, written_again, clean_up })
    }
}

fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprint!("{what} … ");
    io::stderr().flush()?;
    let start = Instant::now();
    let done = work().with_context(|| what.to_owned())?;
    eprintln!("{:.1} s", start.elapsed().as_secs_f64());
    Ok(done)
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
