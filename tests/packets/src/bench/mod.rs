//! Measures how many nanoseconds the programs take for a packet, for every path of a packet:
//! `cargo test -p packets -- --bench [part of a name]`.
//!
//! With `WRITE_NANOSECONDS=1` in the environment, the figures are also written to
//! `docs/benchmarks/nanoseconds.txt`.

mod paths;

use std::{env, fs, path::Path as FilePath, thread};

use anyhow::{Context as _, Result, ensure};
use proxy_common::{
    family::{V4, V6},
    flow::Stage,
    inventory::program,
    layout::*,
    packet::{TCP_ACK, TCP_SYN},
    port::Port,
};

use self::paths::paths;
use crate::{
    cases::{
        forwarding::{direct, forward::Uplink, redirect::Other},
        scene::*,
    },
    katran::Katran,
    restored::Restored,
    wire::{Cut, Endpoint, KnownAddress, Segment, tcp},
    world::{FlowOf, Globals, LOOPBACK, Maps, Verdict, World, frame_context, packet_context},
};

const FIGURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks/nanoseconds.txt");
/// Environment variable that makes the benchmark write its figures to [`FIGURES`].
const WRITE: &str = "WRITE_NANOSECONDS";
/// Environment variable with the path of Katran's object file, whose program is measured too.
const KATRAN: &str = "KATRAN";

const ROUNDS: usize = 5;
/// Number of runs of a program in each round.
const RUNS: u32 = 65_536;
/// Number of calls of the program in each round, each with a single run, for [`Runs::Alone`].
const CALLS: u32 = 256;
/// Numbers of flows whose packets come in turn, or that the packets open.
const SIZES: [u32; 4] = [1, 1_024, 65_536, 1_048_576];
const SIZES_IN_WORDS: [&str; 4] = ["1", "1,024", "65,536", "1,048,576"];
const ONE: &[u32] = &[1];
const FEW: &[u32] = &[1, 1_024];
const NEW: &[u32] = &[1_024];
const MANY_NEW: &[u32] = &[1_024, 65_536];
/// Number of flows that is so large that the flood limit lets only few of them open.
const FLOOD: &[u32] = &[65_536];

/// Number of client ports that flows differ in. Flows beyond it also differ in the ports of
/// frontend and backend.
const CLIENT_PORTS: u32 = 32_768;
const FROM: Endpoint = (KnownAddress::Client, 1_024);
/// Ends of the node that belong to no flow. The second one has a reserved port, as flows get.
const NODES: [Endpoint; 2] = [(KnownAddress::Node, 40_000), (KnownAddress::Node, 20_000)];
const STRANGER: Endpoint = (KnownAddress::Stranger, 80);

/// Ends and flags of the first flow. [`Known::flow`] derives the other flows from it.
#[derive(Clone, Copy)]
struct Known {
    client: Endpoint,
    frontend: Endpoint,
    backend: Endpoint,
    /// End that the backend's side sees in place of the client, for masqueraded flows and for flows
    /// of the node itself.
    node: Endpoint,
    flags: u32,
}

const PLAIN: Known = Known { client: FROM, frontend: CLUSTER_IP, backend: LOCAL, node: FROM, flags: 0 };
const TO_POD: Known = Known { frontend: NODE_PORT, ..PLAIN };
const MASQUERADED: Known =
    Known { backend: REMOTE, node: (KnownAddress::Node, 1_024), flags: FLOW_MASQUERADE, ..TO_POD };
const OF_NODE: Known = Known {
    client: (KnownAddress::Node, 1_024),
    node: (KnownAddress::Node, 34_000),
    flags: FLOW_FROM_HOST,
    backend: REMOTE,
    ..PLAIN
};
const DIRECT: Known = Known { frontend: direct::LOAD_BALANCER, backend: REMOTE, flags: FLOW_DSR, ..PLAIN };
const DIRECT_HERE: Known = Known { frontend: direct::LOAD_BALANCER, ..PLAIN };

