//! Tests as root, in network namespaces. What is written is read back unchanged, and the cleanup
//! removes what is ours.

use nix::sched::{CloneFlags, unshare};
use rstest::rstest;

use super::*;
use crate::{
    model::node::{LocalTraffic, PortRange},
    modes::{Removed, ipvs::sets::Set, netfilter::chains::FamilyChains},
    sys::{
        net::{
            ipvs::{Ipvs, VirtualSocket},
            namespace_lock::{NamespaceAttempt, NamespaceLock},
        },
        xtables,
    },
};

fn host(local_traffic: LocalTraffic) -> Host {
    Host { local_traffic, masquerade_bit: 14, ..Host::default() }
}

fn cidrs() -> LocalTraffic {
    LocalTraffic::FromCidrs(["10.244.0.0/16", "fd00:244::/64"].map(|cidr| cidr.parse().unwrap()).into())
}

/// Makes the sets in a network namespace that ends with the test's thread. `None`: the kernel has
/// no ip_set.
fn with_sets(family: IpFamily) -> Option<FamilyChains> {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let Some(sets) = crate::sys::net::ipset::IpSets::load().unwrap() else {
        println!("skipped: the kernel's ip_set (CONFIG_IP_SET) is not loaded");
        return None;
    };
    for set in Set::all(family) {
        sets.create(&set.name(), set.role.kind(), family == IpFamily::Ipv4).unwrap();
    }
    FamilyChains::open(xtables::choose().unwrap().backend).into_iter().find(|rules| rules.family == family)
}

#[rstest]
#[ignore = "needs root"]
fn as_root_what_is_written_is_read_back_as_it_is(
    #[values(IpFamily::Ipv4, IpFamily::Ipv6)] family: IpFamily,
    #[values(
        cidrs(),
        LocalTraffic::FromCidrs(Vec::new()),
        LocalTraffic::FromBridge("cni0".into()),
        LocalTraffic::FromInterfacePrefix("veth".into())
    )]
    local_traffic: LocalTraffic,
    #[values(None, Some(PortRange { first: 32_768, last: 60_999 }))] masquerade_ports: Option<PortRange>,
) {
    let Some(mut rules) = with_sets(family) else { return };
    let chains = |bit| {
        let host = Host { masquerade_bit: bit, masquerade_ports, ..host(local_traffic.clone()) };
        chains(family, &host, std::iter::empty(), |_| true)
    };
    assert_eq!(rules.write(&chains(14), &JUMPS).unwrap(), 2);
    assert_eq!(rules.write(&chains(14), &JUMPS).unwrap(), 0);
    // Rules of other programs stay.
    rules.tools.restore("*nat\n-I OUTPUT -j ACCEPT\n-F KUBE-SERVICES\nCOMMIT\n").unwrap();
    assert_eq!(rules.write(&chains(14), &JUMPS).unwrap(), 1);
    assert!(rules.saved("nat").unwrap().contains("-A OUTPUT -j ACCEPT\n"));
    assert_eq!(rules.write(&chains(15), &JUMPS).unwrap(), 2);
    assert_eq!(rules.write(&chains(15), &JUMPS).unwrap(), 0);
}

#[rstest]
#[case::ipv4(IpFamily::Ipv4, "203.0.113.80:80")]
#[case::ipv6(IpFamily::Ipv6, "[2001:db8::80]:80")]
#[ignore = "needs root"]
fn as_root_rules_of_ipvs_are_read_back_as_they_are(#[case] family: IpFamily, #[case] closed: &str) {
    let Some(mut rules) = with_sets(family) else { return };
    if Ipvs::open().unwrap().is_none() {
        println!("skipped: the kernel's ip_vs (CONFIG_IP_VS) is not loaded");
        return;
    }
    let closed = [6, 17, 132].map(|protocol| VirtualSocket { protocol, address: closed.parse().unwrap() });
    let chains = chains(family, &host(cidrs()), closed.into_iter(), |_| true);
    assert_eq!(rules.write(&chains, &JUMPS).unwrap(), 2);
    assert_eq!(rules.write(&chains, &JUMPS).unwrap(), 0);
}

fn both(rules: &FamilyChains) -> [String; 2] {
    ["nat", "filter"].map(|table| rules.saved(table).unwrap())
}

