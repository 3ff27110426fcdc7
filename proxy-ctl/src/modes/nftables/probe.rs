//! The requirements of mode nftables. Rules are written by netlink, so the kernel's version matters
//! and that of `nft` does not.

use crate::{
    config::Config,
    model::mode::{HostFacts, KernelModule, KernelVersion, Mode, Probe, Requirement},
    modes::netfilter::requirements::{net_admin, nf_tables},
};

/// The oldest kernel, as for kube-proxy. Older ones have faults that its rules meet.
const OLDEST: KernelVersion = KernelVersion::new(5, 13, 0);

/// Fields without effect in this mode. A configuration that asks for mode nftables uses its section
/// `nftables` instead of `iptables`.
pub(in crate::modes) const UNUSED_FIELDS: &[&str] = &[
    "iptables.masqueradeBit",
    "iptables.minSyncPeriod",
    "ipvs.minSyncPeriod",
    "ipvs.scheduler",
    "ipvs.strictARP",
    "ipvs.tcpFinTimeout",
    "ipvs.tcpTimeout",
    "ipvs.udpTimeout",
    "nftables.minSyncPeriod",
];

pub(in crate::modes) fn probe(_: &Config, host: &HostFacts) -> Probe {
    let release = &host.kernel_release;
    let is_old = host.kernel().is_some_and(|version| version < OLDEST);
    let kernel = Requirement::kernel(host).lacking(is_old && !host.skip_nftables_kernel_check, || {
        format!("the kernel is {release}, {OLDEST} or newer is needed for nftables")
    });
    let modules = ["nft_ct", "nft_nat", "nft_masq", "nft_numgen", "nft_reject", "nf_conntrack"];
    let modules: Vec<_> = [nf_tables()].into_iter().chain(modules.map(KernelModule::named)).collect();
    let remarks = (is_old && host.skip_nftables_kernel_check).then(|| {
        format!(
            "the kernel is {release}, older than {OLDEST}: KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK is set"
        )
    });
    Probe {
        mode: Mode::Nftables,
        requirements: vec![
            kernel,
            net_admin(host),
            Requirement::modules("nftablesModules", "modules of nftables", host, &modules),
        ],
        remarks: remarks.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::mode::recorded::Host;

    fn obstacles(facts: &HostFacts) -> Vec<String> {
        probe(&Config::default(), facts).obstacles().map(str::to_owned).collect()
    }

    #[rstest]
    fn possible(#[values("debian 6.1", "debian 6.12", "debian 7.2", "microvm 6.18")] name: &str) {
        assert_eq!(obstacles(&Host::named(name).facts()), [""; 0]);
        assert_eq!(obstacles(&Host::named(name).contained().facts()), [""; 0]);
    }

    #[test]
    fn an_old_kernel_is_refused_unless_its_check_is_skipped() {
        let mut facts = Host::named("debian 5.10").facts();
        let why = "the kernel is 5.10.0-46-amd64, 5.13 or newer is needed for nftables";
        assert_eq!(obstacles(&facts), [why]);
        facts.skip_nftables_kernel_check = true;
        assert_eq!(obstacles(&facts), [""; 0]);
        let remarks = probe(&Config::default(), &facts).remarks;
        assert!(remarks[0].contains("KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK is set"), "{remarks:?}");
    }

    #[test]
    fn a_kernel_without_nat_is_refused() {
        let host = Host::named("microvm 6.18").with("config", "CONFIG_NF_TABLES=y\nCONFIG_NFT_CT=y\n");
        let obstacles = obstacles(&host.facts());
        assert!(obstacles.iter().any(|why| why.contains("built without CONFIG_NFT_NAT")), "{obstacles:?}");
        assert!(!obstacles.iter().any(|why| why.contains("NFT_CT")), "{obstacles:?}");
    }

    #[test]
    fn without_the_right_to_write_rules_it_is_refused() {
        let facts = HostFacts { capabilities: Default::default(), ..Host::named("debian 6.12").facts() };
        assert_eq!(obstacles(&facts), ["CAP_NET_ADMIN is missing, to write rules"]);
    }
}
