//! Names of kube-proxy's chains, tables, sets and device, in all its modes and versions. This
//! proxy's own modes use the same names.
//!
//! The kubelet's chains are not listed: KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT, KUBE-MARK-DROP,
//! and KUBE-FIREWALL of the table filter. kube-proxy makes the last one too, but does not remove
//! it.

use crate::model::mode::Mode;

/// The tables of iptables in which kube-proxy has chains.
pub const IPTABLES: [&str; 3] = ["filter", "nat", "mangle"];

/// The table of mode nftables in both families. Everything in it is kube-proxy's.
pub const NFTABLES_TABLE: &str = "kube-proxy";

/// The table of this proxy's mode userspace in both families. It redirects clients to the process.
pub const USERSPACE_TABLE: &str = "proxy-ctl-userspace";

/// The table of [`crate::cleanup::from_ipvs::answers`] in both families.
pub const ANSWERS_TABLE: &str = "proxy-ctl-answers";

/// A chain of [`NFTABLES_TABLE`]. If it is the only chain there, this proxy has made the table as a
/// holder.
pub const HOLDER: &str = "nat-postrouting";

/// The device of mode ipvs. It has the addresses of all virtual servers that are not node ports.
pub const IPVS_DEVICE: &str = "kube-ipvs0";

/// The chain that sets the fwmark of packets that [`POSTROUTING`] masquerades. CNI plugins use it
/// too.
pub const MARK_MASQUERADE: &str = "KUBE-MARK-MASQ";
pub const POSTROUTING: &str = "KUBE-POSTROUTING";
/// The chain that accepts packets that are forwarded for a Service. It jumps to no other chain.
pub const FORWARD: &str = "KUBE-FORWARD";
pub const PROXY_FIREWALL: &str = "KUBE-PROXY-FIREWALL";

/// Chains of mode userspace (until 1.25) that redirect clients of frontends to the process: packets
/// that come in, and those of the node itself.
pub const PORTALS_CONTAINER: &str = "KUBE-PORTALS-CONTAINER";
pub const PORTALS_HOST: &str = "KUBE-PORTALS-HOST";
pub const PORTALS_COMMENT: &str = "handle ClusterIPs; NOTE: this must be before the NodePort rules";
/// Chains of mode userspace (until 1.25) that do the same for node ports.
pub const NODE_PORT_CONTAINER: &str = "KUBE-NODEPORT-CONTAINER";
pub const NODE_PORT_HOST: &str = "KUBE-NODEPORT-HOST";
pub const NODE_PORTS_COMMENT: &str =
    "handle service NodePorts; NOTE: this must be the last rule in the chain";

/// The nfacct counter of mode iptables for packets that conntrack found invalid and that were
/// dropped.
pub const INVALID_DROPPED: &str = "ct_state_invalid_dropped_pkts";
/// The nfacct counter of mode iptables for packets to node ports on 127.0.0.1.
pub const LOCALHOST_ACCEPTED: &str = "localhost_nps_accepted_pkts";
pub const PACKET_COUNTERS: [&str; 2] = [INVALID_DROPPED, LOCALHOST_ACCEPTED];

/// Chains of the table filter in which modes iptables and ipvs accept health checks of load
/// balancers.
pub const HEALTH_CHECKS: [&str; 2] = ["KUBE-NODEPORTS", "KUBE-NODE-PORT"];
/// The chain of the table filter in which this proxy accepts health checks that a former kube-proxy
/// accepted before.
pub const OWN_HEALTH_CHECKS: &str = "PROXY-CTL-HEALTH-CHECKS";

/// The modes that write a chain.
type Writers = &'static [Mode];

const IPTABLES_ONLY: Writers = &[Mode::Iptables];
const IPVS_ONLY: Writers = &[Mode::Ipvs];
const USERSPACE_ONLY: Writers = &[Mode::Userspace];
const IPTABLES_AND_IPVS: Writers = &[Mode::Iptables, Mode::Ipvs];

