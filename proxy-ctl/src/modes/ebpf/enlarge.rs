//! Lets maps grow while they serve, and swaps the programs of all hooks for some that use the
//! larger maps.

use std::sync::Arc;

use proxy_common::inventory::Limit;

use super::{
    EbpfDataplane,
    error::Error,
    growth::{self, Demand, Larger, make_larger},
    maps::handles::{CommonMaps, FamilyMaps},
    services::{sync::Services, writer::Failures},
};
use crate::model::desired::DesiredPort;

impl Services {
    /// Notes which maps may still grow. Nothing gives way to what waits for such a map.
    fn let_grow(&mut self, may_grow: Vec<Limit>) {
        self.v4.entries.without_room.may_grow.clone_from(&may_grow);
        self.v6.entries.without_room.may_grow = may_grow;
    }

    /// Returns how much room is needed in the maps that can still grow, by limit.
    pub(super) fn demand(&self) -> Demand {
        let mut demand = Demand::new();
        self.v4.demand(&self.shared, &mut demand);
        self.v6.demand(&self.shared, &mut demand);
        demand.retain(|limit, _| self.v4.entries.without_room.may_grow.contains(limit));
        demand
    }
}

impl EbpfDataplane {
    /// Prepares a write: swaps programs that could not be swapped before, and notes which maps may
    /// grow.
    pub(super) fn prepare(&mut self, failures: &mut Failures) {
        if !self.hooks.are_swapped() {
            failures.merge(self.hooks.swap_rest());
            // Former programs may have compared flows of this epoch with the former maps.
            self.services.shared.is_epoch_over = true;
        }
        self.services.let_grow(self.maps.may_grow());
    }

    /// Grows maps at the start, before anything is published. Later, changes would wait for it.
    pub(super) fn grow_ahead(&mut self, desired: &[Arc<DesiredPort>], failures: &mut Failures) {
        let mut demand =
            growth::ahead(desired, |port| self.services.shared.algorithm_of(port), &self.maps.shapes);
        demand.retain(|limit, _| self.services.v4.entries.without_room.may_grow.contains(limit));
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
            self.maps.begin_rest();
        }
        self.go_on_after_growth(failures);
    }

    fn go_on_after_growth(&mut self, failures: &mut Failures) {
        self.services.let_grow(self.maps.may_grow());
        failures.see("lease", self.keep_lease());
    }

    pub(super) fn grow(&mut self, demand: &Demand, failures: &mut Failures) -> Result<(), Error> {
        self.maps.restore_pins()?;
        if let Err(error) = self.change_to_larger(demand, failures) {
            // The former maps stay in use, so they are pinned again.
            self.maps.take_pins_back()?;
            return Err(error);
        }
        self.services.shared.grace.wait().map_err(Error::Grace)
    }

    fn change_to_larger(&mut self, demand: &Demand, failures: &mut Failures) -> Result<(), Error> {
        let larger = make_larger(&self.maps.paths, &self.maps.shapes, demand, &self.config, &self.hooks)?;
        self.use_maps(larger, failures)
    }

    /// Uses the maps that are pinned now, and the programs that were loaded with them.
    pub(super) fn use_maps(&mut self, made: Larger, failures: &mut Failures) -> Result<(), Error> {
        let Larger { shapes, programs, log } = made;
        let maps = self.maps.paths.maps();
        let (common, v4, v6) =
            (CommonMaps::open(&maps, true)?, FamilyMaps::open(&maps, true)?, FamilyMaps::open(&maps, true)?);
        self.maps.hold(shapes)?;
        self.services.shared.ids.grow(common.services.len() as u32);
        self.services.v4.entries.slots.grow(v4.slots.len() as u32);
        self.services.v6.entries.slots.grow(v6.slots.len() as u32);
        (self.services.shared.maps, self.services.v4.maps, self.services.v6.maps) = (common, v4, v6);
        self.connections.stale_sockets.maps_have_grown();
        failures.merge(self.hooks.use_programs((programs, log)));
        Ok(())
    }
}
