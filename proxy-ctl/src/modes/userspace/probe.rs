//! The requirements of mode userspace. If the mode is asked for, it needs nothing of a node. If it
//! is chosen because another mode cannot run, it must be able to redirect clients to its listeners.

use crate::{
    config::Config,
    model::mode::{HostFacts, KernelModule, Mode, Probe, RequestedMode, Requirement},
    modes::netfilter::requirements::{iptables, nf_tables},
};

/// Fields without effect in this mode. Every connection ends here and begins anew, so there is
/// nothing to masquerade.
pub(in crate::modes) const UNUSED_FIELDS: &[&str] = &[
    "iptables.masqueradeAll",
    "iptables.minSyncPeriod",
    "iptables.masqueradeBit",
    "nftables.masqueradeAll",
    "nftables.masqueradeBit",
    "nftables.minSyncPeriod",
    "ipvs.minSyncPeriod",
    "ipvs.scheduler",
    "ipvs.strictARP",
    "ipvs.tcpFinTimeout",
    "ipvs.tcpTimeout",
    "ipvs.udpTimeout",
];

/// Returns which rules can redirect clients to the listeners, or why none can.
fn redirects_by(host: &HostFacts) -> Result<&'static str, String> {
    if !host.capabilities.net_admin {
        return Err("CAP_NET_ADMIN is missing, to redirect clients to the listeners".to_owned());
    }
    if !host.capabilities.setgid {
        return Err("CAP_SETGID is missing, to tell apart what this process dials from clients".to_owned());
    }
    let missing = |modules: &[KernelModule]| modules.iter().find_map(|module| host.modules.missing(module));
    let [nft_nat, nft_redir] = ["nft_nat", "nft_redir"].map(KernelModule::named);
    let Some(without_nftables) = missing(&[nf_tables(), nft_nat, nft_redir, conntrack()]) else {
        return Ok("nftables");
    };
    let redirection = KernelModule::new("xt_REDIRECT", "CONFIG_NETFILTER_XT_TARGET_REDIRECT");
    let owner = KernelModule::new("xt_owner", "CONFIG_NETFILTER_XT_MATCH_OWNER");
    let without_tools = iptables(host).missing.into_iter().next();
    match without_tools.or_else(|| missing(&[redirection, owner, conntrack()])) {
        None => Ok("iptables"),
        Some(without_iptables) => Err(format!("{without_nftables}; {without_iptables}")),
    }
}

fn conntrack() -> KernelModule {
    KernelModule::named("nf_conntrack")
}

pub(in crate::modes) fn probe(config: &Config, host: &HostFacts) -> Probe {
    let redirects = redirects_by(host);
    let mut redirect = Requirement::new("redirect", "redirection by", redirects.as_ref().ok().copied());
    let mut remarks =
        vec!["this process carries every connection itself, and connections end with it".to_owned()];
    if let Err(why) = redirects {
        remarks.push(format!("it serves only clients that dial an address of this node: {why}"));
        // Only an operator who has asked for this mode knows its limits. If it were chosen for
        // another mode that cannot run, it would look as if everything were served.
        redirect = redirect.lacking(config.mode != RequestedMode::Userspace, || why);
    }
    Probe {
        mode: Mode::Userspace,
        requirements: vec![Requirement::kernel(host), Requirement::capabilities(host.capabilities), redirect],
        remarks,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::mode::{Capabilities, recorded::Host};

    #[rstest]
    fn where_rules_can_lead_clients_to_it_it_serves_all(
        #[values(RequestedMode::Userspace, RequestedMode::Automatic)] mode: RequestedMode,
        #[values("debian 5.10", "debian 6.1", "microvm 6.18")] host: &str,
    ) {
        let probe = probe(&Config { mode, ..Config::default() }, &Host::named(host).facts());
        assert!(probe.can_run(), "{probe:?}");
        assert_eq!(probe.requirements[2].found, "nftables");
        assert_eq!(probe.remarks.len(), 1);
    }

    #[test]
    fn iptables_leads_clients_where_the_kernel_has_no_nf_tables() {
        let config = "CONFIG_NETFILTER_XTABLES=y\nCONFIG_NETFILTER_XT_TARGET_REDIRECT=y\nCONFIG_NF_CONNTRACK=y\n\
             CONFIG_NETFILTER_XT_MATCH_OWNER=y\n";
        let legacy = |program: &str| format!("{program} v1.8.9 (legacy)");
        let host = Host::named("microvm 6.18")
            .with("config", config)
            .with("iptables", &legacy("iptables"))
            .with("ip6tables", &legacy("ip6tables"));
        let probe = probe(&Config::default(), &host.facts());
        assert!(probe.can_run(), "{probe:?}");
        assert_eq!(probe.requirements[2].found, "iptables");
    }

    #[rstest]
    #[case::asked_for(RequestedMode::Userspace, true)]
    #[case::instead_of_another(RequestedMode::Ipvs, false)]
    #[case::nothing_asked(RequestedMode::Automatic, false)]
    fn without_rules_it_runs_only_where_it_is_asked_for(
        #[case] mode: RequestedMode,
        #[case] expected: bool,
        #[values("no right", "no right to a group", "no kernel option")] lacking: &str,
    ) {
        let (facts, why) = match lacking {
            "no right" => {
                let facts = Host::named("debian 6.1").facts();
                (HostFacts { capabilities: Default::default(), ..facts }, "CAP_NET_ADMIN is missing")
            }
            "no right to a group" => {
                let facts = Host::named("debian 6.1").facts();
                let capabilities = Capabilities { setgid: false, ..facts.capabilities };
                (HostFacts { capabilities, ..facts }, "CAP_SETGID is missing")
            }
            _ => (
                Host::named("microvm 6.18").with("config", "CONFIG_NF_TABLES=y\nCONFIG_NFT_NAT=y\n").facts(),
                "the module nft_redir is missing: the kernel is built without CONFIG_NFT_REDIR",
            ),
        };
        let probe = probe(&Config { mode, ..Config::default() }, &facts);
        assert_eq!(probe.can_run(), expected);
        assert!(probe.remarks[1].contains(why), "{:?}", probe.remarks);
        assert!(probe.obstacles().all(|obstacle| obstacle.starts_with(why)));
    }
}