const NAT: [(&str, Writers); 12] = [
    (MARK_MASQUERADE, IPTABLES_AND_IPVS),
    (POSTROUTING, IPTABLES_AND_IPVS),
    // This chain is of older versions.
    ("KUBE-FIREWALL", IPVS_ONLY),
    ("KUBE-LOAD-BALANCER", IPVS_ONLY),
    ("KUBE-NODE-PORT", IPVS_ONLY),
    ("KUBE-NODEPORTS", IPTABLES_ONLY),
    (NODE_PORT_CONTAINER, USERSPACE_ONLY),
    (NODE_PORT_HOST, USERSPACE_ONLY),
    (PORTALS_CONTAINER, USERSPACE_ONLY),
    (PORTALS_HOST, USERSPACE_ONLY),
    ("KUBE-PROXY-CANARY", IPTABLES_ONLY),
    ("KUBE-SERVICES", IPTABLES_AND_IPVS),
];

/// Prefixes of chains of mode iptables, which has one for each service port, endpoint and so on.
/// KUBE-XLB- was used until 1.23.
const NAT_PREFIXES: [&str; 6] = ["KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-", "KUBE-SVC-", "KUBE-SVL-", "KUBE-XLB-"];

const FILTER: [(&str, Writers); 11] = [
    (FORWARD, IPTABLES_AND_IPVS),
    ("KUBE-EXTERNAL-SERVICES", IPTABLES_ONLY),
    ("KUBE-IPVS-FILTER", IPVS_ONLY),
    ("KUBE-IPVS-OUT-FILTER", IPVS_ONLY),
    ("KUBE-NODE-PORT", IPVS_ONLY),
    ("KUBE-NODEPORT-NON-LOCAL", USERSPACE_ONLY),
    ("KUBE-NODEPORTS", IPTABLES_ONLY),
    ("KUBE-PROXY-CANARY", IPTABLES_ONLY),
    (PROXY_FIREWALL, IPTABLES_AND_IPVS),
    ("KUBE-SERVICES", IPTABLES_ONLY),
    ("KUBE-SOURCE-RANGES-FIREWALL", IPVS_ONLY),
];

/// Comments of kube-proxy's jumps from base chains.
const COMMENTS: [&str; 12] = [
    // This is of mode userspace, until 1.25.
    "Ensure that non-local NodePort traffic can flow",
    PORTALS_COMMENT,
    NODE_PORTS_COMMENT,
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

/// The IPv4 sets. The names of IPv6 sets have `KUBE-6-` for `KUBE-`, and are cut to the length that
/// ipset allows.
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

/// Sets with the sockets of virtual servers whose addresses other interfaces than [`IPVS_DEVICE`]
/// may have. The remaining sets have some members of these sets.
pub const SOCKET_SETS: [&str; 4] =
    ["KUBE-EXTERNAL-IP", "KUBE-EXTERNAL-IP-LOCAL", "KUBE-LOAD-BALANCER", "KUBE-NODE-PORT-SCTP-HASH"];
/// Sets of all node ports of a protocol, with IANA's number of the protocol.
pub const NODE_PORT_SETS: [(&str, u16); 2] = [("KUBE-NODE-PORT-TCP", 6), ("KUBE-NODE-PORT-UDP", 17)];

/// Returns the modes that write this chain of a table of iptables. The list is empty if the chain
/// is not kube-proxy's.
fn writers(table: &str, chain: &str) -> Writers {
    let listed = |all: &[(&str, Writers)]| {
        all.iter().find_map(|(name, writers)| (*name == chain).then_some(*writers)).unwrap_or_default()
    };
    match table {
        "nat" if NAT_PREFIXES.iter().any(|prefix| chain.starts_with(prefix)) => IPTABLES_ONLY,
        "nat" => listed(&NAT),
        "filter" => listed(&FILTER),
        "mangle" if chain == "KUBE-PROXY-CANARY" => IPTABLES_ONLY,
        _ => &[],
    }
}

/// Returns true if the mode writes this chain of a table of iptables.
pub fn writes(mode: Mode, table: &str, chain: &str) -> bool {
    writers(table, chain).contains(&mode)
}

/// The rules that a search or a removal covers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Scope<'a> {
    /// The modes in use. What they write is left alone.
    pub in_use: &'a [Mode],
    /// The only mode whose rules are covered. `None` covers all modes.
    pub only: Option<Mode>,
}

