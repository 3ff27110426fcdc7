//! Ends the mode without ending its connections.

use super::{
    EbpfDataplane,
    connections::{expire::Collector, netfilter_ports::KeepPorts, stale_sockets::StaleSockets},
    error::Error,
};

impl EbpfDataplane {
    /// Drains the mode. Without frontends, packets of known TCP flows are still translated, and all
    /// others pass.
    pub(super) fn continue_draining(&mut self) -> Result<bool, crate::modes::Error> {
        if !self.is_draining {
            // From now on netfilter may translate connections to the same frontends.
            self.services.shared.write_settings(|settings| settings.answers_unknown = 0)?;
            self.netfilter.keep_ports = KeepPorts::Done;
            // These sockets are connected to endpoints, and go on without any frontend.
            self.connections.stale_sockets = StaleSockets::none();
            self.services.cidrs.drain();
            let (mut applied, mut failures) = Default::default();
            self.services.write_cidrs(&mut applied, &mut failures);
            failures.into_result()?;
            self.write_desired(&[])?;
            // A program that has read a frontend before may still open a flow.
            self.services.shared.grace.wait().map_err(Error::Grace)?;
            Collector::keep_translated_tcp(&self.services.v4.maps)?;
            Collector::keep_translated_tcp(&self.services.v6.maps)?;
            (self.connections.flows4, self.connections.flows6) = Default::default();
            self.is_draining = true;
        }
        self.keep_up()?;
        Ok(self.flow_maps.are_finished()
            && self.connections.flows4.is_empty()
            && self.connections.flows6.is_empty())
    }
}
