//! Switches from each mode to each other, by a changed file and by another process, and from and to the real kube-proxy,
//! while clients connect; prints a matrix of failed connections.

use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use behaviour::{
    case::Variants,
    check,
    fixtures::{BALANCED, EXTERNAL_LOCAL_ON_NODE1, ServiceFixture},
    proxy,
    setting::{PathKind, ProxyKind, Setting},
    state::State,
    world::World,
};
use clap::Parser;
use lab::{
    Protocol, Tally,
    address::{FAMILIES, Family},
    agent::protocol::Load,
    cluster::{NODES, OUTSIDE, node_name},
    wait,
};
use scenario::{Outcome, Scenario as Test, Shared, Trial};

#[derive(Parser)]
struct Selection {
    #[command(flatten)]
    harness: scenario::Arguments,
    /// Modes to switch between [default: all that this kernel can do]
    #[arg(long, value_enum)]
    proxy: Vec<ProxyKind>,
    /// Also from and to the real kube-proxy, in its modes iptables and nftables
    #[arg(long)]
    kube_proxy: bool,
    /// TCP connections that are held open over each switch
    #[arg(long, default_value_t = 1_000)]
    connections: usize,
}

const OURS: [ProxyKind; 5] =
    [ProxyKind::Ebpf, ProxyKind::Nftables, ProxyKind::Iptables, ProxyKind::Ipvs, ProxyKind::Userspace];
const REAL: [ProxyKind; 2] = [ProxyKind::KubeProxyIptables, ProxyKind::KubeProxyNftables];

const SERVICES: [&ServiceFixture; 2] = [&BALANCED, &EXTERNAL_LOCAL_ON_NODE1];
const CLIENTS: [&str; 4] = ["client-1", "client-2", "node1", OUTSIDE];
/// How long a process may take to follow its file, and to remove what the former mode has left.
const SWITCHES_WITHIN: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum By {
    /// A changed file, which the process follows.
    File,
    /// Another process, after the first was told to end.
    Process,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Switch {
    from: ProxyKind,
    to: ProxyKind,
    by: By,
}

/// Failed connections of each switch.
type Matrix = Arc<Mutex<BTreeMap<Switch, String>>>;

struct Run {
    world: World,
    connections: usize,
    /// What each proxy programs on the nodes, started where nothing was.
    fresh: BTreeMap<ProxyKind, Vec<State>>,
    matrix: Matrix,
}

fn main() -> ExitCode {
    let arguments = Selection::parse();
    if let Err(error) = lab::cluster::remove_on_signals() {
        eprintln!("switching: {error:#}");
        return ExitCode::FAILURE;
    }
    let chosen = if arguments.proxy.is_empty() { OURS.to_vec() } else { arguments.proxy };
    let (modes, skipped): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|mode| missing(*mode).is_none());
    let matrix = Matrix::default();
    let mut trials: Vec<Trial> = skipped.iter().map(|mode| skip(*mode)).collect();
    trials.extend(trials_of(&modes, ours(&modes), false, arguments.connections, &matrix));
    if arguments.kube_proxy {
        let all = [modes.as_slice(), &REAL].concat();
        trials.extend(trials_of(&all, with_the_real_one(&modes), true, arguments.connections, &matrix));
    }
    let is_listing = arguments.harness.list;
    let result = scenario::run(arguments.harness, trials);
    if !is_listing {
        print(&matrix);
    }
    result
}

/// Why this machine cannot do it. What cannot be found out is told by the scenarios.
fn missing(proxy: ProxyKind) -> Option<String> {
    proxy::missing_for(proxy).ok().flatten()
}

fn skip(mode: ProxyKind) -> Trial {
    let run = move |(): &mut ()| Ok(Outcome::Skipped(missing(mode).unwrap_or_default()));
    let mut trials = Shared::new(|| Ok(Ok(()))).trials([Test::new(format!("from and to {mode}"), run)]);
    // There is exactly the one.
    trials.remove(0)
}

