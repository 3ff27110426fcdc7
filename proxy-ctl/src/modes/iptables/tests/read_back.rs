//! Tests of reading the tables: what is compared, and what is shown.

use super::*;
use crate::{
    model::objects::TrafficPolicy,
    modes::{
        Snapshot,
        iptables::{
            names::Table,
            plan::{Stale, Wanted},
            snapshot::Reader,
        },
    },
};

/// Returns the lines that iptables-save would print after the script.
fn saved(script: &str) -> Vec<(Table, String)> {
    let mut table = Table::Mangle;
    let mut lines = Vec::new();
    for line in script.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = Table::ALL.into_iter().find(|table| table.name() == name).unwrap();
        } else if let Some(rule) = line.strip_prefix("-I ") {
            lines.insert(0, (table, format!("-A {rule}")));
        } else if line != "COMMIT" {
            lines.push((table, line.to_owned()));
        }
    }
    lines.sort_by_key(|(table, line)| (*table as usize, !line.starts_with(':')));
    lines
}

fn state(lines: &[(Table, String)]) -> State {
    let mut state = State::default();
    for (table, chain) in [
        (Table::Nat, ":PREROUTING"),
        (Table::Nat, ":OUTPUT"),
        (Table::Nat, ":POSTROUTING"),
        (Table::Filter, ":INPUT"),
        (Table::Filter, ":FORWARD"),
        (Table::Filter, ":OUTPUT"),
    ] {
        state.take(table, &format!("{chain} ACCEPT [0:0]"));
    }
    lines.iter().for_each(|(table, line)| state.take(*table, line));
    state
}

fn wanted(ports: &[Arc<DesiredPort>]) -> Wanted {
    let mut wanted = Wanted::default();
    ports.iter().for_each(|port| wanted.add(&port_rules(port, &settings(IpFamily::Ipv4, &host()))));
    wanted
}

fn of_ipv4() -> Vec<Arc<DesiredPort>> {
    let (services, slices) = several();
    let mut ports = desired(services, slices);
    ports.retain(|port| port.name.family == IpFamily::Ipv4);
    ports
}

#[test]
fn what_is_as_it_was_written_is_neither_written_nor_stale() {
    let ports = of_ipv4();
    let lines = saved(&first_script(&ports, IpFamily::Ipv4, &host()));
    let (state, base) = (state(&lines), BaseRules::new(IpFamily::Ipv4, &host(), ABLE));
    let mut script = Script::default();
    plan::base(&state, &base, &mut script);
    assert_eq!(script.text, "");
    let stale = Stale::new(&state, &base, &wanted(&ports));
    assert_eq!((stale.chains, stale.rules), (vec![], vec![]));
}

#[test]
fn what_is_there_twice_or_not_desired_is_stale() {
    let ports = of_ipv4();
    let mut lines = saved(&first_script(&ports, IpFamily::Ipv4, &host()));
    let rule = |lines: &[(Table, String)]| {
        lines.iter().find(|(_, line)| line.starts_with("-A KUBE-SERVICES -d 172.30.0.41")).unwrap().clone()
    };
    let twice = rule(&lines);
    lines.push(twice.clone());
    lines.push((Table::Nat, ":KUBE-XLB-AAAAAAAAAAAAAAAA - [0:0]".into()));
    lines.push((Table::Nat, ":KUBE-MARK-DROP - [0:0]".into()));
    let stale = Stale::new(&state(&lines), &BaseRules::new(IpFamily::Ipv4, &host(), ABLE), &wanted(&ports));
    assert_eq!(stale.chains, [(Table::Nat, "KUBE-XLB-AAAAAAAAAAAAAAAA".to_owned())]);
    assert_eq!(stale.rules.len(), 1);
    assert_eq!(format!("-A KUBE-SERVICES {}", stale.rules[0].1), twice.1);
}

/// The jumps of mode ipvs also send packets of established connections to a chain that this mode
/// fills.
#[test]
fn other_jumps_to_the_firewall_are_removed() {
    let mut lines = saved(&first_script(&of_ipv4(), IpFamily::Ipv4, &host()));
    let other = "-m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL";
    lines.extend(["INPUT", "FORWARD"].map(|chain| (Table::Filter, format!("-A {chain} {other}"))));
    let mut script = Script::default();
    plan::base(&state(&lines), &BaseRules::new(IpFamily::Ipv4, &host(), ABLE), &mut script);
    let own: Vec<&str> = script.text.lines().filter(|line| line.contains("KUBE-PROXY-FIREWALL")).collect();
    assert_eq!(own, [format!("-D INPUT {other}"), format!("-D FORWARD {other}")]);
}

