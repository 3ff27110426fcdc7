//! Ends the mode without ending its connections.

use super::{
    EbpfDataplane,
    connections::{expire::Collector, netfilter_ports::KeepPorts, stale_sockets::StaleSockets},
    error::Error,
};

impl EbpfDataplane {
    /// Drains the mode. Without frontends, packets of known TCP flows are still translated, and all
    /// others pass.
    pub(super) fn drain(&mut self) -> Result<bool, crate::modes::Error> {
        if !self.retiring {
            // From now on netfilter may translate connections to the same frontends.
            self.write_settings(|settings| settings.answers_unknown = 0)?;
            self.keep_ports = KeepPorts::Done;
            // These sockets are connected to endpoints, and go on without any frontend.
            self.stale_sockets = StaleSockets::none();
            self.service_cidrs.retire();
            let (mut applied, mut failures) = Default::default();
            self.write_service_cidrs(&mut applied, &mut failures);
            failures.into_result()?;
            self.write_desired(&[])?;
            // A program that has read a frontend before may still open a flow.
            self.shared.grace.wait().map_err(Error::Grace)?;
            Collector::end_for_retirement(&self.v4.tables)?;
            Collector::end_for_retirement(&self.v6.tables)?;
            (self.flows4, self.flows6) = Default::default();
            self.retiring = true;
        }
        self.keep_up()?;
        Ok(self.flow_maps.are_finished() && self.flows4.is_empty() && self.flows6.is_empty())
    }
}
