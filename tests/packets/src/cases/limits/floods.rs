//! Floods from forged addresses, with maps as large as by default. Established flows lose nothing,
//! and clients that come meanwhile are served.

use std::env;

use anyhow::{Context as _, Result, ensure};
use proxy_common::{
    flow::Stage,
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
    packet::{TCP_ACK, TCP_RST, TCP_SYN},
    reason::{self, Reason},
};

use crate::{
    cases::{Group, Scene, WorldKind, scene::*},
    wire::{Endpoint, Segment},
    world::{Maps, Verdict, World},
};

/// Number of forged clients: three times as many as the maps of opening flows have room for.
/// `FORGED_CLIENTS` in the environment asks for more; a million take ten seconds for each case.
const FORGED_CLIENTS: u32 = 100_000;
const ESTABLISHED: u32 = 1_000;
/// Number of forged clients between one real client and the next.
const SPACING: u32 = 1_000;
/// Number of forged clients that come while a packet goes to the backend and the answer comes back.
/// At 100,000 a second, this takes 50 ms.
const ROUND_TRIP: u32 = 5_000;

/// First numbers of the clients of each kind. Each client has an address of its own.
const FIRST_ESTABLISHED: u32 = 2_000_000;
const FIRST_REAL: u32 = 3_000_000;

/// Packet that a forged client sends once the backend has answered its first one.
#[derive(Clone, Copy)]
enum Then {
    Nothing,
    /// A segment with these flags, and an acknowledgement number that fits nothing that the backend
    /// has sent.
    Flags(u8),
    SameAgain,
}

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    for (protocol, name, then) in [
        (PROTOCOL_TCP, "a flood of forged SYN", Then::Nothing),
        (PROTOCOL_TCP, "a flood of forged SYN, each followed by an ACK", Then::Flags(TCP_ACK)),
        (PROTOCOL_TCP, "a flood of forged SYN, each followed by data without ACK", Then::Flags(0)),
        (PROTOCOL_TCP, "a flood of forged SYN, each followed by a RST", Then::Flags(TCP_RST)),
        (PROTOCOL_UDP, "a flood of forged datagrams", Then::Nothing),
        (PROTOCOL_UDP, "a flood of forged datagrams, each followed by a second one", Then::SameAgain),
    ] {
        group.add::<W>(name, protocol, WorldKind::Large, move |s| flood(s, then));
    }
    group.add::<W>(
        "a flood of forged datagrams, each followed by two more seconds later",
        PROTOCOL_UDP,
        WorldKind::Large,
        flood_for_seconds,
    );
}

/// Lets the backend answer all forged clients, so that each of them has a flow that goes on.
fn flood_for_seconds<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    const MOST: u32 = 4_000;
    const FORGED: u32 = 5_000;
    s.node_port_here()?;
    s.change_settings(|settings| settings.most_unproven_entries = MOST)?;
    let clients = Clients::new(s, Then::Nothing);
    establish(s, &clients)?;
    for forged in 0..FORGED {
        from_client::<W>(s.world, &clients.first, forged)?;
        to_client::<W>(s.world, &clients.answer, forged)?;
    }
    s.age(Stage::Opening)?;
    for forged in 0..FORGED {
        to_client::<W>(s.world, &clients.answer, forged)?;
        from_client::<W>(s.world, &clients.second, forged)?;
        from_client::<W>(s.world, &clients.second, forged)?;
    }
    let (_, entries) = s.flow_counts()?;
    ensure!(entries == MOST as usize, "{entries} entries of flows that prove no client");
    for client in established_clients() {
        from_client::<W>(s.world, &clients.second, client)?;
        to_client::<W>(s.world, &clients.answer, client)?;
    }
    // TCP connections still have all of their room after the flood.
    let mut tcp = Scene::<W>::new(s.world, PROTOCOL_TCP);
    tcp.node_port_here()?;
    let clients = Clients::new(&tcp, Then::Nothing);
    for client in established_clients() {
        from_client::<W>(tcp.world, &clients.first, client)?;
        to_client::<W>(tcp.world, &clients.answer, client)?;
        from_client::<W>(tcp.world, &clients.second, client)?;
    }
    let (_, entries) = tcp.flow_counts()?;
    ensure!(
        entries == (MOST + 2 * ESTABLISHED) as usize,
        "{entries} entries beside {ESTABLISHED} connections"
    );
    Ok(())
}

