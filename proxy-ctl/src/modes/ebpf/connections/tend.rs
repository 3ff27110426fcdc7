//! Walks through the flow maps about once a second, and ends the sockets of backends that are gone.

use proxy_common::{
    family::{V4, V6},
    flow::FlowLifetimes,
    inventory::map_name,
};

use super::{
    affinity::AffinityCollector,
    counting::ConnectionCount,
    expire::Collector,
    remapped_ports::{RemappedPorts, Walks},
    stale_sockets::StaleSockets,
};
use crate::{
    modes::ebpf::{
        Error,
        maps::filling::Filling,
        services::{
            sync::Services,
            writer::{Common, Failures},
        },
    },
    sys::proc::clock,
};

/// The walks through the maps that programs write, and what follows from what they meet.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) flows4: Collector<V4>,
    pub(crate) flows6: Collector<V6>,
    remapped_ports: RemappedPorts,
    pub(crate) affinity: AffinityCollector,
    pub(crate) lifetimes: FlowLifetimes,
    pub(crate) stale_sockets: StaleSockets,
    /// The counts of connections. `None` if no service port uses least connection.
    pub(crate) counts: Option<ConnectionCount>,
    /// The maps of flows that are nearly full.
    pub(crate) filling: Filling,
}

impl Connections {
    pub(crate) fn new(stale_sockets: StaleSockets) -> Self {
        Self {
            flows4: Collector::default(),
            flows6: Collector::default(),
            remapped_ports: RemappedPorts::default(),
            affinity: AffinityCollector::default(),
            lifetimes: FlowLifetimes::default(),
            stale_sockets,
            counts: None,
            filling: Filling::default(),
        }
    }

    /// Notes how full the maps of established flows were at the end of the last walks.
    pub(crate) fn see_filling(&mut self, Services { v4, v6, .. }: &Services) {
        let (_, flows4) = self.flows4.counted();
        self.filling.see(map_name::flows4, flows4, v4.maps.flows.map().capacity().into());
        let (_, flows6) = self.flows6.counted();
        self.filling.see(map_name::flows6, flows6, v6.maps.flows.map().capacity().into());
    }

    pub(crate) fn end_stale_sockets(&mut self, shared: &mut Common) {
        for transport in std::mem::take(&mut shared.lost_backends) {
            self.stale_sockets.end(transport);
        }
    }

    /// Continues the walks through the flow maps, and removes flows that have expired.
    pub(crate) fn collect_flows(&mut self, services: &Services, failures: &mut Failures) {
        let Self { flows4, flows6, remapped_ports, lifetimes, .. } = self;
        let Services { shared, v4, v6, .. } = services;
        let (now, map) = (clock::since_boot(), &shared.maps.remapped_ports);
        let failed_before = failures.count();
        flows4.collect(&v4.maps, lifetimes, now, (&mut *remapped_ports, map), failures);
        flows6.collect(&v6.maps, lifetimes, now, (&mut *remapped_ports, map), failures);
        if failures.count() > failed_before {
            self.begin_generation();
        } else {
            let walks = self.walks();
            failures.see("ports of flows with another key", self.remapped_ports.tend(map, walks));
        }
    }

    /// Walks through the session affinities, and removes those that have expired.
    pub(crate) fn collect_affinities(&mut self, services: &Services) -> Result<(), Error> {
        let Services { shared, v4, v6, .. } = services;
        self.affinity.collect(&shared.maps, &v4.maps, &v6.maps, clock::since_boot())
    }

    /// Begins all walks through the flow maps anew, as in other maps.
    pub(crate) fn walk_anew(&mut self) {
        (self.flows4, self.flows6) = Default::default();
        self.begin_generation();
    }

    fn begin_generation(&mut self) {
        self.remapped_ports.begin(self.walks());
    }

    fn walks(&self) -> Walks {
        let ([first, second], [third, fourth]) = (self.flows4.walks(), self.flows6.walks());
        [first, second, third, fourth]
    }
}
