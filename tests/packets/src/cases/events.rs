//! Events that the programs send to who watches them.

use std::collections::HashSet;

use anyhow::{Context as _, Result, ensure};
use proxy_common::{layout::*, packet::TCP_ACK, reason::Reason};

use super::{Group, Scene, refused::refusals::refused, scene::*};
use crate::{
    wire::{Endpoint, KnownAddress},
    world::Maps,
};

const EXTERNAL: Endpoint = (KnownAddress::External, 80);

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("events: a flow that opens", |s| {
        s.cluster_ip()?;
        watch(s)?;
        open(s, CLIENT)?;
        let event = with_backend::<W>(expected(s, Reason::FlowOpened, CLUSTER_IP), LOCAL, 11);
        told(s, &[event])
    });
    group.udp::<W>("events: a client that gets another backend", |s| {
        s.cluster_ip()?;
        open(s, CLIENT)?;
        s.service(1, &[(12, REMOTE, false)])?;
        W::remove_backend(&mut s.world.ebpf, 11)?;
        s.world.raise_epoch()?;
        watch(s)?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, REMOTE)?;
        let replaced = with_backend::<W>(expected(s, Reason::FlowReplaced, CLUSTER_IP), LOCAL, 11);
        let opened = with_backend::<W>(expected(s, Reason::FlowOpened, CLUSTER_IP), REMOTE, 12);
        told(s, &[replaced, opened])
    });
    group.both::<W>("events: a client that is refused", |s| {
        s.without_endpoints()?;
        watch(s)?;
        refuse(s)?;
        let event = expected(s, Reason::NoEndpoints, CLUSTER_IP);
        told(s, &[event])
    });
    group.both::<W>("events: a client that is dropped", |s| {
        s.service_without_local_endpoint(1)?;
        s.frontend(EXTERNAL, 1, FRONTEND_EXTERNAL)?;
        watch(s)?;
        s.send("uplink_ingress", &s.first(CLIENT, EXTERNAL), Expect::Dropped)?;
        let event = expected(s, Reason::NoLocalEndpoints, EXTERNAL);
        told(s, &[event])
    });
    group.both::<W>("events: none of packets of open flows and of no service", |s| {
        s.cluster_ip()?;
        open(s, CLIENT)?;
        watch(s)?;
        let next = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        s.send("workload_ingress", &next, Expect::Becomes(&next.to(LOCAL)))?;
        s.send("workload_ingress", &s.first(CLIENT, (KnownAddress::Stranger, 80)), Expect::Untouched)?;
        told(s, &[])
    });
    group.both::<W>("events: none while nobody watches, or no longer", |s| {
        s.without_endpoints()?;
        refuse(s)?;
        told(s, &[])?;
        s.world.set_event_control(EventControl::new(1, Reason::ALL.iter().copied(), 1))?;
        refuse(s)?;
        told(s, &[])
    });
    group.both::<W>("events: only of the reasons that are asked for", |s| {
        s.without_endpoints()?;
        s.world.set_event_control(EventControl::new(u64::MAX, [Reason::FlowOpened], 1))?;
        refuse(s)?;
        told(s, &[])?;
        s.world.set_event_control(EventControl::new(u64::MAX, [Reason::NoEndpoints], 1))?;
        refuse(s)?;
        ensure!(s.world.events()?.len() == 1, "the reason is asked for");
        Ok(())
    });
    group.both::<W>("events: a part of them where that is asked for", |s| {
        const OPENED: u16 = 1_000;
        s.cluster_ip()?;
        s.world.set_event_control(EventControl::new(u64::MAX, [Reason::FlowOpened], 10))?;
        for port in 0..OPENED {
            open(s, (CLIENT.0, 1_024 + port))?;
        }
        let ports: HashSet<u16> = s.world.events()?.iter().map(|event| event.client_port).collect();
        // The mean is a hundred, with a standard deviation of ten.
        ensure!((20..=300).contains(&ports.len()), "{} of {OPENED} flows", ports.len());
        Ok(())
    });
    group.both::<W>("events: those without room are counted", |s| {
        // The ring buffer's header adds eight bytes to a record.
        let room = EVENT_BYTES as usize / (size_of::<Event>() + 8);
        s.service_without_local_endpoint(1)?;
        s.frontend(EXTERNAL, 1, FRONTEND_EXTERNAL)?;
        watch(s)?;
        let packet = s.first(CLIENT, EXTERNAL).bytes::<W>();
        let sent = room + 100;
        for _ in 0..sent {
            s.world.run("uplink_ingress", &packet)?;
        }
        let counted = s.world.counted()?;
        let lost = counted.iter().find(|(reason, _)| *reason == Reason::EventLost).context("none is lost")?.1;
        let told = s.world.events()?.len();
        ensure!(told + lost as usize == sent, "{told} of {sent} were told, and {lost} lost");
        ensure!((100..110).contains(&lost), "{lost} of {sent} were lost with room for {room}");
        s.send_bytes("uplink_ingress", &packet, Expect::Dropped)?;
        ensure!(s.world.events()?.len() == 1, "nothing is told when there is room again");
        Ok(())
    });
}

fn watch<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    s.world.set_event_control(EventControl::new(u64::MAX, Reason::ALL.iter().copied(), 1))
}

/// Makes the event of this reason, from the usual client to `frontend`.
fn expected<W: Maps>(s: &Scene<W>, reason: Reason, frontend: Endpoint) -> Event {
    let mut event = Event::new(0, reason as u32);
    event.protocol = s.protocol;
    event.family = if W::Address::BITS == u32::BITS { 4 } else { 6 };
    (event.client, event.client_port) = (bytes::<W>(CLIENT), CLIENT.1);
    (event.frontend, event.frontend_port) = (bytes::<W>(frontend), frontend.1);
    event
}

fn bytes<W: Maps>(end: Endpoint) -> [u8; 16] {
    let (address, mut bytes) = (W::address(end.0), [0; 16]);
    let address = address.as_ref();
    bytes[..address.len()].copy_from_slice(address);
    bytes
}

/// Adds a backend of service 1 to an event.
fn with_backend<W: Maps>(mut of: Event, backend: Endpoint, id: u32) -> Event {
    (of.backend, of.backend_port) = (bytes::<W>(backend), backend.1);
    (of.backend_id, of.service) = (id, 1);
    of
}

/// Expects exactly these events since they were last read, in this order. Each must have a time in
/// between.
fn told<W: Maps>(s: &mut Scene<W>, expected: &[Event]) -> Result<()> {
    let now = proxy_ctl::sys::proc::clock::since_boot();
    let mut events = s.world.events()?;
    for event in &mut events {
        ensure!(event.time > 0 && event.time <= now, "an event at {} is told at {now}", event.time);
        event.time = 0;
    }
    ensure!(events == expected, "told {events:?}, expected {expected:?}");
    Ok(())
}

fn open<W: Maps>(s: &mut Scene<W>, client: Endpoint) -> Result<()> {
    s.opens("workload_ingress", client, CLUSTER_IP, LOCAL).map(drop)
}

fn refuse<W: Maps>(s: &mut Scene<W>) -> Result<()> {
    let packet = s.first(CLIENT, CLUSTER_IP);
    s.send("workload_ingress", &packet, Expect::Answered(refused::<W>(&packet)))
}
