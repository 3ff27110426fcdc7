//! The list of all cases. Each is there once for every family and protocol that it is about.

mod baseline;
pub(crate) mod choice;
mod events;
mod flows;
pub(crate) mod forwarding;
mod fragments;
mod headers;
mod host;
mod icmp;
mod limits;
mod origins;
mod pod_sockets;
mod refused;
pub(crate) mod scene;
mod source;
mod translation;
mod unknown;

use anyhow::Result;
use proxy_common::{
    family::{V4, V6},
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
};

use crate::world::{Maps, World};
use scene::Scene;

pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) world: WorldKind,
    pub(crate) run: Run,
}

/// Constants and map sizes with which the programs are loaded for a case.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum WorldKind {
    Usual,
    /// The constants `RESETS_GONE`, `DROP_UNALLOCATED`, `ANSWER_PING` and `SKIP_STACK` are on.
    Resetting,
    /// `HOST_PACKETS` is on too, beside the constants of `Resetting`.
    HostPackets,
    /// The constant `MASQUERADE_AS_KUBE_PROXY` is on.
    Masquerading,
    /// The maps of flows are as large as a node's.
    Large,
}

type Run = Box<dyn Fn(&mut World) -> Result<()> + Send>;

type Body<W> = fn(&mut Scene<W>) -> Result<()>;

/// Cases that were collected so far.
pub(crate) struct Group {
    cases: Vec<Case>,
}

impl Group {
    fn add<W: Maps + 'static>(
        &mut self,
        name: &str,
        protocol: u8,
        world: WorldKind,
        body: impl Fn(&mut Scene<W>) -> Result<()> + Send + 'static,
    ) {
        let label = if protocol == PROTOCOL_TCP { "tcp" } else { "udp" };
        self.cases.push(Case {
            name: format!("{} {label} {name}", W::NAME),
            world,
            run: Box::new(move |world| body(&mut Scene::<W>::new(world, protocol))),
        });
    }

    fn each<W: Maps + 'static>(&mut self, protocols: &[u8], world: WorldKind, name: &str, body: Body<W>) {
        protocols.iter().for_each(|protocol| self.add(name, *protocol, world, body));
    }

    fn tcp<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&[PROTOCOL_TCP], WorldKind::Usual, name, body);
    }

    fn udp<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&[PROTOCOL_UDP], WorldKind::Usual, name, body);
    }

    fn both<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&BOTH, WorldKind::Usual, name, body);
    }

    fn host<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&BOTH, WorldKind::HostPackets, name, body);
    }

    fn resetting<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&[PROTOCOL_TCP], WorldKind::Resetting, name, body);
    }

    fn skip_stack<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&BOTH, WorldKind::Resetting, name, body);
    }

    fn masquerading<W: Maps + 'static>(&mut self, name: &str, body: Body<W>) {
        self.each(&BOTH, WorldKind::Masquerading, name, body);
    }
}

const BOTH: [u8; 2] = [PROTOCOL_TCP, PROTOCOL_UDP];

pub(crate) fn all() -> Vec<Case> {
    let mut group = Group { cases: Vec::new() };
    of_family::<V4>(&mut group);
    of_family::<V6>(&mut group);
    headers::family_cases(&mut group);
    headers::longer_than_the_header_can_say(&mut group);
    group.cases.push(baseline::case());
    group.cases
}

fn of_family<W: Maps + 'static>(group: &mut Group) {
    translation::cases::<W>(group);
    source::masquerade::cases::<W>(group);
    flows::cases::<W>(group);
    fragments::cases::<W>(group);
    icmp::cases::<W>(group);
    source::port_pool::cases::<W>(group);
    refused::refusals::cases::<W>(group);
    events::cases::<W>(group);
    limits::floods::cases::<W>(group);
    limits::flood_limit::cases::<W>(group);
    limits::sustained::cases::<W>(group);
    headers::cases::<W>(group);
    host::cases::<W>(group);
    choice::affinity::cases::<W>(group);
    choice::balance::cases::<W>(group);
    choice::connections::cases::<W>(group);
    refused::source_ranges::cases::<W>(group);
    source::source_address::cases::<W>(group);
    forwarding::forward::cases::<W>(group);
    forwarding::redirect::cases::<W>(group);
    origins::cases::<W>(group);
    pod_sockets::cases::<W>(group);
    forwarding::skip_stack::cases::<W>(group);
    refused::unserved::cases::<W>(group);
    unknown::cases::<W>(group);
    forwarding::direct::cases::<W>(group);
}