#[rstest]
#[ignore = "needs root"]
fn as_root_cleanup_goes_by_the_owner_tag(#[values(IpFamily::Ipv4, IpFamily::Ipv6)] family: IpFamily) {
    let Some(mut rules) = with_sets(family) else { return };
    let chains = chains(family, &host(cidrs()), std::iter::empty(), |_| true);
    rules.tools.restore("*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n*filter\n-A OUTPUT -j ACCEPT\nCOMMIT\n").unwrap();
    let without_counters = |saved: [String; 2]| {
        saved.map(|text| {
            text.lines()
                .filter(|line| line.starts_with("-A") || line.contains("KUBE-"))
                .collect::<Vec<_>>()
                .join("\n")
        })
    };
    let before = without_counters(both(&rules));
    assert_eq!(rules.write(&chains, &JUMPS).unwrap(), 2);
    let NamespaceAttempt::Held(lock) = NamespaceLock::acquire("ipvs").unwrap() else { panic!("free") };
    assert!(own_rules::remove_own(Mode::Ipvs, &[]).unwrap_err().is_taken_over());
    drop(lock);
    // A sync of kube-proxy begins with emptying these chains.
    rules.tools.restore("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-LOAD-BALANCER - [0:0]\nCOMMIT\n").unwrap();
    let of_kube_proxy = without_counters(both(&rules));
    assert_eq!(own_rules::remove_own(Mode::Ipvs, &[]).unwrap(), Removed::default());
    assert_eq!(without_counters(both(&rules)), of_kube_proxy);
    assert_eq!(rules.write(&chains, &JUMPS).unwrap(), 1);
    assert!(!own_rules::remove_own(Mode::Ipvs, &[]).unwrap().is_empty());
    assert_eq!(without_counters(both(&rules)), before);
    assert_eq!(set_names(), [""; 0]);
}

fn set_names() -> Vec<String> {
    crate::sys::net::ipset::IpSets::load().unwrap().unwrap().names().unwrap()
}

/// kube-proxy leaves the chains that it does not write itself.
#[rstest]
#[ignore = "needs root"]
fn as_root_cleanup_leaves_what_a_running_kube_proxy_of_mode_iptables_writes(
    #[values(IpFamily::Ipv4, IpFamily::Ipv6)] family: IpFamily,
) {
    let Some(mut rules) = with_sets(family) else { return };
    let chains = chains(family, &host(cidrs()), std::iter::empty(), |_| true);
    assert_eq!(rules.write(&chains, &JUMPS).unwrap(), 2);
    let synced = "*filter\n:KUBE-FORWARD - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-EXTERNAL-SERVICES - [0:0]\n\
                  -I OUTPUT -m comment --comment \"kubernetes load balancer firewall\" -j KUBE-PROXY-FIREWALL\nCOMMIT\n\
                  *nat\n:KUBE-SERVICES - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
                  :KUBE-NODEPORTS - [0:0]\n-A KUBE-SERVICES -j KUBE-NODEPORTS\nCOMMIT\n";
    rules.tools.restore(synced).unwrap();
    assert!(!own_rules::remove_own(Mode::Ipvs, &[]).unwrap().is_empty());
    let saved = both(&rules).concat();
    let mut left: Vec<&str> =
        saved.lines().filter_map(|line| line.strip_prefix(':')?.split(' ').next()).collect();
    left.retain(|chain| chain.starts_with("KUBE-"));
    left.sort_unstable();
    let of_mode_iptables = [
        "EXTERNAL-SERVICES",
        "FORWARD",
        "MARK-MASQ",
        "NODEPORTS",
        "POSTROUTING",
        "PROXY-FIREWALL",
        "SERVICES",
    ];
    assert_eq!(left, of_mode_iptables.map(|name| format!("KUBE-{name}")));
    let to_firewall: Vec<&str> =
        saved.lines().filter(|line| line.ends_with("-j KUBE-PROXY-FIREWALL")).collect();
    assert!(to_firewall.len() == 1 && to_firewall[0].starts_with("-A OUTPUT"), "{to_firewall:?}");
    assert_eq!(set_names(), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn as_root_a_refusal_names_the_program_and_its_words() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    // The sets do not exist.
    let chains = chains(IpFamily::Ipv4, &host(cidrs()), std::iter::empty(), |_| true);
    let rules = &mut FamilyChains::open(xtables::choose().unwrap().backend)[0];
    let error = rules.write(&chains, &JUMPS).unwrap_err().to_string();
    assert!(error.contains("-restore: ") && error.contains("KUBE-"), "{error}");
    assert_eq!(rules.failures, 1);
}
