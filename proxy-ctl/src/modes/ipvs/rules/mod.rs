//! The rules of iptables that match this mode's sets, as iptables-save prints them. This module has
//! no side effects.
//!
//! They do not depend on Services, except for two things: addresses that the node itself may not
//! reach, and whether there are external IPs.

use super::sets::{Set, SetRole};
use crate::{
    model::{
        mode::Mode,
        node::Host,
        objects::{IpFamily, Protocol},
    },
    modes::netfilter::{
        chains::{Chains, Jump},
        own_rules,
        rule_text::{self, masquerade, masquerade_by_fwmark},
    },
    names,
    sys::{net::ipvs::VirtualSocket, xtables::saved::SavedLine},
};

pub(super) const JUMPS: [Jump; 9] = [
    jump("nat", "OUTPUT", "KUBE-SERVICES", "kubernetes service portals"),
    jump("nat", "PREROUTING", "KUBE-SERVICES", "kubernetes service portals"),
    jump("nat", "POSTROUTING", names::POSTROUTING, "kubernetes postrouting rules"),
    jump("filter", "FORWARD", names::FORWARD, "kubernetes forwarding rules"),
    jump("filter", "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules"),
    jump("filter", "INPUT", names::PROXY_FIREWALL, "kube-proxy firewall rules"),
    jump("filter", "FORWARD", names::PROXY_FIREWALL, "kube-proxy firewall rules"),
    jump("filter", "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter"),
    jump("filter", "OUTPUT", "KUBE-IPVS-OUT-FILTER", "kubernetes ipvs access filter"),
];

const fn jump(table: &'static str, from: &'static str, to: &'static str, comment: &'static str) -> Jump {
    Jump { table, from, to, comment }
}

/// Returns the chains of one family with all their rules. `has_members` returns true if a set is to
/// have members.
pub(super) fn chains(
    family: IpFamily,
    host: &Host,
    closed_to_node: impl Iterator<Item = VirtualSocket>,
    has_members: impl Fn(Set) -> bool,
) -> Chains {
    let name = |role| Set { role, family }.name();
    let matches = |role, fields: &str| format!("-m set --match-set {} {fields}", name(role));
    let socket = |role| matches(role, "dst,dst");
    let mut chains = Chains::new();
    let mut add = |table, chain, rules: Vec<String>| chains.insert((table, chain), rules);

    let loopback = match family {
        IpFamily::Ipv4 => "127.0.0.0/8",
        IpFamily::Ipv6 => "::1/128",
    };
    // These rules are written only if needed: they ask more of the kernel than all others
    // (CONFIG_NETFILTER_XT_MATCH_PHYSDEV).
    let external = [SetRole::ExternalIp, SetRole::ExternalIpLocal].map(|role| {
        let mut rules = Vec::new();
        if !has_members(Set { role, family }) {
            return rules;
        }
        if role == SetRole::ExternalIp {
            rules.push(format!("{} -j {}", socket(role), names::MARK_MASQUERADE));
        }
        // Packets from other machines, or to an address of this one, are accepted, so that no other
        // rule translates them.
        let from_outside = "-m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL";
        rules.push(format!("{} {from_outside} -j ACCEPT", socket(role)));
        rules.push(format!("{} -m addrtype --dst-type LOCAL -j ACCEPT", socket(role)));
        rules
    });
    let mut services: Vec<String> = own_rules::owner_tag(Mode::Ipvs).into_iter().collect();
    services.extend([
        format!("-s {loopback} -j RETURN"),
        format!("{} -j KUBE-LOAD-BALANCER", socket(SetRole::LoadBalancer)),
        cluster_ip_rule(family, host),
    ]);
    services.extend(external.into_iter().flatten());
    services.push("-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT".to_owned());
    services.extend(
        [SetRole::ClusterIp, SetRole::LoadBalancer].map(|role| format!("{} -j ACCEPT", socket(role))),
    );
    add("nat", "KUBE-SERVICES", services);
    let mut load_balancer: Vec<String> = own_rules::owner_tag_of_own_chains(Mode::Ipvs).into_iter().collect();
    load_balancer.extend([
        format!("{} -j RETURN", socket(SetRole::LoadBalancerLocal)),
        format!("-j {}", names::MARK_MASQUERADE),
    ]);
    add("nat", "KUBE-LOAD-BALANCER", load_balancer);
    let node_ports =
        [(Protocol::Tcp, "tcp", "dst"), (Protocol::Udp, "udp", "dst"), (Protocol::Sctp, "sctp", "dst,dst")];
    let node_ports = node_ports.into_iter().flat_map(|(protocol, word, fields)| {
        let local = matches(SetRole::NodePortLocal(protocol), fields);
        let all = matches(SetRole::NodePort(protocol), fields);
        [format!("-p {word} {local} -j RETURN"), format!("-p {word} {all} -j {}", names::MARK_MASQUERADE)]
    });
    add("nat", "KUBE-NODE-PORT", node_ports.collect());
    let hairpin = format!("{} ", matches(SetRole::Hairpin, "dst,dst,src"));
    let mut postrouting = masquerade(host, &hairpin, "");
    // The option `--random-fully` needs iptables 1.6.2.
    postrouting.extend(masquerade_by_fwmark(host, "", " --random-fully"));
    add("nat", names::POSTROUTING, postrouting);
    add("nat", names::MARK_MASQUERADE, vec![rule_text::set_fwmark(host)]);

    add("filter", names::FORWARD, rule_text::forward(host, ["", ""]).into());
    let health_check = matches(SetRole::HealthCheckPort, "dst");
    add("filter", "KUBE-NODE-PORT", vec![format!("{health_check} -j ACCEPT")]);
    let restricted = socket(SetRole::LoadBalancerRestricted);
    add("filter", names::PROXY_FIREWALL, vec![format!("{restricted} -j KUBE-SOURCE-RANGES-FIREWALL")]);
    let allowed = [SetRole::LoadBalancerSources, SetRole::LoadBalancerFromItself];
    let mut ranges: Vec<_> = allowed.map(|role| format!("{} -j RETURN", matches(role, "dst,dst,src"))).into();
    ranges.push("-j DROP".to_owned());
    add("filter", "KUBE-SOURCE-RANGES-FIREWALL", ranges);
    // Clients must not use an address of the device to reach processes that listen on all of the
    // node's addresses (kubernetes/kubernetes#72236).
    let mut filter: Vec<_> = SetRole::FRONTENDS.map(|role| format!("{} -j RETURN", socket(role))).into();
    filter.push(format!("{health_check} -j RETURN"));
    let addresses = matches(SetRole::DeviceAddresses, "dst");
    let unreachable = rule_text::port_unreachable(family);
    filter.push(format!("-m conntrack --ctstate NEW {addresses} -j REJECT --reject-with {unreachable}"));
    add("filter", "KUBE-IPVS-FILTER", filter);
    // The node's own connections to an address of the device have that address as their source.
    // Source ranges cannot distinguish them from other connections (kubernetes/kubernetes#119656).
    let closed = closed_to_node.filter(|socket| IpFamily::of(socket.address.ip()) == family);
    let closed = closed.map(|socket| {
        let (ip, port) = (socket.address.ip(), socket.address.port());
        let length = if ip.is_ipv4() { 32 } else { 128 };
        format!("-s {ip}/{length} -m ipvs --vproto {} --vaddr {ip} --vport {port} -j DROP", socket.protocol)
    });
    add("filter", "KUBE-IPVS-OUT-FILTER", closed.collect());
    chains
}