/// Packets of one client after the other. The client's address is written into the bytes without
/// correcting the checksum, which no program reads.
struct Clients {
    first: Vec<u8>,
    answer: Vec<u8>,
    second: Vec<u8>,
    forged: Option<Vec<u8>>,
}

impl Clients {
    fn new<W: Maps>(s: &Scene<W>, then: Then) -> Self {
        let first = s.first(CLIENT, NODE_PORT);
        let forged = match then {
            Then::Nothing => None,
            Then::SameAgain => Some(first.clone()),
            Then::Flags(flags) => {
                let forged = first.flags(flags);
                Some(Segment { acknowledgement: forged.acknowledgement.wrapping_sub(1 << 20), ..forged })
            }
        };
        Self {
            answer: first.to(LOCAL).answer(TCP_SYN | TCP_ACK).bytes::<W>(),
            second: first.flags(TCP_ACK).bytes::<W>(),
            first: first.bytes::<W>(),
            forged: forged.map(|forged| forged.bytes::<W>()),
        }
    }
}

/// Offsets in a packet with an Ethernet header and without options or extension headers.
struct Offsets {
    source: usize,
    destination: usize,
    ports: usize,
}

impl Offsets {
    fn of<W: Maps>() -> Self {
        const NETWORK: usize = 14;
        let length = size_of::<W::Address>();
        // The addresses are the last fields of the header in both families.
        let ports = NETWORK + if length == 4 { 20 } else { 40 };
        Self { source: ports - 2 * length, destination: ports - length, ports }
    }
}

/// Writes the address of a client, which is 100.64.0.0 plus the client's number. In IPv6, these
/// four bytes are the end of the address.
fn write_client(bytes: &mut [u8], end_of_address: usize, client: u32) {
    const FIRST_ADDRESS: u32 = u32::from_be_bytes([100, 64, 0, 0]);
    bytes[end_of_address - 4..end_of_address].copy_from_slice(&(FIRST_ADDRESS + client).to_be_bytes());
}

/// Sends a client's packet, which must reach the backend.
pub(crate) fn from_client<W: Maps>(world: &World, packet: &[u8], client: u32) -> Result<()> {
    let verdict = to_backend::<W>(world, packet, client)?;
    ensure!(verdict == Verdict::GoesOn, "{verdict:?}: the packet of client {client}");
    Ok(())
}

/// Sends a client's packet, which must reach the backend or be dropped.
pub(crate) fn to_backend<W: Maps>(world: &World, packet: &[u8], client: u32) -> Result<Verdict> {
    let Offsets { source: _, destination, ports } = Offsets::of::<W>();
    let mut bytes = packet.to_vec();
    write_client(&mut bytes, destination, client);
    let output = world.run("uplink_ingress", &bytes)?;
    let (address, port) = (&output.packet[destination..ports], &output.packet[ports + 2..ports + 4]);
    ensure!(
        output.verdict == Verdict::Dropped
            || (address == W::address(LOCAL.0).as_ref() && port == LOCAL.1.to_be_bytes()),
        "the packet of client {client} goes to {address:?}, port {port:?}"
    );
    Ok(output.verdict)
}

/// Sends the backend's answer, which must leave with `NODE_PORT` as its source.
pub(crate) fn to_client<W: Maps>(world: &World, packet: &[u8], client: u32) -> Result<()> {
    is_from_frontend::<W>(world, packet, client, NODE_PORT)
}

