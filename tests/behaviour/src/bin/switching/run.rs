//! One switch after the other, in one cluster.

use std::{collections::BTreeMap, net::SocketAddr, sync::PoisonError, time::Duration};

use anyhow::{Context as _, Result, anyhow, ensure};
use behaviour::{
    case::{Variant, Variants},
    check,
    fixtures::{BALANCED, PORT},
    setting::{Datapath, ProxyKind},
    state::{self, HOLDER, Parameters, State},
    world::World,
};
use lab::{
    Protocol, Tally,
    address::{FAMILIES, Family},
    agent::protocol::Load,
    cluster::{NODES, OUTSIDE, node_name},
    wait,
};

use crate::{
    load_balancer,
    matrix::{Matrix, Met},
    setting,
    switch::{By, NODE, Switch},
};

const CLIENTS: [&str; 4] = ["client-1", "client-2", NODE, OUTSIDE];

/// Clients that dial the Service by TCP before and after a switch to mode ebpf, from the same
/// source ports.
const PORT_USERS: [&str; 3] = ["client-1", "client-2", NODE];

/// Number of ports that each of them uses for each family. The endpoint of a connection is random.
const PORTS: u16 = 8;

/// Beginnings of the names of kernel parameters that modes leave as they have set them, as
/// kube-proxy does. See docs/differences.md.
const STAYING_PARAMETERS: [&str; 2] = ["net/ipv4/conf/all/route_localnet", "net/ipv4/vs/"];

/// Part of the names of kernel parameters of mode ipvs's device, which come and go with it.
const PARAMETERS_OF_DEVICE: &str = "/kube-ipvs0/";

/// Time within which a process must follow its file, and remove what the former mode has left.
const SWITCHES_WITHIN: Duration = Duration::from_secs(60);

/// Longest time that a client may be without answers between two things that the real kube-proxy
/// does: it removes what another mode has left, and then writes its own rules. Datagrams show that
/// this takes up to 3 s on two busy cores. A TCP attempt that begins meanwhile is given up 2 s
/// later. The limit is ten times as long, because a busy machine makes kube-proxy slow, which says
/// nothing about proxy-ctl. `LAB_PATIENCE` makes it longer on emulated machines.
const KUBE_PROXY_GAP: Duration = Duration::from_secs(30);

/// First of these ports. They are below those that the kernel chooses.
pub(crate) const FIRST_PORT: u16 = 10_000;

pub(crate) struct Run {
    pub(crate) world: World,
    pub(crate) connections: usize,
    /// First port that no connection has had as its source port.
    pub(crate) free_port: u16,
    /// State of the nodes without a proxy.
    pub(crate) nothing: Vec<State>,
    pub(crate) parameters: Vec<Parameters>,
    /// State of the nodes with each proxy, started where nothing was.
    pub(crate) fresh: BTreeMap<ProxyKind, Vec<State>>,
    pub(crate) matrix: Matrix,
}

impl Run {
    /// Records what each proxy programs where nothing was before. A cleanup after each must restore
    /// that.
    pub(crate) fn start_each(&mut self, proxies: &[ProxyKind]) -> Result<()> {
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

    /// Cleans up each node. If a kube-proxy was the last active proxy, this removes what it has
    /// written too.
    fn clean(&self) -> Result<()> {
        let last = self.world.setting.proxy;
        // `--kube-proxy` also removes the table that keeps translating connections of former rules,
        // if the mode has no such table of its own.
        let is_also = last.is_kube_proxy() || !last.datapath().is_netfilter();
        let also: &[_] = if is_also { &["--kube-proxy"] } else { &[] };
        NODES.into_iter().try_for_each(|node| self.world.cleanup(node, also))
    }

    pub(crate) fn clean_up(&mut self) -> Result<()> {
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

    /// Returns the states while the proxies serve the same objects each time.
    fn settled_states(&mut self) -> Result<Vec<State>> {
        self.world.settle()?;
        self.world.settle_at_rest()?;
        self.states()
    }

    pub(crate) fn switch(&mut self, switch: Switch) -> Result<()> {
        let former = self.world.setting.proxy;
        if former != switch.from {
            self.end()?;
            // The programs of mode ebpf would go on serving, because kube-proxy does not know what
            // only proxy-ctl programs.
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
            // In this case nobody serves before everything is programmed.
            switched = switched.and_then(|()| self.world.settle());
        }
        let used_again = self.dial_each(&used);
        // The loads also count what fails after the switch.
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
            // kube-proxy does not know what only proxy-ctl programs. Connections of the packet
            // programs end with the programs.
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

    /// Opens connections of every client, to cluster IPs and node ports.
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

    /// Opens and ends connections before a switch to mode ebpf, and returns their dials. Mode ebpf
    /// connects clients to endpoints directly, and a client's kernel lets it use a port again at
    /// once.
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

    /// Returns the addresses that the client dials, that of [`BALANCED`] first.
    fn targets(&self, client: &str, family: Family) -> Result<Vec<SocketAddr>> {
        Ok(match client {
            OUTSIDE => {
                let restricted = SocketAddr::new(load_balancer().of(family), PORT);
                vec![self.world.node_port(&BALANCED, 1, family)?, restricted]
            }
            _ => vec![self.world.cluster_ip(&BALANCED, family)],
        })
    }

    /// Starts loads of new connections, or of requests over one connection that stays open.
    fn start_loads(&self, keeps_socket: bool) -> Result<Vec<RunningLoad>> {
        let mut loads = Vec::new();
        for client in CLIENTS {
            let targets = |variant: Variant| {
                let targets = self.targets(client, variant.family)?;
                Ok(targets.into_iter().map(move |target| (variant, target)).collect::<Vec<_>>())
            };
            let targets = Variants::All.list().into_iter().map(targets).collect::<Result<Vec<_>>>()?;
            for (variant, target) in targets.concat() {
                // A lost segment is sent again after a second, and a lost datagram with the next
                // request.
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

    /// Returns the held connections that are not answered, and what became of them.
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

    /// Expects the kernel to have what it would have without the former mode. What is left may go
    /// some time later. What keeps established connections translated stays where nothing else does
    /// so; see docs/life-cycle-details.md.
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

    /// Returns the flows for which the programs of mode ebpf stay, and the proxies' logs.
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

pub(crate) struct RunningLoad {
    client: &'static str,
    name: String,
    pub(crate) protocol: Protocol,
    pub(crate) keeps_socket: bool,
    number: usize,
}

/// Chain that goes on accepting health checks of load balancers where kube-proxy did so.
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