/// Returns the chains that mode iptables does not write, and that need nothing of what it writes.
pub(super) fn own_chains(chains: &Chains) -> Chains {
    let own = chains
        .iter()
        .filter(|((table, chain), _)| *table == "filter" && !names::writes(Mode::Iptables, table, chain));
    own.map(|(chain, rules)| (*chain, rules.clone())).collect()
}

/// Returns true if mode iptables serves by rules in this mode's chains. `nat` is that table as
/// iptables-save prints it.
pub(super) fn another_mode_serves(nat: &str) -> bool {
    let is_anothers =
        |chain| names::writes(Mode::Iptables, "nat", chain) && !names::writes(Mode::Ipvs, "nat", chain);
    nat.lines().any(|line| match SavedLine::parse(line) {
        SavedLine::Rule { chain: "KUBE-SERVICES", rule } => {
            rule.rsplit_once("-j ").is_some_and(|(_, target)| is_anothers(target))
        }
        SavedLine::Rule { .. } | SavedLine::Chain { .. } | SavedLine::Table(_) | SavedLine::Other => false,
    })
}

/// Returns the rule that says which clients of ClusterIPs are masqueraded.
fn cluster_ip_rule(family: IpFamily, host: &Host) -> String {
    let set = Set { role: SetRole::ClusterIp, family }.name();
    let rule = |source: &str, fields| {
        format!("{source}-m set --match-set {set} {fields} -j {}", names::MARK_MASQUERADE)
    };
    if host.masquerade_all {
        return rule("", "dst,dst");
    }
    match rule_text::from_pods(host, family) {
        Some(pods) => rule(&format!("! {pods} "), "dst,dst"),
        // The node's own connections to a ClusterIP have that address as their source, because the
        // node has it.
        None => rule("", "src,dst"),
    }
}

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod tests;
