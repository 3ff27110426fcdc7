//! Compares every choice among up to four endpoints with a second, literal reading of kube-proxy's
//! rules. The two implementations share no code.

use std::sync::Arc;

use crate::model::{
    desired::Endpoints,
    objects::{Endpoint, Hints, TrafficPolicy},
    topology::{Candidate, NodeTopology, Policies, choose},
};

const HERE: &str = "here";
const ZONE: &str = "zone-a";

/// The state of an endpoint, as its slice has it.
#[derive(Clone, Copy, Debug)]
struct Kind {
    ready: bool,
    serving: bool,
    terminating: bool,
    local: bool,
    hint: Hint,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Hint {
    None,
    ThisZone,
    OtherZone,
    ThisNode,
    OtherNode,
    OtherNodeAndThisZone,
}

const HINTS: [Hint; 6] = [
    Hint::None,
    Hint::ThisZone,
    Hint::OtherZone,
    Hint::ThisNode,
    Hint::OtherNode,
    Hint::OtherNodeAndThisZone,
];

/// The combinations of ready, serving and terminating that Kubernetes writes.
const CONDITIONS: [[bool; 3]; 4] =
    [[true, true, false], [false, false, false], [false, true, true], [false, false, true]];

fn kinds(conditions: &[[bool; 3]], hints: &[Hint]) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for &[ready, serving, terminating] in conditions {
        for local in [false, true] {
            kinds.extend(hints.iter().map(|&hint| Kind { ready, serving, terminating, local, hint }));
        }
    }
    kinds
}

/// The settings of the Service and the node.
#[derive(Clone, Copy, Debug)]
struct Asked {
    internal_local: bool,
    external_local: bool,
    externally_accessible: bool,
    zone_is_known: bool,
}

fn all_asked() -> impl Iterator<Item = Asked> {
    (0..16).map(|bits| Asked {
        internal_local: bits & 1 != 0,
        external_local: bits & 2 != 0,
        externally_accessible: bits & 4 != 0,
        zone_is_known: bits & 8 != 0,
    })
}

/// The endpoints that clients get, by their index in the list. `None` means that this service port
/// has no such clients.
#[derive(Debug, Eq, PartialEq)]
struct Choice {
    internal: Vec<usize>,
    external: Option<Vec<usize>>,
    /// The endpoints of clients of the cluster that dial an external address.
    short_circuit: Option<Vec<usize>>,
    has_any: bool,
}

/// Chooses endpoints by kube-proxy's rules as they are documented, step by step.
fn by_the_book(kinds: &[Kind], asked: Asked) -> Choice {
    let Asked { internal_local, external_local, externally_accessible, zone_is_known } = asked;
    let which = |rule: &dyn Fn(&Kind) -> bool| -> Vec<usize> {
        (0..kinds.len()).filter(|index| rule(&kinds[*index])).collect()
    };
    let has_zone_hint =
        |kind: &Kind| matches!(kind.hint, Hint::ThisZone | Hint::OtherZone | Hint::OtherNodeAndThisZone);
    let has_node_hint =
        |kind: &Kind| matches!(kind.hint, Hint::ThisNode | Hint::OtherNode | Hint::OtherNodeAndThisZone);
    let hints_zone =
        |kind: &Kind| zone_is_known && matches!(kind.hint, Hint::ThisZone | Hint::OtherNodeAndThisZone);
    let hints_node = |kind: &Kind| kind.hint == Hint::ThisNode;

    let ready = which(&|kind| kind.ready);
    let every = |rule: &dyn Fn(&Kind) -> bool| ready.iter().all(|index| rule(&kinds[*index]));
    let some = |rule: &dyn Fn(&Kind) -> bool| ready.iter().any(|index| rule(&kinds[*index]));

    let mut cluster = if every(&has_node_hint) && some(&hints_node) {
        which(&|kind| kind.ready && hints_node(kind))
    } else if every(&has_zone_hint) && some(&hints_zone) {
        which(&|kind| kind.ready && hints_zone(kind))
    } else {
        ready.clone()
    };
    if cluster.is_empty() {
        cluster = which(&|kind| kind.serving && kind.terminating);
    }
    let mut local = which(&|kind| kind.ready && kind.local);
    if local.is_empty() {
        local = which(&|kind| kind.serving && kind.terminating && kind.local);
    }

    let uses_cluster = !internal_local || externally_accessible;
    let uses_local = internal_local || (external_local && externally_accessible);
    let usable_anywhere = !ready.is_empty() || kinds.iter().any(|kind| kind.serving && kind.terminating);
    Choice {
        internal: if internal_local { local.clone() } else { cluster.clone() },
        external: externally_accessible.then(|| if external_local { local } else { cluster.clone() }),
        short_circuit: externally_accessible.then(|| cluster.clone()),
        has_any: (uses_cluster && !cluster.is_empty()) || (uses_local && usable_anywhere),
    }
}