impl Known {
    fn flow<W: Maps>(&self, number: u32) -> Result<FlowOf<W>> {
        let (low, high) = (u16::try_from(number % CLIENT_PORTS)?, u16::try_from(number / CLIENT_PORTS)?);
        let mut flow = FlowOf::<W>::default();
        (flow.client, flow.protocol, flow.service) = (W::address(self.client.0), PROTOCOL_TCP, 1);
        flow.flags = self.flags;
        // The stamp is in the future, so that no run refreshes the flow.
        (flow.opened, flow.last_seen) = (1, u64::MAX);
        (flow.frontend, flow.backend) = (W::address(self.frontend.0), W::address(self.backend.0));
        flow.set_client_port(Port::new(self.client.1 + low));
        flow.set_frontend_port(Port::new(self.frontend.1 + high));
        flow.set_backend_port(Port::new(self.backend.1 + high));
        let alias = if self.flags & FLOW_FROM_HOST == 0 { self.client } else { self.node };
        flow.set_alias_port(Port::new(alias.1 + low));
        if self.flags & FLOW_MASQUERADE != 0 {
            flow.masquerade = W::address(self.node.0);
            flow.set_masquerade_port(Port::new(self.node.1 + low));
        }
        flow.state.progress = PROGRESS_CONFIRMED;
        // The packets are taken from the middle of a connection.
        let segment = tcp(self.client, self.frontend, TCP_ACK);
        flow.backend_numbers.reached = segment.sequence;
        flow.client_numbers.reached = segment.acknowledgement;
        Ok(flow)
    }

    fn put<W: Maps>(&self, world: &World, count: u32) -> Result<()> {
        let numbers: Vec<_> = (0..count).collect();
        for some in numbers.chunks(16_384) {
            let flows = some.iter().map(|number| self.flow::<W>(*number)).collect::<Result<Vec<_>>>()?;
            let mut keys: Vec<_> = flows.iter().map(Flow::client_key).collect();
            world.put_flows::<W>(Stage::Established, &keys, &flows)?;
            keys = flows.iter().map(Flow::backend_key).collect();
            world.put_flows::<W>(Stage::Established, &keys, &flows)?;
            if self.flags & FLOW_MASQUERADE != 0 {
                keys = flows.iter().map(Flow::masquerade_key).collect();
                world.put_flows::<W>(Stage::Established, &keys, &flows)?;
            }
        }
        Ok(())
    }

    fn to_frontend<W: Maps>(self) -> Packet {
        Packet::from_client::<W>(&tcp(self.client, self.frontend, TCP_ACK))
    }

    fn to_backend<W: Maps>(self) -> Packet {
        Packet::from_client::<W>(&tcp(self.client, self.backend, TCP_ACK))
    }

    /// Makes the backend's answer as it is sent, to the client that the backend's side sees.
    fn answer<W: Maps>(&self) -> Packet {
        Packet::to_client::<W>(&tcp(self.node, self.backend, 0).answer(TCP_ACK))
    }

    fn answer_inside<W: Maps>(&self) -> Packet {
        Packet::to_client::<W>(&tcp(self.client, self.backend, 0).answer(TCP_ACK))
    }
}

/// Packet of the first flow, and the offsets at which packets of other flows differ. The number at
/// the first offset grows by the flow's number modulo `CLIENT_PORTS`, the one at the second by the
/// quotient.
#[derive(Clone)]
struct Packet {
    bytes: Vec<u8>,
    offsets: [Option<usize>; 2],
}

impl Packet {
    fn from_client<W: Maps>(segment: &Segment) -> Self {
        let at = 14 + direct::ip_header::<W>();
        Self { bytes: segment.bytes::<W>(), offsets: [Some(at), Some(at + 2)] }
    }

    fn to_client<W: Maps>(segment: &Segment) -> Self {
        let at = 14 + direct::ip_header::<W>();
        Self { bytes: segment.bytes::<W>(), offsets: [Some(at + 2), Some(at)] }
    }