/// Each pair, in an order in which each switch begins where the one before has ended.
fn ours(modes: &[ProxyKind]) -> Vec<Switch> {
    let mut order: Vec<ProxyKind> = Vec::new();
    for (number, first) in modes.iter().enumerate() {
        order.extend(modes.iter().skip(number + 1).flat_map(|second| [*first, *second]));
    }
    order.extend(modes.first());
    let pairs = order.windows(2).filter_map(|pair| Some((*pair.first()?, *pair.last()?)));
    let pairs: Vec<_> = pairs.filter(|(from, to)| from != to).collect();
    let each = |by: By| pairs.iter().map(move |(from, to)| Switch { from: *from, to: *to, by });
    each(By::File).chain(each(By::Process)).collect()
}

fn with_the_real_one(modes: &[ProxyKind]) -> Vec<Switch> {
    let pairs = REAL.into_iter().flat_map(|real| modes.iter().map(move |ours| (real, *ours)));
    let there_and_back = |(real, ours)| {
        [Switch { from: real, to: ours, by: By::Process }, Switch { from: ours, to: real, by: By::Process }]
    };
    pairs.flat_map(there_and_back).collect()
}

fn trials_of(
    proxies: &[ProxyKind],
    switches: Vec<Switch>,
    api_server: bool,
    connections: usize,
    matrix: &Matrix,
) -> Vec<Trial> {
    let (matrix, proxies) = (Arc::clone(matrix), proxies.to_vec());
    let first = proxies.first().copied();
    let run = Shared::new(move || {
        let Some(first) = first else { return Ok(Err("no mode can be tested here".to_owned())) };
        if let Some(reason) = proxies.iter().find_map(|proxy| missing(*proxy)) {
            return Ok(Err(reason));
        }
        let world = World::with_services(setting(first), api_server, |lab, objects| {
            SERVICES.iter().try_for_each(|service| service.publish(lab, objects, service.endpoints))
        })?;
        let mut run = Run { world, connections, fresh: BTreeMap::new(), matrix };
        run.start_each(&proxies)?;
        Ok(Ok(run))
    });
    run.trials(
        switches
            .into_iter()
            .map(|switch| Test::new(switch.to_string(), move |run: &mut Run| run.switch(switch))),
    )
}

fn setting(proxy: ProxyKind) -> Setting {
    Setting::new(proxy, PathKind::Sockets)
}

impl Run {
    /// What is programmed by each where nothing was before. A clean-up leaves what was before it.
    fn start_each(&mut self, proxies: &[ProxyKind]) -> Result<()> {
        self.end()?;
        self.clean()?;
        let nothing = self.states()?;
        for proxy in proxies {
            drop(self.world.swap(setting(*proxy))?);
            let fresh = self.settled_states().with_context(|| format!("starting {proxy}"))?;
            ensure!(fresh != nothing, "{proxy} has programmed nothing that can be seen");
            self.fresh.insert(*proxy, fresh);
            self.end()?;
            self.clean()?;
            let left = differences(&self.states()?, &nothing);
            ensure!(left.is_empty(), "cleanup after {proxy}: {left:#?}");
        }
        let first = proxies.first().ok_or_else(|| anyhow!("no proxy"))?;
        drop(self.world.swap(setting(*first))?);
        self.world.settle()
    }

    fn end(&mut self) -> Result<()> {
        NODES.into_iter().try_for_each(|node| self.world.proxy(node)?.terminate())
    }

    /// `proxy-ctl cleanup` on each node.
    fn clean(&self) -> Result<()> {
        NODES.into_iter().try_for_each(|node| self.world.cleanup(node))
    }

    fn states(&self) -> Result<Vec<State>> {
        NODES.into_iter().map(|node| State::read(&self.world.lab, node)).collect()
    }

    /// With the same objects each time.
    fn settled_states(&mut self) -> Result<Vec<State>> {
        self.world.settle()?;
        self.world.settle_at_rest()?;
        self.states()
    }

