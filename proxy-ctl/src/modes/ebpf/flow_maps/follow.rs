//! Gives the flow maps the size of the configuration while they serve.

use std::time::Duration;

use super::{FlowMapResize, HELD_FOR};
use crate::{
    modes::ebpf::{
        EbpfDataplane, FORMER_FLOWS,
        connections::netfilter_ports::KeepPorts,
        error::Error,
        growth::{Larger, load_beside},
        maps::resize::remove_larger,
        services::writer::Failures,
    },
    sys::proc::clock,
};

impl EbpfDataplane {
    /// Gives the flow maps the size of the configuration, once everything is served, and finishes
    /// what this process or its predecessor has begun of that.
    pub(in crate::modes::ebpf) fn follow_flow_limits(&mut self, failures: &mut Failures) {
        let is_taken_over = self.netfilter.keep_ports == KeepPorts::Done && !self.node.attaches_later;
        // A hook where the last attempt has failed may run programs that cannot be held.
        let is_held = self.hooks.are_swapped() && !self.hooks.have_failed();
        let is_due = self.services.is_synced && is_taken_over && is_held && self.flow_maps.are_finished();
        if self.flow_maps.is_change_wanted() && is_due && !self.is_draining {
            if let Err(error) = self.resize_flow_maps(failures) {
                tracing::warn!(%error, "the flow maps keep their size until the next start");
            }
            if let Err(error) = self.hooks.let_open() {
                failures.add("flows that may open again", error);
            }
        }
        failures.see(FORMER_FLOWS, self.finish_flow_maps());
    }

    fn resize_flow_maps(&mut self, failures: &mut Failures) -> Result<(), Error> {
        let shapes = self.flow_maps.take_wanted(&self.maps.paths, &self.maps.shapes)?;
        if shapes == self.maps.shapes {
            return Ok(());
        }
        self.maps.restore_pins()?;
        remove_larger(&self.maps.paths)?;
        let replaced = load_beside(&self.maps.paths, &self.maps.shapes, &shapes, &self.config, &self.hooks)
            .and_then(|(programs, log)| self.replace_flow_maps(Larger { shapes, programs, log }, failures));
        if replaced.is_err() {
            // The former maps stay in use, so they are pinned again.
            self.maps.take_pins_back()?;
            self.flow_maps.give_up(&self.maps.paths)?;
        }
        replaced
    }

    /// Copies the flow maps, and swaps all programs. No flow of TCP opens until the caller lets it.
    fn replace_flow_maps(&mut self, made: Larger, failures: &mut Failures) -> Result<(), Error> {
        self.services.shared.write_settings(|settings| settings.answers_unknown = 0)?;
        let held_from = clock::since_boot();
        self.hooks.hold_openings(HELD_FOR)?;
        // A program may have begun to open a flow before.
        self.services.shared.grace.wait().map_err(Error::Grace)?;
        FlowMapResize::copy_to_larger(&self.maps.paths, &self.maps.shapes, &made.shapes)?;
        failures.see("lease", self.keep_lease());
        // The swap has the same time again, if no flow was opened since the copy began.
        self.hooks.hold_openings(HELD_FOR)?;
        made.programs.hold_openings(HELD_FOR)?;
        let took = Duration::from_nanos(clock::since_boot().saturating_sub(held_from));
        if took >= HELD_FOR {
            return Err(Error::SlowCopy { took, most: HELD_FOR });
        }
        self.flow_maps.replace(&self.maps.paths, &self.maps.shapes, &made.shapes)?;
        self.use_maps(made, failures)?;
        let most_unproven_entries = self.most_unproven_entries();
        let written = self
            .services
            .shared
            .write_settings(|settings| settings.most_unproven_entries = most_unproven_entries);
        failures.see("settings", written.map(drop));
        let held = Duration::from_nanos(clock::since_boot().saturating_sub(held_from));
        tracing::info!(?held, "the flow maps are replaced; no TCP connection was opened meanwhile");
        Ok(())
    }

    /// Copies what is left in the former flow maps, if no program uses them any more.
    fn finish_flow_maps(&mut self) -> Result<(), Error> {
        if self.flow_maps.are_finished() || !self.hooks.are_swapped() {
            return Ok(());
        }
        self.services.shared.grace.wait().map_err(Error::Grace)?;
        self.flow_maps.finish(&self.maps.paths)?;
        // Former programs may have compared flows of this epoch with former maps.
        self.services.shared.is_epoch_over = true;
        // Walks through the former maps do not go on in the new ones.
        self.connections.walk_anew();
        Ok(())
    }

    /// Returns half of the entries that the maps of established flows have room for. These may have
    /// another size than the configuration says.
    pub(in crate::modes::ebpf) fn most_unproven_entries(&self) -> u32 {
        self.services.v4.maps.flows.map().capacity().min(self.services.v6.maps.flows.map().capacity()) / 2
    }
}
