//! Runs one flood after the other, each beside established connections to the flooded Service and a
//! few new connections to another Service, the quiet one. A row of the printed table has what
//! became of both, and the numbers of entries in the flow maps.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{
    Agent, Dial, Lab, Objects, Outcome, Protocol,
    address::{self, Family, cluster_ip},
    agent::protocol::Load,
    cluster::{OUTSIDE, SERVER_PORT},
    namespace::within,
    objects::{Endpoint, Service},
    wait,
};

use super::{
    Extent, ForgedRange, at_pace,
    entries::{Counts, MAPS, PinnedMaps},
    forged,
    packet::{ACK, Ends, FIN, RST, SYN, Segment, Sender, datagram, fragment, icmp_error, segment},
};
use crate::{
    fixtures::{BALANCED, PORT, SERVICES},
    world::World,
};

const NODE: u8 = 1;
/// Established connections to what is flooded.
const HELD: usize = 100;
/// The pause between two connections to the Service that is not flooded.
const QUIET_PAUSE: Duration = Duration::from_millis(200);
/// A connection that takes longer has lost its SYN, which is sent again after a second.
const AT_ONCE_MS: u64 = 950;
/// The timeout of connections whose time is not measured, as in a short run. It is long because
/// several short runs may share a machine.
const PATIENT_MS: u64 = 10_000;
/// The number of map entries of a flow that is not masqueraded.
const LEAST_ENTRIES: usize = 2;
/// Where answers are not seen, a connection is established once it has gone on for two seconds.
const ESTABLISHED_WITHIN: Duration = Duration::from_secs(30);
/// The time until the flood's entries are gone: the lifetime of datagrams that go on, and two walks
/// through the maps.
const BACK_WITHIN: Duration = Duration::from_secs(120 + 60);
/// The Services that are flooded in turn.
const MANY: [u16; 2] = [400, 3_000];
/// The Services that a short run floods in turn.
const FEW: [u16; 2] = [20, 60];
const FIRST_OF_MANY: u16 = 3_000;

/// The target of a flood.
#[derive(Clone, Copy, Debug)]
enum To {
    Flooded,
    Maglev,
    Affine,
    Direct,
    /// Several Services in turn. The value is the index in [`MANY`] of their number.
    Many(usize),
}

/// A Service that is flooded alone.
struct Target {
    name: &'static str,
    index: u16,
    node_port: u16,
    endpoints: &'static [&'static str],
}

const ALL: &[&str] = &["web-1", "web-2", "web-3"];
const FLOODED: Target = Target { name: "flooded", index: 2_000, node_port: 30_110, endpoints: ALL };
const MAGLEV: Target = Target { name: "flooded-maglev", index: 2_001, node_port: 30_111, endpoints: ALL };
const AFFINE: Target = Target { name: "flooded-affine", index: 2_002, node_port: 30_112, endpoints: ALL };
const DIRECT: Target =
    Target { name: "flooded-direct", index: 2_003, node_port: 30_113, endpoints: &["web-2", "web-3"] };

impl Target {
    fn service(&self) -> Service {
        Service::new(self.name, cluster_ip(self.index), PORT, SERVER_PORT, Some(self.node_port))
    }
}

impl To {
    fn target(self) -> Option<&'static Target> {
        match self {
            Self::Flooded => Some(&FLOODED),
            Self::Maglev => Some(&MAGLEV),
            Self::Affine => Some(&AFFINE),
            Self::Direct => Some(&DIRECT),
            Self::Many(_) => None,
        }
    }

    fn addresses(self, family: Family, extent: Extent) -> Vec<SocketAddr> {
        match (self, self.target()) {
            (Self::Many(index), _) => {
                let count = many(extent)[index];
                let one = |index| SocketAddr::new(cluster_ip(FIRST_OF_MANY + index).of(family), PORT);
                (0..count).map(one).collect()
            }
            (_, Some(target)) => {
                vec![SocketAddr::new(address::node(NODE).of(family), target.node_port)]
            }
            (_, None) => Vec::new(),
        }
    }
}

fn many(extent: Extent) -> [u16; 2] {
    if extent.is_full { MANY } else { FEW }
}

/// Makes a packet of the client with this number.
type Make = fn(Ends, u32) -> Vec<u8>;

/// A flood of packets from forged addresses.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    pub name: &'static str,
    family: Family,
    to: To,
    make: Make,
    /// Each client sends three packets, [`LATER`] after each other.
    is_sustained: bool,
}

const LATER: Duration = Duration::from_millis(2_100);

const fn flood(name: &'static str, to: To, make: Make) -> Flood {
    Flood { name, family: Family::V4, to, make, is_sustained: false }
}

