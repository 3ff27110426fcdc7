//! Decides which rules and chains of a table of iptables are removed. Pure: works for nf_tables and
//! for iptables-save.

use std::collections::BTreeSet;

use super::Purpose;
use crate::names::{self, Scope};

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Chain {
    pub name: String,
    /// True for a base chain, which the kernel calls itself.
    pub base: bool,
    /// True if its policy is DROP.
    pub drops: bool,
}

/// A rule of a chain that is not kube-proxy's. `R` identifies it for removal: a handle or its text.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule<R> {
    pub chain: String,
    pub name: R,
    pub comment: Option<String>,
    /// The chains that the rule jumps to.
    pub targets: Vec<String>,
    pub drops: bool,
}

/// The reason why a chain stays.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum RetainReason {
    /// A rule in this chain, which is not kube-proxy's, jumps to the retained chain. The retained
    /// chain is emptied.
    UsedBy(String),
    /// A rule that is not kube-proxy's, in a chain that is not known, jumps to the retained chain.
    /// The kernel therefore does not delete the retained chain. It is emptied.
    Used,
    /// A rule that is not kube-proxy's jumps to the retained chain to masquerade. The value is the
    /// chain of that rule, if it is known. The retained chain is not changed.
    Masquerades(Option<String>),
    /// FORWARD drops or rejects packets, and established connections may need what the chain
    /// accepts. It is not changed.
    Forwards,
}

impl std::fmt::Display for RetainReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::UsedBy(chain) => write!(f, "emptied; a rule in {chain} leads to it"),
            Self::Used => f.write_str("emptied; a rule that is not kube-proxy's leads to it"),
            Self::Masquerades(Some(chain)) => {
                write!(f, "not changed: a rule in {chain} uses it to masquerade")
            }
            Self::Masquerades(None) => {
                f.write_str("not changed: a rule that is not kube-proxy's uses it to masquerade")
            }
            Self::Forwards => f.write_str(
                "not changed: FORWARD drops or rejects packets, and established connections may need what this chain accepts",
            ),
        }
    }
}

/// The changes to one table. The fields are in the order of execution.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Plan<R> {
    /// kube-proxy's jumps to delete, with the chains that they are in.
    pub rules: Vec<(String, R)>,
    pub emptied: Vec<String>,
    /// Chains that no other rule uses. All of them are in `emptied` too.
    pub deleted: Vec<String>,
    pub retained: Vec<(String, RetainReason)>,
}

impl<R> Plan<R> {
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.emptied.is_empty()
    }

    /// Leaves out retained chains that are empty already. `is_filled` is called for retained chains
    /// only.
    pub fn without_done<E>(mut self, is_filled: impl Fn(&str) -> Result<bool, E>) -> Result<Self, E> {
        let mut emptied = Vec::with_capacity(self.emptied.len());
        let stays: BTreeSet<&str> = self.retained.iter().map(|(chain, _)| chain.as_str()).collect();
        for chain in self.emptied {
            if !stays.contains(chain.as_str()) || is_filled(&chain)? {
                emptied.push(chain);
            }
        }
        self.emptied = emptied;
        Ok(self)
    }
}

/// Returns kube-proxy's chains. The list is empty if all of them are chains that old kubelets make
/// too.
pub fn own_chains<'a>(
    table: &str,
    chains: impl IntoIterator<Item = &'a str>,
    scope: Scope<'_>,
) -> Vec<&'a str> {
    let own: Vec<&str> = chains.into_iter().filter(|chain| names::is_chain(table, chain, scope)).collect();
    if own.iter().all(|chain| names::is_shared_chain(chain)) { Vec::new() } else { own }
}

/// Returns the number of chains that only a kube-proxy makes. A growing number shows a running
/// kube-proxy.
pub fn count<'a>(table: &str, chains: impl IntoIterator<Item = &'a str>, scope: Scope<'_>) -> usize {
    let only_its = |chain: &&str| names::is_chain(table, chain, scope) && !names::is_shared_chain(chain);
    chains.into_iter().filter(only_its).count()
}

