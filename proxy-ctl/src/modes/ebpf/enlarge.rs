//! Lets maps grow while they serve, and swaps the programs of all hooks for some that use the
//! larger maps.

use std::sync::Arc;

use super::{
    EbpfDataplane,
    error::Error,
    growth::{self, Demand, make_larger},
    services::writer::Failures,
};
use crate::model::desired::DesiredPort;

impl EbpfDataplane {
    /// Prepares a write: swaps programs that could not be swapped before, and notes which maps may
    /// grow.
    pub(super) fn prepare(&mut self, failures: &mut Failures) {
        if !self.is_swapped {
            let unswapped = self.hooks.swap();
            self.is_swapped = unswapped.is_empty() || !self.hooks.may_run_former();
            failures.merge(unswapped);
            // Former programs may have compared flows of this epoch with the former maps.
            self.shared.is_epoch_over = true;
        }
        self.let_tables_grow();
    }

    /// Notes which maps may still grow. Nothing gives way to what waits for such a map.
    fn let_tables_grow(&mut self) {
        let may_grow = self.growth.may_grow(&self.shapes);
        self.v4.entries.without_room.may_grow.clone_from(&may_grow);
        self.v6.entries.without_room.may_grow = may_grow;
    }

    /// Grows maps at the start, before anything is published. Later, changes would wait for it.
    pub(super) fn grow_ahead(&mut self, desired: &[Arc<DesiredPort>], failures: &mut Failures) {
        let mut demand = growth::ahead(desired, |port| self.shared.algorithm_of(port), &self.shapes);
        demand.retain(|limit, _| self.v4.entries.without_room.may_grow.contains(limit));
        if demand.is_empty() {
            return;
        }
        // This is only logged: most service ports may have room nevertheless, and the others ask
        // for growth by themselves.
        if let Err(error) = self.grow(&demand, failures) {
            tracing::warn!(%error, "maps cannot grow ahead of later changes");
        }
        self.go_on_after_growth(failures);
    }

    pub(super) fn grow_or_rest(&mut self, demand: &Demand, failures: &mut Failures) {
        if let Err(error) = self.grow(demand, failures) {
            tracing::warn!(%error, "maps cannot grow now; what has no room in them waits");
            self.growth.rest();
        }
        self.go_on_after_growth(failures);
    }

    fn go_on_after_growth(&mut self, failures: &mut Failures) {
        self.let_tables_grow();
        failures.see("lease", self.keep_lease());
    }

    /// Returns how much room is needed in the maps that can still grow, by limit.
    pub(super) fn demand(&self) -> Demand {
        let mut demand = Demand::new();
        self.v4.demand(&self.shared, &mut demand);
        self.v6.demand(&self.shared, &mut demand);
        demand.retain(|limit, _| self.v4.entries.without_room.may_grow.contains(limit));
        demand
    }

    pub(super) fn grow(&mut self, demand: &Demand, failures: &mut Failures) -> Result<(), Error> {
        self.restore_pins()?;
        if let Err(error) = self.change_to_larger(demand, failures) {
            // The former maps stay in use, so they are pinned again.
            self.pins.restore(&self.bpffs, &self.paths)?;
            return Err(error);
        }
        self.shared.grace.wait().map_err(Error::Grace)
    }

    fn change_to_larger(&mut self, demand: &Demand, failures: &mut Failures) -> Result<(), Error> {
        let larger = make_larger(&self.paths, &self.shapes, demand, &self.config, &self.hooks)?;
        self.use_maps(larger, failures)
    }
}
