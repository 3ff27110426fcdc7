//! What mode userspace needs of a node: nothing, where it is asked for. In another mode's place it must be able to lead clients to
//! its listeners.

use crate::{
    config::{Config, RequestedMode},
    dataplane::netfilter::requirements::nf_tables,
    mode::{HostFacts, KernelModule, Mode, Probe, Requirement},
};

/// Every connection ends here and begins anew: there is nothing to masquerade.
pub(in crate::dataplane) const UNUSED_FIELDS: &[&str] = &[
    "iptables.masqueradeAll",
    "iptables.masqueradeBit",
    "nftables.masqueradeAll",
    "nftables.masqueradeBit",
    "ipvs.scheduler",
    "ipvs.strictARP",
    "ipvs.tcpFinTimeout",
    "ipvs.tcpTimeout",
    "ipvs.udpTimeout",
];

/// Why no rules can lead clients to the listeners.
fn obstacle(host: &HostFacts) -> Option<String> {
    if !host.capabilities.net_admin {
        return Some("CAP_NET_ADMIN is missing, to lead clients to the listeners".to_owned());
    }
    let modules = ["nft_nat", "nft_redir", "nf_conntrack"].map(KernelModule::named);
    [nf_tables()].iter().chain(&modules).find_map(|module| host.modules.missing(module))
}

pub(in crate::dataplane) fn probe(config: &Config, host: &HostFacts) -> Probe {
    let obstacle = obstacle(host);
    let redirects = obstacle.is_none().then_some("nftables");
    let mut redirect = Requirement::new("redirect", "redirection by", redirects);
    let mut remarks =
        vec!["this process carries every connection itself, and connections end with it".to_owned()];
    if let Some(why) = obstacle {
        remarks.push(format!("it serves only clients that dial an address of this node: {why}"));
        // Who has asked for this mode knows; in another one's place it would look as if all were served.
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
    use crate::mode::recorded::Host;

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

    #[rstest]
    #[case::asked_for(RequestedMode::Userspace, true)]
    #[case::in_place_of_another(RequestedMode::Ipvs, false)]
    #[case::nothing_asked(RequestedMode::Automatic, false)]
    fn without_rules_it_runs_only_where_it_is_asked_for(
        #[case] mode: RequestedMode,
        #[case] expected: bool,
        #[values("no right", "no kernel option")] lacking: &str,
    ) {
        let (facts, why) = match lacking {
            "no right" => {
                let facts = Host::named("debian 6.1").facts();
                (HostFacts { capabilities: Default::default(), ..facts }, "CAP_NET_ADMIN is missing")
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