    fn switch(&mut self, switch: Switch) -> Result<()> {
        if self.world.setting.proxy != switch.from {
            self.end()?;
            drop(self.world.swap(setting(switch.from))?);
        }
        self.world.settle().with_context(|| format!("in {}", switch.from))?;
        let held = self.hold()?;
        let loads = self.start_loads()?;
        let switched = self.carry_out(switch);
        // What comes after the switch counts as well.
        let settled = switched.and_then(|()| self.world.settle());
        let tallies = self.stop_loads(loads)?;
        settled.context("after the switch")?;
        let result = self.judge(switch, &held, &tallies);
        self.release(held)?;
        result?;
        self.nothing_left(switch.to)
    }

    fn carry_out(&mut self, switch: Switch) -> Result<()> {
        let to = setting(switch.to);
        match switch.by {
            By::File => self.world.switch(to)?,
            By::Process => {
                self.end()?;
                drop(self.world.swap(to)?);
            }
        }
        for node in NODES {
            let world = &self.world;
            wait::until(&format!("node{node} is in mode {}", switch.to), SWITCHES_WITHIN, || {
                match world.proxy_mode(node) {
                    Ok(mode) if mode == to.datapath().mode() => Ok(Some(())),
                    Ok(other) => Err(format!("it is in mode {other}; {}", world.logs())),
                    Err(error) => Err(format!("{error:#}; {}", world.logs())),
                }
            })?;
        }
        Ok(())
    }

    /// Connections of every client, to cluster IPs and node ports.
    fn hold(&self) -> Result<Held> {
        let share = self.connections.div_ceil(CLIENTS.len());
        let mut held = Held { streams: Vec::new(), datagrams: Vec::new() };
        for client in CLIENTS {
            let agent = self.world.agent(client)?;
            let targets = FAMILIES.map(|family| self.target(client, family));
            let targets = targets.into_iter().collect::<Result<Vec<_>>>()?;
            held.streams.push((client, agent.hold_many(Protocol::Tcp, &targets, share)?));
            held.datagrams.push((client, agent.hold_many(Protocol::Udp, &targets, FAMILIES.len())?));
        }
        Ok(held)
    }

    fn target(&self, client: &str, family: Family) -> Result<std::net::SocketAddr> {
        match client {
            OUTSIDE => self.world.node_port(&BALANCED, 1, family),
            _ => Ok(self.world.cluster_ip(&BALANCED, family)),
        }
    }

    fn start_loads(&self) -> Result<Loads> {
        let mut loads = Vec::new();
        for client in CLIENTS {
            for variant in Variants::All.list() {
                let target = self.target(client, variant.family)?;
                let protocol = variant.protocol;
                let load = Load { target, protocol, clients: 1, pause_micros: 5_000, timeout_ms: 2_000 };
                let number = self.world.agent(client)?.start_load(&load)?;
                loads.push((client, format!("{client}, {variant}"), number));
            }
        }
        Ok(loads)
    }

    fn stop_loads(&self, loads: Loads) -> Result<Vec<(String, Tally)>> {
        let stop = |(client, name, load): (&str, String, usize)| {
            Ok((name, self.world.agent(client)?.stop_load(load)?))
        };
        loads.into_iter().map(stop).collect()
    }

    fn judge(&self, switch: Switch, held: &Held, tallies: &[(String, Tally)]) -> Result<()> {
        let lost = self.lost(&held.streams)?;
        let silent = self.lost(&held.datagrams)?;
        let failed: u64 = tallies.iter().map(|(_, tally)| tally.failed).sum();
        let answered: u64 = tallies.iter().map(|(_, tally)| tally.answered).sum();
        let cell = format!("{failed}/{}, {}/{}", failed + answered, lost.len(), self.connections);
        self.matrix.lock().unwrap_or_else(PoisonError::into_inner).insert(switch, cell);
        // The process that carries connections takes them with it.
        let ends = switch.by == By::Process && setting(switch.from).datapath().is_a_process();
        ensure!(ends || lost.is_empty(), "{} held connections are lost: {:?}", lost.len(), lost.first());
        ensure!(silent.is_empty(), "datagrams of held sockets are not answered: {silent:?}");
        for (name, tally) in tallies {
            ensure!(tally.answered > 0, "{name}: nothing was answered: {tally:?}");
            // kube-proxy removes what another mode has left before it writes rules of its own.
            let may_fail = switch.to.is_kube_proxy() && switch.to.datapath() != switch.from.datapath();
            ensure!(may_fail || tally.failed_in_a_row <= 1, "{name}: a retry has failed too: {tally:?}");
        }
        Ok(())
    }