/// An older version put the jump to KUBE-FIREWALL behind the others.
#[test]
fn jumps_are_moved_where_their_order_is_another() {
    let lines = saved(&first_script(&of_ipv4(), IpFamily::Ipv4, &host()));
    let is_jump = |(_, line): &&(Table, String)| line == "-A INPUT -j KUBE-FIREWALL";
    let jump = lines.iter().find(is_jump).unwrap().clone();
    let written = |lines: &[(Table, String)]| {
        let mut script = Script::default();
        plan::base(&state(lines), &BaseRules::new(IpFamily::Ipv4, &host(), ABLE), &mut script);
        script.text
    };
    let others: Vec<_> = lines.iter().filter(|line| !is_jump(line)).cloned().collect();
    assert_eq!(written(&others), "*filter\n-I INPUT -j KUBE-FIREWALL\nCOMMIT\n", "missing");
    let behind = written(&[others, vec![jump]].concat());
    let lines: Vec<&str> = behind.lines().collect();
    assert!(lines.iter().all(|line| !line.contains("OUTPUT") && !line.contains("FORWARD")), "{lines:?}");
    assert_eq!(lines.iter().filter(|line| line.starts_with("-D INPUT ")).count(), 4, "{lines:?}");
    assert_eq!(
        lines[lines.len() - 3..],
        ["-D INPUT -j KUBE-FIREWALL", "-I INPUT -j KUBE-FIREWALL", "COMMIT"],
        "the last one that is inserted is the first"
    );
}

/// The jumps to the chain of node ports come last, and each is there once.
#[test]
fn node_ports_are_moved_to_the_end() {
    let ports = of_ipv4();
    let mut lines = saved(&first_script(&ports, IpFamily::Ipv4, &host()));
    lines.push((Table::Nat, "-A KUBE-SERVICES -d 203.0.113.9/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA".into()));
    let mut script = Script::default();
    plan::base(&state(&lines), &BaseRules::new(IpFamily::Ipv4, &host(), ABLE), &mut script);
    let own: Vec<&str> = script.text.lines().filter(|line| line.contains("KUBE-NODEPORTS")).collect();
    assert!(
        own.len() == 2 && own[0].starts_with("-A KUBE-SERVICES ") && own[1].starts_with("-D KUBE-SERVICES "),
        "{own:?}"
    );
}

#[test]
fn a_snapshot_is_what_was_desired() {
    let ports = of_ipv4();
    let mut reader = Reader::new(IpFamily::Ipv4);
    for (table, line) in saved(&first_script(&ports, IpFamily::Ipv4, &host())) {
        reader.take(table, &line);
    }
    let mut snapshot = Snapshot::default();
    reader.finish(&mut snapshot);
    assert_eq!(snapshot.services.len(), ports.len());
    for (service, port) in snapshot.services.iter().zip(&ports) {
        assert_eq!(service.name, port.name);
        let mut desired: Vec<_> = port
            .frontends
            .iter()
            .map(|one| (Some(one.address).filter(|address| !address.is_unspecified()), one.port))
            .collect();
        let mut shown: Vec<_> = service.frontends.iter().map(|one| (one.address, one.port)).collect();
        desired.sort_unstable();
        shown.sort_unstable();
        assert_eq!(shown, desired, "{}", port.name);
        let addresses = |set: &[u32]| -> Vec<_> {
            set.iter().map(|index| port.endpoints.all[*index as usize].address).collect()
        };
        let of = |set: &[crate::modes::EndpointSnapshot]| -> Vec<_> {
            set.iter().map(|endpoint| endpoint.address.ip()).collect()
        };
        assert_eq!(of(&service.internal), addresses(&port.endpoints.internal), "{}", port.name);
        assert_eq!(service.affinity_seconds, port.affinity_seconds.unwrap_or(0));
        assert_eq!(service.any_endpoints, port.endpoints.any, "{}", port.name);
        assert_eq!(service.internal_policy, port.internal_policy, "{}", port.name);
        if port.external_policy == TrafficPolicy::Local {
            assert_eq!(of(&service.external), addresses(&port.endpoints.external));
            assert_eq!(of(&service.cluster), addresses(&port.endpoints.cluster));
            assert_eq!(service.external_policy, TrafficPolicy::Local);
        }
    }
}
