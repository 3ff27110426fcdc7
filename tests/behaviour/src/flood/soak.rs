//! Flows with every kind of end, thousands a second, beside flows that go on. At the end the flow
//! maps have the entries of the flows that go on, and no others.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use lab::{
    Agent, Dial, Outcome, Protocol,
    address::{self, FAMILIES, Family, cluster_ip},
    cluster::OUTSIDE,
    namespace::{nft, within},
    objects::{Service, ServicePort},
    wait,
};
use proxy_common::{
    flow::Side,
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
};
use serde_json::{Value, json};

use super::{
    Extent, ForgedRange, at_pace,
    ends::{CLIENT_PORTS, End, play},
    entries::{Client, Counts, MAPS, PinnedMaps},
    forged,
    packet::{Ends, Sender},
};
use crate::{fixtures::BALANCED, world::World};

/// The node whose maps are read.
const NODE: u8 = 1;
/// A flow to the second endpoint is masqueraded.
const ENDPOINTS: [&str; 2] = ["web-1", "web-2"];
/// Ports of the Service whose flows end, so that the flows to one endpoint have enough ports to be
/// masqueraded to.
const PORTS: u16 = 4;
const FIRST_NODE_PORT: u16 = 30_120;
const FIRST_TARGET_PORT: u16 = 9_000;
const INDEX: u16 = 2_100;
/// The source port of the first flow that goes on.
const FIRST_LIVING_PORT: u16 = 50_000;
/// The time in which a living flow is answered, on a machine that is busy with something else.
const ANSWERS_WITHIN_MS: u64 = 10_000;
/// A flow of datagrams is established if an answer comes this long after its first one.
const SUSTAINED_AFTER: Duration = Duration::from_millis(2_100);
/// For how long a connection is kept of which one side has not acknowledged all.
const UNACKNOWLEDGED: Duration = Duration::from_secs(300);
/// The pause between two readings of the flow maps while flows end.
const LOOKS_EACH: Duration = Duration::from_secs(30);
const LOOKS_EACH_OF_SHORT: Duration = Duration::from_secs(1);
/// The time that two walks through a full map take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns what the configuration has beyond the defaults. A full run has no connection that only
/// its timeout of an hour ends. A short one waits for seconds instead of minutes.
fn configuration(extent: Extent) -> Value {
    if extent.is_full {
        return json!({"conntrack": {"tcpCloseWaitTimeout": "60s"}});
    }
    json!({
        "conntrack": {"tcpCloseWaitTimeout": "2s", "udpTimeout": "4s", "udpStreamTimeout": "6s"},
        "ebpf": {"flowLifetimes": {"tcpOpening": "2s", "tcpClosed": "2s", "tcpReset": "2s"}},
    })
}

/// Runs the soak. At its end the flow maps must have the entries of the flows that go on, and no
/// others.
pub fn run(world: &mut World, extent: Extent) -> Result<()> {
    world.configure(configuration(extent))?;
    publish(world)?;
    let maps = PinnedMaps::of(&world.lab, NODE);
    let living = Living::open(world, extent)?;
    let counts = |family| anyhow::Ok((family, maps.counts(family)?));
    let before = FAMILIES.map(counts).into_iter().collect::<Result<Vec<_>>>()?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let exchanging = scope.spawn(|| living.exchange(&stop));
        let soaked = soak(world, &maps, &living, extent);
        stop.store(true, Ordering::Relaxed);
        let alive = exchanging.join().map_err(|_| anyhow!("the thread of living flows has panicked"))?;
        soaked.and(alive)
    })?;
    for (family, before) in before {
        let after = maps.counts(family)?;
        let are_no_more = after.others().iter().zip(before.others()).all(|(after, before)| *after <= before);
        ensure!(
            are_no_more,
            "{family}: entries of affinity, fragments and host connections are {:?}, and were {:?} before",
            after.others(),
            before.others()
        );
    }
    Ok(())
}

fn soak(world: &mut World, maps: &PinnedMaps, living: &Living, extent: Extent) -> Result<()> {
    end_flows(world, maps, extent)?;
    if extent.is_full {
        return until_left(maps, living, UNACKNOWLEDGED + PATIENCE, |_| true);
    }
    until_left(maps, living, PATIENCE, |end| !end.is_unacknowledged())?;
    // The flows that are kept for 300 seconds are the only ones that are left. They may not be kept
    // for longer than connections that are established.
    let mut fields = configuration(extent);
    fields["conntrack"]["tcpEstablishedTimeout"] = json!("30s");
    world.reconfigure(fields)?;
    until_left(maps, living, PATIENCE, |_| true)
}