/// Sends the backend's answer, which must leave with this frontend as its source.
pub(crate) fn is_from_frontend<W: Maps>(
    world: &World,
    packet: &[u8],
    client: u32,
    frontend: Endpoint,
) -> Result<()> {
    let Offsets { source, destination, ports } = Offsets::of::<W>();
    let mut bytes = packet.to_vec();
    write_client(&mut bytes, ports, client);
    let output = world.run("uplink_egress", &bytes)?;
    let (address, port) = (&output.packet[source..destination], &output.packet[ports..ports + 2]);
    ensure!(
        address == W::address(frontend.0).as_ref() && port == frontend.1.to_be_bytes(),
        "the answer to client {client} comes from {address:?}, port {port:?}"
    );
    Ok(())
}

fn flood<W: Maps>(s: &mut Scene<W>, then: Then) -> Result<()> {
    s.node_port_here()?;
    let clients = Clients::new(s, then);
    establish(s, &clients)?;
    let forged_clients = forged_clients()?;
    for forged in 0..forged_clients {
        from_client::<W>(s.world, &clients.first, forged)?;
        if let Some(packet) = &clients.forged {
            to_client::<W>(s.world, &clients.answer, forged)?;
            from_client::<W>(s.world, packet, forged)?;
        }
        let Some(number) = (forged % SPACING == 0).then_some(forged / SPACING) else { continue };
        from_client::<W>(s.world, &clients.first, FIRST_REAL + number)?;
        if let Some(answered) = number.checked_sub(ROUND_TRIP / SPACING) {
            to_client::<W>(s.world, &clients.answer, FIRST_REAL + answered)?;
            from_client::<W>(s.world, &clients.second, FIRST_REAL + answered)?;
        }
    }
    let real = forged_clients / SPACING - ROUND_TRIP / SPACING;
    for client in (FIRST_REAL..FIRST_REAL + real).chain(established_clients()) {
        from_client::<W>(s.world, &clients.second, client)?;
        to_client::<W>(s.world, &clients.answer, client)?;
    }
    let (_, entries) = s.flow_counts()?;
    // Flows of datagrams are established after seconds. On a slow machine, those of real clients
    // may last that long.
    let least = ESTABLISHED + if s.protocol == PROTOCOL_TCP { real } else { 0 };
    let expected = 2 * least as usize..=2 * (ESTABLISHED + real) as usize;
    ensure!(expected.contains(&entries), "{entries} entries of established flows, not {expected:?}");
    let counted = s.world.counted()?;
    let is_wrong =
        |reason: &Reason| *reason == Reason::FlowsFull || reason.verdict() != reason::Verdict::Pass;
    ensure!(!counted.iter().any(|(reason, _)| is_wrong(reason)), "counted {counted:?}");
    Ok(())
}

fn forged_clients() -> Result<u32> {
    const VARIABLE: &str = "FORGED_CLIENTS";
    let Some(number) = env::var_os(VARIABLE) else { return Ok(FORGED_CLIENTS) };
    let number =
        number.to_str().and_then(|text| text.parse().ok()).filter(|number| *number < FIRST_ESTABLISHED);
    number.with_context(|| format!("{VARIABLE} must be a number below {FIRST_ESTABLISHED}"))
}

const fn established_clients() -> std::ops::Range<u32> {
    FIRST_ESTABLISHED..FIRST_ESTABLISHED + ESTABLISHED
}

fn establish<W: Maps>(s: &mut Scene<W>, clients: &Clients) -> Result<()> {
    for client in established_clients() {
        from_client::<W>(s.world, &clients.first, client)?;
        to_client::<W>(s.world, &clients.answer, client)?;
    }
    if s.protocol == PROTOCOL_UDP {
        s.age(Stage::Opening)?;
        established_clients().try_for_each(|client| to_client::<W>(s.world, &clients.answer, client))?;
    }
    established_clients().try_for_each(|client| from_client::<W>(s.world, &clients.second, client))?;
    let (_, entries) = s.flow_counts()?;
    ensure!(entries == 2 * ESTABLISHED as usize, "{entries} entries of {ESTABLISHED} established flows");
    Ok(())
}
