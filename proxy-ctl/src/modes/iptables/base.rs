//! The rules that belong to no service port: they jump to the other rules, and treat packets by
//! their fwmark. This module has no side effects.

use std::net::IpAddr;

use super::names::{self, SharedChain, Table};
use crate::{
    model::{mode::Mode, node::Host, objects::IpFamily},
    modes::netfilter::{own_rules, rule_text},
    names::INVALID_DROPPED,
};

/// A chain that only this mode uses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct BaseChain {
    pub(super) table: Table,
    pub(super) name: &'static str,
    pub(super) rules: Vec<String>,
}

/// A rule in a chain in which others have rules too.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Jump {
    pub(super) table: Table,
    pub(super) chain: &'static str,
    pub(super) rule: String,
}

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct BaseRules {
    pub(super) chains: Vec<BaseChain>,
    /// Owner tags: rules in these chains of nat. Each shows that this proxy was the last to write
    /// the chain.
    pub(super) owner_tags: Vec<(SharedChain, String)>,
    /// The last rules of KUBE-SERVICES in nat.
    pub(super) node_ports: Vec<String>,
    /// Jumps that go ahead of all other rules of their chains, in this order.
    pub(super) jumps: Vec<Jump>,
    /// The last rule of KUBE-FIREWALL, a chain that others use too.
    pub(super) martians: Option<String>,
}

/// Abilities of the tools and the kernel. Parameters of the node may change them at any time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Abilities {
    /// True if MASQUERADE knows `--random-fully`.
    pub(super) random_fully: bool,
    /// True if packets that conntrack finds invalid are dropped. False where conntrack is liberal
    /// (`nf_conntrack_tcp_be_liberal`).
    pub(super) drop_invalid: bool,
    /// True if nfacct counts packets. They are counted only where invalid ones are dropped.
    pub(super) counts_packets: bool,
    /// True if neighbours reach 127.0.0.0/8 unless a rule forbids it (`route_localnet`,
    /// CVE-2020-8558).
    pub(super) routes_localnet: bool,
}

/// Returns a match for all packets that counts them.
pub(super) fn count(counter: &str) -> String {
    format!("-m nfacct --nfacct-name {counter} ")
}

impl BaseRules {
    pub(super) fn new(family: IpFamily, host: &Host, abilities: Abilities) -> Self {
        let chain = |table, name, rules: &[String]| BaseChain { table, name, rules: rules.to_vec() };
        let why = |text: &str| format!("-m comment --comment \"{text}\"");
        let random = if abilities.random_fully { " --random-fully" } else { "" };
        let traffic = why("kubernetes service traffic requiring SNAT");
        let masquerading = rule_text::masquerade_by_fwmark(host, &format!("{traffic} "), random);
        let mut forwarding = Vec::new();
        if abilities.drop_invalid {
            // An invalid packet of a translated connection would reach the client untranslated, and
            // the client would reset the connection.
            let counted = if abilities.counts_packets { count(INVALID_DROPPED) } else { String::new() };
            forwarding.push(format!("-m conntrack --ctstate INVALID {counted}-j DROP"));
        }
        let [by_fwmark, known] = ["kubernetes forwarding rules", "kubernetes forwarding conntrack rule"]
            .map(|text| format!("{} ", why(text)));
        forwarding.extend(rule_text::forward(host, [&by_fwmark, &known]));
        let mut chains = vec![
            chain(Table::Nat, names::MARK_MASQUERADE, &[rule_text::set_fwmark(host)]),
            chain(Table::Nat, names::POSTROUTING, &masquerading),
            chain(Table::Filter, names::FORWARD, &forwarding),
        ];
        chains.extend(Table::ALL.map(|table| chain(table, names::CANARY, &[])));
        let serves_localhost = serves_localhost(family, host);
        // The parameter route_localnet stays set when node ports are no longer served on 127.0.0.1.
        let is_open = serves_localhost || family == IpFamily::Ipv4 && abilities.routes_localnet;
        let martians = is_open.then(|| {
            format!(
                "! -s 127.0.0.0/8 -d 127.0.0.0/8 {} -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
                why("block incoming localnet connections")
            )
        });
        let to_martians = martians.iter().flat_map(|_| {
            ["INPUT", "OUTPUT"].map(|chain| Jump {
                table: Table::Filter,
                chain,
                rule: format!("-j {}", names::FIREWALL),
            })
        });
        let jumps = to_martians.chain(jumps()).collect();
        Self {
            chains,
            owner_tags: owner_tags(),
            node_ports: node_ports(family, host, serves_localhost),
            jumps,
            martians,
        }
    }