    fn alone<W: Maps>(segment: &Segment) -> Self {
        Self { bytes: segment.bytes::<W>(), offsets: [None; 2] }
    }

    fn opening<W: Maps>() -> Self {
        Self::from_client::<W>(&tcp(FROM, CLUSTER_IP, TCP_SYN))
    }

    fn fragment<W: Maps>(later: usize) -> Self {
        let segment = Segment { payload: vec![7; 100], ..tcp(FROM, CLUSTER_IP, TCP_ACK) };
        let bytes = segment.fragments::<W>(Cut { id: 0, piece: 64 }).swap_remove(later);
        // `id` is the offset of the fragment's id. In IPv6, its lower half ends the fragment
        // header.
        let id = if W::NAME == "ipv4" { 14 + 4 } else { 14 + 40 + 6 };
        Self { bytes, offsets: [Some(id), None] }
    }

    fn change(&self, bytes: &mut [u8], number: u32) {
        for (offset, added) in self.offsets.into_iter().zip([number % CLIENT_PORTS, number / CLIENT_PORTS]) {
            let Some(offset) = offset else { continue };
            let before = u16::from_be_bytes([bytes[offset], bytes[offset + 1]]);
            bytes[offset..offset + 2].copy_from_slice(&before.wrapping_add(added as u16).to_be_bytes());
        }
    }
}

/// Interface where a packet is when the program gets it.
#[derive(Clone, Copy)]
enum At {
    /// The loopback, and the packet was not received by another interface.
    Here,
    /// The loopback, and another interface has received the packet.
    Forwarded,
    Uplink,
    Pod,
}

/// Interfaces that a path needs. They are removed when this is dropped.
#[derive(Default)]
struct Devices {
    uplink: Option<Uplink>,
    pod: Option<Other>,
}

#[derive(Clone)]
struct Step {
    program: &'static str,
    at: At,
    packet: Packet,
    verdict: Verdict,
    is_changed: bool,
}

impl Step {
    fn translates(program: &'static str, packet: Packet) -> Self {
        Self { program, at: At::Here, packet, verdict: Verdict::GoesOn, is_changed: true }
    }

    fn passes(program: &'static str, packet: Packet) -> Self {
        Self { is_changed: false, ..Self::translates(program, packet) }
    }

    fn forwards(packet: Packet, verdict: Verdict) -> Self {
        Self { at: At::Uplink, verdict, ..Self::translates(program::xdp_forward, packet) }
    }

    fn at(self, at: At) -> Self {
        Self { at, ..self }
    }

    /// Makes a runner for the packets of `count` flows. It first checks verdict and change on the
    /// first packet.
    fn on(&self, world: &World, devices: &Devices, count: u32) -> Result<Restored> {
        let uplink = devices.uplink.as_ref().map_or(0, |uplink| uplink.index);
        let Packet { bytes, .. } = &self.packet;
        let context = match self.at {
            At::Here => None,
            At::Forwarded => Some(packet_context(LOOPBACK, 0)),
            At::Uplink if self.program == program::xdp_forward => Some(frame_context(uplink, bytes)),
            At::Uplink => Some(packet_context(uplink, 0)),
            At::Pod => Some(packet_context(devices.pod.as_ref().map_or(0, |pod| pod.index), 0)),
        };
        let change = |bytes: &mut [u8], number| self.packet.change(bytes, number);
        let program =
            world.ebpf.program(self.program).with_context(|| format!("no program {}", self.program))?;
        let mut restored = Restored::new(program, context, bytes, count, change)?;
        let output = restored.run()?;
        let is = (output.verdict, output.packet != *bytes);
        ensure!(is == (self.verdict, self.is_changed), "{}: {is:?}", self.program);
        Ok(restored)
    }
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Runs {
    Again,
    /// Each packet runs once, and the maps are filled anew before each round.
    Once,
    /// Each run is a call of its own, so the kernel's caches are colder. This is needed because
    /// `bpf_skb_adjust_room` refuses a packet that it has encapsulated before, even if all its
    /// bytes were restored.
    Alone,
}

type Prepare<W> = Box<dyn Fn(&mut Scene<W>) -> Result<Devices>>;

struct Path<W: Maps + 'static> {
    name: String,
    globals: Globals,
    sizes: &'static [u32],
    runs: Runs,
    prepare: Prepare<W>,
    known: Option<Known>,
    /// Steps that run once for each flow before the measured step.
    before: Vec<Step>,
    step: Step,
}

