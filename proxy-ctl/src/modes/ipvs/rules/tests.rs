use std::iter;

use rstest::rstest;

use super::*;
use crate::{
    model::node::{LocalTraffic, PortRange},
    modes::netfilter::chains::restoration,
    names,
};

fn chains_of(family: IpFamily, host: &Host) -> Chains {
    chains(family, host, iter::empty(), |_| true)
}

fn host(local_traffic: LocalTraffic) -> Host {
    Host { local_traffic, masquerade_bit: 14, ..Host::default() }
}

fn cidrs(cidrs: &[&str]) -> LocalTraffic {
    LocalTraffic::FromCidrs(cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect())
}

#[rstest]
fn everything_is_found_again_by_its_name(#[values(IpFamily::Ipv4, IpFamily::Ipv6)] family: IpFamily) {
    let chains = chains_of(family, &host(cidrs(&[])));
    for (table, chain) in chains.keys() {
        assert!(names::is_chain(table, chain, names::Scope::default()), "{table} {chain}");
    }
    for Jump { table, to: chain, comment, .. } in JUMPS {
        assert!(names::is_comment_of_jump(comment), "{comment}");
        assert!(chains.contains_key(&(table, chain)), "{table} {chain}");
    }
    let text = format!("{chains:?}");
    for set in Set::all(family) {
        assert!(text.contains(&format!("--match-set {} ", set.name())), "{}", set.name());
    }
}

#[rstest]
#[case::networks(cidrs(&["10.244.0.0/16", "fd00:244::/64"]), false, "! -s 10.244.0.0/16 -m set --match-set KUBE-CLUSTER-IP dst,dst")]
#[case::network_of_the_other_family(cidrs(&["fd00:244::/64"]), false, "-m set --match-set KUBE-CLUSTER-IP src,dst")]
#[case::bridge(LocalTraffic::FromBridge("cni0".into()), false, "! -i cni0 -m set --match-set KUBE-CLUSTER-IP dst,dst")]
#[case::prefix(LocalTraffic::FromInterfacePrefix("veth".into()), false, "! -i veth+ -m set --match-set KUBE-CLUSTER-IP dst,dst")]
#[case::everybody(cidrs(&["10.244.0.0/16"]), true, "-m set --match-set KUBE-CLUSTER-IP dst,dst")]
fn who_is_masqueraded_on_the_way_to_cluster_ips(
    #[case] local_traffic: LocalTraffic,
    #[case] masquerade_all: bool,
    #[case] expected: &str,
) {
    let chains = chains_of(IpFamily::Ipv4, &Host { masquerade_all, ..host(local_traffic) });
    assert_eq!(chains[&("nat", "KUBE-SERVICES")][3], format!("{expected} -j KUBE-MARK-MASQ"));
}

#[rstest]
#[case(0, "0x1")]
#[case(14, "0x4000")]
#[case(31, "0x80000000")]
fn the_fwmark(#[case] masquerade_bit: u8, #[case] fwmark: &str) {
    let host = Host { masquerade_bit, ..Host::default() };
    let chains = chains_of(IpFamily::Ipv4, &host);
    assert_eq!(chains[&("nat", "KUBE-MARK-MASQ")], [format!("-j MARK --set-xmark {fwmark}/{fwmark}")]);
    assert_eq!(chains[&("nat", "KUBE-POSTROUTING")][2], format!("-j MARK --set-xmark {fwmark}/0x0"));
}

/// MASQUERADE takes ports only in rules that name the protocol.
#[rstest]
fn sources_get_no_ports_of_the_programs(
    #[values(IpFamily::Ipv4, IpFamily::Ipv6)] family: IpFamily,
    #[values(("tcp", 0), ("udp", 1), ("sctp", 2))] protocol: (&str, usize),
) {
    let masquerade_ports = Some(PortRange { first: 32_768, last: 60_999 });
    let chains = chains_of(family, &Host { masquerade_ports, ..host(cidrs(&[])) });
    let rules: Vec<_> =
        chains[&("nat", "KUBE-POSTROUTING")].iter().filter(|rule| rule.contains("-j MASQUERADE")).collect();
    let hairpin = Set { role: SetRole::Hairpin, family }.name();
    let (protocol, index) = protocol;
    assert_eq!(rules.len(), 6, "{rules:?}");
    assert_eq!(
        *rules[index],
        format!(
            "-p {protocol} -m set --match-set {hairpin} dst,dst,src -j MASQUERADE --to-ports 32768-60999"
        )
    );
    assert_eq!(
        *rules[index + 3],
        format!("-p {protocol} -j MASQUERADE --to-ports 32768-60999 --random-fully")
    );
}

