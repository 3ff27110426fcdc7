//! Figures that need a real API server and many Services: how long after the API server's acknowledgement of an
//! endpoint change the first connection follows it, how long a cold controller takes, what it holds in memory.
//! The real kube-proxy can be measured in its place.

mod change;
mod metrics;
mod subject;

use std::{
    io::{self, Write as _},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use control_plane::{ADMIN, ApiServer, Options, objects::Bulk};
use lab::{
    Lab,
    address::gateway,
    cluster::{FABRIC, PodProcesses, node_name},
};
use serde_json::json;

use crate::{metrics::Metrics, subject::Subject};

#[derive(Parser)]
#[command(about = "Endpoint changes, cold start and memory with a real API server and many Services")]
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
    /// Who is measured
    #[arg(long, value_enum, default_value_t = Proxy::Ebpf)]
    proxy: Proxy,
    /// proxy-ctl [default: the one beside this program]
    #[arg(long, env = "PROXY_CTL")]
    proxy_ctl: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Proxy {
    /// proxy-ctl in mode ebpf
    Ebpf,
    /// proxy-ctl in mode nftables
    Nftables,
    /// The real kube-proxy in mode iptables
    KubeProxyIptables,
    /// The real kube-proxy in mode nftables
    KubeProxyNftables,
}

impl Proxy {
    pub(crate) const fn is_kube_proxy(self) -> bool {
        match self {
            Self::Ebpf | Self::Nftables => false,
            Self::KubeProxyIptables | Self::KubeProxyNftables => true,
        }
    }

    /// As the configuration names it.
    pub(crate) const fn mode(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables | Self::KubeProxyNftables => "nftables",
            Self::KubeProxyIptables => "iptables",
        }
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    lab::cluster::remove_on_signals()?;
    let mut lab = Lab::new()?;
    for (node, pod) in [(1, "client"), (1, "server-a"), (2, "server-b")] {
        lab.add_pod(node, pod, PodProcesses::InNodeCgroup)?;
    }
    let _servers = (lab.server("server-a")?, lab.server("server-b")?);
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
    let label =
        format!("creating {} Services with {} endpoints each", arguments.services, arguments.endpoints);
    step(&label, || server.run(async |api| bulk.create(&api).await.map(drop)))?;

    let mut subject = Subject::new(&lab, arguments.proxy, arguments.proxy_ctl, &server.kubeconfig(ADMIN))?;
    let started = Instant::now();
    subject.start(&lab)?;
    change::wait_for(&client, "server-a", Duration::from_secs(1800))?;
    println!("first connection after the start of the process: {:.0} ms", millis(started.elapsed()));
    match arguments.proxy.is_kube_proxy() {
        true => println!("  resident memory: {:.1} MB at most", subject.peak_resident_bytes()? / 1e6),
        false => report(&subject.metrics()?),
    }

    let times = server.run(async |api| change::measure(&api, &client, addresses, arguments.rounds).await)?;
    println!(
        "endpoint change, from the API server's acknowledgement to the first connection that follows it, {} rounds: \
         p50 {:.1} ms, max {:.1} ms",
        times.len(),
        millis(times.get(times.len() / 2).copied().unwrap_or_default()),
        millis(times.last().copied().unwrap_or_default()),
    );
    if !arguments.proxy.is_kube_proxy() {
        subject.kill()?;
        subject.start(&lab)?;
        let metrics = subject.metrics()?;
        println!("after kill -9 and a new start:");
        report(&metrics);
    }
    Ok(())
}

fn report(metrics: &Metrics) {
    println!("  from everything listed to everything programmed: {:.0} ms", metrics.first_sync_seconds * 1e3);
    println!("  table entries written: {:.0}, removed: {:.0}", metrics.written, metrics.removed);
    println!(
        "  resident memory: {:.1} MB now, {:.1} MB at most; tables: {:.1} MB",
        metrics.resident_bytes / 1e6,
        metrics.peak_resident_bytes / 1e6,
        metrics.table_bytes / 1e6
    );
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