fn hints(hint: Hint) -> Option<Arc<Hints>> {
    let (zones, nodes): (&[&str], &[&str]) = match hint {
        Hint::None => return None,
        Hint::ThisZone => (&[ZONE], &[]),
        Hint::OtherZone => (&["zone-b"], &[]),
        Hint::ThisNode => (&[], &[HERE]),
        Hint::OtherNode => (&[], &["elsewhere"]),
        Hint::OtherNodeAndThisZone => (&[ZONE], &["elsewhere"]),
    };
    let shared = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
    Some(Arc::new(Hints { zones: shared(zones), nodes: shared(nodes) }))
}

fn policy(is_local: bool) -> TrafficPolicy {
    if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster }
}

/// Endpoints of each kind for each index of the list, made once.
struct Made {
    kinds: Vec<Kind>,
    endpoints: Vec<Vec<Endpoint>>,
}

impl Made {
    fn new(kinds: Vec<Kind>, count: u8) -> Self {
        let endpoint = |number: u8, kind: &Kind| Endpoint {
            weight: 1,
            address: [10, 0, 0, number].into(),
            ready: kind.ready,
            serving: kind.serving,
            terminating: kind.terminating,
            node: Some(if kind.local { HERE } else { "elsewhere" }.into()),
            hints: hints(kind.hint),
        };
        let endpoints =
            (0..count).map(|number| kinds.iter().map(|kind| endpoint(number, kind)).collect()).collect();
        Self { kinds, endpoints }
    }

    fn compare(&self, chosen: &[usize]) {
        let kinds: Vec<Kind> = chosen.iter().map(|index| self.kinds[*index]).collect();
        let candidates: Vec<Candidate<'_>> = chosen
            .iter()
            .zip(&self.endpoints)
            .map(|(index, of_number)| Candidate {
                endpoint: &of_number[*index],
                port: 80,
                local: self.kinds[*index].local,
            })
            .collect();
        for asked in all_asked() {
            let policies = Policies {
                internal: policy(asked.internal_local),
                external: policy(asked.external_local),
                externally_accessible: asked.externally_accessible,
            };
            let zone = asked.zone_is_known.then_some(ZONE);
            let found = choose(&candidates, policies, NodeTopology { node: HERE, zone });
            let expected = by_the_book(&kinds, asked);
            let numbers = |set: &[u32]| numbers(&found, set);
            let is_external = asked.externally_accessible;
            let found = Choice {
                internal: numbers(&found.internal),
                external: is_external.then(|| numbers(&found.external)),
                short_circuit: is_external.then(|| numbers(&found.cluster)),
                has_any: found.any,
            };
            assert_eq!(found, expected, "{kinds:?} {asked:?}");
        }
    }

    /// Compares every list of `count` endpoints, whatever their order.
    fn compare_all(&self, count: usize, chosen: &mut Vec<usize>) -> usize {
        if chosen.len() == count {
            self.compare(chosen);
            return 1;
        }
        let first = chosen.last().copied().unwrap_or(0);
        let mut compared = 0;
        for index in first..self.kinds.len() {
            chosen.push(index);
            compared += self.compare_all(count, chosen);
            chosen.pop();
        }
        compared
    }
}

fn numbers(endpoints: &Endpoints, set: &[u32]) -> Vec<usize> {
    let number = |index: &u32| {
        let std::net::IpAddr::V4(address) = endpoints.all[*index as usize].address else { unreachable!() };
        usize::from(address.octets()[3])
    };
    let mut numbers: Vec<usize> = set.iter().map(number).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn two_endpoints_of_any_kind() {
    let every: Vec<[bool; 3]> = (0..8).map(|bits| [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0]).collect();
    let made = Made::new(kinds(&every, &HINTS), 2);
    let compared: usize = (0..=2).map(|count| made.compare_all(count, &mut Vec::new())).sum();
    assert_eq!(compared, 1 + 96 + 96 * 97 / 2);
}

#[test]
fn four_endpoints_in_every_condition_that_kubernetes_writes() {
    let made =
        Made::new(kinds(&CONDITIONS, &[Hint::None, Hint::ThisZone, Hint::OtherZone, Hint::ThisNode]), 4);
    let compared: usize = (3..=4).map(|count| made.compare_all(count, &mut Vec::new())).sum();
    assert_eq!(compared, 32 * 33 * 34 / 6 + 32 * 33 * 34 * 35 / 24);
}
