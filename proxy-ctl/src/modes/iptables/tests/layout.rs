//! Tests of what is written, as text. Chains, their rules, and the order of both are kube-proxy's
//! (TestOverallIPTablesRules).

use rstest::rstest;

use super::*;
use crate::{model::node::PortRange, modes::iptables::names::Table};

/// Returns the script's rules of this chain, without the chain's name.
fn rules_of(script: &str, table: Table, chain: &str) -> Vec<String> {
    let (mut present, mut rules) = ("", Vec::new());
    for line in script.lines() {
        if let Some(name) = line.strip_prefix('*') {
            present = name;
        }
        let own = [format!("-A {chain} "), format!("-I {chain} ")];
        if present == table.name()
            && let Some(rule) = own.iter().find_map(|prefix| line.strip_prefix(prefix.as_str()))
        {
            rules.push(rule.to_owned());
        }
    }
    rules
}

fn script(family: IpFamily) -> String {
    let (services, slices) = several();
    first_script(&desired(services, slices), family, &host())
}

#[rstest]
#[case::cluster_ip("KUBE-SVC-XPGD46QRK7WJZT7O", &[
    "! -s 10.0.0.0/8 -d 172.30.0.41/32 -p tcp -m comment --comment \"ns1/svc1:p80 cluster IP\" -m tcp --dport 80 -j KUBE-MARK-MASQ",
    "-m comment --comment \"ns1/svc1:p80 -> 10.180.0.1:80\" -j KUBE-SEP-SXIVWICOYRO3J4NJ",
])]
#[case::endpoint("KUBE-SEP-SXIVWICOYRO3J4NJ", &[
    "-s 10.180.0.1/32 -m comment --comment \"ns1/svc1:p80\" -j KUBE-MARK-MASQ",
    "-p tcp -m comment --comment \"ns1/svc1:p80\" -m tcp -j DNAT --to-destination 10.180.0.1:80",
])]
#[case::external_policy_local("KUBE-EXT-GNZBNJ2PO5MGZ6GT", &[
    "-s 10.0.0.0/8 -m comment --comment \"pod traffic for ns2/svc2:p80 external destinations\" -j KUBE-SVC-GNZBNJ2PO5MGZ6GT",
    "-m comment --comment \"masquerade LOCAL traffic for ns2/svc2:p80 external destinations\" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ",
    "-m comment --comment \"route LOCAL traffic for ns2/svc2:p80 external destinations\" -m addrtype --src-type LOCAL -j KUBE-SVC-GNZBNJ2PO5MGZ6GT",
    "-j KUBE-SVL-GNZBNJ2PO5MGZ6GT",
])]
#[case::endpoints_here("KUBE-SVL-GNZBNJ2PO5MGZ6GT", &[
    "-m comment --comment \"ns2/svc2:p80 -> 10.180.0.2:80\" -j KUBE-SEP-RS4RBKLTHTF2IUXJ",
])]
#[case::source_ranges_with_the_node("KUBE-FW-GNZBNJ2PO5MGZ6GT", &[
    "-s 203.0.113.0/25 -m comment --comment \"ns2/svc2:p80 loadbalancer IP\" -j KUBE-EXT-GNZBNJ2PO5MGZ6GT",
    "-s 192.168.0.0/24 -m comment --comment \"ns2/svc2:p80 loadbalancer IP\" -j KUBE-EXT-GNZBNJ2PO5MGZ6GT",
    "-s 1.2.3.4/32 -m comment --comment \"ns2/svc2:p80 loadbalancer IP\" -j KUBE-EXT-GNZBNJ2PO5MGZ6GT",
    "-m comment --comment \"other traffic to ns2/svc2:p80 will be dropped by KUBE-PROXY-FIREWALL\"",
])]
#[case::affinity("KUBE-SVC-SGI4TAWZPNC67VHM", &[
    "! -s 10.0.0.0/8 -d 172.30.0.43/32 -p udp -m comment --comment \"ns3/svc3:p80 cluster IP\" -m udp --dport 80 -j KUBE-MARK-MASQ",
    "-m comment --comment \"ns3/svc3:p80 -> 10.180.0.3:80\" -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-FS7CKM2S7YUA7EWZ --mask 255.255.255.255 --rsource -j KUBE-SEP-FS7CKM2S7YUA7EWZ",
    "-m comment --comment \"ns3/svc3:p80 -> 10.180.0.4:80\" -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-PKQCN3JJ4AILE3C3 --mask 255.255.255.255 --rsource -j KUBE-SEP-PKQCN3JJ4AILE3C3",
    "-m comment --comment \"ns3/svc3:p80 -> 10.180.0.3:80\" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-FS7CKM2S7YUA7EWZ",
    "-m comment --comment \"ns3/svc3:p80 -> 10.180.0.4:80\" -j KUBE-SEP-PKQCN3JJ4AILE3C3",
])]
#[case::affinity_is_set("KUBE-SEP-FS7CKM2S7YUA7EWZ", &[
    "-s 10.180.0.3/32 -m comment --comment \"ns3/svc3:p80\" -j KUBE-MARK-MASQ",
    "-p udp -m comment --comment \"ns3/svc3:p80\" -m recent --set --name KUBE-SEP-FS7CKM2S7YUA7EWZ --mask 255.255.255.255 --rsource -m udp -j DNAT --to-destination 10.180.0.3:80",
])]
#[case::masquerades("KUBE-POSTROUTING", &[
    "-m mark ! --mark 0x4000/0x4000 -j RETURN",
    "-j MARK --set-xmark 0x4000/0x0",
    "-m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully",
])]
#[case::node_ports("KUBE-NODEPORTS", &[
    "-m comment --comment \"proxy-ctl has chains of mode iptables\"",
    "-p tcp -m comment --comment \"ns2/svc2:p80\" -m tcp --dport 3001 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT",
    "-p udp -m comment --comment \"ns3/svc3:p80\" -m udp --dport 3003 -j KUBE-EXT-SGI4TAWZPNC67VHM",
])]
fn of_nat(#[case] chain: &str, #[case] expected: &[&str]) {
    assert_eq!(rules_of(&script(IpFamily::Ipv4), Table::Nat, chain), expected);
}