impl<W: Maps + 'static> Path<W> {
    fn new(name: impl Into<String>, step: Step) -> Self {
        Self {
            name: name.into(),
            globals: Globals::default(),
            sizes: ONE,
            runs: Runs::Again,
            prepare: Box::new(|_| Ok(Devices::default())),
            known: None,
            before: Vec::new(),
            step,
        }
    }

    fn known(name: impl Into<String>, known: Known, step: Step) -> Self {
        Self { known: Some(known), sizes: FEW, ..Self::new(name, step) }
    }

    fn opening(name: impl Into<String>, prepare: impl Fn(&mut Scene<W>) -> Result<()> + 'static) -> Self {
        let step = Step::translates("workload_ingress", Packet::opening::<W>());
        Self { sizes: NEW, runs: Runs::Once, ..Self::new(name, step) }.with(move |s| {
            prepare(s)?;
            Ok(Devices::default())
        })
    }

    fn with(self, prepare: impl Fn(&mut Scene<W>) -> Result<Devices> + 'static) -> Self {
        Self { prepare: Box::new(prepare), ..self }
    }

    fn nanoseconds(&self, world: &mut World, count: u32) -> Result<Vec<u64>> {
        let mut filled = None;
        (0..ROUNDS)
            .map(|_| {
                if self.runs == Runs::Once {
                    filled = None;
                }
                let (_, restored) = match &mut filled {
                    Some(filled) => filled,
                    none => none.insert(self.fill(world, count)?),
                };
                match self.runs {
                    Runs::Again => restored.nanoseconds(1, RUNS.max(count)),
                    Runs::Once => restored.nanoseconds(1, count),
                    Runs::Alone => restored.nanoseconds(CALLS, 1),
                }
            })
            .collect()
    }

    fn fill(&self, world: &mut World, count: u32) -> Result<(Devices, Restored)> {
        world.clear()?;
        let devices = (self.prepare)(&mut Scene::new(world, PROTOCOL_TCP))?;
        if let Some(known) = self.known {
            known.put::<W>(world, count)?;
        }
        for step in &self.before {
            step.on(world, &devices, count)?.nanoseconds(count, 1)?;
        }
        let mut restored = self.step.on(world, &devices, count)?;
        if self.runs == Runs::Again {
            restored.nanoseconds(1, count)?;
        }
        Ok((devices, restored))
    }
}

/// Measures the paths whose names contain `filter`, and prints the figures.
pub(crate) fn run(object: &[u8], filter: &str) -> Result<()> {
    let head = format!(
        "{}\nNanoseconds that the programs take for a packet: medians of {ROUNDS} rounds, in brackets the least; packets of so many flows in turn.",
        machine()?
    );
    let is_written = env::var_os(WRITE).is_some();
    let is_all = filter.is_empty() && env::var_os(KATRAN).is_some();
    ensure!(is_all || !is_written, "{WRITE} is for all figures, those of {KATRAN} too");
    println!("{head}");
    let katran = match env::var_os(KATRAN) {
        Some(object) => beside(object.as_ref())?,
        None => String::new(),
    };
    let figures =
        [head + "\n", katran, family::<V4>(object, filter)?, family::<V6>(object, filter)?].concat();
    if is_written {
        fs::write(FIGURES, figures).with_context(|| format!("writing {FIGURES}"))?;
    }
    Ok(())
}

