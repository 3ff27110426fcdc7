//! Does what is due about once a second.

use super::{
    EbpfDataplane,
    connections::netfilter_ports::KeepPorts,
    services::{sync::raise_epoch, writer::Failures},
};
use crate::{modes::Applied, sys::proc::clock};

const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;

impl EbpfDataplane {
    /// Does what is due about once a second. If one step fails, the others are still done.
    pub(super) fn keep_up(&mut self) -> Result<(), crate::modes::Error> {
        let (mut applied, mut failures): (Applied, Failures) = Default::default();
        failures.see("lease", self.keep_lease());
        failures.see("retired elements", self.free_retired());
        self.prepare(&mut failures);
        self.publish_waiting(&mut applied, &mut failures);
        self.write_service_cidrs(&mut applied, &mut failures);
        raise_epoch(&mut self.shared, &mut failures);
        self.end_stale_sockets();
        if self.keep_ports == KeepPorts::AfterModeBeside {
            self.keep_netfilter_ports();
            self.keep_ports = KeepPorts::Done;
        }
        failures.see("the programs' log", self.log.follow());
        self.follow_flow_limits(&mut failures);
        // An entry that a walk does not meet may still be in the former map.
        if self.flow_maps.are_finished() {
            failures.see("counting connections", self.recount_flows());
            self.collect_flows(&mut failures);
            self.see_filling();
        }
        let affinity =
            self.affinity.collect(&self.shared.tables, &self.v4.tables, &self.v6.tables, clock::since_boot());
        failures.see("session affinity", affinity);
        failures.see("interfaces that are gone", self.hooks.tend());
        self.attach_to_settled(&mut failures);
        self.collections = self.collections.wrapping_add(1);
        if self.collections.is_multiple_of(COLLECTIONS_BETWEEN_INSPECTIONS) {
            self.inspect(&mut failures)?;
        }
        self.list_netfilters_after_handshakes();
        failures.see("answers to unknown connections", self.follow_circumstances());
        Ok(failures.into_result()?)
    }
}