impl<'a> Scope<'a> {
    pub const fn but(in_use: &'a [Mode]) -> Self {
        Self { in_use, only: None }
    }

    /// Returns true if the scope covers objects that these modes write.
    pub fn has(&self, writers: &[Mode]) -> bool {
        !writers.iter().any(|mode| self.in_use.contains(mode))
            && self.only.map_or(!writers.is_empty(), |mode| writers.contains(&mode))
    }
}

/// Returns true if a chain of a table of iptables is kube-proxy's and in `scope`.
pub fn is_chain(table: &str, chain: &str, scope: Scope<'_>) -> bool {
    scope.has(writers(table, chain))
}

/// Returns true for chains that kubelets before 1.28 make too. Such chains do not prove that there
/// was a kube-proxy.
pub fn is_shared_chain(chain: &str) -> bool {
    matches!(chain, MARK_MASQUERADE | POSTROUTING)
}

/// Tables of nf_tables, each with the mode that writes it. Everything in such a table belongs to
/// that mode.
pub const OWN_TABLES: [(&str, Mode); 2] =
    [(NFTABLES_TABLE, Mode::Nftables), (USERSPACE_TABLE, Mode::Userspace)];

/// Returns true if the rules of one of these modes make the kernel keep translating connections.
pub fn translates(in_use: &[Mode]) -> bool {
    in_use.iter().any(|mode| matches!(mode, Mode::Nftables | Mode::Iptables | Mode::Ipvs))
}

/// An owner tag: a rule in a chain of iptables whose comment says who has written the chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct OwnerTag {
    pub table: &'static str,
    pub chain: &'static str,
    pub comment: &'static str,
}

/// Returns the owner tag that this proxy writes in a mode with chains of iptables. A running
/// kube-proxy in such a mode empties the chain of the tag when it writes its own rules. So the tag
/// shows that this proxy was the last to write.
///
/// Modes iptables and ipvs have their tags in the same chain, because both write it. A kube-proxy
/// in one of these modes does not touch the chains that only the other mode writes. For those
/// chains there is [`owner_tag_of_own_chains`].
pub const fn owner_tag(mode: Mode) -> Option<OwnerTag> {
    let (chain, comment) = match mode {
        Mode::Iptables => ("KUBE-SERVICES", "proxy-ctl in mode iptables"),
        Mode::Ipvs => ("KUBE-SERVICES", "proxy-ctl in mode ipvs"),
        Mode::Userspace => (PORTALS_CONTAINER, "proxy-ctl in mode userspace"),
        Mode::Ebpf | Mode::Nftables => return None,
    };
    Some(OwnerTag { table: "nat", chain, comment })
}

/// Returns the owner tag in a chain that no other mode writes. It shows that this proxy was the
/// last to write the chains of this mode alone. A kube-proxy in the same mode empties the chain at
/// each sync.
pub const fn owner_tag_of_own_chains(mode: Mode) -> Option<OwnerTag> {
    let (chain, comment) = match mode {
        Mode::Iptables => ("KUBE-NODEPORTS", "proxy-ctl has chains of mode iptables"),
        Mode::Ipvs => ("KUBE-LOAD-BALANCER", "proxy-ctl has chains of mode ipvs"),
        Mode::Userspace | Mode::Ebpf | Mode::Nftables => return owner_tag(mode),
    };
    Some(OwnerTag { table: "nat", chain, comment })
}

/// Returns the other mode whose kube-proxy writes some of the same chains.
pub const fn shares_chains_with(mode: Mode) -> Option<Mode> {
    match mode {
        Mode::Iptables => Some(Mode::Ipvs),
        Mode::Ipvs => Some(Mode::Iptables),
        Mode::Userspace | Mode::Ebpf | Mode::Nftables => None,
    }
}

pub fn is_comment_of_jump(comment: &str) -> bool {
    COMMENTS.contains(&comment)
}

