//! Switches from each mode to each other, by a changed file and by another process, and from and to the real kube-proxy,
//! while clients connect; prints a matrix of failed connections.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use behaviour::{
    case::{Variant, Variants},
    check,
    fixtures::{BALANCED, EXTERNAL_LOCAL_ON_NODE1, GUARDED, PORT, ServiceFixture},
    proxy,
    selection::Selection,
    setting::{Datapath, PathKind, ProxyKind, Setting},
    state::{self, HOLDER, Parameters, State},
    world::World,
};
use clap::Parser;
use lab::{
    Lab, Objects, Protocol, Tally,
    address::{self, Addresses, FAMILIES, Family, NodeNumber},
    agent::protocol::Load,
    cluster::{NODES, OUTSIDE, node_name},
    objects::{Endpoint, Ingress, Service},
    wait,
};
use scenario::{Outcome, Scenario as Test, Shared, Trial};

// clap names a group of arguments after its struct, and the harness has `Arguments`.
#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    selection: Selection,
    /// TCP connections that are held open over each switch
    #[arg(long, default_value_t = 1_000)]
    connections: usize,
}

const SERVICES: [&ServiceFixture; 2] = [&BALANCED, &EXTERNAL_LOCAL_ON_NODE1];
const CLIENTS: [&str; 4] = ["client-1", "client-2", NODE, OUTSIDE];
/// Clients that call the Service itself by TCP, before and after a switch to mode ebpf from the same source ports.
const PORT_USERS: [&str; 3] = ["client-1", "client-2", NODE];
/// By each of them to each family. Which endpoint a connection goes to is random.
const PORTS: u16 = 8;
/// Below those that the kernel chooses.
const FIRST_PORT: u16 = 10_000;
/// How the names of those begin that modes leave as they have set them, as kube-proxy does; see docs/differences.md.
const STAYING_PARAMETERS: [&str; 2] = ["net/ipv4/conf/all/route_localnet", "net/ipv4/vs/"];
/// In the names of those of mode ipvs's device, which come and go with it.
const PARAMETERS_OF_DEVICE: &str = "/kube-ipvs0/";
/// The client that is the node itself.
const NODE: &str = "node1";
const PODS: [&str; 2] = ["client-1", "client-2"];
/// How long a process may take to follow its file, and to remove what the former mode has left.
const SWITCHES_WITHIN: Duration = Duration::from_secs(60);

/// The time that a client may go without an answer while the real kube-proxy has removed what
/// another mode has left, and not yet written its own. Datagrams show that it takes up to 3 s on
/// two busy cores; an attempt by TCP that begins in it is given up after 2 s more. The limit is ten
/// times as long, as a busy machine makes kube-proxy slow, which is nothing of ours. It is longer
/// on machines that are emulated, as `LAB_PATIENCE` says.
const KUBE_PROXY_GAP: Duration = Duration::from_secs(30);

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

impl Switch {
    /// kube-proxy removes the rules of another mode before it writes its own: what is sent meanwhile is not translated, and an answer that
    /// is not resets its connection. Programs of mode ebpf go on.
    fn has_gap(self) -> bool {
        let serves_on = self.from.datapath() == Datapath::Ebpf;
        self.to.is_kube_proxy() && self.to.datapath() != self.from.datapath() && !serves_on
    }

    /// The process that carries connections takes them with it, and nobody serves until the next one does.
    fn ends_connections(self) -> bool {
        self.by == By::Process && self.from.datapath().is_a_process()
    }

    /// UDP sockets of the client stay without answers. Mode ebpf translates for the node itself when a socket connects, and what
    /// was connected before depends on what the kernel still translates: to nobody, where a process has carried datagrams.
    /// After mode ipvs they are ended, and clients open them anew. See docs/differences.md. What is sent while nobody serves has an entry of
    /// connection tracking, without a masquerade: kube-proxy in mode ipvs removes it when it syncs again, and pods need no masquerade.
    fn strands(self, client: &str) -> bool {
        let stays_untranslated = self.to.datapath() == Datapath::Ebpf && client == NODE;
        let stays_unmasqueraded = self.to == ProxyKind::KubeProxyIpvs && !PODS.contains(&client);
        self.from.datapath().is_a_process() && (stays_untranslated || stays_unmasqueraded)
    }

