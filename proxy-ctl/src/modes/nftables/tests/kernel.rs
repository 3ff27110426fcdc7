//! Tests of the tables in the kernel, each in a network namespace of its own.

use std::{process::Command, sync::Arc};

use nix::sched::{CloneFlags, unshare};

use super::{
    super::{
        NftablesDataplane,
        names::{PortChain, PortNames},
    },
    host, ports,
};
use crate::{
    model::{
        desired::{Changes, DesiredPort},
        node::Host,
        objects::{Service, TrafficPolicy},
        test_support::{local, remote, service},
    },
    modes::{Applied, Dataplane, Programmed},
};

const NOTHING: Applied = Applied { written: 0, removed: 0 };

/// Moves the thread into a network namespace of its own, which ends with the test's thread.
fn in_own_namespace() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
}

fn opened() -> NftablesDataplane {
    let mut dataplane = NftablesDataplane::open().unwrap();
    dataplane.set_host(&host()).unwrap();
    dataplane
}

fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().unwrap();
    assert!(output.status.success(), "nft {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a Service with every kind of frontend, in both families.
fn web() -> Service {
    let service = service("default/web", &["172.30.0.41", "fd00:96::41"])
        .node_port(30080)
        .load_balancer_ip("1.2.3.4")
        .load_balancer_ip("2001:db8:5::4")
        .external_ip("192.168.99.11")
        .policies(TrafficPolicy::Cluster, TrafficPolicy::Local);
    Service {
        affinity_seconds: Some(10),
        source_ranges: vec!["203.0.113.0/25".parse().unwrap(), "2001:db8:9::/48".parse().unwrap()],
        ..service
    }
}

fn desired() -> Vec<Arc<DesiredPort>> {
    let endpoints = ["10.180.0.1", "fd00:10::1"].map(local).into_iter();
    let endpoints = endpoints.chain(["10.180.1.1", "10.180.1.2", "fd00:10:1::1"].map(remote)).collect();
    let plain = ports(service("default/plain", &["172.30.0.42"]), vec![remote("10.180.1.3")]);
    let empty = ports(service("default/empty", &["172.30.0.43"]), vec![]);
    [ports(web(), endpoints), plain, empty].concat()
}

fn listed() -> String {
    nft(&["list", "ruleset"])
}

#[test]
#[ignore = "needs root"]
fn as_root_a_restart_writes_nothing_and_reads_what_is_served() {
    in_own_namespace();
    let desired = desired();
    let mut first = opened();
    assert!(first.resync(&desired).unwrap().written > 0);
    let (before, snapshot) = (listed(), first.snapshot().unwrap());
    assert_eq!(first.resync(&desired).unwrap(), NOTHING);
    drop(first);
    let mut second = opened();
    assert_eq!(second.resync(&desired).unwrap(), NOTHING);
    assert_eq!(listed(), before);
    assert_eq!(second.snapshot().unwrap(), snapshot);
    let names: Vec<_> = snapshot.services.iter().map(|service| service.name.clone()).collect();
    let mut expected: Vec<_> = desired.iter().map(|port| port.name.clone()).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    let web = snapshot.services.iter().find(|service| &*service.name.service.name == "web").unwrap();
    assert_eq!((web.cluster.len(), web.external.len(), web.affinity_seconds), (3, 1, 10));
    assert_eq!(web.external_policy, TrafficPolicy::Local);
    assert_eq!(web.frontends.len(), 4);
}

#[test]
#[ignore = "needs root"]
fn as_root_nft_reads_back_what_it_lists() {
    in_own_namespace();
    let mut desired = desired();
    // nft 1.0.6 does not read the rules for affinity in the form in which it lists them.
    desired.iter_mut().for_each(|port| Arc::make_mut(port).affinity_seconds = None);
    opened().resync(&desired).unwrap();
    let before = listed();
    assert!(before.contains("numgen random mod 3 map @endpoints-0"), "{before}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("flush ruleset\n{before}")).unwrap();
    nft(&["-f", file.path().to_str().unwrap()]);
    assert_eq!(listed(), before);
}

#[test]
#[ignore = "needs root"]
fn as_root_changes_write_what_they_change_and_what_is_unused_goes() {
    in_own_namespace();
    let all = desired();
    let mut dataplane = opened();
    dataplane.resync(&all).unwrap();
    let before = listed();
    let plain = |endpoints: &[&str]| {
        ports(service("default/plain", &["172.30.0.42"]), endpoints.iter().map(|ip| remote(ip)).collect())
    };
    let change = |dataplane: &mut NftablesDataplane, changed| {
        dataplane.apply(&Changes { changed, removed: vec![] }).unwrap()
    };
    // An endpoint that replaces another is one changed element.
    let moved = change(&mut dataplane, plain(&["10.180.1.4"]));
    assert_eq!(moved, Applied { written: 1, removed: 1 });
    // One more endpoint is a new element and a new rule.
    assert_eq!(
        change(&mut dataplane, plain(&["10.180.1.3", "10.180.1.4"])),
        Applied { written: 3, removed: 1 }
    );
    change(&mut dataplane, plain(&[]));
    dataplane.apply(&Changes { changed: vec![], removed: vec![all[0].name.clone()] }).unwrap();
    change(&mut dataplane, vec![Arc::clone(&all[0])]);
    change(&mut dataplane, plain(&["10.180.1.3"]));
    for _ in 0..3 {
        dataplane.collect_garbage().unwrap();
    }
    assert_eq!(dataplane.resync(&all).unwrap(), NOTHING);
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(&listed()).len(), sorted(&before).len());
    dataplane.resync(&[]).unwrap();
    for _ in 0..3 {
        dataplane.collect_garbage().unwrap();
    }
    assert!(!listed().contains("default/"), "{}", listed());
}

#[test]
#[ignore = "needs root"]
fn as_root_what_other_programs_change_is_repaired() {
    in_own_namespace();
    let desired = desired();
    let mut dataplane = opened();
    dataplane.resync(&desired).unwrap();
    let before = listed();
    for damage in [
        "flush chain ip kube-proxy services",
        "add rule ip kube-proxy services drop",
        "delete element ip kube-proxy service-ips { 172.30.0.42 . tcp . 80 }",
        "add element ip kube-proxy cluster-ips { 172.30.0.99 }",
        "flush set ip6 kube-proxy cluster-ips",
        "add chain ip kube-proxy stray",
        "delete table ip kube-proxy",
        "flush ruleset",
    ] {
        nft(&[damage]);
        assert_ne!(listed(), before, "{damage}");
        assert_ne!(dataplane.resync(&desired).unwrap(), NOTHING, "{damage}");
        for _ in 0..3 {
            dataplane.collect_garbage().unwrap();
        }
        assert_eq!(dataplane.resync(&desired).unwrap(), NOTHING, "{damage}");
        let mut lines: Vec<_> = listed().lines().map(str::to_owned).collect();
        let mut expected: Vec<_> = before.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        expected.sort_unstable();
        assert_eq!(lines.len(), expected.len(), "{damage}");
    }
}

#[test]
#[ignore = "needs root"]
fn as_root_a_table_of_kube_proxy_is_replaced_and_other_tables_stay() {
    in_own_namespace();
    nft(&["add table ip kube-proxy { comment \"rules for kube-proxy\"; chain services { }; }"]);
    nft(&["add table ip other { chain input { type filter hook input priority 0; counter accept; }; }"]);
    let other = nft(&["list", "table", "ip", "other"]);
    let mut dataplane = opened();
    dataplane.resync(&desired()).unwrap();
    assert_eq!(nft(&["list", "table", "ip", "other"]), other);
    assert!(nft(&["list", "table", "ip", "kube-proxy"]).contains("rules of proxy-ctl"));
    drop(dataplane);
    assert_eq!(
        super::super::cleanup().unwrap().objects,
        ["nftables ip kube-proxy", "nftables ip6 kube-proxy"]
    );
    assert_eq!(listed(), other);
}

#[test]
#[ignore = "needs root"]
fn as_root_a_service_port_that_the_kernel_refuses_does_not_hurt_others() {
    in_own_namespace();
    let all = desired();
    let mut dataplane = opened();
    dataplane.resync(&all).unwrap();
    // Another program has taken the frontend that the new port needs.
    nft(&["add element ip kube-proxy service-ips { 172.30.0.44 . tcp . 80 : drop }"]);
    let new = |name: &str, address: &str| ports(service(name, &[address]), vec![remote("10.180.1.9")]);
    let changed = [new("default/refused", "172.30.0.44"), new("default/fine", "172.30.0.45")].concat();
    let error = dataplane.apply(&Changes { changed: changed.clone(), removed: vec![] }).unwrap_err();
    assert!(error.to_string().contains("default/refused"), "{error}");
    assert!(!error.to_string().contains("default/fine"), "{error}");
    assert!(listed().contains("default/fine"));
    let all = [all, changed].concat();
    dataplane.resync(&all).unwrap();
    assert_eq!(dataplane.resync(&all).unwrap(), NOTHING);
    assert!(listed().contains("default/refused"));
}

#[test]
#[ignore = "needs root"]
fn as_root_a_service_port_that_a_comparison_cannot_write_keeps_what_it_has() {
    in_own_namespace();
    let refused = |change: fn(Service) -> Service| {
        ports(change(service("default/refused", &["172.30.0.44"])), vec![local("10.180.0.9")])
    };
    let mut dataplane = opened();
    let before = [desired(), refused(|service| service)].concat();
    dataplane.resync(&before).unwrap();
    // An element of a map cannot jump to a base chain.
    let chain = PortNames::new(&before.last().unwrap().name).chain(PortChain::External);
    nft(&[&format!("add chain ip kube-proxy {chain} {{ type filter hook input priority 0; }}")]);
    let (all, list) = (listed(), |set| nft(&["list", "set", "ip", "kube-proxy", set]));
    let after = [desired(), refused(|service| service.node_port(30090))].concat();
    let error = dataplane.resync(&after).unwrap_err();
    assert!(error.to_string().contains("default/refused"), "{error}");
    assert!(list("cluster-ips").contains("172.30.0.44"), "{}", list("cluster-ips"));
    assert!(list("hairpin-connections").contains("10.180.0.9"), "{}", list("hairpin-connections"));
    assert_eq!(listed(), all);
    nft(&[&format!("delete chain ip kube-proxy {chain}")]);
    dataplane.resync(&after).unwrap();
    assert_eq!(dataplane.resync(&after).unwrap(), NOTHING);
}

#[test]
#[ignore = "needs root"]
fn as_root_clients_of_an_endpoint_that_goes_are_forgotten() {
    in_own_namespace();
    let web = |endpoints: &[&str]| {
        let service = Service { affinity_seconds: Some(600), ..service("default/web", &["172.30.0.41"]) };
        ports(service, endpoints.iter().map(|ip| remote(ip)).collect())
    };
    let mut dataplane = opened();
    let both = web(&["10.180.1.1", "10.180.1.2"]);
    dataplane.resync(&both).unwrap();
    let set = PortNames::new(&both[0].name).affinity();
    let remembered =
        ["10.0.0.1 . 10.180.1.1 . 8080", "10.0.0.2 . 10.180.1.2 . 8080", "10.0.0.3 . 10.180.1.1 . 8080"];
    nft(&[&format!("add element ip kube-proxy {set} {{ {} }}", remembered.join(", "))]);
    let list = || nft(&["list", "set", "ip", "kube-proxy", &set]);
    dataplane.apply(&Changes { changed: both.clone(), removed: vec![] }).unwrap();
    assert_eq!(list().matches(" . 8080").count(), 3, "{}", list());
    dataplane.apply(&Changes { changed: web(&["10.180.1.2"]), removed: vec![] }).unwrap();
    assert!(list().contains("10.0.0.2") && list().matches(" . 8080").count() == 1, "{}", list());
    // The set is to be deleted later, and is needed again before that.
    dataplane.apply(&Changes { changed: vec![], removed: vec![both[0].name.clone()] }).unwrap();
    dataplane.apply(&Changes { changed: web(&["10.180.1.1"]), removed: vec![] }).unwrap();
    assert_eq!(list().matches(" . 8080").count(), 0, "{}", list());
}

#[test]
#[ignore = "needs root"]
fn as_root_a_change_of_the_node_is_written_without_a_comparison() {
    in_own_namespace();
    let desired = desired();
    let mut dataplane = opened();
    dataplane.resync(&desired).unwrap();
    let everywhere = Host { node_ports_everywhere: true, masquerade_all: true, ..host() };
    dataplane.set_host(&everywhere).unwrap();
    assert!(listed().contains("fib daddr type local ip daddr != 127.0.0.0/8"), "{}", listed());
    assert_eq!(dataplane.resync(&desired).unwrap(), NOTHING);
    assert_eq!(dataplane.set_host(&everywhere).unwrap(), NOTHING);
}

#[test]
#[ignore = "needs root"]
fn as_root_a_change_of_the_node_that_failed_is_written_by_the_next_attempt() {
    in_own_namespace();
    let desired = desired();
    let mut dataplane = opened();
    dataplane.resync(&desired).unwrap();
    let everywhere = Host { node_ports_everywhere: true, masquerade_all: true, ..host() };
    nft(&["flush ruleset"]);
    dataplane.set_host(&everywhere).unwrap_err();
    assert_ne!(dataplane.set_host(&everywhere).unwrap(), NOTHING);
    assert!(listed().contains("fib daddr type local ip daddr != 127.0.0.0/8"), "{}", listed());
    assert_eq!(dataplane.set_host(&everywhere).unwrap(), NOTHING);
    assert_eq!(dataplane.resync(&desired).unwrap(), NOTHING);
}

#[test]
#[ignore = "needs root"]
fn as_root_there_is_one_writer() {
    in_own_namespace();
    let _first = opened();
    let Err(error) = NftablesDataplane::open() else { panic!("it is taken") };
    let expected = format!("process {},", std::process::id());
    assert!(error.to_string().contains(&expected), "{error}");
}
