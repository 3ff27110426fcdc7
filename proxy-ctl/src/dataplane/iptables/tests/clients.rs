//! What a new connection meets, by who opens it: the rendered rules are walked as the kernel does it, and the answers are
//! kube-proxy's (TestInternalExternalMasquerade).

use rstest::rstest;

use super::*;
use crate::{
    dataplane::iptables::rules::SharedChain,
    sys::xtables::saved::{after, words},
};

#[derive(Clone, Copy, Debug)]
enum Client {
    Pod,
    Node,
    Outside,
}

#[derive(Clone, Copy, Debug)]
enum Dialled {
    ClusterIp,
    NodePort,
    ExternalIp,
    LoadBalancer,
}

/// Endpoints that a connection may get, and whether its source is replaced; empty: none is chosen.
type Fate = (Vec<&'static str>, bool);

const POD_CIDR: &str = "10.0.0.0/8";

struct Walk<'a> {
    rules: &'a PortRules,
    client: Client,
    endpoints: Vec<String>,
    masqueraded: bool,
}

impl Walk<'_> {
    fn is_of(&self, rule: &[(String, bool)]) -> bool {
        let is = |text: &str| {
            rule.windows(text.split(' ').count())
                .any(|part| part.iter().map(|(word, _)| word.as_str()).eq(text.split(' ')))
        };
        let from_pod = matches!(self.client, Client::Pod);
        if is(&format!("! -s {POD_CIDR}")) || is("! -i cni0") || is("! -i veth+") {
            return !from_pod;
        }
        if is(&format!("-s {POD_CIDR}")) || is("-i cni0") || is("-i veth+") {
            return from_pod;
        }
        if is("--src-type LOCAL") {
            return matches!(self.client, Client::Node);
        }
        // Hairpin, and what is remembered of earlier connections.
        !is("-s") && !is("--rcheck")
    }

    /// False: the walk goes on in the calling chain.
    fn chain(&mut self, name: &str) -> bool {
        let rules = self.rules;
        let chain =
            rules.chains.iter().find(|chain| chain.name == name).unwrap_or_else(|| panic!("no {name}"));
        let mut done = false;
        for rule in &chain.rules {
            let words = words(rule);
            if done || !self.is_of(&words) {
                continue;
            }
            match after(&words, &["-j"]).as_deref() {
                Some("KUBE-MARK-MASQ") => self.masqueraded = true,
                Some("DNAT") => {
                    self.endpoints.extend(after(&words, &["--to-destination"]));
                    done = true;
                }
                Some(target) => {
                    let ended = self.chain(target);
                    // One of several endpoints: the others may be chosen too.
                    done = ended && !rule.contains("--probability");
                }
                None => {}
            }
        }
        done
    }
}

/// `remote_only`: the only endpoint is on another node.
fn fate(port: &DesiredPort, host: &Host, client: Client, dialled: Dialled) -> (Vec<String>, bool, String) {
    let rules = port_rules(port, &settings(IpFamily::Ipv4, host));
    let destination = match dialled {
        Dialled::ClusterIp => "172.30.0.41/32",
        Dialled::NodePort => "3001",
        Dialled::ExternalIp => "192.168.99.22/32",
        Dialled::LoadBalancer => "1.2.3.4/32",
    };
    let entry = |chains: &[SharedChain]| {
        let of = |(chain, rule): &&(SharedChain, String)| {
            chains.contains(chain) && words(rule).iter().any(|(word, _)| word == destination)
        };
        let rule = rules.shared.iter().find(of)?;
        after(&words(&rule.1), &["-j"])
    };
    let mut walk = Walk { rules: &rules, client, endpoints: Vec::new(), masqueraded: false };
    if let Some(chain) = entry(&[SharedChain::Services, SharedChain::NodePorts]) {
        walk.chain(&chain);
    }
    let filter = match walk.endpoints.is_empty() {
        true => entry(&[SharedChain::Refused, SharedChain::RefusedExternal]).unwrap_or_default(),
        false => String::new(),
    };
    (walk.endpoints, walk.masqueraded, filter)
}

fn web(internal: TrafficPolicy, external: TrafficPolicy, addresses: &[&str]) -> Arc<DesiredPort> {
    let service = named("ns1/svc1", "172.30.0.41")
        .policies(internal, external)
        .node_port(3001)
        .external_ip("192.168.99.22")
        .load_balancer_ip("1.2.3.4");
    desired(vec![service], vec![endpoints("ns1/svc1", addresses)]).remove(0)
}

const CLUSTER: TrafficPolicy = TrafficPolicy::Cluster;
const LOCAL: TrafficPolicy = TrafficPolicy::Local;

fn all(masqueraded: bool) -> Fate {
    (vec!["10.180.0.1:80", "10.180.1.1:80"], masqueraded)
}

