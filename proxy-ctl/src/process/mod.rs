//! The running proxy: from a checked configuration to a node that may be programmed, in kube-proxy's order, and to its
//! end.
//!
//! 1. [`node`]: the own Node and its addresses, waited for up to 30 s; its pod CIDRs up to 5 min, where local traffic
//!    is told by them.
//! 2. [`prepare`]: the [`oom`] score, then [`kernel`] parameters. `--init-only` does no more than this.
//! 3. [`checks`]: what of the configuration does not fit the node.
//! 4. The [`event`] `Starting`; then the controller may write.
//!
//! A running proxy ends when [`node::changed`] or [`config_file`] with [`reload`] say that it must be started anew.
//! What is programmed goes on working without it.

pub mod checks;
pub mod config_file;
pub mod event;
mod former;
pub mod kernel;
mod life;
pub mod node;
pub mod oom;
pub mod record;
mod recorder;
pub mod reload;
mod run;
pub mod settings;

use self::kernel::Kernel;
pub use self::{record::Record, run::run, settings::Settings};
use crate::{
    config::{Config, RequestedMode},
    events::Recorder,
};

/// What needs privileges, and outlives this process. May be done again at any time.
pub fn prepare(
    mode: RequestedMode,
    config: &Config,
    kernel: &Kernel,
    events: &Recorder,
) -> Result<(), kernel::Error> {
    oom::set_score(config.oom_score_adj);
    let left = kernel.set(&kernel::wanted(mode, config, cores(kernel)))?;
    if !left.not_there.is_empty() {
        tracing::warn!(
            parameters = ?left.not_there,
            "the kernel does not have these parameters: nf_conntrack is not loaded; the section conntrack of the \
             configuration has no effect before the next start"
        );
    }
    if !left.read_only.is_empty() {
        tracing::error!(
            parameters = ?left.read_only,
            "these are on read-only file systems and stay as they are: run once with --init-only and privileges, or \
             set conntrack.maxPerCore and the timeouts to 0"
        );
        events.record(event::read_only(&left.read_only));
    }
    if !kernel.shows_bridged_packets(mode) {
        tracing::warn!(
            "Missing br-netfilter module or unset sysctl br-nf-call-iptables, proxy may not work as intended"
        );
    }
    Ok(())
}

fn cores(kernel: &Kernel) -> u32 {
    let usable = || std::thread::available_parallelism().map_or(1, usize::from);
    kernel.cores().unwrap_or_else(|| u32::try_from(usable()).unwrap_or(u32::MAX))
}

/// Whether the kernel has both address families.
pub fn is_dual_stack() -> bool {
    let disabled = std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    std::path::Path::new("/proc/net/if_inet6").exists() && disabled.map_or(true, |text| text.trim() != "1")
}