#[rstest]
#[case::cluster_ips("KUBE-SERVICES", &[
    "-d 172.30.0.44/32 -p tcp -m comment --comment \"ns4/svc4:p80 has no endpoints\" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable",
    "-d 172.30.0.45/32 -p tcp -m comment --comment \"ns5/svc5:p80 has no local endpoints\" -m tcp --dport 80 -j DROP",
])]
#[case::external("KUBE-EXTERNAL-SERVICES", &[
    "-p tcp -m addrtype --dst-type LOCAL -m comment --comment \"ns4/svc4:p80 has no endpoints\" -m tcp --dport 3004 -j REJECT --reject-with icmp-port-unreachable",
    "-d 192.168.99.33/32 -p tcp -m comment --comment \"ns4/svc4:p80 has no endpoints\" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable",
])]
#[case::health_check("KUBE-NODEPORTS", &[
    "-p tcp -m comment --comment \"ns2/svc2:p80 health check node port\" -m tcp --dport 30000 -j ACCEPT",
])]
#[case::source_ranges("KUBE-PROXY-FIREWALL", &[
    "-d 1.2.3.4/32 -p tcp -m comment --comment \"ns2/svc2:p80 traffic not accepted by KUBE-FW-GNZBNJ2PO5MGZ6GT\" -m tcp --dport 80 -j DROP",
])]
#[case::forwarding("KUBE-FORWARD", &[
    "-m conntrack --ctstate INVALID -j DROP",
    "-m comment --comment \"kubernetes forwarding rules\" -m mark --mark 0x4000/0x4000 -j ACCEPT",
    "-m comment --comment \"kubernetes forwarding conntrack rule\" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
])]
#[case::martians("KUBE-FIREWALL", &[
    "! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet connections\" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
])]
// Each jump is inserted before the one above it.
#[case::jumps("FORWARD", &[
    "-m conntrack --ctstate NEW -m comment --comment \"kubernetes externally-visible service portals\" -j KUBE-EXTERNAL-SERVICES",
    "-m conntrack --ctstate NEW -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
    "-m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD",
    "-m conntrack --ctstate NEW -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL",
])]
fn of_filter(#[case] chain: &str, #[case] expected: &[&str]) {
    assert_eq!(rules_of(&script(IpFamily::Ipv4), Table::Filter, chain), expected);
}

