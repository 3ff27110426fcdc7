//! Reads and writes this mode's rules by the node's iptables-save and iptables-restore.

use std::path::Path;

use super::{
    Error,
    rules::{self, Chains},
};
use crate::{
    model::objects::IpFamily,
    sys::{
        nftables::TableFamily,
        xtables::{self, Tools},
    },
};

/// The rules of one family.
#[derive(Debug)]
pub(super) struct FamilyRules {
    pub(super) family: IpFamily,
    /// Runs of iptables-restore that failed.
    pub(super) failures: u64,
    tools: Tools,
}

impl FamilyRules {
    /// Of the families that this node has tools for, in the backend that the node's rules are in.
    pub(super) fn open() -> Result<Vec<Self>, Error> {
        let backend = xtables::choose()?.backend;
        let has_ipv6 = Path::new("/proc/net/if_inet6").exists();
        let open = |family| {
            let tools = match family {
                IpFamily::Ipv4 => Tools::find(TableFamily::Ipv4, backend),
                IpFamily::Ipv6 => Tools::find(TableFamily::Ipv6, backend).filter(|_| has_ipv6),
            };
            Some(Self { family, failures: 0, tools: tools? })
        };
        Ok(IpFamily::ALL.into_iter().filter_map(open).collect())
    }

    /// Makes the rules as `chains` says; answers how many tables were written.
    pub(super) fn write(&mut self, chains: &Chains) -> Result<u64, Error> {
        let mut text = String::new();
        let mut count = 0;
        for table in rules::TABLES {
            let saved = self.saved(table)?;
            if let Some(restoration) = rules::restoration(table, chains, &saved) {
                text.push_str(&restoration);
                count += 1;
            }
        }
        if count > 0 {
            self.tools.restore(&text).inspect_err(|_| self.failures += 1)?;
        }
        Ok(count)
    }

    fn saved(&self, table: &str) -> Result<String, Error> {
        let mut saved = String::new();
        self.tools.save(table, |line| {
            saved.push_str(line);
            saved.push('\n');
        })?;
        Ok(saved)
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};
    use rstest::rstest;

    use super::*;
    use crate::{
        dataplane::{Host, LocalTraffic, Removed, own_rules},
        mode::Mode,
        sys::{
            ipvs::{Ipvs, VirtualSocket},
            namespace_lock::{NamespaceAttempt, NamespaceLock},
        },
    };

    fn host(local_traffic: LocalTraffic) -> Host {
        Host { local_traffic, masquerade_bit: 14, ..Host::default() }
    }

    fn cidrs() -> LocalTraffic {
        LocalTraffic::FromCidrs(["10.244.0.0/16", "fd00:244::/64"].map(|cidr| cidr.parse().unwrap()).into())
    }

    /// In a network namespace that ends with the test's thread.
    fn with_sets(family: IpFamily) -> Option<FamilyRules> {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let Some(sets) = crate::sys::ipset::IpSets::load().unwrap() else {
            println!("skipped: the kernel's ip_set (CONFIG_IP_SET) is not loaded");
            return None;
        };
        for set in super::super::sets::Set::all(family) {
            sets.create(&set.name(), set.role.kind(), family == IpFamily::Ipv4).unwrap();
        }
        FamilyRules::open().unwrap().into_iter().find(|rules| rules.family == family)
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
    ) {
        let Some(mut rules) = with_sets(family) else { return };
        let chains = |bit| {
            let host = Host { masquerade_bit: bit, ..host(local_traffic.clone()) };
            rules::chains(family, &host, std::iter::empty())
        };
        assert_eq!(rules.write(&chains(14)).unwrap(), 2);
        assert_eq!(rules.write(&chains(14)).unwrap(), 0);
        // Somebody else's rules stay.
        rules.tools.restore("*nat\n-I OUTPUT -j ACCEPT\n-F KUBE-SERVICES\nCOMMIT\n").unwrap();
        assert_eq!(rules.write(&chains(14)).unwrap(), 1);
        assert!(rules.saved("nat").unwrap().contains("-A OUTPUT -j ACCEPT\n"));
        assert_eq!(rules.write(&chains(15)).unwrap(), 2);
        assert_eq!(rules.write(&chains(15)).unwrap(), 0);
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
        let closed =
            [6, 17, 132].map(|protocol| VirtualSocket { protocol, address: closed.parse().unwrap() });
        let chains = rules::chains(family, &host(cidrs()), closed.into_iter());
        assert_eq!(rules.write(&chains).unwrap(), 2);
        assert_eq!(rules.write(&chains).unwrap(), 0);
    }

    fn both(rules: &FamilyRules) -> [String; 2] {
        rules::TABLES.map(|table| rules.saved(table).unwrap())
    }

    #[rstest]
    #[ignore = "needs root"]
    fn as_root_cleanup_goes_by_the_mark(#[values(IpFamily::Ipv4, IpFamily::Ipv6)] family: IpFamily) {
        let Some(mut rules) = with_sets(family) else { return };
        let chains = rules::chains(family, &host(cidrs()), std::iter::empty());
        rules
            .tools
            .restore("*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n*filter\n-A OUTPUT -j ACCEPT\nCOMMIT\n")
            .unwrap();
        let without_counters = |saved: [String; 2]| {
            saved.map(|text| {
                text.lines()
                    .filter(|line| line.starts_with("-A") || line.contains("KUBE-"))
                    .collect::<Vec<_>>()
                    .join("\n")
            })
        };
        let before = without_counters(both(&rules));
        assert_eq!(rules.write(&chains).unwrap(), 2);
        let NamespaceAttempt::Held(lock) = NamespaceLock::acquire("ipvs").unwrap() else { panic!("free") };
        assert!(own_rules::remove_own(Mode::Ipvs, &[]).unwrap_err().is_taken_over());
        drop(lock);
        // A sync of kube-proxy begins with this.
        rules.tools.restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n").unwrap();
        let of_kube_proxy = without_counters(both(&rules));
        assert_eq!(own_rules::remove_own(Mode::Ipvs, &[]).unwrap(), Removed::default());
        assert_eq!(without_counters(both(&rules)), of_kube_proxy);
        assert_eq!(rules.write(&chains).unwrap(), 1);
        assert!(!own_rules::remove_own(Mode::Ipvs, &[]).unwrap().is_empty());
        assert_eq!(without_counters(both(&rules)), before);
        let sets = crate::sys::ipset::IpSets::load().unwrap().unwrap().names().unwrap();
        assert_eq!(sets, [""; 0]);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_refusal_names_the_program_and_its_words() {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        // The sets are not there.
        let chains = rules::chains(IpFamily::Ipv4, &host(cidrs()), std::iter::empty());
        let rules = &mut FamilyRules::open().unwrap()[0];
        let error = rules.write(&chains).unwrap_err().to_string();
        assert!(error.contains("-restore: ") && error.contains("KUBE-"), "{error}");
        assert_eq!(rules.failures, 1);
    }
}