fn here(masqueraded: bool) -> Fate {
    (vec!["10.180.0.1:80"], masqueraded)
}

fn local_traffic() -> [LocalTraffic; 3] {
    [
        LocalTraffic::FromCidrs(vec![POD_CIDR.parse().unwrap()]),
        LocalTraffic::FromBridge("cni0".into()),
        LocalTraffic::FromInterfacePrefix("veth".into()),
    ]
}

#[rstest]
#[case::pod_to_cluster_ip(Client::Pod, true, [all(false), all(false), here(false)])]
#[case::pod_to_external(Client::Pod, false, [all(true), all(false), all(true)])]
#[case::node_to_cluster_ip(Client::Node, true, [all(true), all(true), here(true)])]
#[case::node_to_external(Client::Node, false, [all(true), all(true), all(true)])]
#[case::outside_to_cluster_ip(Client::Outside, true, [all(true), all(true), here(true)])]
#[case::outside_to_external(Client::Outside, false, [all(true), here(false), all(true)])]
fn who_gets_which_endpoints(
    #[case] client: Client,
    #[case] to_cluster_ip: bool,
    #[case] expected: [Fate; 3],
    #[values(0, 1, 2)] detector: usize,
) {
    let host = Host { local_traffic: local_traffic()[detector].clone(), ..host() };
    let policies = [(CLUSTER, CLUSTER), (CLUSTER, LOCAL), (LOCAL, CLUSTER)];
    let dialled: &[Dialled] = if to_cluster_ip {
        &[Dialled::ClusterIp]
    } else {
        &[Dialled::NodePort, Dialled::ExternalIp, Dialled::LoadBalancer]
    };
    for ((internal, external), (addresses, masqueraded)) in policies.into_iter().zip(expected) {
        let port = web(internal, external, &["here:10.180.0.1", "10.180.1.1"]);
        for dialled in dialled {
            let (got, replaced, _) = fate(&port, &host, client, *dialled);
            assert_eq!(
                (got, replaced),
                (addresses.iter().map(ToString::to_string).collect(), masqueraded),
                "{dialled:?}"
            );
        }
    }
}

#[rstest]
#[case::nobody_is_masqueraded_to_a_cluster_ip(Client::Outside, Dialled::ClusterIp, CLUSTER, all(false))]
#[case::pods_are_as_everybody(Client::Pod, Dialled::NodePort, LOCAL, here(false))]
fn where_pods_cannot_be_told(
    #[case] client: Client,
    #[case] dialled: Dialled,
    #[case] external: TrafficPolicy,
    #[case] (addresses, masqueraded): Fate,
) {
    let host = Host { local_traffic: LocalTraffic::default(), ..host() };
    let port = web(CLUSTER, external, &["here:10.180.0.1", "10.180.1.1"]);
    let (got, replaced, _) = fate(&port, &host, client, dialled);
    assert_eq!((got, replaced), (addresses.iter().map(ToString::to_string).collect(), masqueraded));
}

#[test]
fn masquerade_all_is_for_pods_too() {
    let host = Host { masquerade_all: true, ..host() };
    let port = web(CLUSTER, CLUSTER, &["here:10.180.0.1"]);
    assert!(fate(&port, &host, Client::Pod, Dialled::ClusterIp).1);
}

#[rstest]
#[case::none_at_all(CLUSTER, CLUSTER, &[], Client::Outside, Dialled::NodePort, "REJECT", 0)]
#[case::none_for_the_cluster_ip(CLUSTER, CLUSTER, &[], Client::Pod, Dialled::ClusterIp, "REJECT", 0)]
#[case::not_here(LOCAL, CLUSTER, &["10.180.1.1"], Client::Pod, Dialled::ClusterIp, "DROP", 0)]
#[case::not_here_from_outside(CLUSTER, LOCAL, &["10.180.1.1"], Client::Outside, Dialled::LoadBalancer, "DROP", 0)]
#[case::pods_reach_those_elsewhere(CLUSTER, LOCAL, &["10.180.1.1"], Client::Pod, Dialled::LoadBalancer, "", 1)]
#[case::so_does_the_node(CLUSTER, LOCAL, &["10.180.1.1"], Client::Node, Dialled::NodePort, "", 1)]
fn without_endpoints(
    #[case] internal: TrafficPolicy,
    #[case] external: TrafficPolicy,
    #[case] addresses: &[&str],
    #[case] client: Client,
    #[case] dialled: Dialled,
    #[case] verdict: &str,
    #[case] count: usize,
) {
    let (got, _, filter) = fate(&web(internal, external, addresses), &host(), client, dialled);
    assert_eq!((got.len(), filter.as_str()), (count, verdict));
}
