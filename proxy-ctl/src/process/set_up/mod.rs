//! Sets up the node before it is programmed, in kube-proxy's order: wait for the own Node, set
//! kernel parameters, report what in the configuration does not fit the node, and send the event
//! `Starting`.

mod checks;
pub(super) mod kernel;

use std::{fs, thread};

use anyhow::bail;
use tokio::sync::watch;

use self::{checks::NodeFacts, kernel::Kernel};
use super::{
    event,
    own_node::{self, Patience},
};
use crate::{
    config::{Config, LocalMode},
    events::Recorder,
    model::objects::Node,
    node::{NodeIps, OwnNode},
    sys::has_ipv6,
};

/// Sets up the node, and returns the Node by which that was done. `own_node` is `None` if the
/// source need not have one.
pub(super) async fn set_up(
    config: &Config,
    node_name: &str,
    own_node: Option<&mut watch::Receiver<OwnNode>>,
    events: &Recorder,
) -> anyhow::Result<Option<Node>> {
    let mut node = None;
    let checked = own_node.is_some();
    if let Some(own_node) = own_node {
        let by_pod_cidrs = needs_pod_cidrs(config);
        node = own_node::wait_for(node_name, own_node, by_pod_cidrs, Patience::default()).await?;
    }
    prepare(config, &Kernel::default(), events)?;
    if checked {
        check(config, node.as_ref())?;
    }
    events.record(event::starting());
    Ok(node)
}

/// Returns true if `detectLocalMode` is NodeCIDR.
pub(super) fn needs_pod_cidrs(config: &Config) -> bool {
    config.detect_local_mode == LocalMode::NodeCidr
}

/// Sets kernel parameters, which needs privileges and outlives this process. It can be repeated.
pub(super) fn prepare(config: &Config, kernel: &Kernel, events: &Recorder) -> Result<(), kernel::Error> {
    // Without CAP_SYS_RESOURCE the score can only be raised. A failure is only logged, as by
    // kube-proxy.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", config.oom_score_adj.to_string()) {
        tracing::debug!(%error, score = config.oom_score_adj, "Failed to apply OOMScore");
    }
    let skipped = kernel.set(&kernel::wanted(&config.conntrack, cores(kernel)))?;
    if !skipped.missing.is_empty() {
        tracing::warn!(
            parameters = ?skipped.missing,
            "the kernel does not have these parameters: nf_conntrack is not loaded; the section conntrack of the \
             configuration has no effect before the next start"
        );
    }
    if !skipped.forbidden.is_empty() {
        tracing::warn!(
            parameters = ?skipped.forbidden,
            "this process has no CAP_NET_ADMIN and leaves these as they are: the section conntrack of the \
             configuration has no effect"
        );
    }
    if !skipped.read_only.is_empty() {
        tracing::error!(
            parameters = ?skipped.read_only,
            "these are on read-only file systems and stay as they are: run once with --init-only and privileges, or \
             set conntrack.maxPerCore and the timeouts to 0"
        );
        events.record(event::read_only(&skipped.read_only));
    }
    Ok(())
}

fn cores(kernel: &Kernel) -> u32 {
    let usable = || thread::available_parallelism().map_or(1, usize::from);
    kernel.cores().unwrap_or_else(|| u32::try_from(usable()).unwrap_or(u32::MAX))
}

/// Reports what in the configuration does not fit the node.
fn check(config: &Config, node: Option<&Node>) -> anyhow::Result<()> {
    let addresses = node.map(|node| node.addresses.as_slice()).unwrap_or_default();
    let ips = NodeIps::detect(config.bind_address, addresses);
    if ips.is_assumed() {
        tracing::warn!(
            "Can't determine this node's IP, assuming loopback; if this is incorrect, please set the \
             --bind-address flag"
        );
    }
    let pod_cidrs =
        node.filter(|_| needs_pod_cidrs(config)).map(|node| node.pod_cidrs.clone()).unwrap_or_default();
    let facts = NodeFacts { ips, pod_cidrs, dual_stack: is_dual_stack() };
    tracing::info!(primary = ?ips.primary, dual_stack = facts.dual_stack, "address families");
    if let Some(nothing) = checks::nothing_is_local(config, &facts) {
        tracing::info!(ip_family = ips.primary.name(), "{nothing}");
    }
    let findings = checks::check(config, &facts);
    for warning in &findings.warnings {
        tracing::warn!("{warning}");
    }
    if !findings.fatal.is_empty() {
        bail!("kube-proxy configuration is incorrect: {}", findings.fatal.join("; "));
    }
    Ok(())
}

/// Returns true if the kernel has both address families.
fn is_dual_stack() -> bool {
    let disabled = fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    has_ipv6() && disabled.map_or(true, |text| text.trim() != "1")
}
