//! Names of kube-proxy's chains, tables, sets and device, in all its modes and versions. The kubelet's chains are not
//! listed: KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT, KUBE-MARK-DROP, and KUBE-FIREWALL of the table filter, which kube-proxy
//! makes too but does not remove.

/// The tables of iptables that it has chains in.
pub const IPTABLES: [&str; 3] = ["filter", "nat", "mangle"];

/// Of mode nftables, in both families: everything in it is kube-proxy's.
pub const NFTABLES_TABLE: &str = "kube-proxy";

/// A chain of [`NFTABLES_TABLE`]. If it is the only chain there, this proxy has made it as a holder.
pub const HOLDER: &str = "nat-postrouting";

/// Of mode ipvs: has the addresses of all virtual servers that are not node ports.
pub const IPVS_DEVICE: &str = "kube-ipvs0";

/// Marks packets that [`POSTROUTING`] masquerades. CNI plugins use it too.
pub const MARK_MASQUERADE: &str = "KUBE-MARK-MASQ";
pub const POSTROUTING: &str = "KUBE-POSTROUTING";
/// Accepts what is forwarded for a Service; leads nowhere.
pub const FORWARD: &str = "KUBE-FORWARD";

const NAT: [&str; 9] = [
    MARK_MASQUERADE,
    POSTROUTING,
    // Of older versions in mode ipvs.
    "KUBE-FIREWALL",
    "KUBE-LOAD-BALANCER",
    "KUBE-NODE-PORT",
    "KUBE-NODEPORTS",
    "KUBE-NODEPORT-CONTAINER",
    "KUBE-PROXY-CANARY",
    "KUBE-SERVICES",
];

/// One chain for each service port, endpoint and so on; KUBE-XLB- up to 1.23.
const NAT_PREFIXES: [&str; 6] = ["KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-", "KUBE-SVC-", "KUBE-SVL-", "KUBE-XLB-"];

const FILTER: [&str; 10] = [
    FORWARD,
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-NODE-PORT",
    "KUBE-NODEPORTS",
    "KUBE-PROXY-CANARY",
    "KUBE-PROXY-FIREWALL",
    "KUBE-SERVICES",
    "KUBE-SOURCE-RANGES-FIREWALL",
];

/// Comments of kube-proxy's jumps from base chains.
const COMMENTS: [&str; 9] = [
    "kube-proxy firewall rules",
    "kubernetes externally-visible service portals",
    "kubernetes forwarding rules",
    "kubernetes health check rules",
    "kubernetes health check service ports",
    "kubernetes ipvs access filter",
    "kubernetes load balancer firewall",
    "kubernetes postrouting rules",
    "kubernetes service portals",
];

/// IPv6 sets have `KUBE-6-` for `KUBE-`, cut to the length that ipset allows.
const IP_SETS: [&str; 17] = [
    "KUBE-LOOP-BACK",
    "KUBE-CLUSTER-IP",
    "KUBE-EXTERNAL-IP",
    "KUBE-EXTERNAL-IP-LOCAL",
    "KUBE-LOAD-BALANCER",
    "KUBE-LOAD-BALANCER-FW",
    "KUBE-LOAD-BALANCER-LOCAL",
    "KUBE-LOAD-BALANCER-SOURCE-IP",
    "KUBE-LOAD-BALANCER-SOURCE-CIDR",
    "KUBE-NODE-PORT-TCP",
    "KUBE-NODE-PORT-LOCAL-TCP",
    "KUBE-NODE-PORT-UDP",
    "KUBE-NODE-PORT-LOCAL-UDP",
    "KUBE-NODE-PORT-SCTP-HASH",
    "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
    "KUBE-HEALTH-CHECK-NODE-PORT",
    "KUBE-IPVS-IPS",
];
const LONGEST_IP_SET: usize = 31;

/// `table`: of iptables.
pub fn is_chain(table: &str, chain: &str) -> bool {
    match table {
        "nat" => NAT.contains(&chain) || NAT_PREFIXES.iter().any(|prefix| chain.starts_with(prefix)),
        "filter" => FILTER.contains(&chain),
        "mangle" => chain == "KUBE-PROXY-CANARY",
        _ => false,
    }
}

/// Kubelets before 1.28 make these chains too, so they do not show that there was a kube-proxy.
pub fn is_shared_chain(chain: &str) -> bool {
    matches!(chain, MARK_MASQUERADE | POSTROUTING)
}

pub fn is_comment_of_jump(comment: &str) -> bool {
    COMMENTS.contains(&comment)
}

pub fn is_ip_set(name: &str) -> bool {
    IP_SETS.iter().any(|set| {
        let of_ipv6 = set.replacen("KUBE-", "KUBE-6-", 1);
        name == *set || name == of_ipv6.get(..LONGEST_IP_SET).unwrap_or(&of_ipv6)
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("nat", "KUBE-SERVICES", true)]
    #[case("nat", "KUBE-SVC-TCOU7JCQXEZGVUNU", true)]
    #[case("nat", "KUBE-XLB-TCOU7JCQXEZGVUNU", true)]
    #[case("filter", "KUBE-SERVICES", true)]
    #[case("mangle", "KUBE-PROXY-CANARY", true)]
    #[case("filter", "KUBE-SVC-TCOU7JCQXEZGVUNU", false)]
    #[case("filter", "KUBE-FIREWALL", false)]
    #[case("nat", "KUBE-FIREWALL", true)]
    #[case("nat", "KUBE-MARK-DROP", false)]
    #[case("mangle", "KUBE-IPTABLES-HINT", false)]
    #[case("nat", "KUBE-KUBELET-CANARY", false)]
    #[case("filter", "KUBE-ROUTER-FORWARD", false)]
    #[case("raw", "KUBE-SERVICES", false)]
    fn chains_of_kube_proxy(#[case] table: &str, #[case] chain: &str, #[case] own: bool) {
        assert_eq!(is_chain(table, chain), own);
    }

    #[rstest]
    #[case("KUBE-CLUSTER-IP", true)]
    #[case("KUBE-6-CLUSTER-IP", true)]
    #[case("KUBE-6-LOAD-BALANCER-SOURCE-CID", true)]
    #[case("KUBE-6-LOAD-BALANCER-SOURCE-CIDR", false)]
    #[case("KUBE-ROUTER-PODS", false)]
    fn sets_of_kube_proxy(#[case] name: &str, #[case] own: bool) {
        assert_eq!(is_ip_set(name), own);
    }
}
