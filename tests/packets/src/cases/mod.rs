//! The table of cases: each once for every family and protocol that it is about.

mod flows;
mod fragments;
mod headers;
mod host;
mod icmp;
mod masquerade;
mod refusals;
pub(crate) mod scene;
mod translation;

use anyhow::Result;
use proxy_common::{
    family::{V4, V6},
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
};

use crate::world::{Tables, World};
use scene::Scene;

pub(crate) struct Case {
    pub(crate) name: String,
    /// With `HOST_PACKETS` on.
    pub(crate) host_packets: bool,
    pub(crate) run: Run,
}

type Run = Box<dyn Fn(&mut World) -> Result<()> + Send>;

type Body<W> = fn(&mut Scene<W>) -> Result<()>;

/// Cases of one family.
struct Group {
    cases: Vec<Case>,
}

impl Group {
    fn add<W: Tables + 'static>(&mut self, name: &str, protocol: u8, host_packets: bool, body: Body<W>) {
        let label = if protocol == PROTOCOL_TCP { "tcp" } else { "udp" };
        self.cases.push(Case {
            name: format!("{} {label} {name}", W::NAME),
            host_packets,
            run: Box::new(move |world| body(&mut Scene::<W>::new(world, protocol))),
        });
    }

    fn both<W: Tables + 'static>(&mut self, name: &str, body: Body<W>) {
        self.add(name, PROTOCOL_TCP, false, body);
        self.add(name, PROTOCOL_UDP, false, body);
    }

    fn host<W: Tables + 'static>(&mut self, name: &str, body: Body<W>) {
        self.add(name, PROTOCOL_TCP, true, body);
        self.add(name, PROTOCOL_UDP, true, body);
    }

    fn tcp<W: Tables + 'static>(&mut self, name: &str, body: Body<W>) {
        self.add(name, PROTOCOL_TCP, false, body);
    }

    fn udp<W: Tables + 'static>(&mut self, name: &str, body: Body<W>) {
        self.add(name, PROTOCOL_UDP, false, body);
    }
}

pub(crate) fn all() -> Vec<Case> {
    let mut group = Group { cases: Vec::new() };
    of_family::<V4>(&mut group);
    of_family::<V6>(&mut group);
    headers::family_cases(&mut group);
    group.cases
}

fn of_family<W: Tables + 'static>(group: &mut Group) {
    translation::cases::<W>(group);
    masquerade::cases::<W>(group);
    refusals::cases::<W>(group);
    flows::cases::<W>(group);
    headers::cases::<W>(group);
    fragments::cases::<W>(group);
    host::cases::<W>(group);
    icmp::cases::<W>(group);
}
