//! Does what is due about once a second.

use super::{
    EbpfDataplane, connections::netfilter_ports::KeepPorts, error::Error, services::writer::Failures,
};
use crate::modes::Applied;

const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;

impl EbpfDataplane {
    /// Does what is due about once a second. If one step fails, the others are still done.
    pub(super) fn keep_up(&mut self) -> Result<(), crate::modes::Error> {
        let (mut applied, mut failures): (Applied, Failures) = Default::default();
        failures.see("lease", self.keep_lease());
        failures.see("freeing ids and slots", self.services.free_pending());
        self.prepare(&mut failures);
        self.publish_waiting(&mut applied, &mut failures);
        self.services.write_cidrs(&mut applied, &mut failures);
        self.services.raise_epoch(&mut failures);
        self.connections.end_stale_sockets(&mut self.services.shared);
        if self.netfilter.keep_ports == KeepPorts::AfterSecondaryMode {
            self.keep_netfilter_ports();
            self.netfilter.keep_ports = KeepPorts::Done;
        }
        failures.see("the programs' log", self.hooks.follow_log());
        self.follow_flow_limits(&mut failures);
        // An entry that a walk does not meet may still be in the former map.
        if self.flow_maps.are_finished() {
            failures.see("counting connections", self.recount_flows());
            self.connections.collect_flows(&self.services, &mut failures);
            self.connections.see_filling(&self.services);
        }
        failures.see("session affinity", self.connections.collect_affinities(&self.services));
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

    /// Renews the lease if it is time for that. If it has ended before, packets have passed, and
    /// rules of others may have opened connections.
    pub(super) fn keep_lease(&mut self) -> Result<(), Error> {
        if self.lease.has_lapsed(&self.services.shared.maps.lease)? {
            tracing::warn!(
                "the lease of ebpf.withdrawAfter had ended, so that nothing was served; it is renewed now"
            );
            self.keep_netfilter_ports();
        }
        self.lease.renew(&self.services.shared.maps.lease)
    }
}