#[test]
fn ipv6_differs_in_addresses_only() {
    let script = script(IpFamily::Ipv6);
    assert_eq!(
        rules_of(&script, Table::Nat, "KUBE-SEP-V4XIPKDNAVXDL74U")[1],
        "-p tcp -m comment --comment \"ns6/svc6:p80\" -m tcp -j DNAT --to-destination [fd00:10::6]:80"
    );
    assert!(!script.contains("KUBE-FIREWALL") && !script.contains("172.30."), "{script}");
}

/// Each probability is that of a packet that comes as far as the rule, in the kernel's units of
/// 2⁻³¹.
#[test]
fn chances_are_as_the_tools_print_them() {
    let addresses: Vec<String> = (1..=3).map(|number| format!("10.180.0.{number}")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let ports = desired(vec![named("ns1/svc1", "172.30.0.41")], vec![endpoints("ns1/svc1", &addresses)]);
    let script = first_script(&ports, IpFamily::Ipv4, &host());
    let chances: Vec<&str> =
        script.lines().filter_map(|line| line.split_once("--probability ")?.1.split(' ').next()).collect();
    assert_eq!(chances, ["0.33333333349", "0.50000000000"]);
}

const LAST: &str =
    "-m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\"";

#[rstest]
#[case::everywhere(true, &["127.0.0.1", "192.168.0.2"], IpFamily::Ipv4, &["{LAST} -m addrtype --dst-type LOCAL"])]
#[case::not_on_localhost(true, &["192.168.0.2"], IpFamily::Ipv4, &["! -d 127.0.0.0/8 {LAST} -m addrtype --dst-type LOCAL"])]
#[case::everywhere_of_ipv6(true, &["::1"], IpFamily::Ipv6, &["! -d ::1/128 {LAST} -m addrtype --dst-type LOCAL"])]
#[case::some_addresses(false, &["192.168.0.2", "192.168.1.2", "2001:db8::1"], IpFamily::Ipv4, &["-d 192.168.0.2/32 {LAST}", "-d 192.168.1.2/32 {LAST}"])]
#[case::some_of_ipv6(false, &["192.168.0.2", "::1", "2001:db8::1"], IpFamily::Ipv6, &["-d 2001:db8::1/128 {LAST}"])]
#[case::localhost_among_them(false, &["127.0.0.1"], IpFamily::Ipv4, &["-d 127.0.0.1/32 {LAST}"])]
#[case::none(false, &[], IpFamily::Ipv4, &[])]
fn where_node_ports_are_served(
    #[case] node_ports_everywhere: bool,
    #[case] addresses: &[&str],
    #[case] family: IpFamily,
    #[case] expected: &[&str],
) {
    let node_port_addresses = addresses.iter().map(|address| ip(address)).collect();
    let host = Host { node_ports_everywhere, node_port_addresses, ..host() };
    let expected: Vec<_> =
        expected.iter().map(|rule| format!("{} -j KUBE-NODEPORTS", rule.replace("{LAST}", LAST))).collect();
    assert_eq!(BaseRules::new(family, &host, ABLE).node_ports, expected);
}

#[rstest]
#[case::bit(Host { masquerade_bit: 5, ..host() }, ABLE, "-j MARK --set-xmark 0x20/0x20", true)]
#[case::ports(
    Host { masquerade_ports: Some(PortRange { first: 32_768, last: 60_999 }), ..host() },
    ABLE,
    "-p sctp -m comment --comment \"kubernetes service traffic requiring SNAT\" \
     -j MASQUERADE --to-ports 32768-60999 --random-fully",
    true
)]
#[case::without_random_fully(host(), Abilities { random_fully: false, ..ABLE }, "--random-fully", false)]
#[case::conntrack_is_liberal(host(), Abilities { drop_invalid: false, ..ABLE }, "INVALID", false)]
#[case::not_counted(host(), ABLE, "--ctstate INVALID -j DROP", true)]
#[case::counted(
    host(),
    Abilities { counts_packets: true, ..ABLE },
    "--ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP",
    true
)]
fn base_rules_follow_the_node(
    #[case] host: Host,
    #[case] abilities: Abilities,
    #[case] text: &str,
    #[case] expected: bool,
) {
    let rules = BaseRules::new(IpFamily::Ipv4, &host, abilities);
    let has = rules.chains.iter().flat_map(|chain| &chain.rules).any(|rule| rule.contains(text));
    assert_eq!(has, expected);
}