/// Makes the plan for one table. `rules` are those of all chains that are not kube-proxy's. `busy`
/// are chains that the kernel has refused to delete.
pub fn plan<R: Clone>(
    table: &str,
    chains: &[Chain],
    rules: &[Rule<R>],
    busy: &BTreeSet<String>,
    purpose: Purpose,
    scope: Scope<'_>,
) -> Plan<R> {
    let own: BTreeSet<&str> =
        own_chains(table, chains.iter().map(|chain| chain.name.as_str()), scope).into_iter().collect();
    let is_base = |name: &str| chains.iter().any(|chain| chain.base && chain.name == name);
    let is_firewall_jump = |rule: &Rule<R>| {
        let is_ours = |comment: &str| names::is_comment_of_firewall_jump(comment, scope);
        rule.comment.as_deref().is_some_and(is_ours)
            && rule.targets.iter().any(|target| target == names::PROXY_FIREWALL)
    };
    let leads_to_us = |rule: &&Rule<R>| {
        rule.targets.iter().any(|target| own.contains(target.as_str())) || is_firewall_jump(rule)
    };
    let (ours, theirs): (Vec<&Rule<R>>, Vec<&Rule<R>>) = rules.iter().filter(leads_to_us).partition(|rule| {
        is_base(&rule.chain) && rule.comment.as_deref().is_some_and(names::is_comment_of_jump)
    });
    let used_by = |chain: &str| {
        let leads_there = |rule: &&&Rule<R>| rule.targets.iter().any(|target| target == chain);
        theirs.iter().find(leads_there).map(|rule| rule.chain.clone())
    };
    // Verdict maps are not read. A chain that one of them jumps to is recognised by the kernel's
    // refusal to delete it.
    let masqueraded = [names::MARK_MASQUERADE, names::POSTROUTING].into_iter().find_map(|chain| {
        let by = used_by(chain);
        (by.is_some() || busy.contains(chain)).then_some(RetainReason::Masquerades(by))
    });
    let forward_drops = chains.iter().any(|chain| chain.name == "FORWARD" && chain.drops)
        || reachable("FORWARD", rules).iter().any(|rule| rule.drops);
    // A chain with such a reason is not even emptied.
    let whole = |chain: &str| match chain {
        names::MARK_MASQUERADE | names::POSTROUTING => masqueraded.clone(),
        names::FORWARD if forward_drops && purpose == Purpose::TakeOver => Some(RetainReason::Forwards),
        _ => None,
    };
    let mut plan = Plan { rules: Vec::new(), emptied: Vec::new(), deleted: Vec::new(), retained: Vec::new() };
    for rule in ours {
        if rule.targets.iter().all(|target| whole(target).is_none()) {
            plan.rules.push((rule.chain.clone(), rule.name.clone()));
        }
    }
    for chain in own {
        let name = chain.to_owned();
        if let Some(why) = whole(chain) {
            plan.retained.push((name, why));
            continue;
        }
        plan.emptied.push(name.clone());
        match used_by(chain) {
            Some(by) => plan.retained.push((name, RetainReason::UsedBy(by))),
            None if busy.contains(chain) => plan.retained.push((name, RetainReason::Used)),
            None => plan.deleted.push(name),
        }
    }
    plan
}

