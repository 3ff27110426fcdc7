//! The flood limit. A service that is flooded opens few flows, whatever comes, and other services
//! do not suffer.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use proxy_common::{
    flow::openings_per_window,
    layout::{PROTOCOL_TCP, SERVICE_HAS_ENDPOINTS, Service},
    packet::{TCP_ACK, TCP_SYN},
    reason::Reason,
};

use super::floods::{from_client, is_from_frontend, to_backend};
use crate::{
    cases::{Group, Scene, WorldKind, scene::*},
    wire::{Endpoint, Segment},
    world::{Maps, Verdict},
};

/// Limit of flows in a second. It is so low that the packets are a flood even if a test takes a
/// hundred times as long.
const LIMIT: u32 = 450;
const FORGED: u32 = 200_000;
const ESTABLISHED: u32 = 1_000;
/// Number of forged clients between one client of the other service and the next.
const SPACING: u32 = 4_000;
/// Number of forged clients that come while a packet goes to the backend and the answer comes back.
/// Without the limit, the map of opening flows would have evicted the flow by then.
const ROUND_TRIP: u32 = 100_000;

/// First numbers of the clients of each kind. Each client has an address of its own.
const FIRST_ESTABLISHED: u32 = 2_000_000;
const FIRST_OF_OTHER: u32 = 3_000_000;

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    let name = "a flood of forged SYN to one service";
    group.each::<W>(&[PROTOCOL_TCP], WorldKind::Large, name, flood);
    let name = "a flood of forged SYN to more service ports than shares, and one that is quiet";
    group.each::<W>(&[PROTOCOL_TCP], WorldKind::Large, name, flood_of_many);
}

/// Packets of the clients of a frontend, and the answers to them.
struct Connection {
    frontend: Endpoint,
    first: Vec<u8>,
    answer: Vec<u8>,
    second: Vec<u8>,
}

impl Connection {
    fn to<W: Maps>(s: &Scene<W>, frontend: Endpoint) -> Self {
        let first: Segment = s.first(CLIENT, frontend);
        Self {
            frontend,
            answer: first.to(LOCAL).answer(TCP_SYN | TCP_ACK).bytes::<W>(),
            second: first.flags(TCP_ACK).bytes::<W>(),
            first: first.bytes::<W>(),
        }
    }

    fn open<W: Maps>(&self, s: &Scene<W>, client: u32) -> Result<()> {
        from_client::<W>(s.world, &self.first, client)
    }

    fn establish<W: Maps>(&self, s: &Scene<W>, client: u32) -> Result<()> {
        is_from_frontend::<W>(s.world, &self.answer, client, self.frontend)?;
        from_client::<W>(s.world, &self.second, client)
    }
}

const FLOODED: u16 = 60;
/// Limit of a second for the flood of many service ports. A window has 7 openings, so the share of
/// a service port is less than one. A machine that takes half a millisecond for a packet still
/// sends more than the limit lets pass.
const LIMIT_OF_MANY: u32 = 420;
/// Time between two connections to the service port that is not flooded: 19 windows of the flood
/// limit.
const PAUSE: Duration = Duration::from_millis(330);
const QUIET_CONNECTIONS: u32 = 10;

fn flood_of_many<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    let set = s.set(&[(11, LOCAL, true)])?;
    let service = Service {
        cluster: set,
        internal: set,
        external: set,
        flags: SERVICE_HAS_ENDPOINTS,
        ..Service::default()
    };
    let port_of = |number: u16| (CLUSTER_IP.0, 10_000 + number);
    for number in 0..=FLOODED {
        s.world.set_service(u32::from(number) + 1, service)?;
        s.frontend(port_of(number), u32::from(number) + 1, 0)?;
    }
    let flooded: Vec<_> = (1..=FLOODED).map(|number| s.first(CLIENT, port_of(number)).bytes::<W>()).collect();
    let quiet = Connection::to::<W>(s, port_of(0));
    s.change_settings(|settings| settings.openings_per_window = openings_per_window(LIMIT_OF_MANY))?;
    let (mut forged, mut refused) = (0, 0);
    for connection in 0..=QUIET_CONNECTIONS {
        let begin = Instant::now();
        while begin.elapsed() < PAUSE {
            for packet in &flooded {
                refused += u64::from(to_backend::<W>(s.world, packet, forged)? == Verdict::Dropped);
                forged += 1;
            }
        }
        // The first connection comes while the flood still spends the credit that its service ports
        // had.
        if connection > 0 {
            quiet.open(s, FIRST_OF_OTHER + connection)?;
        }
    }
    ensure!(refused > u64::from(forged) / 10, "{refused} of {forged} forged clients were refused");
    Ok(())
}

fn flood<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.node_port_here()?;
    s.service(2, &[(12, LOCAL, true)])?;
    s.frontend(CLUSTER_IP, 2, 0)?;
    let flooded = Connection::to::<W>(s, NODE_PORT);
    let other = Connection::to::<W>(s, CLUSTER_IP);
    for client in FIRST_ESTABLISHED..FIRST_ESTABLISHED + ESTABLISHED {
        flooded.open(s, client)?;
        flooded.establish(s, client)?;
    }
    s.change_settings(|settings| settings.openings_per_window = openings_per_window(LIMIT))?;
    let begin = Instant::now();
    let mut opened = 0;
    for forged in 0..FORGED {
        opened += u64::from(to_backend::<W>(s.world, &flooded.first, forged)? == Verdict::GoesOn);
        let Some(number) = (forged % SPACING == 0).then_some(forged / SPACING) else { continue };
        other.open(s, FIRST_OF_OTHER + number)?;
        if let Some(answered) = number.checked_sub(ROUND_TRIP / SPACING) {
            other.establish(s, FIRST_OF_OTHER + answered)?;
        }
        flooded.establish(s, FIRST_ESTABLISHED + number)?;
    }
    // In each second begun, the flood may open at most twice the limit: the room of all windows,
    // and its own share besides. The credit that a quarter of a second without a flood has left
    // comes on top.
    let most = u64::from(LIMIT) * 2 * (begin.elapsed().as_secs() + 1) + u64::from(LIMIT);
    ensure!((1..most).contains(&opened), "{opened} of {FORGED} forged clients have flows, {most} is most");
    for client in FIRST_ESTABLISHED..FIRST_ESTABLISHED + ESTABLISHED {
        flooded.establish(s, client)?;
    }
    let clients = u64::from(FORGED / SPACING);
    let answered = u64::from((FORGED - ROUND_TRIP) / SPACING);
    let (_, entries) = s.flow_counts()?;
    let confirmed = u64::from(ESTABLISHED) + answered;
    ensure!(entries as u64 == 2 * confirmed, "{entries} entries of {confirmed} established flows");
    s.counted(&[
        (Reason::FlowOpened, u64::from(ESTABLISHED) + clients + opened),
        (Reason::ConnectionsLimited, u64::from(FORGED) - opened),
    ])
}
