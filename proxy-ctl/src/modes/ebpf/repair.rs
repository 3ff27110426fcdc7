//! Repairs what other programs have changed: pins, sockets' counts, hooks and their order.

use super::{
    EbpfDataplane, error::Error, hooks, maps::handles::Shape, node::write_masquerade_ports,
    services::writer::Failures,
};

impl EbpfDataplane {
    /// Repairs what others have changed. Fails only if another controller has the maps now.
    pub(super) fn inspect(&mut self, failures: &mut Failures) -> Result<(), Error> {
        match self.maps.restore_pins() {
            Err(error @ Error::Locked { .. }) => return Err(error),
            restored => failures.see("pins", restored),
        }
        failures.see("counting sockets", self.recount_sockets());
        match write_masquerade_ports(&self.services.shared) {
            Ok(true) => tracing::info!("the ports for translated sources follow the kernel's parameters"),
            Ok(false) => {}
            Err(error) => failures.add("ports for translated sources", error),
        }
        let refused = self.hooks.unattached_count();
        failures.merge(self.hooks.repair());
        if self.hooks.unattached_count() < refused {
            // The secondary mode has served the pod, and goes on translating its connections.
            self.keep_netfilter_ports();
        }
        failures.see("uplinks for redirects", self.write_redirects());
        failures.see("the order of programs", self.repair_order());
        Ok(())
    }

    fn repair_order(&mut self) -> Result<(), Error> {
        let out_of_order = self.hooks.out_of_order()?;
        if out_of_order.is_empty() {
            return Ok(());
        }
        let maps = |_: &Shape| self.maps.paths.maps();
        let (mut programs, log) = hooks::load::load(&self.maps.shapes, maps, &self.config, false)?;
        self.hooks.load(&mut programs)?;
        self.hooks.move_first((programs, log), &out_of_order).into_result()
    }
}
