//! Reduction of a failing case to a smaller one.

use anyhow::Result;
use proptest::strategy::ValueTree;

/// Smallest case that was found to fail, and the number of cases that were tried.
pub struct Smallest<T> {
    pub case: T,
    pub tried: usize,
}

/// Looks for smaller cases that fail as the current one of `tree` does. Tries at most `limit`.
pub fn smallest<T: PartialEq>(
    tree: &mut impl ValueTree<Value = T>,
    limit: usize,
    mut fails: impl FnMut(&T) -> Result<bool>,
) -> Result<Smallest<T>> {
    let mut smallest = Smallest { case: tree.current(), tried: 0 };
    let mut is_other = tree.simplify();
    while is_other && smallest.tried < limit {
        let case = tree.current();
        // The tree's change has no effect, or it has taken the last change back.
        let fails = case == smallest.case || {
            smallest.tried += 1;
            fails(&case)?
        };
        is_other = if fails {
            smallest.case = case;
            tree.simplify()
        } else {
            tree.complicate()
        };
    }
    Ok(smallest)
}

#[cfg(test)]
mod tests {
    use lab::{address::Family, objects::State};

    use super::*;
    use crate::{
        random::cluster::{Cluster, generate},
        table::Client,
    };

    /// Returns true for a fault that needs one probe, one policy and one endpoint.
    fn fails(cluster: &Cluster) -> bool {
        cluster.services().any(|(_, service)| {
            let spec = &service.now;
            let terminates = spec.slices(Family::V6).iter().flat_map(|slice| &slice.endpoints);
            let mut terminates = terminates.filter(|endpoint| endpoint.state == State::Terminating);
            spec.external_local
                && terminates.next().is_some()
                && service
                    .probes
                    .iter()
                    .any(|probe| probe.client == Client::Outside && probe.family == Family::V6)
        })
    }

    #[test]
    fn a_cluster_shrinks_to_what_the_fault_needs() {
        let mut shrunk = 0;
        for number in 0..40 {
            let mut tree = generate(1, number).unwrap();
            if !fails(&tree.current()) {
                continue;
            }
            let Smallest { case, tried } = smallest(&mut tree, 1_000, |cluster| Ok(fails(cluster))).unwrap();
            assert!(fails(&case) && tried < 300, "{tried}");
            let (.., service) = case.services().next().unwrap();
            assert_eq!((case.services().count(), service.probes.len()), (1, 1), "{case:?}");
            assert_eq!(service.before, None);
            let spec = &service.now;
            let mut endpoints = spec.slices.iter().flatten().flat_map(|slice| &slice.endpoints);
            assert_eq!(endpoints.next().unwrap().state, State::Terminating);
            assert!(
                endpoints.next().is_none() && spec.source_ranges.is_empty() && !spec.affinity,
                "{spec:?}"
            );
            shrunk += 1;
        }
        assert!(shrunk > 5, "only {shrunk} clusters have it");
    }

    #[test]
    fn the_limit_bounds_what_is_tried() {
        let find = |number: &u32| fails(&generate(1, *number).unwrap().current());
        let mut tree = generate(1, (0..).find(find).unwrap()).unwrap();
        let mut tried = 0;
        let smallest = smallest(&mut tree, 7, |cluster| {
            tried += 1;
            Ok(fails(cluster))
        });
        assert_eq!((smallest.unwrap().tried, tried), (7, 7));
    }

    #[test]
    fn what_cannot_be_judged_ends_it() {
        let mut tree = generate(1, 1).unwrap();
        assert!(smallest(&mut tree, 10, |_| anyhow::bail!("no lab")).is_err());
    }
}