#[rstest]
#[case::counted(true, "127.0.0.1", IpFamily::Ipv4, true)]
#[case::not_counted(false, "127.0.0.1", IpFamily::Ipv4, false)]
#[case::not_on_localhost(true, "192.168.0.2", IpFamily::Ipv4, false)]
#[case::no_localhost_of_ipv6(true, "::1", IpFamily::Ipv6, false)]
fn packets_to_node_ports_on_localhost(
    #[case] counts_packets: bool,
    #[case] address: &str,
    #[case] family: IpFamily,
    #[case] is_counted: bool,
) {
    let host = Host { node_port_addresses: [ip(address)].into(), ..host() };
    let settings = PortSettings::new(family, &host, Abilities { counts_packets, ..ABLE }, true);
    let (services, slices) = several();
    let ports = desired(services, slices);
    let of_family = ports.iter().filter(|port| port.name.family == family);
    let rules: Vec<String> =
        of_family.flat_map(|port| port_rules(port, &settings).shared).map(|(_, rule)| rule).collect();
    let counting: Vec<_> = rules.iter().filter(|rule| rule.contains("nfacct")).collect();
    assert_ne!(counting.is_empty(), is_counted, "{counting:?}");
    for rule in counting {
        let uncounted = rule.replace("-d 127.0.0.0/8 ", "");
        let uncounted = uncounted.replace("-m nfacct --nfacct-name localhost_nps_accepted_pkts ", "");
        let at = |rule: &String| rules.iter().position(|other| other == rule);
        assert!(at(&uncounted).unwrap() < at(rule).unwrap(), "what is inserted later is asked first");
    }
}

/// CVE-2020-8558: with route_localnet, neighbours reach what listens on 127.0.0.1.
#[rstest]
#[case::node_ports_on_localhost("127.0.0.1", false, IpFamily::Ipv4, true)]
#[case::no_longer_on_localhost("192.168.0.2", true, IpFamily::Ipv4, true)]
#[case::never_on_localhost("192.168.0.2", false, IpFamily::Ipv4, false)]
#[case::no_such_parameter_of_ipv6("2001:db8::1", true, IpFamily::Ipv6, false)]
fn neighbours_are_kept_from_localhost(
    #[case] address: &str,
    #[case] routes_localnet: bool,
    #[case] family: IpFamily,
    #[case] expected: bool,
) {
    let host = Host { node_port_addresses: [ip(address)].into(), ..host() };
    let base = BaseRules::new(family, &host, Abilities { routes_localnet, ..ABLE });
    let leads_there = base.jumps.iter().any(|jump| jump.rule == "-j KUBE-FIREWALL");
    assert_eq!((base.martians.is_some(), leads_there), (expected, expected));
}

/// kube-proxy puts each of its jumps before all others, and those to KUBE-FIREWALL last.
#[rstest]
#[case("INPUT", &["KUBE-FIREWALL", "KUBE-PROXY-FIREWALL", "KUBE-NODEPORTS", "KUBE-EXTERNAL-SERVICES"])]
#[case("OUTPUT", &["KUBE-FIREWALL", "KUBE-PROXY-FIREWALL", "KUBE-SERVICES"])]
fn jumps_lie_in_the_order_of_kube_proxy(#[case] chain: &str, #[case] targets: &[&str]) {
    let base = BaseRules::new(IpFamily::Ipv4, &host(), ABLE);
    let of_chain = base.jumps.iter().filter(|jump| jump.table == Table::Filter && jump.chain == chain);
    let found: Vec<_> = of_chain.filter_map(|jump| jump.rule.rsplit(' ').next()).collect();
    assert_eq!(found, targets);
}