/// Writes the Service whose flows end. Nobody listens at its endpoints, and their kernels answer
/// nothing.
fn publish(world: &mut World) -> Result<()> {
    let mut service = Service::new("soaked", cluster_ip(INDEX), 80, FIRST_TARGET_PORT, None);
    let port = |number, protocol: Protocol| ServicePort {
        name: format!("{}-{number}", protocol.name().to_lowercase()),
        protocol,
        port: 80 + number,
        target_port: FIRST_TARGET_PORT + number,
        node_port: Some(FIRST_NODE_PORT + number),
    };
    let both = |number| [Protocol::Tcp, Protocol::Udp].map(|protocol| port(number, protocol));
    service.ports = (0..PORTS).flat_map(both).collect();
    let ports = format!("{FIRST_TARGET_PORT}-{}", FIRST_TARGET_PORT + PORTS - 1);
    for endpoint in ENDPOINTS {
        nft(
            &world.lab.netns(endpoint)?.namespace,
            &format!(
                "table inet silent {{ chain in {{ type filter hook prerouting priority -300; \
                 tcp dport {ports} drop; udp dport {ports} drop; }}; }}"
            ),
        )?;
    }
    world.set_service(&service, &ENDPOINTS)
}

/// Has threads stop when it is dropped, also where an error ends what they were for.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Opens as many flows as the extent asks for, and plays both of their sides.
fn end_flows(world: &World, maps: &PinnedMaps, extent: Extent) -> Result<()> {
    let lab = &world.lab;
    let _range = ForgedRange::to(lab, OUTSIDE)?;
    let targets = FIRST_TARGET_PORT..FIRST_TARGET_PORT + PORTS;
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let stopped = Stop(stop);
        let mut players = Vec::new();
        for family in FAMILIES {
            let client = &lab.netns(OUTSIDE)?.namespace;
            players.push(scope.spawn(move || play(Side::Client, client, family, CLIENT_PORTS, stop)));
            for endpoint in ENDPOINTS {
                let backend = &lab.netns(endpoint)?.namespace;
                let ports = targets.clone();
                players.push(scope.spawn(move || play(Side::Backend, backend, family, ports, stop)));
            }
        }
        let opening = scope.spawn(|| within(&lab.netns(OUTSIDE)?.namespace, || open_flows(extent)));
        let (mut look_at, mut met) = (Instant::now(), [BTreeSet::new(), BTreeSet::new()]);
        while !opening.is_finished() {
            thread::sleep(Duration::from_millis(100));
            if Instant::now() >= look_at {
                look_at = Instant::now() + if extent.is_full { LOOKS_EACH } else { LOOKS_EACH_OF_SHORT };
                look(maps, extent, &mut met)?;
            }
        }
        let opened = opening.join().map_err(|_| anyhow!("the thread that opens flows has panicked"));
        drop(stopped);
        for player in players {
            player.join().map_err(|_| anyhow!("a thread that plays a side has panicked"))??;
        }
        opened??;
        are_met(&met)
    })
}

/// Notes the kinds of end whose flows have entries in the map of established flows and in that of
/// opening ones. A full run prints the number of entries.
fn look(maps: &PinnedMaps, extent: Extent, met: &mut [BTreeSet<End>; 2]) -> Result<()> {
    for family in FAMILIES {
        let found = maps.flows(family, &BTreeSet::new())?;
        for (met, entries) in met.iter_mut().zip(found) {
            met.extend(entries.of_others.keys().filter_map(|port| End::of_client_port(*port)));
        }
        if extent.is_full {
            let Counts(counts) = maps.counts(family)?;
            let counted = MAPS.iter().zip(counts).map(|(map, count)| format!("{map} {count}"));
            eprintln!("soak: {family}: {}", Vec::from_iter(counted).join(", "));
        }
    }
    Ok(())
}

/// Flows of every kind of end had entries, and those of established connections were in the map of
/// established flows.
fn are_met([established, opening]: &[BTreeSet<End>; 2]) -> Result<()> {
    for end in End::MIXED {
        let is_established =
            end.is_unacknowledged() || matches!(end, End::HalfClosed | End::DatagramsSustained);
        let is_met = established.contains(&end) || (!is_established && opening.contains(&end));
        ensure!(is_met, "no flow was seen that ends so: {end:?}; {established:?} were established");
    }
    Ok(())
}

/// Sends the first packet of each flow, and all datagrams of those that are sustained.
fn open_flows(extent: Extent) -> Result<()> {
    let sender = Sender::new()?;
    let send = |ends: Ends, end: End| sender.send(ends.destination.ip(), &end.first(ends));
    let mut later = VecDeque::new();
    let rate = at_pace(extent.rate, extent.duration, |number| {
        let family = FAMILIES[number as usize % FAMILIES.len()];
        let client = number / FAMILIES.len() as u32;
        let end = End::MIXED[client as usize % End::MIXED.len()];
        let port = FIRST_NODE_PORT + (client % u32::from(PORTS)) as u16;
        let ends = Ends {
            source: SocketAddr::new(forged(family, client), end.client_port()),
            destination: SocketAddr::new(address::node(NODE).of(family), port),
        };
        send(ends, end)?;
        let now = Instant::now();
        if end == End::DatagramsSustained {
            later.push_back((now + SUSTAINED_AFTER, ends, true));
        }
        while let Some((due, ends, is_second)) = later.pop_front_if(|(due, ..)| *due <= now) {
            send(ends, End::DatagramsSustained)?;
            if is_second {
                later.push_back((due + SUSTAINED_AFTER, ends, false));
            }
        }
        Ok(())
    })?;
    while let Some((due, ends, is_second)) = later.pop_front() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        send(ends, End::DatagramsSustained)?;
        if is_second {
            later.push_back((due + SUSTAINED_AFTER, ends, false));
        }
    }
    eprintln!("soak: {rate:.0} flows a second for {} s", extent.duration.as_secs());
    let is_reached = rate > f64::from(extent.rate) * 0.9;
    ensure!(is_reached || !extent.is_full, "this machine opens {rate:.0} flows a second");
    Ok(())
}