    /// What became of held connections that are not answered.
    fn lost(&self, held: &[(&str, Vec<usize>)]) -> Result<Vec<lab::Outcome>> {
        let mut lost = Vec::new();
        for (client, connections) in held {
            lost.extend(self.world.agent(client)?.ping_many(connections)?);
        }
        Ok(lost)
    }

    fn release(&self, held: Held) -> Result<()> {
        for (client, connections) in held.streams.into_iter().chain(held.datagrams) {
            let agent = self.world.agent(client)?;
            connections.into_iter().try_for_each(|connection| agent.release(connection))?;
        }
        Ok(())
    }

    /// The kernel has what it would have had without the former mode. What is left may go some time later.
    fn nothing_left(&mut self, proxy: ProxyKind) -> Result<()> {
        self.world.settle_at_rest()?;
        for client in CLIENTS {
            for variant in Variants::All.list() {
                let target = self.target(client, variant.family)?;
                let dial = lab::Dial::new(variant.protocol, target).times(30);
                check::answered_by(&self.world.dial(client, &dial)?, BALANCED.endpoints)?;
            }
        }
        let fresh = self.fresh.get(&proxy).with_context(|| format!("{proxy} was never started"))?;
        wait::until("nothing of the former mode is left", SWITCHES_WITHIN, || {
            let states = self.states().map_err(|error| format!("{error:#}"))?;
            let differences = differences(&states, fresh);
            if differences.is_empty() { Ok(Some(())) } else { Err(format!("{differences:#?}")) }
        })
    }
}

struct Held {
    streams: Vec<(&'static str, Vec<usize>)>,
    datagrams: Vec<(&'static str, Vec<usize>)>,
}

type Loads = Vec<(&'static str, String, usize)>;

fn differences(states: &[State], expected: &[State]) -> Vec<String> {
    let of_node = |(node, (state, expected)): (u8, (&State, &State))| {
        let differences = state.differences(expected);
        differences.into_iter().map(move |one| format!("{}: {one}", node_name(node))).collect::<Vec<_>>()
    };
    NODES.into_iter().zip(states.iter().zip(expected)).flat_map(of_node).collect()
}

impl std::fmt::Display for Switch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by = match self.by {
            By::File => "by a changed file",
            By::Process => "by another process",
        };
        write!(formatter, "{} to {}, {by}", self.from, self.to)
    }
}

/// Lines that begin with `| ` are shown by `cargo xtask test`.
fn print(matrix: &Matrix) {
    let matrix = matrix.lock().unwrap_or_else(PoisonError::into_inner);
    for by in [By::File, By::Process] {
        let of_kind = || matrix.keys().filter(|switch| switch.by == by);
        let mut targets: Vec<ProxyKind> = of_kind().map(|switch| switch.to).collect();
        targets.sort_unstable();
        targets.dedup();
        if targets.is_empty() {
            continue;
        }
        let what = match by {
            By::File => "live",
            By::Process => "new process",
        };
        let names: Vec<String> = targets.iter().map(ProxyKind::to_string).collect();
        println!("| {what}: failed of new connections, lost of held ones | {} |", names.join(" | "));
        println!("|---{}|", "|---".repeat(targets.len()));
        let mut sources: Vec<ProxyKind> = of_kind().map(|switch| switch.from).collect();
        sources.sort_unstable();
        sources.dedup();
        for from in sources {
            let cell = |to: &ProxyKind| matrix.get(&Switch { from, to: *to, by }).map_or("", String::as_str);
            let cells: Vec<&str> = targets.iter().map(cell).collect();
            println!("| from {from} | {} |", cells.join(" | "));
        }
    }
}