/// Returns true if the comment is that of a jump to [`PROXY_FIREWALL`] that is in `scope`. Modes
/// iptables and ipvs both write such jumps, each with its own comment.
pub fn is_comment_of_firewall_jump(comment: &str, scope: Scope<'_>) -> bool {
    match comment {
        "kubernetes load balancer firewall" => scope.has(IPTABLES_ONLY),
        "kube-proxy firewall rules" => scope.has(IPVS_ONLY),
        _ => false,
    }
}

pub fn is_ip_set(name: &str) -> bool {
    IP_SETS.iter().any(|set| ip_sets(set).iter().any(|set| set == name))
}

/// Returns the names of both families' sets, from the name of the IPv4 set.
pub fn ip_sets(ipv4: &str) -> [String; 2] {
    let mut of_ipv6 = ipv4.replacen("KUBE-", "KUBE-6-", 1);
    of_ipv6.truncate(LONGEST_IP_SET);
    [ipv4.to_owned(), of_ipv6]
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
    #[case("nat", "KUBE-PORTALS-CONTAINER", true)]
    #[case("nat", "KUBE-NODEPORT-HOST", true)]
    #[case("filter", "KUBE-NODEPORT-NON-LOCAL", true)]
    #[case("filter", "KUBE-ROUTER-FORWARD", false)]
    #[case("raw", "KUBE-SERVICES", false)]
    fn chains_of_kube_proxy(#[case] table: &str, #[case] chain: &str, #[case] own: bool) {
        assert_eq!(is_chain(table, chain, Scope::default()), own);
    }

    #[rstest]
    #[case("nat", "KUBE-SERVICES", &[Mode::Iptables], false)]
    #[case("nat", "KUBE-SERVICES", &[Mode::Ipvs], false)]
    #[case("nat", "KUBE-SERVICES", &[Mode::Ebpf, Mode::Nftables], true)]
    #[case("nat", "KUBE-SVC-TCOU7JCQXEZGVUNU", &[Mode::Iptables], false)]
    #[case("nat", "KUBE-SVC-TCOU7JCQXEZGVUNU", &[Mode::Ipvs], true)]
    #[case("nat", "KUBE-LOAD-BALANCER", &[Mode::Iptables], true)]
    #[case("nat", "MINE", &[Mode::Ebpf], false)]
    fn chains_of_a_mode_in_use_are_not_former_rules(
        #[case] table: &str,
        #[case] chain: &str,
        #[case] in_use: &[Mode],
        #[case] is_former: bool,
    ) {
        assert_eq!(is_chain(table, chain, Scope::but(in_use)), is_former);
    }

    #[rstest]
    #[case("nat", "KUBE-SERVICES", &[], true)]
    #[case("nat", "KUBE-SVC-TCOU7JCQXEZGVUNU", &[], true)]
    #[case("nat", "KUBE-LOAD-BALANCER", &[], false)]
    #[case("nat", "KUBE-SERVICES", &[Mode::Ipvs], false)]
    #[case("nat", "MINE", &[], false)]
    #[case("nat", "KUBE-PORTALS-HOST", &[], false)]
    fn chains_of_one_mode(
        #[case] table: &str,
        #[case] chain: &str,
        #[case] in_use: &[Mode],
        #[case] in_scope: bool,
    ) {
        let scope = Scope { in_use, only: Some(Mode::Iptables) };
        assert_eq!(is_chain(table, chain, scope), in_scope);
        assert!(!scope.has(&[Mode::Nftables]));
    }

    /// kube-proxy in one of the two modes empties KUBE-SERVICES, and leaves the chain that has the
    /// other mode's second owner tag.
    #[test]
    fn a_mode_that_shares_chains_has_an_owner_tag_in_one_of_its_own() {
        for mode in [Mode::Iptables, Mode::Ipvs] {
            let other = [shares_chains_with(mode).unwrap()];
            let is_the_others = |tag: Option<OwnerTag>| {
                let OwnerTag { table, chain, .. } = tag.unwrap();
                !is_chain(table, chain, Scope { in_use: &other, only: Some(mode) })
            };
            assert_eq!(
                (is_the_others(owner_tag(mode)), is_the_others(owner_tag_of_own_chains(mode))),
                (true, false)
            );
        }
        assert_eq!(owner_tag_of_own_chains(Mode::Userspace), owner_tag(Mode::Userspace));
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