pub const FLOODS: [Flood; 13] = [
    flood("SYNs to one Service", To::Flooded, syn),
    Flood { family: Family::V6, ..flood("SYNs to one Service, IPv6", To::Flooded, syn) },
    flood("SYNs to hundreds of Services in turn", To::Many(0), syn),
    flood("SYNs to thousands of Services in turn", To::Many(1), syn),
    flood("SYNs, session affinity", To::Affine, syn),
    flood("SYNs, direct server return", To::Direct, syn),
    flood("datagrams, one each", To::Flooded, one_datagram),
    Flood { is_sustained: true, ..flood("datagrams, three each in 4 s", To::Flooded, one_datagram) },
    flood("ACKs, RSTs and FINs without a flow", To::Flooded, without_flow),
    flood("ACKs, RSTs and FINs without a flow, Maglev", To::Maglev, without_flow),
    flood("ICMP errors of no flow", To::Flooded, error),
    flood("first fragments", To::Flooded, |ends, number| fragment(ends, number, true)),
    flood("later fragments without a first one", To::Flooded, |ends, number| fragment(ends, number, false)),
];

fn syn(ends: Ends, number: u32) -> Vec<u8> {
    segment(ends, &Segment { flags: SYN, sequence: number, acknowledgement: 0, payload: &[] })
}

fn one_datagram(ends: Ends, _: u32) -> Vec<u8> {
    datagram(ends, b"forged")
}

fn without_flow(ends: Ends, number: u32) -> Vec<u8> {
    const FLAGS: [u8; 4] = [ACK, RST, FIN | ACK, RST | ACK];
    let flags = FLAGS[number as usize % FLAGS.len()];
    segment(ends, &Segment { flags, sequence: number, acknowledgement: !number, payload: &[] })
}

/// A router says that a client of the frontend cannot be reached.
fn error(ends: Ends, number: u32) -> Vec<u8> {
    let answer = ends.reversed();
    let quoted = Segment { flags: ACK, sequence: number, acknowledgement: number, payload: &[] };
    // The error goes to the source of what it quotes.
    icmp_error(ends.source.ip(), &segment(answer, &quoted), answer, false)
}

/// The outcome of one flood.
#[derive(Debug)]
pub struct Found {
    name: String,
    per_second: f64,
    before: Counts,
    most: Counts,
    after: Counts,
    held: usize,
    lost: usize,
    opened: u64,
    failed: u64,
}