#[test]
fn a_closed_address_is_refused_to_the_node_in_its_family() {
    let closed = ["203.0.113.80:80", "[2001:db8::80]:80"]
        .map(|address| VirtualSocket { protocol: 6, address: address.parse().unwrap() });
    let of = |family| chains(family, &Host::default(), closed.into_iter(), |_| true);
    let rule = |family| of(family)[&("filter", "KUBE-IPVS-OUT-FILTER")].clone();
    assert_eq!(
        rule(IpFamily::Ipv4),
        ["-s 203.0.113.80/32 -m ipvs --vproto 6 --vaddr 203.0.113.80 --vport 80 -j DROP"]
    );
    assert_eq!(
        rule(IpFamily::Ipv6),
        ["-s 2001:db8::80/128 -m ipvs --vproto 6 --vaddr 2001:db8::80 --vport 80 -j DROP"]
    );
}

/// Returns the table as iptables-save prints it after `restoration` on an empty table.
fn saved(table: &str, chains: &Chains) -> String {
    let mut text = format!("*{table}\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [7:420]\n:OUTPUT ACCEPT [0:0]\n");
    for ((_, chain), _) in chains.iter().filter(|((of, _), _)| *of == table) {
        text += &format!(":{chain} - [0:0]\n");
    }
    for Jump { from, to, comment, .. } in JUMPS.iter().filter(|jump| jump.table == table) {
        text += &format!("-A {from} -m comment --comment \"{comment}\" -j {to}\n");
    }
    for ((_, chain), rules) in chains.iter().filter(|((of, _), _)| *of == table) {
        rules.iter().for_each(|rule| text += &format!("-A {chain} {rule}\n"));
    }
    text + "COMMIT\n"
}

#[rstest]
fn what_is_there_is_not_written(#[values("nat", "filter")] table: &str) {
    let chains = chains_of(IpFamily::Ipv4, &host(cidrs(&["10.244.0.0/16"])));
    let saved = saved(table, &chains);
    assert_eq!(restoration(table, &chains, &JUMPS, &saved), None);
}

#[test]
fn only_the_chain_that_differs_is_written() {
    let chains = chains_of(IpFamily::Ipv4, &host(cidrs(&["10.244.0.0/16"])));
    let before = saved("filter", &chains).replace("-A KUBE-SOURCE-RANGES-FIREWALL -j DROP\n", "");
    assert_eq!(
        restoration("filter", &chains, &JUMPS, &before).unwrap(),
        "*filter\n:KUBE-SOURCE-RANGES-FIREWALL - [0:0]\n\
         -A KUBE-SOURCE-RANGES-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN\n\
         -A KUBE-SOURCE-RANGES-FIREWALL -m set --match-set KUBE-LOAD-BALANCER-SOURCE-IP dst,dst,src -j RETURN\n\
         -A KUBE-SOURCE-RANGES-FIREWALL -j DROP\nCOMMIT\n"
    );
}

#[test]
fn a_jump_that_is_gone_is_written_first_in_its_chain() {
    let chains = chains_of(IpFamily::Ipv4, &host(cidrs(&[])));
    let jump = "-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n";
    let before = saved("nat", &chains).replace(jump, "");
    assert_eq!(
        restoration("nat", &chains, &JUMPS, &before).unwrap(),
        format!("*nat\n{}COMMIT\n", jump.replace("-A ", "-I "))
    );
}

