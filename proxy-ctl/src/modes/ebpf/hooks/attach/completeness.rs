//! Says at which hooks programs are missing, or may be others than those that are loaded.
//!
//! There are four questions, because what is missing matters to each caller for another reason:
//!
//! - [`Hooks::are_swapped`]: a former map is needed until no hook runs programs that use it.
//! - [`Hooks::have_failed`]: a hook where the last attempt has failed may run programs that cannot
//!   be held.
//! - [`Hooks::has_waiting`]: netfilter translates for a pod until its interface gets programs.
//! - [`Hooks::lacks_programs`]: a secondary mode is to serve pods that nothing else serves.

use super::Hooks;
use crate::{
    config::SocketLoadBalancing,
    modes::ebpf::{
        hooks::{load::Programs, program_log::KernelLog, settling},
        services::writer::Failures,
    },
};

impl Hooks {
    /// Returns true if all hooks run programs of the maps in use.
    pub(crate) const fn are_swapped(&self) -> bool {
        self.are_swapped
    }

    /// Swaps the programs of all hooks for these, which use other maps.
    pub(crate) fn use_programs(&mut self, loaded: (Programs, KernelLog)) -> Failures {
        (self.programs, self.log) = loaded;
        self.swap_rest()
    }

    /// Tries again to swap the programs that could not be swapped.
    pub(crate) fn swap_rest(&mut self) -> Failures {
        let unswapped = self.swap();
        self.are_swapped = unswapped.is_empty() || !self.may_run_former();
        unswapped
    }

    /// Notes which hooks run programs of a killed predecessor, which may use former maps.
    pub(crate) fn look_for_former(&mut self) {
        self.are_swapped &= !self.may_run_former();
    }

    /// Returns true if some hook may run other programs than those that are loaded. A hook that
    /// takes no program of ours runs none of them.
    fn may_run_former(&self) -> bool {
        self.have_sockets_failed || !self.unswapped.is_empty()
    }

    /// Returns true if the last attempt to attach to some interface has failed.
    pub(crate) fn have_failed(&self) -> bool {
        !self.failed_last.is_empty()
    }

    /// Returns true if some interfaces wait for their programs.
    pub(crate) fn has_waiting(&self) -> bool {
        self.settling.waiting().next().is_some()
    }

    /// Returns true if some pods have no packet programs, and may have no socket hooks either.
    pub(crate) fn lacks_programs(&self) -> bool {
        // If the plugin is in use, each new pod waits for its programs.
        let new_pods_wait =
            self.is_beside_plugin && self.uses_filters() && self.sockets != SocketLoadBalancing::All;
        new_pods_wait || self.unattached_count() > 0
    }

    /// Looks for CNI's bandwidth plugin. On a node that uses it, new interfaces wait longer.
    pub(crate) fn look_for_bandwidth_plugin(&mut self, is_seen: bool) {
        self.is_beside_plugin |= is_seen || self.meets_bandwidth_plugin();
        self.pause = settling::pause(self.sockets, self.is_beside_plugin);
    }

    /// Returns true if filters are used, and a workload interface has an ingress qdisc other than
    /// clsact, such as that of CNI's bandwidth plugin.
    fn meets_bandwidth_plugin(&self) -> bool {
        self.unattached.values().any(|refusal| refusal.is_qdisc_taken)
    }

    /// Returns true if new workload interfaces may have to wait.
    fn uses_filters(&self) -> bool {
        self.tcx == Some(false)
    }
}