fn family<W: Maps + 'static>(object: &[u8], filter: &str) -> Result<String> {
    let mut paths = paths::<W>();
    paths.retain(|path| path.name.contains(filter));
    let mut cells = vec![[const { String::new() }; SIZES.len()]; paths.len()];
    let mut loaded: Option<(Globals, u32, World)> = None;
    for (column, count) in SIZES.into_iter().enumerate() {
        for (path, cells) in paths.iter().zip(&mut cells).filter(|(path, _)| path.sizes.contains(&count)) {
            let is_it =
                |(globals, size, _): &(Globals, u32, World)| (*globals, *size) == (path.globals, count);
            if !loaded.as_ref().is_some_and(is_it) {
                // Only one world is loaded at a time, because of the memory that it takes.
                drop(loaded.take());
                let world = World::with_flows::<W>(object, path.globals, &PROGRAMS, 3 * count.max(16))?;
                loaded = Some((path.globals, count, world));
            }
            let (_, _, world) = loaded.as_mut().context("no world")?;
            let rounds = path.nanoseconds(world, count).with_context(|| path.name.clone())?;
            cells[column] = median(rounds.into_iter().map(Ok))?;
        }
    }
    let mut text = format!("\n{}", row(W::NAME, SIZES_IN_WORDS.map(str::to_owned)));
    text.extend(paths.iter().zip(cells).map(|(path, cells)| row(&path.name, cells)));
    print!("{text}");
    Ok(text)
}

/// Measures Katran's program, which is given as an object file.
fn beside(object: &FilePath) -> Result<String> {
    let known = SIZES.map(|count| {
        let katran = Katran::load(object, 3 * count.max(1_024))?;
        let mut restored = katran.known_flows(count)?;
        median((0..ROUNDS).map(|_| restored.nanoseconds(1, RUNS.max(count))))
    });
    let katran = Katran::load(object, RUNS)?;
    let mut of_no_service = katran.of_no_service()?;
    let of_no_service = median((0..ROUNDS).map(|_| of_no_service.nanoseconds(1, RUNS)));
    // The map is full, so each new flow evicts one of the round before.
    katran.known_flows(RUNS)?;
    let opening = (1..).take(ROUNDS).map(|round| katran.new_flows(RUNS, round * RUNS)?.nanoseconds(1, RUNS));
    let opening = median(opening);
    let mut rows = vec![row("katran", SIZES_IN_WORDS.map(str::to_owned))];
    rows.push(row("of no service", [of_no_service?, String::new(), String::new(), String::new()]));
    let [one, some, many, most] = known;
    rows.push(row("known flow, encapsulated", [one?, some?, many?, most?]));
    rows.push(row("new flow, in place of another", [String::new(), String::new(), opening?, String::new()]));
    let text = format!("\n{}", rows.concat());
    print!("{text}");
    Ok(text)
}

/// Returns the median of the rounds, followed by the lowest value in brackets.
fn median(rounds: impl Iterator<Item = Result<u64>>) -> Result<String> {
    let mut rounds = rounds.collect::<Result<Vec<_>>>()?;
    rounds.sort_unstable();
    Ok(format!("{} ({})", rounds[rounds.len() / 2], rounds[0]))
}

fn row(name: &str, cells: [String; SIZES.len()]) -> String {
    let row = format!("{name:<44} {}", cells.map(|cell| format!("{cell:>12}")).concat());
    format!("{}\n", row.trim_end())
}

/// Returns a line such as `AMD EPYC, 2 cores, Linux 6.18.44`.
fn machine() -> Result<String> {
    let processors = fs::read_to_string("/proc/cpuinfo")?;
    let name = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let name = name.map_or("unknown", |(_, name)| name);
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let kernel = release.trim().split(['-', '+']).next().unwrap_or_default();
    Ok(format!("{name}, {} cores, Linux {kernel}", thread::available_parallelism()?))
}