    /// Packets of a connection, whose ends these are, are dropped until `cleanup`. Mode ipvs leads all packets to the chain of the
    /// source ranges, as kube-proxy's does. Rules of mode iptables drop there what has not been translated before. See docs/life-cycle.md.
    fn drops(self, ends: &str) -> bool {
        let kind = (self.from, self.to);
        kind == (ProxyKind::Ipvs, ProxyKind::KubeProxyIptables)
            && load_balancer()
                .both()
                .into_iter()
                .any(|address| ends.ends_with(&SocketAddr::new(address, PORT).to_string()))
    }

    /// How many of `held` connections may be lost. Where IPVS has one, it takes packets of others for it that have the same client, port and
    /// endpoint: when these end, so does what it knows. Endpoints of kube-proxy in mode iptables are reached without IPVS.
    fn mistaken(self, held: usize) -> usize {
        if (self.from, self.to) == (ProxyKind::Ipvs, ProxyKind::KubeProxyIptables) { held / 20 } else { 0 }
    }
}

/// What clients have met in a switch.
#[derive(Clone, Copy, Debug, Default)]
struct Met {
    connections: u64,
    failed: u64,
    /// Clients whose next attempt has failed too.
    without_retry: usize,
    held: usize,
    lost: usize,
    /// Of a UDP socket that stays open.
    longest_silence_micros: u64,
}

type Matrix = Arc<Mutex<BTreeMap<Switch, Met>>>;

struct Run {
    world: World,
    connections: usize,
    /// No connection has had it, or one above it, as its source port.
    free_port: u16,
    /// What is on the nodes without a proxy.
    nothing: Vec<State>,
    parameters: Vec<Parameters>,
    /// What each proxy programs on the nodes, started where nothing was.
    fresh: BTreeMap<ProxyKind, Vec<State>>,
    matrix: Matrix,
}

