//! The tests that are run, and those that cannot be run on one machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Result, ensure};

/// Names of the conformance tests of sig-network, one a line.
const CONFORMANCE: &str = include_str!("../conformance.txt");

/// Parts of the names of tests that no Service proxy can pass or fail here, each with what they
/// need.
const NOT_HERE: [(&str, &str); 7] = [
    ("Netpol", "needs a network plugin with policies, which ptp is not"),
    ("NetworkPolicy", "needs a network plugin with policies, which ptp is not"),
    ("Internet connection", "needs the internet"),
    ("PerformanceDNS", "measures CoreDNS, which a small DNS server replaces here"),
    ("DNS configMap", "changes the configuration of CoreDNS, which a small DNS server replaces here"),
    ("configurable pod resolv.conf", "runs CoreDNS, which the images of this suite do not have"),
    ("IPerf2", "reads columns of iperf 2.2, which Debian does not package yet"),
];
/// Part of the names of tests that send SCTP.
const SCTP: (&str, &str) = ("SCTPConnectivity", "needs the kernel's module sctp");

/// Returns the conformance tests, which are run by default.
pub fn conformance() -> BTreeSet<String> {
    CONFORMANCE.lines().map(str::to_owned).collect()
}

/// Returns the reason why a test cannot be run here, if there is one.
fn not_here(name: &str, has_sctp: bool) -> Option<&'static str> {
    let sctp = (!has_sctp).then_some(&SCTP);
    NOT_HERE.iter().chain(sctp).find(|(part, _)| name.contains(part)).map(|(_, why)| *why)
}

/// Tests that are run, and the reasons of those that are not.
pub type Selection = (BTreeSet<String>, BTreeMap<String, &'static str>);

/// Divides the tests of the binary into those that are run and those that are not.
pub fn all(names: &BTreeSet<String>) -> Selection {
    let has_sctp = Path::new("/proc/net/sctp").exists();
    let not: BTreeMap<_, _> =
        names.iter().filter_map(|name| Some((name.clone(), not_here(name, has_sctp)?))).collect();
    let run = names.iter().filter(|name| !not.contains_key(*name)).cloned().collect();
    (run, not)
}

/// Returns an error if the list of conformance tests is not that of the test binary.
pub fn check(names: &BTreeSet<String>) -> Result<()> {
    let found: BTreeSet<String> =
        names.iter().filter(|name| name.contains("[Conformance]")).cloned().collect();
    let listed = conformance();
    ensure!(
        found == listed,
        "conformance.txt lacks {:?} and has {:?} too many",
        found.difference(&listed).collect::<Vec<_>>(),
        listed.difference(&found).collect::<Vec<_>>()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_conformance_test_is_run() {
        let listed = conformance();
        assert_eq!(listed.len(), 47);
        for name in &listed {
            assert!(name.starts_with("[sig-network] ") && name.contains("[Conformance]"), "{name}");
            assert_eq!(not_here(name, false), None, "{name}");
        }
    }

    #[test]
    fn tests_of_sctp_are_run_where_the_kernel_has_it() {
        let name = "[sig-network] Networking Granular Checks: Pods [Feature:SCTPConnectivity]";
        assert_eq!(not_here(name, true), None);
        assert_eq!(not_here(name, false), Some(SCTP.1));
        assert_eq!(
            not_here("[sig-network] Services should allow creating a basic SCTP service", false),
            None
        );
    }

    #[test]
    fn a_list_that_differs_from_the_binary_is_told() {
        let mut names = conformance();
        check(&names).unwrap();
        names.insert("[sig-network] Services should shine [Conformance]".to_owned());
        names.insert("[sig-network] Services should shine too".to_owned());
        let error = check(&names).unwrap_err().to_string();
        assert!(error.contains("should shine [Conformance]") && !error.contains("shine too"), "{error}");
    }
}
