//! Tests of what a change writes.

use super::*;
use crate::modes::iptables::{
    names::{SharedChain, Table},
    plan::SharedDigests,
};

fn change(before: &DesiredPort, after: Option<&DesiredPort>) -> String {
    let settings = settings(IpFamily::Ipv4, &host());
    let after = after.map(|port| port_rules(port, &settings)).unwrap_or_default();
    let mut script = Script::default();
    let difference = PortDifference::between(&port_rules(before, &settings), after);
    plan::ports(&[difference], usize::MAX, &mut script);
    script.text
}

fn web(addresses: &[&str]) -> Arc<DesiredPort> {
    desired(vec![named("ns1/svc1", "172.30.0.41")], vec![endpoints("ns1/svc1", addresses)]).remove(0)
}

#[test]
fn an_endpoint_more_is_its_chain_and_the_one_that_balances() {
    assert_eq!(
        change(&web(&["10.180.0.1"]), Some(&web(&["10.180.0.1", "10.180.0.2"]))),
        "*nat\n\
         :KUBE-SEP-LXVODXWDISEETFEF - [0:0]\n\
         :KUBE-SVC-XPGD46QRK7WJZT7O - [0:0]\n\
         -A KUBE-SEP-LXVODXWDISEETFEF -s 10.180.0.2/32 -m comment --comment \"ns1/svc1:p80\" -j KUBE-MARK-MASQ\n\
         -A KUBE-SEP-LXVODXWDISEETFEF -p tcp -m comment --comment \"ns1/svc1:p80\" -m tcp -j DNAT --to-destination 10.180.0.2:80\n\
         -A KUBE-SVC-XPGD46QRK7WJZT7O ! -s 10.0.0.0/8 -d 172.30.0.41/32 -p tcp -m comment --comment \"ns1/svc1:p80 cluster IP\" -m tcp --dport 80 -j KUBE-MARK-MASQ\n\
         -A KUBE-SVC-XPGD46QRK7WJZT7O -m comment --comment \"ns1/svc1:p80 -> 10.180.0.1:80\" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-SXIVWICOYRO3J4NJ\n\
         -A KUBE-SVC-XPGD46QRK7WJZT7O -m comment --comment \"ns1/svc1:p80 -> 10.180.0.2:80\" -j KUBE-SEP-LXVODXWDISEETFEF\n\
         COMMIT\n"
    );
}

#[test]
fn nothing_new_is_nothing_to_write() {
    assert_eq!(change(&web(&["10.180.0.1"]), Some(&web(&["10.180.0.1"]))), "");
}

/// Clients meet the refusal or an endpoint. No packet goes on untranslated.
#[test]
fn refusal_begins_before_translation_ends_and_ends_after_it_has_begun() {
    let [with, without] = [web(&["10.180.0.1"]), web(&[])];
    let order = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| line.starts_with('*') || line.contains("KUBE-SERVICES"))
            .map(|line| line[..8].to_owned())
            .collect()
    };
    let short = |lines: [&str; 4]| lines.map(|line| line.chars().take(8).collect::<String>());
    let went = change(&with, Some(&without)).replace("*nat\n", "*nat....\n");
    let came = change(&without, Some(&with)).replace("*nat\n", "*nat....\n");
    let [add, remove] = ["-I KUBE-SERVICES", "-D KUBE-SERVICES"];
    assert_eq!(order(&went.replace("*filter", "*filter.")), short(["*filter.", add, "*nat....", remove]));
    assert_eq!(order(&came.replace("*filter", "*filter.")), short(["*nat....", add, "*filter.", remove]));
}

#[test]
fn a_service_port_goes_with_its_chains() {
    let text = change(&web(&["10.180.0.1"]), None);
    let deleted: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("-X ")).collect();
    assert_eq!(deleted, ["KUBE-SVC-XPGD46QRK7WJZT7O", "KUBE-SEP-SXIVWICOYRO3J4NJ"]);
    let at = |what: &str| text.find(what).unwrap();
    assert!(at("-D KUBE-SERVICES") < at("-X"), "{text}");
}

#[test]
fn parts_are_short_where_that_is_asked_for_and_lines_have_owners() {
    let settings = settings(IpFamily::Ipv4, &host());
    let ports = desired(
        vec![
            named("ns1/svc1", "172.30.0.41"),
            named("ns2/svc2", "172.30.0.42"),
            named("ns3/svc3", "172.30.0.43"),
        ],
        vec![endpoints("ns1/svc1", &["10.180.0.1"]), endpoints("ns2/svc2", &["10.180.0.2"])],
    );
    let of =
        |port: &Arc<DesiredPort>| PortDifference::between(&PortRules::default(), port_rules(port, &settings));
    let differences: Vec<_> = ports.iter().map(of).collect();
    let mut script = Script::default();
    plan::ports(&differences, 1, &mut script);
    let tables: Vec<&str> = script.text.lines().filter(|line| line.starts_with('*')).collect();
    assert_eq!(tables, ["*filter", "*nat", "*nat"]);
    for (index, line) in script.text.lines().enumerate() {
        let expected = [("svc1", 0), ("svc2", 1), ("svc3", 2)];
        let expected = expected.into_iter().find(|(name, _)| line.contains(name)).map(|(_, owner)| owner);
        if expected.is_some() || line == "COMMIT" {
            assert_eq!(script.owner(index + 1), expected, "{line}");
        }
    }
}

#[test]
fn what_was_read_counts_not_what_was_believed() {
    let settings = settings(IpFamily::Ipv4, &host());
    let rules = |addresses: &[&str]| port_rules(&web(addresses), &settings);
    let (before, after) = (rules(&["10.180.0.1"]), rules(&["10.180.0.2"]));
    // Another program has removed everything but the chain of the endpoint that is removed.
    let mut state = State::default();
    state.take(Table::Nat, ":KUBE-SEP-SXIVWICOYRO3J4NJ - [0:0]");
    let difference = PortDifference::from_state(&state, &SharedDigests::new(&state), &before, after.clone());
    assert_eq!(difference.deleted, ["KUBE-SEP-SXIVWICOYRO3J4NJ"]);
    assert_eq!((difference.written, difference.added), (after.chains, after.shared.clone()));
    assert_eq!(difference.removed, []);
    assert!(after.shared.iter().all(|(chain, _)| *chain == SharedChain::Services));
}