/// Mode iptables sends only packets of new connections to a chain that both modes fill.
#[test]
fn other_jumps_to_the_firewall_are_removed() {
    let chains = chains_of(IpFamily::Ipv4, &host(cidrs(&[])));
    let other = "-m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL";
    let jumps = ["INPUT", "OUTPUT"].map(|from| format!("-A {from} {other}\n"));
    let before = saved("filter", &chains).replace("COMMIT\n", &(jumps.concat() + "COMMIT\n"));
    assert_eq!(
        restoration("filter", &chains, &JUMPS, &before).unwrap(),
        format!("*filter\n-D INPUT {other}\n-D OUTPUT {other}\nCOMMIT\n")
    );
    // The jumps stay while the other mode's chain stays.
    assert_eq!(restoration("filter", &own_chains(&chains), &JUMPS, &before), None);
}

#[test]
fn a_chain_that_is_missing_is_made_even_without_rules() {
    let chains = chains_of(IpFamily::Ipv4, &host(cidrs(&[])));
    let before = saved("filter", &chains).replace(":KUBE-IPVS-OUT-FILTER - [0:0]\n", "");
    let expected = "*filter\n:KUBE-IPVS-OUT-FILTER - [0:0]\nCOMMIT\n";
    assert_eq!(restoration("filter", &chains, &JUMPS, &before).unwrap(), expected);
}

#[rstest]
#[case::nothing("", false)]
#[case::kube_proxy_iptables(
    "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"default/web cluster IP\" -m tcp --dport 80 -j KUBE-SVC-TCOU7JCQXEZGVUNU",
    true
)]
#[case::node_ports_of_mode_iptables("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS", true)]
#[case::left_after_it("-A KUBE-SEP-A -j KUBE-MARK-MASQ\n-A KUBE-SVC-A -j KUBE-SEP-A", false)]
#[case::node_ports_of_mode_ipvs("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT", false)]
fn whether_another_mode_serves(#[case] nat: &str, #[case] expected: bool) {
    assert_eq!(another_mode_serves(nat), expected);
}

#[test]
fn this_mode_does_not_take_its_own_rules_for_anothers() {
    let chains = chains_of(IpFamily::Ipv4, &host(cidrs(&["10.244.0.0/16"])));
    assert!(!another_mode_serves(&saved("nat", &chains)));
}

#[test]
fn what_is_this_modes_alone_is_written_with_the_jumps_to_it() {
    let chains = own_chains(&chains_of(IpFamily::Ipv4, &host(cidrs(&[]))));
    let names: Vec<_> = chains.keys().map(|(_, chain)| *chain).collect();
    let own = ["KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL"];
    assert_eq!(names, own);
    let written = restoration("filter", &chains, &JUMPS, "*filter\nCOMMIT\n").unwrap();
    let jumps: Vec<_> = written.lines().filter(|line| line.starts_with("-I ")).collect();
    assert_eq!(jumps.len(), 3, "{jumps:?}");
    assert!(!jumps.iter().any(|jump| jump.contains("KUBE-PROXY-FIREWALL") || jump.contains("KUBE-FORWARD")));
}

#[rstest]
#[case::no_external_ip(&[], 0, 0)]
#[case::cluster(&[SetRole::ExternalIp], 3, 1)]
#[case::local(&[SetRole::ExternalIpLocal], 2, 1)]
#[case::both(&[SetRole::ExternalIp, SetRole::ExternalIpLocal], 5, 2)]
fn rules_of_external_ips_and_their_match_are_there_with_external_ips_only(
    #[case] filled: &[SetRole],
    #[case] rules: usize,
    #[case] matches: usize,
) {
    let chains = chains(IpFamily::Ipv4, &Host::default(), iter::empty(), |set| filled.contains(&set.role));
    let of_services = &chains[&("nat", "KUBE-SERVICES")];
    let count = |text: &str| of_services.iter().filter(|rule| rule.contains(text)).count();
    assert_eq!((count("KUBE-EXTERNAL-IP"), count("-m physdev")), (rules, matches));
    assert!(!chains.iter().any(|(chain, rules)| {
        *chain != ("nat", "KUBE-SERVICES") && rules.iter().any(|rule| rule.contains("physdev"))
    }));
}
