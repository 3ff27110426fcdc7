//! Shows proxy-ctl at work: a cluster, its services, who answers whom, and how it follows changes.

use std::{
    io::{IsTerminal as _, Write as _},
    net::SocketAddr,
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use behaviour::{
    check,
    fixtures::{BALANCED, ON_NODE2, ServiceFixture},
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};
use clap::Parser;
use lab::{
    Dial, Protocol, Tally,
    address::{Family, node},
    agent::protocol::Load,
    cluster::{NODES, OUTSIDE, SERVER_PORT},
};

#[derive(Parser)]
#[command(
    name = "cargo xtask demo",
    bin_name = "cargo xtask demo",
    about = "Shows how proxy-ctl serves a small cluster in network namespaces",
    after_help = "Example:\n  cargo xtask demo --keep      # shows the demo, and leaves the cluster up\n  cargo xtask demo --remove    # removes the cluster"
)]
struct Arguments {
    /// Feed the proxies from a real etcd and kube-apiserver
    #[arg(long)]
    api_server: bool,
    /// Leave the cluster up and print how to look around
    #[arg(long)]
    keep: bool,
    /// Remove clusters that were kept, and end
    #[arg(long)]
    remove: bool,
    /// Seconds that each step is shown
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Show everything that cargo and apt print before the demo begins
    #[arg(long)]
    verbose: bool,
}

/// Service with a node port, one endpoint on node 1, and two on node 2.
const WEB: ServiceFixture =
    ServiceFixture { name: "web", endpoints: &["web-1", "web-2", "web-3"], ..BALANCED };
const QUEUE: ServiceFixture = ServiceFixture { name: "queue", node_port: None, ..ON_NODE2 };

const TOPOLOGY: &str =
    "      outside 192.0.2.100 ──┬── fabric 192.0.2.0/24, 2001:db8:c0::/64 ──┬────────────────┐
                            │                                           │                │
                     node1 192.0.2.11 (proxy-ctl)              node2 192.0.2.12 (proxy-ctl)
                            │ routed veths, as Calico                   │ bridge cni0, as flannel
                     client-1  10.244.1.2                      client-2  10.244.2.2
                     web-1     10.244.1.3                      web-2     10.244.2.3
                                                               web-3     10.244.2.4";

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn heading(text: &str) {
    let line = "─".repeat(96_usize.saturating_sub(text.chars().count()));
    println!("\n── {text} {line}");
}

/// Runs the demo, and returns how many connections failed.
fn run(arguments: &Arguments) -> Result<u64> {
    lab::cluster::remove_on_signals()?;
    if arguments.remove {
        for name in lab::cluster::remove_kept()? {
            println!("removed {name}");
        }
        return Ok(0);
    }
    heading("the cluster");
    println!("{TOPOLOGY}\n");
    let source = if arguments.api_server { "a real kube-apiserver" } else { "a folder of manifests" };
    println!("starting proxy-ctl on both nodes; it reads Services and EndpointSlices from {source}");
    let setting = Setting::new(ProxyKind::Ebpf, PathKind::Sockets);
    let start = Instant::now();
    let mut world = World::with_services(setting, arguments.api_server, |lab, objects| {
        [WEB, QUEUE].iter().try_for_each(|service| service.publish(lab, objects, service.endpoints))
    })?;
    println!("both serve after {:.1} s", start.elapsed().as_secs_f32());

    heading("what node1 serves: proxy-ctl services");
    print!("{}", world.tool(1, &["services"])?);
    heading("which mode, and why: proxy-ctl status");
    print!("{}", world.tool(1, &["status"])?);
    heading("the same in the kernel: bpftool map dump name frontends4");
    dump(&world);

    heading("what a Service costs: client-1 dials one, and its endpoint directly");
    compare(&world)?;
    let shown = Duration::from_secs(arguments.seconds);
    let mut loads = Loads::start(&world)?;
    heading("who answers whom: five clients at once, each as fast as it is answered");
    loads.show(&world, shown)?;
    heading("endpoint web-3 is removed");
    world.set_endpoints(&WEB, &["web-1", "web-2"])?;
    loads.show(&world, shown)?;
    heading("endpoint web-3 is added again");
    world.set_endpoints(&WEB, WEB.endpoints)?;
    loads.show(&world, shown)?;
    heading("both controllers are killed with -9: the maps stay, connections go on");
    for number in NODES {
        world.kill(number)?;
    }
    loads.show(&world, shown)?;
    heading("they start again, and adopt what they find");
    for number in NODES {
        world.start(number)?;
    }
    world.settle()?;
    loads.show(&world, shown)?;
    let (answered, failed) = loads.stop(&world)?;
    heading("in the end");
    println!("{answered} connections were answered, {failed} failed");
    if arguments.keep {
        keep(world)?;
    } else {
        drop(world);
        println!("the cluster is removed");
    }
    Ok(failed)
}