/// Returns the rules of a chain and of all chains that it jumps to, directly or indirectly.
fn reachable<'a, R>(chain: &'a str, rules: &'a [Rule<R>]) -> Vec<&'a Rule<R>> {
    let (mut seen, mut next, mut found) = (BTreeSet::from([chain]), vec![chain], Vec::new());
    while let Some(chain) = next.pop() {
        for rule in rules.iter().filter(|rule| rule.chain == chain) {
            found.push(rule);
            next.extend(rule.targets.iter().map(String::as_str).filter(|target| seen.insert(target)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::mode::Mode;

    fn chains(names: &[&str]) -> Vec<Chain> {
        let base = |name: &str| matches!(name, "PREROUTING" | "POSTROUTING" | "OUTPUT" | "FORWARD" | "INPUT");
        names.iter().map(|name| Chain { name: (*name).to_owned(), base: base(name), drops: false }).collect()
    }

    fn rule(chain: &str, name: u64, comment: &str, target: &str) -> Rule<u64> {
        let comment = Some(comment.to_owned()).filter(|comment| !comment.is_empty());
        Rule { chain: chain.to_owned(), name, comment, targets: vec![target.to_owned()], drops: false }
    }

    const PORTALS: &str = "kubernetes service portals";

    fn nat() -> (Vec<Chain>, Vec<Rule<u64>>) {
        let chains = chains(&[
            "PREROUTING",
            "POSTROUTING",
            "CNI-HOSTPORT-DNAT",
            "KUBE-SERVICES",
            "KUBE-SVC-A",
            "KUBE-SEP-B",
            "KUBE-MARK-MASQ",
            "KUBE-POSTROUTING",
            "KUBE-KUBELET-CANARY",
        ]);
        let rules = vec![
            rule("PREROUTING", 1, PORTALS, "KUBE-SERVICES"),
            rule("PREROUTING", 2, "", "CNI-HOSTPORT-DNAT"),
            rule("POSTROUTING", 3, "kubernetes postrouting rules", "KUBE-POSTROUTING"),
        ];
        (chains, rules)
    }

    fn of(table: &str, (chains, rules): &(Vec<Chain>, Vec<Rule<u64>>), purpose: Purpose) -> Plan<u64> {
        plan(table, chains, rules, &BTreeSet::new(), purpose, Scope::default())
    }

    #[test]
    fn everything_of_kube_proxy_goes_and_nothing_else() {
        let plan = of("nat", &nat(), Purpose::Cleanup);
        assert_eq!(plan.rules, [("PREROUTING".to_owned(), 1), ("POSTROUTING".to_owned(), 3)]);
        assert_eq!(
            plan.deleted,
            ["KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-SEP-B", "KUBE-SERVICES", "KUBE-SVC-A"]
        );
        assert_eq!(plan.emptied, plan.deleted);
        assert_eq!(plan.retained, []);
    }

    #[test]
    fn a_chain_that_somebody_uses_stays_empty() {
        let mut nat = nat();
        nat.1.push(rule("CNI-HOSTPORT-DNAT", 4, PORTALS, "KUBE-SVC-A"));
        // A rule without kube-proxy's comment is not kube-proxy's.
        nat.1.push(rule("PREROUTING", 5, "mine", "KUBE-SERVICES"));
        let plan = of("nat", &nat, Purpose::TakeOver);
        assert_eq!(plan.rules.len(), 2);
        assert!(plan.emptied.iter().any(|chain| chain == "KUBE-SVC-A"));
        assert_eq!(plan.deleted, ["KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-SEP-B"]);
        let kept = [("KUBE-SERVICES", "PREROUTING"), ("KUBE-SVC-A", "CNI-HOSTPORT-DNAT")];
        assert_eq!(
            plan.retained,
            kept.map(|(chain, by)| (chain.to_owned(), RetainReason::UsedBy(by.to_owned())))
        );
    }

    #[test]
    fn who_marks_packets_for_masquerading_still_gets_them_masqueraded() {
        let mut nat = nat();
        nat.1.push(rule("CNI-HOSTPORT-DNAT", 4, "", "KUBE-MARK-MASQ"));
        for purpose in [Purpose::TakeOver, Purpose::Cleanup] {
            let plan = of("nat", &nat, purpose);
            assert_eq!(plan.rules, [("PREROUTING".to_owned(), 1)]);
            assert_eq!(plan.deleted, ["KUBE-SEP-B", "KUBE-SERVICES", "KUBE-SVC-A"]);
            assert_eq!(plan.emptied, plan.deleted);
            assert_eq!(plan.retained.len(), 2);
        }
    }

    #[test]
    fn what_accepts_forwarded_packets_stays_where_others_are_dropped() {
        let mut filter = (chains(&["FORWARD", "KUBE-FORWARD", "KUBE-SERVICES"]), Vec::new());
        filter.1.push(rule("FORWARD", 1, "kubernetes forwarding rules", "KUBE-FORWARD"));
        filter.1.push(rule("FORWARD", 2, PORTALS, "KUBE-SERVICES"));
        assert_eq!(of("filter", &filter, Purpose::TakeOver).deleted, ["KUBE-FORWARD", "KUBE-SERVICES"]);
        filter.0[0].drops = true;
        let served = of("filter", &filter, Purpose::TakeOver);
        assert_eq!(served.rules, [("FORWARD".to_owned(), 2)]);
        assert_eq!(served.deleted, ["KUBE-SERVICES"]);
        assert_eq!(served.retained, [("KUBE-FORWARD".to_owned(), RetainReason::Forwards)]);
        assert_eq!(of("filter", &filter, Purpose::Cleanup).deleted, ["KUBE-FORWARD", "KUBE-SERVICES"]);
    }

    #[test]
    fn a_rule_that_rejects_is_as_a_policy_that_drops() {
        let mut filter = (chains(&["FORWARD", "INPUT", "KUBE-FORWARD", "MINE", "LAST"]), Vec::new());
        filter.1.push(rule("FORWARD", 1, "kubernetes forwarding rules", "KUBE-FORWARD"));
        filter.1.push(rule("FORWARD", 2, "", "MINE"));
        filter.1.push(rule("MINE", 3, "", "LAST"));
        filter.1.push(rule("LAST", 4, "", "MINE"));
        filter.1.push(Rule { drops: true, ..rule("INPUT", 5, "", "MINE") });
        assert_eq!(of("filter", &filter, Purpose::TakeOver).deleted, ["KUBE-FORWARD"]);
        filter.1.push(Rule { targets: Vec::new(), drops: true, ..rule("LAST", 6, "", "") });
        let served = of("filter", &filter, Purpose::TakeOver);
        assert!(served.is_empty());
        assert_eq!(served.retained, [("KUBE-FORWARD".to_owned(), RetainReason::Forwards)]);
        assert_eq!(of("filter", &filter, Purpose::Cleanup).deleted, ["KUBE-FORWARD"]);
    }

    #[test]
    fn where_two_modes_write_one_chain_the_jumps_of_the_one_that_left_go() {
        let of_modes = [
            (Mode::Iptables, "kubernetes load balancer firewall"),
            (Mode::Ipvs, "kube-proxy firewall rules"),
        ];
        let chains = chains(&["INPUT", "KUBE-PROXY-FIREWALL", "KUBE-EXTERNAL-SERVICES", "KUBE-IPVS-FILTER"]);
        let rules: Vec<_> = (1..)
            .zip(of_modes)
            .map(|(name, (_, comment))| rule("INPUT", name, comment, "KUBE-PROXY-FIREWALL"))
            .collect();
        for (name, (mode, _)) in (1..).zip(of_modes) {
            let other = [names::shares_chains_with(mode).unwrap()];
            let scope = Scope { in_use: &other, only: Some(mode) };
            let plan = plan("filter", &chains, &rules, &BTreeSet::new(), Purpose::Cleanup, scope);
            assert_eq!(plan.rules, [("INPUT".to_owned(), name)]);
            assert!(!plan.emptied.contains(&"KUBE-PROXY-FIREWALL".to_owned()) && plan.deleted.len() == 1);
        }
    }

    #[test]
    fn masquerading_stays_for_an_unknown_rule() {
        let (chains, rules) = nat();
        for used in ["KUBE-MARK-MASQ", "KUBE-POSTROUTING"] {
            let busy = BTreeSet::from([used.to_owned()]);
            let plan = plan("nat", &chains, &rules, &busy, Purpose::Cleanup, Scope::default());
            assert_eq!(plan.rules, [("PREROUTING".to_owned(), 1)]);
            assert_eq!(plan.emptied, ["KUBE-SEP-B", "KUBE-SERVICES", "KUBE-SVC-A"]);
            let kept = ["KUBE-MARK-MASQ", "KUBE-POSTROUTING"];
            assert_eq!(plan.retained, kept.map(|chain| (chain.to_owned(), RetainReason::Masquerades(None))));
        }
    }

    #[test]
    fn a_chain_that_the_kernel_would_not_delete_is_emptied() {
        let (chains, rules) = nat();
        let busy = BTreeSet::from(["KUBE-SEP-B".to_owned()]);
        let plan = plan("nat", &chains, &rules, &busy, Purpose::Cleanup, Scope::default());
        assert!(!plan.deleted.contains(&"KUBE-SEP-B".to_owned()));
        assert!(plan.emptied.contains(&"KUBE-SEP-B".to_owned()));
        assert_eq!(plan.retained, [("KUBE-SEP-B".to_owned(), RetainReason::Used)]);
    }

    #[test]
    fn what_an_old_kubelet_has_made_is_not_kube_proxys() {
        let chains = chains(&["POSTROUTING", "KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-MARK-DROP"]);
        let rules = [rule("POSTROUTING", 3, "kubernetes postrouting rules", "KUBE-POSTROUTING")];
        assert!(of("nat", &(chains, rules.to_vec()), Purpose::Cleanup).is_empty());
    }

    /// The kubelet's rule in POSTROUTING was removed before, and another chain is retained.
    #[test]
    fn an_old_kubelet_that_starts_anew_is_no_kube_proxy() {
        let before = ["KUBE-SERVICES", "KUBE-KUBELET-CANARY"];
        let after = [before[0], before[1], "KUBE-MARK-MASQ", "KUBE-POSTROUTING"];
        assert_eq!((count("nat", before, Scope::default()), count("nat", after, Scope::default())), (1, 1));
        assert_eq!(count("nat", ["KUBE-MARK-MASQ", "KUBE-POSTROUTING"], Scope::default()), 0);
        assert_eq!(own_chains("nat", after, Scope::default()), [after[0], after[2], after[3]]);
    }

    #[test]
    fn what_stays_is_emptied_once() {
        let chains = chains(&["PREROUTING", "KUBE-SVC-A"]);
        let rules = [rule("PREROUTING", 4, "mine", "KUBE-SVC-A")];
        let plan = || of("nat", &(chains.clone(), rules.to_vec()), Purpose::Cleanup);
        let with = |filled: bool| plan().without_done(|_| Ok::<_, ()>(filled)).unwrap();
        assert_eq!((with(true).is_empty(), with(true).emptied), (false, vec!["KUBE-SVC-A".to_owned()]));
        assert!(with(false).is_empty());
        assert_eq!(with(false).retained, with(true).retained);
    }
}