fn main() -> ExitCode {
    let CommandLine { selection, connections } = CommandLine::parse();
    if let Err(error) = lab::cluster::remove_on_signals() {
        eprintln!("switching: {error:#}");
        return ExitCode::FAILURE;
    }
    let (modes, skipped): (Vec<_>, Vec<_>) =
        selection.ours().into_iter().partition(|mode| missing(*mode).is_none());
    let matrix = Matrix::default();
    let mut trials: Vec<Trial> = skipped.iter().map(|mode| skip(*mode)).collect();
    trials.extend(trials_of(ours(&modes, selection.lean), false, connections, &matrix));
    let with_the_real_one = with_the_real_one(&selection.real(), &modes, selection.lean);
    if !with_the_real_one.is_empty() {
        trials.extend(trials_of(with_the_real_one, true, connections, &matrix));
    }
    let is_listing = selection.harness.list;
    let result = scenario::run(selection.harness, trials);
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

/// Each pair, in an order in which each switch begins where the one before has ended. Lean: each mode once from and once to,
/// by another process the other way round.
fn ours(modes: &[ProxyKind], lean: bool) -> Vec<Switch> {
    let each_pair = || {
        let with_later = |(number, first): (usize, &ProxyKind)| {
            let first = *first;
            modes.iter().skip(number + 1).flat_map(move |second| [first, *second])
        };
        modes.iter().enumerate().flat_map(with_later).collect()
    };
    let (live, by_process) = match lean {
        true => {
            let back = modes.iter().take(1).chain(modes.iter().skip(1).rev());
            (modes.to_vec(), back.copied().collect())
        }
        false => (each_pair(), each_pair()),
    };
    let along = |order: Vec<ProxyKind>, by: By| {
        let next = order.clone().into_iter().cycle().skip(1);
        let pairs = order.into_iter().zip(next).filter(|(from, to)| from != to);
        pairs.map(move |(from, to)| Switch { from, to, by })
    };
    along(live, By::File).chain(along(by_process, By::Process)).collect()
}

/// Lean: one of each.
fn with_the_real_one(real: &[ProxyKind], modes: &[ProxyKind], lean: bool) -> Vec<Switch> {
    let of_each = if lean { 1 } else { usize::MAX };
    let ours = || modes.iter().take(of_each);
    let pairs = real.iter().take(of_each).flat_map(|real| ours().map(move |ours| (*real, *ours)));
    let there_and_back = |(real, ours)| {
        [Switch { from: real, to: ours, by: By::Process }, Switch { from: ours, to: real, by: By::Process }]
    };
    pairs.flat_map(there_and_back).collect()
}

fn trials_of(switches: Vec<Switch>, api_server: bool, connections: usize, matrix: &Matrix) -> Vec<Trial> {
    let matrix = Arc::clone(matrix);
    let mut proxies: Vec<ProxyKind> = switches.iter().flat_map(|switch| [switch.from, switch.to]).collect();
    proxies.sort_unstable();
    proxies.dedup();
    let first = proxies.first().copied();
    let run = Shared::new(move || {
        let Some(first) = first else { return Ok(Err("no mode can be tested here".to_owned())) };
        if let Some(reason) = proxies.iter().find_map(|proxy| missing(*proxy)) {
            return Ok(Err(reason));
        }
        let world = World::with_services(setting(first), api_server, |lab, objects| {
            SERVICES.iter().try_for_each(|service| service.publish(lab, objects, service.endpoints))?;
            publish_guarded(lab, objects)?;
            NODES.into_iter().try_for_each(|node| masquerade_as_plugins_do(lab, node))
        })?;
        let (nothing, parameters, fresh) = Default::default();
        let mut run = Run { world, connections, free_port: FIRST_PORT, nothing, parameters, fresh, matrix };
        run.start_each(&proxies)?;
        Ok(Ok(run))
    });
    let switch = |switch: Switch| {
        Test::new(switch.to_string(), move |run: &mut Run| {
            run.switch(switch).inspect_err(|error| eprintln!("{switch}: {error:#}"))
        })
    };
    let cleanup = format!("clean-up after all{}", if api_server { ", the real one among them" } else { "" });
    run.trials(switches.into_iter().map(switch).chain([Test::new(cleanup, Run::clean_up)]))
}

/// Of [`GUARDED`].
fn load_balancer() -> Addresses {
    address::external(1, 91)
}

/// Its load-balancer addresses are for the client outside alone.
fn publish_guarded(lab: &Lab, objects: &mut Objects) -> Result<()> {
    let endpoint = |name: &&str| {
        let pod = lab.netns(name)?;
        Ok(Endpoint::ready(pod.addresses, pod.node.unwrap_or_default()))
    };
    let endpoints = GUARDED.endpoints.iter().map(endpoint).collect::<Result<Vec<_>>>()?;
    let client = lab.netns(OUTSIDE)?.addresses;
    let ingress = |address| Ingress { address, proxied: false };
    let service = Service {
        load_balancer: load_balancer().both().into_iter().map(ingress).collect(),
        source_ranges: vec![format!("{}/32", client.v4), format!("{}/128", client.v6)],
        ..GUARDED.service()
    };
    objects.set_service(&service, &endpoints);
    Ok(())
}

/// What pods send out of the cluster, so that netfilter tracks connections in each mode. Where nothing had it do so, mode ebpf's of sockets
/// are unknown to it, and a new one may get the port of one that is silent; see docs/life-cycle.md.
fn masquerade_as_plugins_do(lab: &Lab, node: NodeNumber) -> Result<()> {
    let of = |family, pods| format!("{family} saddr {pods} {family} daddr != {pods} masquerade");
    let rules = [of("ip", address::POD_RANGE4), of("ip6", address::POD_RANGE6)];
    lab::namespace::masquerade(&lab.netns(&node_name(node))?.namespace, &rules)
}

fn setting(proxy: ProxyKind) -> Setting {
    Setting::new(proxy, PathKind::Sockets)
}

impl Run {
    /// What is programmed by each where nothing was before. A clean-up leaves what was before it.
    fn start_each(&mut self, proxies: &[ProxyKind]) -> Result<()> {
        self.end()?;
        self.clean()?;
        self.nothing = self.states()?;
        self.parameters = self.read_parameters()?;
        for proxy in proxies {
            drop(self.world.swap(setting(*proxy))?);
            let fresh = self.settled_states().with_context(|| format!("starting {proxy}"))?;
            ensure!(fresh != self.nothing, "{proxy} has programmed nothing that can be seen");
            self.fresh.insert(*proxy, fresh);
            self.clean_up().with_context(|| format!("cleanup after {proxy}"))?;
        }
        let first = proxies.first().ok_or_else(|| anyhow!("no proxy"))?;
        drop(self.world.swap(setting(*first))?);
        self.world.settle()
    }

    fn end(&mut self) -> Result<()> {
        NODES.into_iter().try_for_each(|node| self.world.proxy(node)?.terminate())
    }

    /// On each node. What a kube-proxy has written goes too, if one was the last at work.
    fn clean(&self) -> Result<()> {
        let last = self.world.setting.proxy;
        // So does the table that keeps connections going which former rules have translated, where the mode has none of its own.
        let is_also = last.is_kube_proxy() || !last.datapath().is_netfilter();
        let also: &[_] = if is_also { &["--kube-proxy"] } else { &[] };
        NODES.into_iter().try_for_each(|node| self.world.cleanup(node, also))
    }

    fn clean_up(&mut self) -> Result<()> {
        self.end()?;
        self.clean()?;
        let left = differences(&self.states()?, &self.nothing);
        ensure!(left.is_empty(), "{left:#?}");
        self.parameters_stay()
    }

    fn read_parameters(&self) -> Result<Vec<Parameters>> {
        NODES.into_iter().map(|node| state::parameters(&self.world.lab, node)).collect()
    }

    fn parameters_stay(&self) -> Result<()> {
        let now = self.read_parameters()?;
        let is_same = |(name, value): &(&String, &String), before: &Parameters| {
            STAYING_PARAMETERS.iter().any(|staying| name.starts_with(staying))
                || name.contains(PARAMETERS_OF_DEVICE)
                || before.get(*name) == Some(*value)
        };
        let changed = now
            .iter()
            .zip(&self.parameters)
            .flat_map(|(now, before)| now.iter().filter(move |parameter| !is_same(parameter, before)));
        let changed: BTreeMap<_, _> = changed.collect();
        ensure!(changed.is_empty(), "kernel parameters are other than before: {changed:?}");
        Ok(())
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
        let former = self.world.setting.proxy;
        if former != switch.from {
            self.end()?;
            // The programs of mode ebpf would go on serving: kube-proxy does not know what only we have.
            if switch.from.is_kube_proxy() && !former.is_kube_proxy() {
                self.clean()?;
            }
            drop(self.world.swap(setting(switch.from))?);
        }
        self.world.settle().with_context(|| format!("in {}", switch.from))?;
        let held = self.hold()?;
        let mut loads = self.start_loads(false)?;
        loads.extend(self.start_loads(true)?);
        let used = self.use_ports(switch)?;
        let mut switched = self.carry_out(switch);
        if switch.ends_connections() {
            // Nobody serves before everything is programmed.
            switched = switched.and_then(|()| self.world.settle());
        }
        let used_again = self.dial_each(&used);
        // What comes after the switch counts as well.
        let leaves_hooks = switch.from == ProxyKind::Ebpf && switch.to.is_kube_proxy();
        let settled = switched.and_then(|()| match leaves_hooks {
            true => self.world.settle_by_new_service(),
            false => self.world.settle(),
        });
        let tallies = self.stop_loads(loads)?;
        settled.context("after the switch")?;
        let judged = self.judge(switch, &held, &tallies);
        self.release(held)?;
        judged?;
        used_again.context("from source ports that were used just before the switch")?;
        if switch.to.is_kube_proxy() && !switch.from.is_kube_proxy() {
            // kube-proxy does not know what only we have. The packet programs' connections end with them.
            NODES.into_iter().try_for_each(|node| self.world.cleanup(node, &[]))?;
        }
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
            let targets = FAMILIES.map(|family| self.targets(client, family));
            let targets = targets.into_iter().collect::<Result<Vec<_>>>()?.concat();
            held.streams.push((client, agent.hold_many(Protocol::Tcp, &targets, share)?));
            held.datagrams.push((client, agent.hold_many(Protocol::Udp, &targets, targets.len())?));
        }
        Ok(held)
    }

    /// Connections that have ended before a switch to mode ebpf, which connects clients to endpoints: their own kernels let them use a port
    /// again at once.
    fn use_ports(&mut self, switch: Switch) -> Result<Vec<(&'static str, lab::Dial)>> {
        if switch.to.datapath() != Datapath::Ebpf || switch.from.datapath() == Datapath::Ebpf {
            return Ok(Vec::new());
        }
        let mut dials = Vec::new();
        for client in PORT_USERS {
            for target in FAMILIES.map(|family| self.world.cluster_ip(&BALANCED, family)) {
                let dial = lab::Dial::new(Protocol::Tcp, target);
                let ports = self.free_port..self.free_port + PORTS;
                self.free_port = ports.end;
                dials.extend(ports.map(|port| (client, dial.clone().source_port(port))));
            }
        }
        self.dial_each(&dials).context("before the switch")?;
        Ok(dials)
    }

    fn dial_each(&self, dials: &[(&'static str, lab::Dial)]) -> Result<()> {
        for (client, dial) in dials {
            check::answered(&self.world.dial(client, dial)?)
                .with_context(|| format!("{client} from {:?} to {}", dial.source_port, dial.target))?;
        }
        Ok(())
    }

    /// What the client dials, of [`BALANCED`] first.
    fn targets(&self, client: &str, family: Family) -> Result<Vec<SocketAddr>> {
        Ok(match client {
            OUTSIDE => {
                let guarded = SocketAddr::new(load_balancer().of(family), PORT);
                vec![self.world.node_port(&BALANCED, 1, family)?, guarded]
            }
            _ => vec![self.world.cluster_ip(&BALANCED, family)],
        })
    }

    /// New connections, or requests over one that stays open.
    fn start_loads(&self, keeps_socket: bool) -> Result<Vec<RunningLoad>> {
        let mut loads = Vec::new();
        for client in CLIENTS {
            let targets = |variant: Variant| {
                let targets = self.targets(client, variant.family)?;
                Ok(targets.into_iter().map(move |target| (variant, target)).collect::<Vec<_>>())
            };
            let targets = Variants::All.list().into_iter().map(targets).collect::<Result<Vec<_>>>()?;
            for (variant, target) in targets.concat() {
                // A segment that is lost is sent again after a second, a datagram with the next request.
                let timeout_ms = if variant.protocol == Protocol::Udp { 500 } else { 2_000 };
                let patience = u64::from(wait::patience());
                let load = Load {
                    timeout_ms: timeout_ms * patience,
                    keeps_socket,
                    pause_micros: 10_000 * patience,
                    ..Load::new(variant.protocol, target)
                };
                let number = self.world.agent(client)?.start_load(&load)?;
                let what = if keeps_socket { "one connection" } else { "new connections" };
                let name = format!("{client} to {target}, {}, {what}", variant.protocol);
                let protocol = variant.protocol;
                loads.push(RunningLoad { client, name, protocol, keeps_socket, number });
            }
        }
        Ok(loads)
    }

    fn stop_loads(&self, loads: Vec<RunningLoad>) -> Result<Vec<(RunningLoad, Tally)>> {
        let stop = |load: RunningLoad| {
            let tally = self.world.agent(load.client)?.stop_load(load.number)?;
            Ok((load, tally))
        };
        loads.into_iter().map(stop).collect()
    }

    fn judge(&self, switch: Switch, held: &Held, tallies: &[(RunningLoad, Tally)]) -> Result<()> {
        let lost = self.lost(&held.streams)?;
        let silent = self.lost(&held.datagrams)?;
        let met = Met::new(tallies, self.connections, lost.len());
        self.matrix.lock().unwrap_or_else(PoisonError::into_inner).insert(switch, met);
        for (RunningLoad { name, .. }, tally) in tallies.iter().filter(|(_, tally)| tally.failed > 0) {
            let (all, outage) = (tally.failed + tally.answered, tally.longest_outage_micros / 1_000);
            eprintln!("{switch}: {name}: {:?} of {all}, no answer for {outage} ms", tally.failures);
        }
        let ends = switch.ends_connections();
        let lost: Vec<_> = lost.into_iter().filter(|(_, ends, _)| !switch.drops(ends)).collect();
        let silent: Vec<_> = silent
            .into_iter()
            .filter(|(client, ends, _)| !switch.strands(client) && !switch.drops(ends))
            .collect();
        let is_lost = lost.len() > switch.mistaken(self.connections);
        ensure!(ends || !is_lost, "{} held connections are lost: {:?}", lost.len(), lost.first());
        ensure!(silent.is_empty(), "datagrams of held sockets are not answered: {silent:?}");
        for (load, tally) in tallies {
            let RunningLoad { client, name, protocol, keeps_socket, .. } = load;
            let has_gap = switch.has_gap();
            let is_stranded = *keeps_socket && *protocol == Protocol::Udp && switch.strands(client);
            ensure!(is_stranded || tally.answered > 0, "{name}: nothing was answered: {tally:?}");
            let breaks = *keeps_socket && *protocol == Protocol::Tcp && tally.failed > 0;
            ensure!(ends || has_gap || !breaks, "{name}: it has broken: {tally:?}");
            ensure!(
                ends || has_gap || is_stranded || tally.failed_in_a_row <= 1,
                "{name}: a retry has failed too: {tally:?}"
            );
            let outage = Duration::from_micros(tally.longest_outage_micros);
            let longest = KUBE_PROXY_GAP * wait::patience();
            ensure!(ends || !has_gap || outage <= longest, "{name}: no answer for {outage:?}: {tally:?}");
        }
        Ok(())
    }

    /// What became of held connections that are not answered.
    fn lost(&self, held: &[(&'static str, Vec<usize>)]) -> Result<Vec<(&'static str, String, lab::Outcome)>> {
        let mut lost = Vec::new();
        for (client, connections) in held {
            let outcomes = self.world.agent(client)?.ping_many(connections)?;
            lost.extend(outcomes.into_iter().map(|(ends, outcome)| (*client, ends, outcome)));
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

    /// The kernel has what it would have had without the former mode. What is left may go some time later. What keeps established
    /// connections translated stays where nothing else does so; see docs/life-cycle-details.md.
    fn nothing_left(&mut self, proxy: ProxyKind) -> Result<()> {
        self.world.settle_at_rest()?;
        for client in CLIENTS {
            for variant in Variants::All.list() {
                for target in self.targets(client, variant.family)? {
                    let dial = lab::Dial::new(variant.protocol, target).times(30);
                    let outcomes = self.world.dial(client, &dial)?;
                    check::answered_by(&outcomes, BALANCED.endpoints)
                        .with_context(|| format!("{client} to {target}, {variant}"))?;
                }
            }
        }
        let fresh = self.fresh.get(&proxy).with_context(|| format!("{proxy} was never started"))?;
        wait::until("nothing of the former mode is left", SWITCHES_WITHIN, || {
            let states = self.states().map_err(|error| format!("{error:#}"))?;
            let mut differences = differences(&states, fresh);
            if !setting(proxy).datapath().is_netfilter() {
                differences.retain(|one| !is_holder(one));
                if differences.iter().any(|one| one.contains(HEALTH_CHECKS)) {
                    differences.retain(|one| !is_of_health_checks(one));
                }
            }
            if differences.is_empty() { Ok(Some(())) } else { Err(format!("{differences:#?}")) }
        })
        .with_context(|| self.flows_left())?;
        self.parameters_stay()
    }

    /// What the programs of mode ebpf stay for, and what the proxies say.
    fn flows_left(&self) -> String {
        let of_node = |node| {
            let flows = self.world.tool(node, &["flows"]).unwrap_or_else(|error| format!("{error:#}"));
            format!("flows on {}:\n{flows}", node_name(node))
        };
        NODES.map(of_node).join("\n") + "\n" + &self.world.logs()
    }
}

struct Held {
    streams: Vec<(&'static str, Vec<usize>)>,
    datagrams: Vec<(&'static str, Vec<usize>)>,
}

struct RunningLoad {
    client: &'static str,
    name: String,
    protocol: Protocol,
    keeps_socket: bool,
    number: usize,
}

impl Met {
    fn new(tallies: &[(RunningLoad, Tally)], held: usize, lost: usize) -> Self {
        let mut met = Self { held, lost, ..Self::default() };
        for (load, tally) in tallies {
            if !load.keeps_socket {
                met.connections += tally.answered + tally.failed;
                met.failed += tally.failed;
                met.without_retry += usize::from(tally.failed_in_a_row > 1);
            } else if load.protocol == Protocol::Udp {
                met.longest_silence_micros = met.longest_silence_micros.max(tally.longest_outage_micros);
            }
        }
        met
    }
}

impl std::fmt::Display for Met {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { connections, failed, without_retry, held, lost, longest_silence_micros } = self;
        let silence = longest_silence_micros / 1_000;
        write!(formatter, "{failed}/{connections}, {without_retry}; {lost}/{held}; {silence} ms")
    }
}

/// The chain that goes on accepting health checks of load balancers where kube-proxy did so.
const HEALTH_CHECKS: &str = "PROXY-CTL-HEALTH-CHECKS";

/// Returns true for the jump to [`HEALTH_CHECKS`], and for the chain and the table that hold it.
fn is_of_health_checks(difference: &str) -> bool {
    let has_all = |parts: &[&str]| parts.iter().all(|part| difference.contains(part));
    has_all(&[HEALTH_CHECKS])
        || has_all(&[r#""name":"INPUT""#, r#""policy":"accept""#, r#""table":"filter""#])
        || has_all(&[r#"{"table":{"#, r#""name":"filter""#])
}

fn is_holder(difference: &str) -> bool {
    difference.contains(&format!(": left: {HOLDER}"))
}

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
        println!(
            "| {what}: failed of new connections, clients whose retry failed too; lost of held connections; longest silence of a \
             UDP socket | {} |",
            names.join(" | ")
        );
        println!("|---{}|", "|---".repeat(targets.len()));
        let mut sources: Vec<ProxyKind> = of_kind().map(|switch| switch.from).collect();
        sources.sort_unstable();
        sources.dedup();
        for from in sources {
            let cell = |to: &ProxyKind| matrix.get(&Switch { from, to: *to, by }).map(Met::to_string);
            let cells: Vec<String> = targets.iter().map(|to| cell(to).unwrap_or_default()).collect();
            println!("| from {from} | {} |", cells.join(" | "));
        }
    }
}