const DUMP_LINES: usize = 12;

fn dump(world: &World) {
    let map = world.lab.bpffs(1).join("proxy-ctl/v1/maps/frontends4");
    match Command::new("bpftool").args(["map", "dump", "pinned"]).arg(&map).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            for line in text.lines().take(DUMP_LINES) {
                println!("{line}");
            }
            println!("  … {} lines", text.lines().count());
        }
        Err(_) => println!("  (bpftool is not installed; the package of that name shows this map)"),
    }
}

/// Number of connections of a round, and number of rounds of each way. The two ways take turns,
/// because other work on the machine comes and goes.
const ROUND: u32 = 100;
const ROUNDS: u32 = 20;

/// Shows how long connections take through a Service and without one.
fn compare(world: &World) -> Result<()> {
    let ways = [
        ("ClusterIP of queue", world.cluster_ip(&QUEUE, Family::V4)),
        ("its endpoint web-2", SocketAddr::new(world.addresses("web-2")?.of(Family::V4), SERVER_PORT)),
    ];
    let mut times: [Vec<u64>; 2] = Default::default();
    for _ in 0..ROUNDS {
        for ((_, target), times) in ways.iter().zip(&mut times) {
            let outcomes = world.dial("client-1", &Dial::new(Protocol::Tcp, *target).times(ROUND))?;
            times.extend(check::answered(&outcomes)?.iter().map(|answer| answer.micros));
        }
    }
    println!(
        "{:<20} {:<22} {:>11} {:>10} {:>10}",
        "client-1 dials", "", "connections", "median us", "90 % us"
    );
    for ((name, target), times) in ways.iter().zip(&mut times) {
        times.sort_unstable();
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
        println!("{name:<20} {:<22} {:>11} {:>10} {:>10}", target.to_string(), times.len(), at(50), at(90));
    }
    println!("each with a request and its answer; the programs of the demo are not optimised");
    Ok(())
}

/// Clients that dial until they are stopped.
struct Loads {
    running: Vec<Running>,
}

struct Running {
    client: &'static str,
    what: String,
    load: usize,
    /// Counts at the last check.
    before: Tally,
}

impl Loads {
    fn start(world: &World) -> Result<Self> {
        let web = world.cluster_ip(&WEB, Family::V4);
        let queue = world.cluster_ip(&QUEUE, Family::V6);
        let node_port = world.node_port(&WEB, 1, Family::V4)?;
        let from = [
            ("client-1", "web", web, Protocol::Tcp),
            ("client-2", "web", web, Protocol::Udp),
            ("client-2", "queue", queue, Protocol::Tcp),
            ("node1", "web", web, Protocol::Tcp),
            (OUTSIDE, "web", node_port, Protocol::Tcp),
        ];
        let mut running = Vec::new();
        for (client, name, target, protocol) in from {
            running.push(Self::start_one(world, client, name, target, protocol)?);
        }
        Ok(Self { running })
    }

