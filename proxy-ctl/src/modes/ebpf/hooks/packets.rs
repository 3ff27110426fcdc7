//! Attaches the packet programs to the node's interfaces in an order in which no flow is opened
//! that would get no answers.

use std::time::Instant;

use super::xdp::attach::Redirects;
use crate::modes::ebpf::{
    EbpfDataplane, FORMER_FLOWS, connections::netfilter_ports::KeepPorts, error::Error,
    services::writer::Failures,
};

impl EbpfDataplane {
    /// Attaches to the interfaces of the node, swaps the programs of what is attached, and then
    /// lets packets open flows. Otherwise a flow that one interface opens would get no answers
    /// while another has no programs.
    pub(crate) fn take_packets(&mut self) -> Failures {
        let is_first = self.netfilter.keep_ports == KeepPorts::BeforePackets;
        if is_first {
            self.keep_netfilter_ports();
        }
        let mut failures = Failures::default();
        // A killed predecessor has left some hooks with programs of the former flow maps.
        failures.see(FORMER_FLOWS, self.flow_maps.copy(&self.maps.paths));
        let unattached = self.hooks.follow(&self.node.interfaces, Instant::now());
        if !self.flow_maps.are_finished() {
            self.hooks.look_for_former();
        }
        failures.merge(unattached);
        if is_first {
            self.keep_netfilter_ports();
            self.netfilter.keep_ports = KeepPorts::AfterSecondaryMode;
        }
        if let Err(error) = self.write_redirects() {
            failures.add("uplinks for redirects", error);
        }
        if let Err(error) = self.hooks.attach_sockets() {
            failures.add("socket hooks", error);
        }
        if let Err(error) = self.services.shared.write_settings(|settings| settings.packets_held = 0) {
            failures.add("settings", error);
        }
        // Former programs may have compared flows of this epoch with maps of the former size.
        self.services.shared.is_epoch_over = true;
        self.services.raise_epoch(&mut failures);
        failures
    }

    /// Attaches to new interfaces that have waited long enough.
    pub(crate) fn attach_to_settled(&mut self, failures: &mut Failures) {
        self.hooks.look_for_bandwidth_plugin(false);
        // The secondary mode may serve their pods, and its connections are listed after the
        // attachment. It goes on with them while no list may be made.
        let are_served_by_secondary = self.hooks.lacks_programs();
        if are_served_by_secondary && !self.netfilter.list_rest.is_over() {
            return;
        }
        let (any, unattached) = self.hooks.attach_settled(Instant::now());
        failures.merge(unattached);
        if !any {
            return;
        }
        if are_served_by_secondary {
            self.keep_netfilter_ports();
        }
        if let Err(error) = self.write_redirects() {
            failures.add("uplinks for redirects", error);
        }
    }

    /// Writes the interfaces between which XDP may send. Call this after interfaces were attached
    /// to, because some can take frames only with a program on them.
    pub(crate) fn write_redirects(&mut self) -> Result<(), Error> {
        self.hooks.follow_routes();
        let Redirects { sources, targets } = self.hooks.redirects();
        let maps = &self.services.shared.maps;
        maps.redirect_sources.replace_all(&sources)?;
        match maps.redirect_targets.replace_all(&targets) {
            // An uplink has vanished at this moment. The kernel's message about that comes next.
            Err(Error::Map { source, .. }) if source.errno() == libc::EINVAL => Ok(()),
            written => written.map(drop),
        }
    }
}