/// Waits until the flow maps have only the entries of the living flows, and of flows with other
/// kinds of end than those that must be over.
fn until_left(
    maps: &PinnedMaps,
    living: &Living,
    limit: Duration,
    is_over: impl Fn(End) -> bool,
) -> Result<()> {
    const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
    let start = Instant::now();
    wait::until("the entries are those of living flows", limit, || {
        let left = left(maps, living, &is_over).map_err(|error| format!("{error:#}"))?;
        if left.is_empty() {
            return Ok(Some(()));
        }
        thread::sleep(BETWEEN_LOOKS);
        Err(left.join("; "))
    })?;
    eprintln!("soak: the entries are back after {} s", start.elapsed().as_secs());
    Ok(())
}

/// Describes how the flow maps differ from the entries of the living flows.
fn left(maps: &PinnedMaps, living: &Living, is_over: impl Fn(End) -> bool) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for family in FAMILIES {
        let [established, opening] = maps.flows(family, &living.clients)?;
        for (name, entries) in [("established", &established), ("opening", &opening)] {
            let mut ended: BTreeMap<String, usize> = BTreeMap::new();
            for (port, count) in &entries.of_others {
                let end = End::of_client_port(*port);
                if end.is_none_or(&is_over) {
                    let what = end.map_or_else(|| format!("port {port}"), |end| format!("{end:?}"));
                    *ended.entry(what).or_default() += count;
                }
            }
            let ended = ended.iter().map(|(end, count)| format!("{family}: {count} {name} entries of {end}"));
            left.extend(ended);
        }
        let datagrams = established.of_clients.iter().filter(|((.., protocol), _)| *protocol == PROTOCOL_UDP);
        let (unproven, entries) =
            (maps.unproven(family)?, datagrams.map(|(_, entries)| entries.len() as u64).sum::<u64>());
        if unproven != entries {
            left.push(format!(
                "{family}: {unproven} entries are counted as those of datagrams, and {entries} are"
            ));
        }
        // Copies of established flows may stay among the opening ones, which evict them at need.
        let mut copies = opening.of_clients.values().flatten();
        left.extend(
            copies.find(|entry| !entry.keys.contains(&entry.key)).map(|entry| format!("a copy is {entry:?}")),
        );
        for client in living.clients.iter().filter(|(address, ..)| Family::of(*address) == family) {
            let entries = established.of_clients.get(client).map_or(&[][..], Vec::as_slice);
            let found = BTreeSet::from_iter(entries.iter().map(|entry| &entry.key));
            if entries.first().is_none_or(|entry| found != entry.keys.iter().collect()) {
                left.push(format!("the flow of {client:?} has the entries {entries:?}"));
            }
        }
    }
    Ok(left)
}

/// Flows of a real client and real servers, which go on all the time.
struct Living {
    agent: Agent,
    connections: Vec<usize>,
    clients: BTreeSet<Client>,
}

impl Living {
    fn open(world: &World, extent: Extent) -> Result<Self> {
        let (connections, datagrams) = if extent.is_full { (100, 20) } else { (20, 5) };
        let mut living =
            Self { agent: world.lab.agent(OUTSIDE)?, connections: Vec::new(), clients: BTreeSet::new() };
        for family in FAMILIES {
            let own = world.addresses(OUTSIDE)?.of(family);
            let target = world.node_port(&BALANCED, NODE, family)?;
            for (protocol, number, count) in
                [(Protocol::Tcp, PROTOCOL_TCP, connections), (Protocol::Udp, PROTOCOL_UDP, datagrams)]
            {
                let dial = Dial::new(protocol, target).timeout_ms(ANSWERS_WITHIN_MS);
                for port in FIRST_LIVING_PORT..FIRST_LIVING_PORT + count {
                    let (connection, outcome) = living.agent.hold_as(&dial.clone().source_port(port))?;
                    ensure!(matches!(outcome, Outcome::Answered(_)), "{protocol} {target}: {outcome}");
                    living.connections.push(connection);
                    living.clients.insert((own, port, number));
                }
            }
        }
        Ok(living)
    }

    /// Sends and receives over each flow once a second, until told to stop.
    fn exchange(&self, stop: &AtomicBool) -> Result<()> {
        const PERIOD: Duration = Duration::from_secs(1);
        while !stop.load(Ordering::Relaxed) {
            let lost = self.agent.ping_many(&self.connections)?;
            let first = lost.first().map(|(ends, outcome)| format!("{ends}: {outcome}"));
            ensure!(lost.is_empty(), "{} living flows are not answered: {first:?}", lost.len());
            thread::sleep(PERIOD);
        }
        Ok(())
    }
}