    /// Returns the number of rules in the table.
    pub(super) fn count(&self, table: Table) -> usize {
        let own = self.chains.iter().filter(|chain| chain.table == table).map(|chain| chain.rules.len());
        let jumps = self.jumps.iter().filter(|jump| jump.table == table).count();
        let of_services = || self.node_ports.len() + self.owner_tags.len();
        own.sum::<usize>() + jumps + if table == Table::Nat { of_services() } else { 0 }
    }
}

fn owner_tags() -> Vec<(SharedChain, String)> {
    let in_services = own_rules::owner_tag(Mode::Iptables).map(|rule| (SharedChain::Services, rule));
    let in_own =
        own_rules::owner_tag_of_own_chains(Mode::Iptables).map(|rule| (SharedChain::NodePorts, rule));
    in_services.into_iter().chain(in_own).collect()
}

/// Returns true if node ports are served on 127.0.0.1.
pub(super) fn serves_localhost(family: IpFamily, host: &Host) -> bool {
    family == IpFamily::Ipv4
        && host.node_port_addresses.iter().any(|address| address.is_ipv4() && address.is_loopback())
}

/// Returns the jumps that follow those to KUBE-FIREWALL, in kube-proxy's order.
fn jumps() -> Vec<Jump> {
    const NEW: &str = "-m conntrack --ctstate NEW ";
    let jump = |table, chain, matches: &str, comment: &str, target: &str| Jump {
        table,
        chain,
        rule: format!("{matches}-m comment --comment \"{comment}\" -j {target}"),
    };
    let filter = |chain, matches, comment, target| jump(Table::Filter, chain, matches, comment, target);
    let firewall = |chain| filter(chain, NEW, "kubernetes load balancer firewall", names::PROXY_FIREWALL);
    let portals = |chain| filter(chain, NEW, "kubernetes service portals", names::SERVICES);
    let external =
        |chain| filter(chain, NEW, "kubernetes externally-visible service portals", names::EXTERNAL_SERVICES);
    let nat = |chain| jump(Table::Nat, chain, "", "kubernetes service portals", names::SERVICES);
    vec![
        firewall("INPUT"),
        filter("INPUT", "", "kubernetes health check service ports", names::NODE_PORTS),
        external("INPUT"),
        firewall("FORWARD"),
        filter("FORWARD", "", "kubernetes forwarding rules", names::FORWARD),
        portals("FORWARD"),
        external("FORWARD"),
        firewall("OUTPUT"),
        portals("OUTPUT"),
        nat("PREROUTING"),
        nat("OUTPUT"),
        jump(Table::Nat, "POSTROUTING", "", "kubernetes postrouting rules", names::POSTROUTING),
    ]
}

fn node_ports(family: IpFamily, host: &Host, serves_localhost: bool) -> Vec<String> {
    let comment = "-m comment --comment \
        \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\"";
    let target = SharedChain::NodePorts.name();
    if host.node_ports_everywhere {
        let but = match (family, serves_localhost) {
            // A connection from ::1 would get no answers, because the kernel has no route_localnet
            // for IPv6.
            (IpFamily::Ipv6, _) => "! -d ::1/128 ",
            (IpFamily::Ipv4, false) => "! -d 127.0.0.0/8 ",
            (IpFamily::Ipv4, true) => "",
        };
        return vec![format!("{but}{comment} -m addrtype --dst-type LOCAL -j {target}")];
    }
    let serves =
        |address: &&IpAddr| IpFamily::of(**address) == family && (!address.is_loopback() || serves_localhost);
    let addresses = host.node_port_addresses.iter().filter(serves);
    addresses.map(|address| format!("-d {} {comment} -j {target}", ipnet::IpNet::from(*address))).collect()
}
