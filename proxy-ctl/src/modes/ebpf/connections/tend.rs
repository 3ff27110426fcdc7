//! Walks through the flow maps about once a second, and ends the sockets of backends that are gone.

use proxy_common::inventory::table;

use crate::{
    modes::ebpf::{EbpfDataplane, services::writer::Failures},
    sys::proc::clock,
};

impl EbpfDataplane {
    /// Notes how full the maps of established flows were at the end of the last walks.
    pub(crate) fn see_filling(&mut self) {
        let (_, flows4) = self.flows4.counted();
        self.filling.see(table::flows4, flows4, self.v4.tables.flows.map().capacity().into());
        let (_, flows6) = self.flows6.counted();
        self.filling.see(table::flows6, flows6, self.v6.tables.flows.map().capacity().into());
    }

    pub(crate) fn end_stale_sockets(&mut self) {
        for transport in std::mem::take(&mut self.shared.lost_backends) {
            self.stale_sockets.end(transport);
        }
    }

    /// Continues the walks through the flow maps, and removes flows that have expired.
    pub(crate) fn collect_flows(&mut self, failures: &mut Failures) {
        let Self { flows4, flows6, moved_ports, shared, v4, v6, .. } = self;
        let (lifetimes, now, table) = (&self.flow_lifetimes, clock::since_boot(), &shared.tables.moved_ports);
        let failed_before = failures.count();
        flows4.collect(&v4.tables, lifetimes, now, (&mut *moved_ports, table), failures);
        flows6.collect(&v6.tables, lifetimes, now, (&mut *moved_ports, table), failures);
        let ([first, second], [third, fourth]) = (flows4.walks(), flows6.walks());
        let walks = [first, second, third, fourth];
        if failures.count() > failed_before {
            moved_ports.begin(walks);
        } else {
            failures.see("ports of flows with another key", moved_ports.tend(table, walks));
        }
    }
}
