//! Finds the tables in which health checks of load balancers (`healthCheckNodePort`) are accepted:
//! by a former kube-proxy, or by this proxy instead. kube-proxy accepts them in modes iptables and
//! ipvs.

use super::{Error, in_use};
use crate::{
    names::{self, Scope},
    sys::{
        nftables::{NfTables, TableFamily},
        xtables::{self, Backend},
    },
};

/// A table filter, by family and backend.
pub type FilterTable = (TableFamily, Backend);

const TABLE: &str = "filter";

/// Returns the tables in which a kube-proxy accepts health checks, in a mode that this proxy is not
/// in. Needs CAP_NET_ADMIN.
pub fn accepted_by_kube_proxy() -> Result<Vec<FilterTable>, Error> {
    let in_use = in_use::modes();
    let scope = Scope::but(&in_use);
    let of_others = names::HEALTH_CHECKS.into_iter().filter(|chain| names::is_chain(TABLE, chain, scope));
    with_one_of(&of_others.collect::<Vec<_>>())
}

/// Returns the tables in which this proxy accepts health checks that a former kube-proxy accepted
/// before. Needs CAP_NET_ADMIN.
pub fn accepted_by_proxy_ctl() -> Result<Vec<FilterTable>, Error> {
    with_one_of(&[names::OWN_HEALTH_CHECKS])
}

/// Returns true if a process is in a mode that writes netfilter rules: nftables, iptables, ipvs or
/// userspace.
pub fn is_any_mode_in_use() -> bool {
    !in_use::modes().is_empty()
}

fn with_one_of(chains: &[&str]) -> Result<Vec<FilterTable>, Error> {
    let mut tables = Vec::new();
    let nftables = NfTables::open()?;
    for family in TableFamily::ALL {
        if let Some(nftables) = &nftables {
            for chain in chains {
                if nftables.has_chain(family, TABLE, chain)? {
                    tables.push((family, Backend::Nft));
                    break;
                }
            }
        }
        // Asking for a table that does not exist would create it.
        let is_there = xtables::tables(family)?.iter().any(|name| name == TABLE);
        let found = if is_there { xtables::chains(family, TABLE)? } else { None };
        if found.is_some_and(|(_, names)| names.iter().any(|name| chains.contains(&name.as_str()))) {
            tables.push((family, Backend::Legacy));
        }
    }
    Ok(tables)
}
