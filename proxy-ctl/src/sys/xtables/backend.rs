//! Chooses the backend of iptables. Rules of both backends apply to every packet, and their order
//! is only defined within one backend.

use super::{Backend, ToolError, Tools, chains, tables};
use crate::sys::{
    CallError,
    nftables::{NfTables, TableFamily},
};

/// Chains of which the kubelet makes one in the table mangle, so that others find the backend that
/// the node uses.
const HINTS: [&str; 2] = ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"];

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ChosenBackend {
    pub backend: Backend,
    /// Why it was chosen, for people to read.
    pub reason: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("neither iptables-nft-save and -restore nor iptables-legacy-save and -restore are on PATH")]
    NoTools,
}

/// Chooses a backend as the image of kube-proxy does (sigs.k8s.io/iptables-wrappers), among those
/// whose tools are installed.
pub fn choose() -> Result<ChosenBackend, BackendError> {
    let has =
        |backend| Tools::find(TableFamily::Ipv4, backend).or_else(|| Tools::find(TableFamily::Ipv6, backend));
    match (has(Backend::Nft), has(Backend::Legacy)) {
        (Some(nft), Some(legacy)) => {
            let hints = (has_hint(Backend::Nft)?, has_hint(Backend::Legacy)?);
            decide(hints, || Ok((rules(&nft)?, rules(&legacy)?)))
        }
        (Some(_), None) => only(Backend::Nft),
        (None, Some(_)) => only(Backend::Legacy),
        (None, None) => Err(BackendError::NoTools),
    }
}

fn only(backend: Backend) -> Result<ChosenBackend, BackendError> {
    Ok(ChosenBackend { backend, reason: "only its tools are there" })
}

/// Decides by the hints, then by the number of rules. `hints` and the result of `count` are for nft
/// and legacy, in this order.
fn decide<E>(
    hints: (bool, bool),
    count: impl FnOnce() -> Result<(usize, usize), E>,
) -> Result<ChosenBackend, E> {
    let chosen = |backend, reason| Ok(ChosenBackend { backend, reason });
    match hints {
        (true, _) => chosen(Backend::Nft, "the kubelet's rules are there"),
        (false, true) => chosen(Backend::Legacy, "the kubelet's rules are there"),
        (false, false) => match count()? {
            (nft, legacy) if legacy > nft => chosen(Backend::Legacy, "most rules are there"),
            (0, _) => chosen(Backend::Nft, "there are no rules yet"),
            _ => chosen(Backend::Nft, "most rules are there"),
        },
    }
}

fn has_hint(backend: Backend) -> Result<bool, CallError> {
    for family in TableFamily::ALL {
        let found = match backend {
            Backend::Nft => match NfTables::open()? {
                Some(kernel) => {
                    let mut found = false;
                    for hint in HINTS {
                        found |= kernel.has_chain(family, "mangle", hint)?;
                    }
                    found
                }
                None => false,
            },
            Backend::Legacy => {
                // Asking for a table that does not exist would create it.
                let is_there = tables(family)?.iter().any(|table| table == "mangle");
                let chains = if is_there { chains(family, "mangle")? } else { None };
                chains.is_some_and(|(_, chains)| chains.iter().any(|chain| HINTS.contains(&chain.as_str())))
            }
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the number of rules in the tables that exist, of both families.
fn rules(tools: &Tools) -> Result<usize, BackendError> {
    let mut count = 0;
    for family in TableFamily::ALL {
        let there = match tools.backend {
            Backend::Legacy => tables(family)?,
            Backend::Nft => NfTables::open()?.map_or(Ok(Vec::new()), |kernel| kernel.tables(family))?,
        };
        let Some(tools) = Tools::find(family, tools.backend) else { continue };
        for table in ["filter", "nat", "mangle", "raw", "security"] {
            if there.iter().any(|name| name == table) {
                tools.save(table, |line| count += usize::from(line.starts_with('-')))?;
            }
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::hint_in_nft((true, false), (0, 90), Backend::Nft)]
    #[case::hint_in_both((true, true), (0, 90), Backend::Nft)]
    #[case::hint_in_legacy((false, true), (90, 0), Backend::Legacy)]
    #[case::more_rules_in_legacy((false, false), (1, 2), Backend::Legacy)]
    #[case::as_many_rules((false, false), (2, 2), Backend::Nft)]
    #[case::no_rules((false, false), (0, 0), Backend::Nft)]
    fn backends(#[case] hints: (bool, bool), #[case] rules: (usize, usize), #[case] expected: Backend) {
        let chosen = decide::<()>(hints, || Ok(rules)).unwrap();
        assert_eq!(chosen.backend, expected);
    }
}
