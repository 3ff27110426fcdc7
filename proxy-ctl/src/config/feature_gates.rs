//! The feature gates that kube-proxy knows. Most concern other parts of Kubernetes. An unknown name
//! is refused, as in kube-proxy.

use std::sync::LazyLock;

use rustc_hash::FxHashMap;

/// The gate that decides if `externalIPs` of Services are served.
pub const ALLOW_SERVICE_EXTERNAL_IPS: &str = "AllowServiceExternalIPs";
/// The gate that decides if the API server is asked for streaming lists.
pub const WATCH_LIST_CLIENT: &str = "WatchListClient";

/// The table of gates. Each line has a name, a stage, and "on" or "off" as the default.
const KNOWN: &str = include_str!("feature_gates.txt");

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Alpha,
    Beta,
    /// The gate cannot be changed any more.
    Locked,
    /// The gate is in no group, and not locked.
    Other,
    /// Only older versions have the gate. Its feature is always on.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Gate {
    stage: Stage,
    on: bool,
}

static GATES: LazyLock<FxHashMap<&'static str, Gate>> = LazyLock::new(|| {
    let gate = |line: &'static str| {
        let mut words = line.split_whitespace();
        let (name, stage, on) = (words.next()?, words.next()?, words.next()?);
        let stage = match stage {
            "alpha" => Stage::Alpha,
            "beta" => Stage::Beta,
            "locked" => Stage::Locked,
            "gone" => Stage::Gone,
            _ => Stage::Other,
        };
        Some((name, Gate { stage, on: on == "on" }))
    };
    KNOWN.lines().filter(|line| !line.starts_with('#')).filter_map(gate).collect()
});

/// Returns true if a gate is on. Its own setting counts first, then that of all gates of its stage,
/// then its default.
pub(super) fn is_on(set: &[(String, bool)], gate: &str) -> bool {
    let setting = |name: &str| set.iter().find(|(set, _)| set == name).map(|(_, on)| *on);
    let known = GATES.get(gate);
    let group = known.and_then(|gate| match gate.stage {
        Stage::Alpha => setting("AllAlpha"),
        Stage::Beta => setting("AllBeta"),
        Stage::Locked | Stage::Other | Stage::Gone => None,
    });
    setting(gate).or(group).unwrap_or_else(|| known.is_some_and(|gate| gate.on))
}

/// Returns true if only older versions have the gate.
pub fn is_gone(gate: &str) -> bool {
    GATES.get(gate).is_some_and(|gate| gate.stage == Stage::Gone)
}

/// Returns the gates whose setting is not allowed, each with the problem.
pub(super) fn invalid(set: &[(String, bool)]) -> impl Iterator<Item = (&str, String)> {
    set.iter().filter_map(|(name, on)| match GATES.get(name.as_str()) {
        None => Some((name.as_str(), "must be the name of a feature gate".to_owned())),
        Some(Gate { stage: Stage::Locked, on: locked }) if locked != on => {
            Some((name.as_str(), format!("must be {locked}, found {on}: it cannot be changed any more")))
        }
        Some(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn set(gates: &[(&str, bool)]) -> Vec<(String, bool)> {
        gates.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect()
    }

    #[rstest]
    #[case(&[], "LoggingAlphaOptions", false)]
    #[case(&[], "LoggingBetaOptions", true)]
    #[case(&[("AllAlpha", true)], "LoggingAlphaOptions", true)]
    #[case(&[("AllAlpha", true), ("LoggingAlphaOptions", false)], "LoggingAlphaOptions", false)]
    #[case(&[("AllBeta", false)], "LoggingBetaOptions", false)]
    #[case(&[("AllBeta", false)], "NFTablesProxyMode", true)]
    #[case(&[("AllBeta", false)], WATCH_LIST_CLIENT, false)]
    #[case(&[("AllBeta", false)], ALLOW_SERVICE_EXTERNAL_IPS, true)]
    #[case(&[(ALLOW_SERVICE_EXTERNAL_IPS, false)], ALLOW_SERVICE_EXTERNAL_IPS, false)]
    fn gates_that_are_on(#[case] gates: &[(&str, bool)], #[case] gate: &str, #[case] on: bool) {
        assert_eq!(is_on(&set(gates), gate), on);
    }

    #[rstest]
    #[case(&[("AllAlpha", true), ("NFTablesProxyMode", true), ("WatchList", false)], &[])]
    #[case(&[("TopologyAwareHints", true), ("ProxyTerminatingEndpoints", false)], &[])]
    #[case(&[("NoSuch", true)], &["NoSuch must be the name of a feature gate"])]
    #[case(&[("NFTablesProxyMode", false)], &["NFTablesProxyMode must be true, found false: it cannot be changed any more"])]
    fn checked(#[case] gates: &[(&str, bool)], #[case] problems: &[&str]) {
        let gates = set(gates);
        let found: Vec<_> = invalid(&gates).map(|(gate, problem)| format!("{gate} {problem}")).collect();
        assert_eq!(found, problems);
    }
}