    fn start_one(
        world: &World,
        client: &'static str,
        name: &str,
        target: SocketAddr,
        protocol: Protocol,
    ) -> Result<Running> {
        let load = Load { pause_micros: 0, ..Load::new(protocol, target) };
        let number = world.agent(client)?.start_load(&load)?;
        let what = format!("{name} {target} {protocol}");
        Ok(Running { client, what, load: number, before: Tally::default() })
    }

    /// Shows what happens from now on, for `duration`. On a terminal, it shows this while it
    /// happens.
    fn show(&mut self, world: &World, duration: Duration) -> Result<()> {
        for load in &mut self.running {
            load.before = world.agent(load.client)?.peek_load(load.load)?;
        }
        let start = Instant::now();
        let live = std::io::stdout().is_terminal();
        let mut lines = 0;
        loop {
            let over = start.elapsed() >= duration;
            if live || over {
                let table = self.table(world, start.elapsed())?;
                if lines > 0 {
                    print!("\x1b[{lines}A\x1b[J");
                }
                lines = table.lines().count();
                print!("{table}");
                std::io::stdout().flush().context("writing to standard output")?;
            }
            if over {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(250));
        }
    }

    fn table(&self, world: &World, elapsed: Duration) -> Result<String> {
        use std::fmt::Write as _;
        let seconds = elapsed.as_secs_f64().max(0.001);
        let mut table =
            format!("{:<9} {:<34} {:<8} {:>6} {:>8}   failed\n", "client", "dials", "answers", "per s", "us");
        for load in &self.running {
            let now = world.agent(load.client)?.peek_load(load.load)?;
            let mut first = (load.client, load.what.as_str(), (now.failed - load.before.failed).to_string());
            for (backend, share) in &now.backends {
                let before = load.before.backends.get(backend).copied().unwrap_or_default();
                let answered = share.answered - before.answered;
                if answered == 0 {
                    continue;
                }
                let micros = (share.micros - before.micros) / answered;
                let rate = answered as f64 / seconds;
                let (client, what, failed) = std::mem::take(&mut first);
                writeln!(table, "{client:<9} {what:<34} {backend:<8} {rate:>6.0} {micros:>8}   {failed}")?;
            }
        }
        Ok(table)
    }

    /// Stops the clients. Returns how many connections were answered and how many failed since they
    /// began.
    fn stop(self, world: &World) -> Result<(u64, u64)> {
        let (mut answered, mut failed) = (0, 0);
        for load in self.running {
            let tally = world.agent(load.client)?.stop_load(load.load)?;
            for (failure, count) in &tally.failures {
                println!("  {} to {}: {count} x {failure}", load.client, load.what);
            }
            answered += tally.answered;
            failed += tally.failed;
        }
        Ok((answered, failed))
    }
}

/// Leaves the cluster up, and prints hints: commands that root can paste.
fn keep(world: World) -> Result<()> {
    heading("it stays: look around as root");
    let lab = world.lab.name();
    let bpffs = world.lab.bpffs(1).display().to_string();
    let web = world.cluster_ip(&WEB, Family::V4);
    let program = std::env::current_exe().context("finding this program")?.with_file_name("proxy-ctl");
    let on_node1 = format!("nsenter --net=/run/netns/{lab}-node1 {}", program.display());
    for command in ["services", "status", "flows"] {
        println!("{on_node1} {command} --bpffs {bpffs}");
    }
    println!("ip netns exec {lab}-client-1 curl -s {web}");
    println!("ip netns exec {lab}-{OUTSIDE} curl -s {}:30080", node(1).v4);
    println!("bpftool map dump pinned {bpffs}/proxy-ctl/v1/maps/backends4");
    println!("ls {}    # manifests, configuration, logs", world.lab.directory().display());
    println!("cargo xtask demo --remove    # when you have seen enough");
    world.keep()
}
