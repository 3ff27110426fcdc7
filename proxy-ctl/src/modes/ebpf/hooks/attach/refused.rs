//! Remembers which interfaces take no programs, and why.

use std::collections::{BTreeMap, BTreeSet};

use super::Hooks;
use crate::{
    model::node::{Interface, Role},
    modes::ebpf::Error,
};

/// Reason why a workload interface has no programs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Refusal {
    pub(super) reason: String,
    /// True if the interface has an ingress qdisc other than `clsact`, to which our programs cannot
    /// be attached. This says nothing about our programs.
    pub(super) is_qdisc_taken: bool,
}

/// Returns the reason if the kernel refuses programs at every workload interface, and at two at
/// least, because one alone may have a problem of its own. An interface with another program's
/// ingress qdisc says nothing about our programs. One that waits has refused nothing yet.
fn refused_everywhere<'a>(interfaces: impl Iterator<Item = Option<&'a Refusal>>) -> Option<&'a str> {
    const LEAST: usize = 2;
    let all: Vec<&Refusal> = interfaces.collect::<Option<_>>()?;
    let refused: Vec<_> = all.into_iter().filter(|refusal| !refusal.is_qdisc_taken).collect();
    refused.first().filter(|_| refused.len() >= LEAST).map(|refusal| refusal.reason.as_str())
}

impl Hooks {
    pub(super) fn note_refusal(&mut self, interface: &Interface, error: &Error) {
        let refusal = Refusal {
            reason: error.to_string(),
            is_qdisc_taken: matches!(error, Error::IngressQdiscTaken(_)),
        };
        if self.unattached.get(&interface.index) != Some(&refusal) {
            tracing::warn!(
                interface = interface.name,
                reason = refusal.reason,
                "no packet program can be attached to the interface: socket hooks and the secondary mode serve \
                 its workload, if there are any; it is tried again every 10 s"
            );
            self.unattached.insert(interface.index, refusal);
        }
    }

    /// Returns why workload interfaces have no programs, by interface index.
    pub(crate) fn unattached(&self) -> BTreeMap<u32, String> {
        self.unattached.iter().map(|(index, refusal)| (*index, refusal.reason.clone())).collect()
    }

    /// Returns the reason why no workload interface takes programs.
    pub(crate) fn attached_nowhere(&self) -> Option<String> {
        // An interface that waits has refused nothing, and has not taken anything either.
        let waiting: BTreeSet<u32> = self.settling.waiting().collect();
        let workloads = self.interfaces.values().filter(|interface| interface.role == Role::Workload);
        let workloads = workloads.filter(|interface| !waiting.contains(&interface.index));
        refused_everywhere(workloads.map(|interface| self.unattached.get(&interface.index)))
            .map(str::to_owned)
    }

    /// Returns how many workload interfaces have no programs because they refuse them.
    pub(crate) fn unattached_count(&self) -> usize {
        self.unattached.len()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Each word of `interfaces` is an interface. `-` has programs, and other words are refusals.
    /// `taken` is a refusal because of another ingress qdisc.
    #[rstest]
    #[case::no_interface("", None)]
    #[case::all_attached("- -", None)]
    #[case::one_of_several("full - -", None)]
    #[case::the_only_one("full", None)]
    #[case::all("full denied full", Some("full"))]
    #[case::qdiscs_taken("taken taken taken", None)]
    #[case::all_but_one_whose_qdisc_is_taken("taken full denied", Some("full"))]
    #[case::one_and_one_whose_qdisc_is_taken("taken full", None)]
    fn programs_are_refused_everywhere(#[case] interfaces: &str, #[case] expected: Option<&str>) {
        let refusal = |word: &str| {
            (word != "-").then(|| Refusal { reason: word.to_owned(), is_qdisc_taken: word == "taken" })
        };
        let refusals: Vec<_> = interfaces.split_whitespace().map(refusal).collect();
        assert_eq!(refused_everywhere(refusals.iter().map(Option::as_ref)), expected);
    }
}
