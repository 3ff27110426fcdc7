//! Measures connections to one Service during a flood of SYNs to another, as from an attacker who
//! forges addresses.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use behaviour::state;
use etherparse::PacketBuilder;
use lab::{
    Lab, Protocol,
    cluster::{FABRIC, OUTSIDE, node_name},
    xdp,
};

use super::{
    forward::received,
    generator::{DEVICE, Generator, attach, link_address, within_on_one_core},
    program::{self, FRAME},
    traffic,
};
use crate::{
    cluster::{Cluster, NODE},
    plan::{Measure, Route},
    results::{Figures, Settings},
    subject::Subject,
};

/// Number of established connections to the flooded Service.
const HELD: usize = 100;
/// Factor by which a measurement with a flood takes longer, because its turns differ more.
const LONGER: f64 = 3.0;
/// Interval in which SYNs are sent, as many as the pace asks for.
const PERIOD: Duration = Duration::from_millis(20);
/// First of the forged addresses, which differ in their lower half. Answers to them end at the
/// fabric.
const FORGED: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 0);
const FORGED_BITS: u8 = 16;

/// Measures connections to one Service while another one is flooded. `route` is the way by which
/// the first Service is dialled. `has_cards` is true if the devices already run XDP programs that
/// make them behave like network cards.
pub(crate) fn beside(
    cluster: &Cluster,
    subject: &Subject,
    settings: &Settings,
    route: Route,
    has_cards: bool,
) -> Result<Figures> {
    let figures = measured(cluster, subject, settings, route, has_cards);
    // Hundreds of thousands of connections that were never answered would stay for minutes, and
    // disturb the next measurement.
    state::forget_connections(&cluster.lab, NODE)?;
    figures
}

fn measured(
    cluster: &Cluster,
    subject: &Subject,
    settings: &Settings,
    route: Route,
    has_cards: bool,
) -> Result<Figures> {
    let lab = &cluster.lab;
    let _nowhere = Nowhere::new(lab)?;
    // Frames come to a device with an XDP program as to a network card.
    let _receives = if has_cards { None } else { Some(attach(lab, &node_name(NODE), DEVICE, &xdp::PASS)?) };
    let flooded = Cluster::names();
    let outside = cluster.dialler(Route::NodePortRemote);
    let held = outside.hold_many(Protocol::Tcp, &[flooded], HELD)?;
    let frame = frame(lab, flooded)?;
    let is_over = AtomicBool::new(false);
    let settings = &Settings { seconds: settings.seconds * LONGER, ..settings.clone() };
    let without_room = || Ok::<_, anyhow::Error>(received(lab, &node_name(NODE), DEVICE)?.lost);
    let (dropped_before, lost_before) = (subject.dropped_by_flood_limit()?, without_room()?);
    let (rates, sent) = thread::scope(|scope| {
        let flood = scope.spawn(|| {
            within_on_one_core(&lab.netns(FABRIC)?.namespace, || {
                let generator = Generator::new(lab, |device| program::flood(&frame, device))?;
                at_pace(&generator, settings.syns_per_second, &is_over)
            })
        });
        let rates = traffic::rates(cluster, settings, Measure::Connect, route);
        is_over.store(true, Ordering::Relaxed);
        let sent = flood.join().map_err(|_| anyhow!("the thread of the flood has panicked"))?;
        anyhow::Ok((rates.context("beside a flood")?, sent.context("the flood")?))
    })?;
    let arrived = sent.syns - (without_room()? - lost_before) as f64;
    let dropped =
        subject.dropped_by_flood_limit()?.zip(dropped_before).map(|(now, before)| (now - before) / arrived);
    let lost = outside.ping_many(&held)?.len();
    held.into_iter().try_for_each(|connection| outside.release(connection))?;
    let Figures::Rates { ratio, service, .. } = rates else { bail!("no rates") };
    let syns_per_second = arrived / sent.seconds;
    Ok(Figures::Flood { syns_per_second, dropped, ratio, p99_micros: service.p99_micros, held: HELD, lost })
}

struct Sent {
    syns: f64,
    seconds: f64,
}

fn at_pace(generator: &Generator, per_second: u32, is_over: &AtomicBool) -> Result<Sent> {
    let burst = (f64::from(per_second) * PERIOD.as_secs_f64()) as u32;
    let (start, mut bursts) = (Instant::now(), 0_u32);
    while !is_over.load(Ordering::Relaxed) {
        generator.send(burst)?;
        bursts += 1;
        thread::sleep((PERIOD * bursts).saturating_sub(start.elapsed()));
    }
    Ok(Sent { syns: f64::from(bursts) * f64::from(burst), seconds: start.elapsed().as_secs_f64() })
}

/// Makes a SYN from outside. Its changing fields have the values with which [`program::flood`]
/// keeps the checksums right.
fn frame(lab: &Lab, to: SocketAddr) -> Result<[u8; FRAME]> {
    const HALF: u32 = 0xffff;
    let SocketAddr::V4(to) = to else { bail!("{to} is no address of IPv4") };
    let mut ip =
        etherparse::Ipv4Header::new(20, 64, etherparse::IpNumber::TCP, FORGED.octets(), to.ip().octets())?;
    ip.identification = HALF as u16;
    let mut tcp = etherparse::TcpHeader::new(0, to.port(), HALF, 64_240);
    (tcp.syn, tcp.acknowledgment_number) = (true, HALF);
    let mut bytes = Vec::with_capacity(FRAME);
    PacketBuilder::ethernet2(link_address(lab, OUTSIDE)?, link_address(lab, &node_name(NODE))?)
        .ip(etherparse::IpHeaders::Ipv4(ip, etherparse::Ipv4Extensions::default()))
        .tcp_header(tcp)
        .write(&mut bytes, &[])?;
    bytes.resize(FRAME, 0);
    bytes.try_into().map_err(|_| anyhow!("a frame of another length"))
}

/// Route of the fabric for answers to forged addresses, so that it looks for no neighbours. It is
/// removed when this is dropped.
struct Nowhere<'a>(&'a Lab);

impl<'a> Nowhere<'a> {
    fn new(lab: &'a Lab) -> Result<Self> {
        let nowhere = Self(lab);
        nowhere.route("add")?;
        Ok(nowhere)
    }

    fn route(&self, what: &str) -> Result<()> {
        self.0.netns(FABRIC)?.ip(&format!("route {what} blackhole {FORGED}/{FORGED_BITS}\n"))
    }
}

impl Drop for Nowhere<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.route("del") {
            eprintln!("bench: {error:#}");
        }
    }
}