impl Found {
    /// Returns the heading of the printed table.
    pub fn heading() -> String {
        let columns = ["flood", "packets/s"].into_iter().chain(MAPS).chain(["live on", "quiet opened"]);
        let columns = Vec::from_iter(columns);
        format!("| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()))
    }

    /// Returns a row of the printed table.
    pub fn row(&self) -> String {
        let Self { name, per_second, before, most, after, held, lost, opened, failed } = self;
        let counts = before.0.iter().zip(most.0).zip(after.0).map(|((before, most), after)| {
            if *before == most && most == after {
                before.to_string()
            } else {
                format!("{before} / {most} / {after}")
            }
        });
        format!(
            "| {name} | {per_second:.0} | {} | {} of {held} | {opened} of {} |",
            Vec::from_iter(counts).join(" | "),
            held - lost,
            opened + failed
        )
    }
}

/// Writes the Services that all floods need, beside the fixtures.
pub fn publish(lab: &Lab, objects: &mut Objects, extent: Extent) -> Result<()> {
    SERVICES.iter().try_for_each(|service| service.publish(lab, objects, service.endpoints))?;
    let endpoints = |names: &[&str]| -> Result<Vec<Endpoint>> {
        let endpoint = |name: &&str| {
            let pod = lab.netns(name)?;
            Ok(Endpoint::ready(pod.addresses, pod.node.unwrap_or_default()))
        };
        names.iter().map(endpoint).collect()
    };
    for target in [&FLOODED, &MAGLEV, &AFFINE, &DIRECT] {
        let mut service = target.service();
        match target.index {
            index if index == MAGLEV.index => service.algorithm = Some("maglev"),
            index if index == AFFINE.index => service.affinity_seconds = Some(5),
            index if index == DIRECT.index => service.forwarding = Some("dsr"),
            _ => {}
        }
        objects.set_service(&service, &endpoints(target.endpoints)?);
    }
    let endpoints = endpoints(&["web-1", "web-2"])?;
    for index in 0..many(extent)[1] {
        let address = cluster_ip(FIRST_OF_MANY + index);
        let service = Service::new(&format!("many-{index}"), address, PORT, SERVER_PORT, None);
        objects.set_service(&service, &endpoints);
    }
    Ok(())
}

/// Runs one flood. A full run waits until its entries are gone.
pub fn run(world: &World, flood: &Flood, extent: Extent) -> Result<Found> {
    let maps = PinnedMaps::of(&world.lab, NODE);
    let targets = flood.to.addresses(flood.family, extent);
    let _range = ForgedRange::to_nowhere(&world.lab)?;
    let outside = world.agent(OUTSIDE)?;
    let held = hold(outside, &targets)?;
    let before = wait::until("the connections are established", ESTABLISHED_WITHIN, || {
        let lost = outside.ping_many(&held).map_err(|error| format!("{error:#}"))?;
        let now = maps.counts(flood.family).map_err(|error| format!("{error:#}"))?;
        let is_established = lost.is_empty() && now.flows() >= LEAST_ENTRIES * HELD;
        if is_established { Ok(Some(now)) } else { Err(format!("{now:?}, {} are lost", lost.len())) }
    })?;
    let quiet = Load {
        pause_micros: QUIET_PAUSE.as_micros() as u64,
        timeout_ms: if extent.is_full { AT_ONCE_MS } else { PATIENT_MS },
        ..Load::new(Protocol::Tcp, world.node_port(&BALANCED, NODE, flood.family)?)
    };
    let quiet = outside.start_load(&quiet)?;
    let flooded = flood_beside(world, &maps, flood, &targets, extent);
    let tally = outside.stop_load(quiet)?;
    let (per_second, most) = flooded?;
    let lost = outside.ping_many(&held)?;
    let mut found = Found {
        // A short run has fewer Services.
        name: match flood.to {
            To::Many(_) => format!("SYNs to {} Services in turn", targets.len()),
            To::Flooded | To::Maglev | To::Affine | To::Direct => flood.name.to_owned(),
        },
        per_second,
        before,
        most: most.most(&before),
        after: Counts::default(),
        held: held.len(),
        lost: lost.len(),
        opened: tally.answered,
        failed: tally.failed,
    };
    let start = Instant::now();
    if extent.is_full {
        until_back(&maps, flood.family, &before)?;
    }
    found.after = maps.counts(flood.family)?;
    eprintln!("{} ({} s until the entries were back)", found.row(), start.elapsed().as_secs());
    held.into_iter().try_for_each(|connection| outside.release(connection))?;
    ensure!(lost.is_empty(), "{} of {} connections are lost: {:?}", lost.len(), found.held, lost.first());
    ensure!(tally.failed == 0 && tally.answered > 0, "the quiet Service: {tally:?}");
    Ok(found)
}

/// Opens connections to the targets in turn.
fn hold(outside: &Agent, targets: &[SocketAddr]) -> Result<Vec<usize>> {
    let open = |target: &SocketAddr| {
        let dial = Dial::new(Protocol::Tcp, *target).timeout_ms(PATIENT_MS);
        let (connection, outcome) = outside.hold_as(&dial)?;
        ensure!(matches!(outcome, Outcome::Answered(_)), "{target}: {outcome}");
        Ok(connection)
    };
    targets.iter().cycle().take(HELD).map(open).collect()
}

/// Returns the number of packets a second, and the largest number of entries seen in each map.
fn flood_beside(
    world: &World,
    maps: &PinnedMaps,
    flood: &Flood,
    targets: &[SocketAddr],
    extent: Extent,
) -> Result<(f64, Counts)> {
    const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
    let namespace = &world.lab.netns(OUTSIDE)?.namespace;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let sent = within(namespace, || send(flood, targets, extent));
            is_over.store(true, Ordering::Relaxed);
            sent
        });
        let mut most = Counts::default();
        while !is_over.load(Ordering::Relaxed) {
            thread::sleep(BETWEEN_LOOKS);
            most = most.most(&maps.counts(flood.family)?);
        }
        let sent = sending.join().map_err(|_| anyhow!("the thread of the flood has panicked"))?;
        Ok((sent.with_context(|| flood.name)?, most))
    })
}

fn send(flood: &Flood, targets: &[SocketAddr], extent: Extent) -> Result<f64> {
    let sender = Sender::new()?;
    let send = |number: u32| -> Result<()> {
        let destination = targets[number as usize % targets.len()];
        // Ports that no flow of the lab has.
        let source = SocketAddr::new(forged(flood.family, number), 1_024 + (number % 20_000) as u16);
        let packet = (flood.make)(Ends { source, destination }, number);
        Ok(sender.send(destination.ip(), &packet)?)
    };
    if !flood.is_sustained {
        return at_pace(extent.rate, extent.duration, send);
    }
    // Each client's packets come in turn with those of the clients before it.
    let clients = extent.rate / 3;
    let apart = (LATER.as_secs_f64() * f64::from(clients)) as u32;
    let first_ones = (extent.duration.as_secs_f64() * f64::from(clients)) as u32;
    at_pace(extent.rate, extent.duration + LATER * 2, |number| {
        let client = (number / 3).checked_sub(apart * (number % 3));
        client.filter(|client| *client < first_ones).map_or(Ok(()), send)
    })
}

/// Waits until the flood has left no flow and no client of session affinity. Entries of fragments
/// are left: only other fragments replace them.
fn until_back(maps: &PinnedMaps, family: Family, before: &Counts) -> Result<()> {
    const BETWEEN_LOOKS: Duration = Duration::from_secs(1);
    wait::until("the entries are back", BACK_WITHIN, || {
        let now = maps.counts(family).map_err(|error| format!("{error:#}"))?;
        let is_back = now.flows() == before.flows()
            && now.opening_flows() <= before.opening_flows()
            && now.affinity() <= before.affinity();
        if is_back {
            return Ok(Some(()));
        }
        thread::sleep(BETWEEN_LOOKS);
        Err(format!("{:?} now, {:?} before, of {MAPS:?}", now.0, before.0))
    })
}
