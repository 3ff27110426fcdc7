//! Loads that a node must stand for long: many connections that come and go, and forged segments of
//! established ones. The maps are those of a controller with default limits, which collects flows
//! meanwhile.

use std::{
    env, fs,
    panic::resume_unwind,
    path::PathBuf,
    process,
    sync::{
        Barrier,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use proxy_common::{
    flow::{FlowLifetimes, Side, Stage},
    inventory::Limit,
    layout::LAYOUT_VERSION,
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
    reason::Reason,
};
use proxy_ctl::{
    config::{Ebpf, Limits, SocketLoadBalancing},
    model::node::Host,
    modes::{
        Dataplane as _,
        ebpf::{EbpfDataplane, cleanup::cleanup},
    },
    sys::proc::filesystem::provide_bpffs,
};
use scenario::Skip;

use super::floods::{from_client, to_client};
use crate::{
    cases::{Group, Scene, scene::*},
    wire::{Endpoint, KnownAddress, Segment, tcp},
    world::{Maps, World},
};

/// Number of connections that open in a second.
const CONNECTIONS: u32 = 50_000;
/// Number of connections that open while a packet goes to the backend and its answer comes back,
/// which is 50 ms.
const ROUND_TRIP: u32 = CONNECTIONS / 20;
/// Number of connections that open while one lasts.
const LIFETIME: u32 = CONNECTIONS;
/// Number of forged packets in a second.
const FORGED: u32 = 10_000;
/// Numbers of connections that go on while their segments are forged, and of those that are silent.
const ACTIVE: u32 = 200;
const SILENT: u32 = 50;
/// Shortest time that a flow must stay that in truth goes on.
const PERHAPS_RESET: Duration = Duration::from_secs(10_800);
const OTHER: Endpoint = (KnownAddress::RemoteBackend, 9090);
/// Interval of the controller's garbage collections.
const COLLECTED_EVERY: Duration = Duration::from_secs(1);

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    if env::var_os(SECONDS).is_some() {
        group.tcp::<W>("50,000 connections a second", come_and_go);
        group.tcp::<W>("10,000 forged segments a second", forge);
    }
}

/// Environment variable that says how long each case lasts. Without it there are no cases, because
/// they need a machine that does nothing else.
const SECONDS: &str = "SUSTAINED_SECONDS";

fn seconds() -> Result<u32> {
    let number = env::var(SECONDS).ok().and_then(|text| text.parse().ok());
    number
        .filter(|number| (1..=60).contains(number))
        .with_context(|| format!("{SECONDS} must be a number from 1 to 60"))
}

/// Controller without services and interfaces.
struct Controller {
    dataplane: EbpfDataplane,
    /// Folder of the pins, which is declared last so that it is removed after the dataplane.
    pins: Pins,
}

/// Folder for what a controller pins. It is removed when this is dropped.
struct Pins(PathBuf);

/// Most entries of flows that were seen at once.
#[derive(Debug, Default)]
struct Most {
    opening: usize,
    established: usize,
}

impl Controller {
    fn start() -> Result<Self> {
        const BPFFS: &str = "/sys/fs/bpf";
        provide_bpffs(BPFFS.as_ref())?;
        let pins = Pins(PathBuf::from(format!("{BPFFS}/proxy-ctl-packets-{}", process::id())));
        fs::create_dir(&pins.0).with_context(|| format!("making {}", pins.0.display()))?;
        let config = Ebpf {
            bpffs: pins.0.clone(),
            socket_load_balancing: SocketLoadBalancing::Off,
            limits: Limits::default(),
            ..Ebpf::default()
        };
        Ok(Self { dataplane: EbpfDataplane::open(&config)?, pins })
    }

    fn maps(&self) -> PathBuf {
        self.pins.0.join(format!("proxy-ctl/v{LAYOUT_VERSION}/maps"))
    }

    /// Does `work` while garbage is collected every second.
    fn beside<W: Maps>(&mut self, world: &World, work: impl FnOnce() -> Result<()>) -> Result<Most> {
        let (working, ended) = mpsc::channel();
        thread::scope(|scope| {
            let collecting = scope.spawn(move || self.collect::<W>(world, &ended));
            let done = work();
            drop(working);
            let most = collecting.join().unwrap_or_else(|panic| resume_unwind(panic));
            done.and(most)
        })
    }

    fn collect<W: Maps>(&mut self, world: &World, ended: &Receiver<()>) -> Result<Most> {
        stay_on(&cpus()?)?;
        let mut most = Most::default();
        while ended.recv_timeout(COLLECTED_EVERY) == Err(RecvTimeoutError::Timeout) {
            self.dataplane.collect_garbage()?;
            most.opening = most.opening.max(world.count_flows::<W>(Stage::Opening)?);
            most.established = most.established.max(world.count_flows::<W>(Stage::Established)?);
        }
        Ok(most)
    }

    /// Collects until no flow is left, as if all closed flows had closed long ago. Returns the
    /// number of collections.
    fn drain<W: Maps>(&mut self, world: &World) -> Result<u32> {
        const AT_MOST: u32 = 60;
        let flow_lifetimes = FlowLifetimes { tcp_closed: Duration::ZERO, ..FlowLifetimes::default() };
        self.dataplane.set_host(&Host { flow_lifetimes, ..Host::default() })?;
        for times in 1..=AT_MOST {
            self.dataplane.collect_garbage()?;
            if world.count_flows::<W>(Stage::Opening)? == 0 {
                return Ok(times);
            }
        }
        let left = world.count_flows::<W>(Stage::Opening)?;
        Err(anyhow!("{left} entries of flows that have closed are left after {AT_MOST} collections"))
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let removed = cleanup(&self.0).map_err(anyhow::Error::from);
        if let Err(error) = removed.and_then(|_| Ok(fs::remove_dir(&self.0)?)) {
            eprintln!("left {}: {error:#}", self.0.display());
        }
    }
}

fn cpus() -> Result<Vec<u32>> {
    aya::util::online_cpus().map_err(|(file, error)| anyhow!("{file}: {error}"))
}

/// Keeps the calling thread on these CPUs.
fn stay_on(cpus: &[u32]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().try_for_each(|cpu| set.set(*cpu as usize))?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Waits until `count` events are due at this rate.
fn keep_to(rate: u32, start: Instant, count: u32) {
    let due = start + Duration::from_secs(1) * count / rate;
    thread::sleep(due.saturating_duration_since(Instant::now()));
}

/// Prints the rate and the most entries that were seen. Skips the case if the machine is too slow
/// for the rate.
fn tell(what: &str, rate: u32, count: u32, took: Duration, most: &Most) -> Result<()> {
    let reached = f64::from(count) / took.as_secs_f64();
    eprintln!("{reached:.0} {what} a second for {:.1} s; at most {most:?}", took.as_secs_f64());
    if reached < f64::from(rate) * 0.98 {
        return Err(Skip(format!("{reached:.0} {what} a second were reached here")).into());
    }
    Ok(())
}

type SentPacket = (Side, Vec<u8>);

const DATA: &[u8] = b"as much as a question, and as its answer";
const LENGTH: u32 = DATA.len() as u32;

/// Makes a segment for a stream whose sender has sent and received this many bytes.
fn segment<W: Maps>(sender: Side, flags: u8, [sent, received]: [u32; 2], payload: &[u8]) -> SentPacket {
    let first = tcp(CLIENT, NODE_PORT, TCP_SYN);
    let segment = match sender {
        Side::Client => first.flags(flags),
        Side::Backend => first.to(LOCAL).answer(flags),
    };
    let segment = Segment {
        sequence: segment.sequence.wrapping_add(sent),
        acknowledgement: segment.acknowledgement.wrapping_add(received),
        payload: payload.to_vec(),
        ..segment
    };
    (sender, segment.bytes::<W>())
}

fn opening<W: Maps>() -> [SentPacket; 3] {
    [
        segment::<W>(Side::Client, TCP_SYN, [0, 0], &[]),
        segment::<W>(Side::Backend, TCP_SYN | TCP_ACK, [0, 0], &[]),
        segment::<W>(Side::Client, TCP_ACK, [0, 0], &[]),
    ]
}

/// Makes a question and its answer, after `others` such exchanges.
fn exchange<W: Maps>(others: u32) -> [SentPacket; 2] {
    let before = others * LENGTH;
    [
        segment::<W>(Side::Client, TCP_ACK, [before, before], DATA),
        segment::<W>(Side::Backend, TCP_ACK, [before, before + LENGTH], DATA),
    ]
}

/// Makes the segments that close a connection after this many exchanges.
fn closing<W: Maps>(exchanges: u32) -> [SentPacket; 3] {
    let before = exchanges * LENGTH;
    [
        segment::<W>(Side::Client, TCP_FIN | TCP_ACK, [before, before], &[]),
        segment::<W>(Side::Backend, TCP_FIN | TCP_ACK, [before, before + 1], &[]),
        segment::<W>(Side::Client, TCP_ACK, [before + 1, before + 1], &[]),
    ]
}

/// Sends segments of client and backend, all of which must be translated.
fn send<W: Maps>(world: &World, sent: &[SentPacket], client: u32) -> Result<()> {
    sent.iter().try_for_each(|(sender, packet)| match sender {
        Side::Client => from_client::<W>(world, packet, client),
        Side::Backend => to_client::<W>(world, packet, client),
    })
}

fn come_and_go<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    let mut controller = Controller::start()?;
    let mut world = World::with_maps_in(&crate::object()?, &controller.maps())?;
    let mut scene = Scene::<W>::new(&mut world, s.protocol);
    scene.node_port_here()?;
    let mut cpus = cpus()?;
    cpus.truncate(2);
    let count = CONNECTIONS * seconds()?;
    let of = cpus.len() as u32;
    let load = Load { count, start: Instant::now(), abreast: &Barrier::new(cpus.len()) };
    let world = &*scene.world;
    let most = controller.beside::<W>(world, || {
        thread::scope(|scope| {
            let shares = cpus
                .iter()
                .zip(0..)
                .map(|(cpu, share)| scope.spawn(move || load.bear::<W>(world, *cpu, share, of)));
            let shares: Vec<_> = shares.collect();
            shares.into_iter().try_for_each(|share| share.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    })?;
    let took = load.start.elapsed();
    ensure!(most.established < Limit::Flows.default_entries() as usize, "{most:?}");
    ensure!(scene.world.count_flows::<W>(Stage::Established)? == 0, "flows that have closed are established");
    scene.counted(&[(Reason::FlowOpened, count.into())])?;
    let collections = controller.drain::<W>(scene.world)?;
    eprintln!("no flow is left after {collections} collections");
    tell("connections", CONNECTIONS, count + LIFETIME, took, &most)
}

/// Connections of `count` clients, which the CPUs share.
#[derive(Clone, Copy)]
struct Load<'a> {
    count: u32,
    start: Instant,
    /// Barrier at which a CPU waits for the others. Otherwise the flows that it opens could evict
    /// opening flows of a CPU that is behind.
    abreast: &'a Barrier,
}

impl Load<'_> {
    /// Handles the share of one CPU: clients whose number is `share` or greater than it by a
    /// multiple of `of`.
    fn bear<W: Maps>(self, world: &World, cpu: u32, share: u32, of: u32) -> Result<()> {
        /// Number of steps between two waits, 20 ms of two CPUs. Waiting more often would cost more
        /// than the packets do.
        const BATCH: u32 = 500;
        let (opening, exchange, closing) = (opening::<W>(), exchange::<W>(0), closing::<W>(1));
        let mut outcome = stay_on(&[cpu]);
        for step in (share..self.count + LIFETIME).step_by(of as usize) {
            if (step / of).is_multiple_of(BATCH) {
                keep_to(CONNECTIONS, self.start, step);
                self.abreast.wait();
            }
            if outcome.is_ok() {
                outcome = self.step::<W>(world, [&opening, &exchange, &closing], step);
            }
        }
        outcome
    }

    /// Opens one connection, answers one that came before, and closes an older one.
    fn step<W: Maps>(
        self,
        world: &World,
        [opening, exchange, closing]: [&[SentPacket]; 3],
        step: u32,
    ) -> Result<()> {
        let before = |connections| step.checked_sub(connections).filter(|client| *client < self.count);
        if let Some(client) = before(0) {
            send::<W>(world, &opening[..1], client)?;
        }
        if let Some(client) = before(ROUND_TRIP) {
            send::<W>(world, &opening[1..], client)?;
            send::<W>(world, exchange, client)?;
        }
        before(LIFETIME).map_or(Ok(()), |client| send::<W>(world, closing, client))
    }
}

fn forge<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    let mut controller = Controller::start()?;
    let mut world = World::with_maps_in(&crate::object()?, &controller.maps())?;
    let mut scene = Scene::<W>::new(&mut world, s.protocol);
    scene.node_port_here()?;
    (0..ACTIVE + SILENT).try_for_each(|client| send::<W>(scene.world, &opening::<W>(), client))?;
    // From here on, a new connection goes to another backend.
    scene.service(1, &[(21, OTHER, true)])?;
    let count = FORGED * seconds()?;
    let mut exchanges = vec![0; (ACTIVE + SILENT) as usize];
    let start = Instant::now();
    let world = &*scene.world;
    let most = controller.beside::<W>(world, || forge_among::<W>(world, count, &mut exchanges))?;
    let took = start.elapsed();
    for (client, before) in (0..).zip(&exchanges) {
        send::<W>(scene.world, &exchange::<W>(*before), client)?;
    }
    scene.counted(&[(Reason::FlowOpened, exchanges.len() as u64)])?;
    let flows = scene.flows(Stage::Established)?;
    ensure!(flows.len() == 2 * exchanges.len(), "{} entries of {} flows", flows.len(), exchanges.len());
    let lifetimes = flows.iter().map(|(_, flow)| FlowLifetimes::default().of(flow.protocol, flow.state));
    let shortest = lifetimes.min().unwrap_or_default();
    ensure!(shortest >= PERHAPS_RESET, "a flow is removed after {shortest:?}");
    for (client, before) in (0..).zip(&exchanges) {
        send::<W>(scene.world, &closing::<W>(before + 1), client)?;
    }
    ensure!(scene.world.count_flows::<W>(Stage::Established)? == 0, "flows that have closed are established");
    tell("forged segments", FORGED, count, took, &most)
}

/// Sends `count` forged segments. Each one that ends a connection is followed by one that opens it,
/// and by an exchange of an active connection. `exchanges` counts these.
fn forge_among<W: Maps>(world: &World, count: u32, exchanges: &mut [u32]) -> Result<()> {
    let ends = [
        (Side::Client, TCP_RST),
        (Side::Client, TCP_FIN),
        (Side::Backend, TCP_RST),
        (Side::Backend, TCP_FIN),
        (Side::Client, TCP_RST | TCP_ACK),
        (Side::Client, TCP_FIN | TCP_ACK),
        (Side::Backend, TCP_RST | TCP_ACK),
        (Side::Backend, TCP_FIN | TCP_ACK),
    ];
    let mut random = fastrand::Rng::with_seed(1);
    let mut forged = |sender, flags| segment::<W>(sender, flags, [random.u32(..), random.u32(..)], &[]);
    let start = Instant::now();
    for (number, (sender, flags)) in (0..count / 2).zip(ends.into_iter().cycle()) {
        if number.is_multiple_of(50) {
            keep_to(FORGED, start, 2 * number);
        }
        send::<W>(
            world,
            &[forged(sender, flags), forged(Side::Client, TCP_SYN)],
            number % (ACTIVE + SILENT),
        )?;
        let active = number % ACTIVE;
        send::<W>(world, &exchange::<W>(exchanges[active as usize]), active)?;
        exchanges[active as usize] += 1;
    }
    Ok(())
}
