//! Chooses the first mode that can run for what was asked for.

use super::{Mode, Probe};

/// The mode that was asked for: `mode` of the file, or `--proxy-mode` of the command line.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RequestedMode {
    /// No mode was asked for.
    #[default]
    Automatic,
    Ebpf,
    Nftables,
    Iptables,
    Ipvs,
    Userspace,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ChosenMode {
    pub mode: Mode,
    pub requested: RequestedMode,
    /// The reasons why this mode was chosen, and what is less than best on this node.
    pub reasons: Vec<String>,
    /// The reason why this mode was chosen instead of the one that was asked for, if it was.
    pub fallback: Option<String>,
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("mode {mode} cannot run here: {obstacles}")]
    Impossible { mode: Mode, obstacles: String },
    #[error("no mode can run here: {}", .0.join("; "))]
    NoMode(Vec<String>),
}

/// Returns the modes that may be taken, the preferred one first.
fn candidates(requested: RequestedMode) -> &'static [Mode] {
    use Mode::{Ebpf, Iptables, Ipvs, Nftables, Userspace};
    match requested {
        RequestedMode::Automatic | RequestedMode::Ebpf => &[Ebpf, Iptables, Nftables, Userspace],
        RequestedMode::Nftables => &[Nftables, Iptables, Userspace],
        RequestedMode::Ipvs => &[Ipvs, Iptables, Nftables, Userspace],
        RequestedMode::Iptables => &[Iptables, Nftables, Userspace],
        RequestedMode::Userspace => &[Userspace],
    }
}

fn obstacles(probe: &Probe) -> String {
    probe.obstacles().collect::<Vec<_>>().join("; ")
}

/// Chooses the mode by `probes`, the answers of the modes. If `may_fall_back` is true, another mode
/// may be chosen instead of the one that was asked for.
pub fn choose(
    requested: RequestedMode,
    may_fall_back: bool,
    probes: &[Probe],
) -> Result<ChosenMode, Refusal> {
    let is_automatic = requested == RequestedMode::Automatic;
    let mut passed_over = Vec::new();
    for mode in candidates(requested) {
        let Some(probe) = probes.iter().find(|probe| probe.mode == *mode) else { continue };
        if probe.can_run() {
            return Ok(chosen(requested, probe, &passed_over));
        }
        if !is_automatic && !may_fall_back {
            return Err(Refusal::Impossible { mode: *mode, obstacles: obstacles(probe) });
        }
        passed_over.push(format!("mode {mode} cannot run here: {}", obstacles(probe)));
    }
    Err(Refusal::NoMode(passed_over))
}

fn chosen(requested: RequestedMode, probe: &Probe, passed_over: &[String]) -> ChosenMode {
    let mode = probe.mode;
    let asked = if requested == RequestedMode::Automatic {
        format!("no mode was asked for, and this node can do {mode}")
    } else {
        format!("{requested} was asked for")
    };
    let reasons = [asked].into_iter().chain(passed_over.iter().cloned()).chain(probe.remarks.iter().cloned());
    let is_fallback = requested != RequestedMode::Automatic && !passed_over.is_empty();
    let fallback = is_fallback.then(|| format!("{}; mode {mode} replaces it", passed_over.join("; ")));
    ChosenMode { mode, requested, reasons: reasons.collect(), fallback }
}
