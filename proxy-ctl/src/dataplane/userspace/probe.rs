//! What mode userspace needs of a node: nothing. It serves those clients that dial an address of this node.

use crate::{
    config::{Config, RequestedMode},
    mode::{HostFacts, Mode, Probe, Requirement},
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

pub(in crate::dataplane) fn probe(config: &Config, host: &HostFacts) -> Probe {
    // Who has asked for this mode knows; in another one's place it would look as if all were served.
    let is_asked_for = config.mode == RequestedMode::Userspace;
    let redirect =
        Requirement::new("redirect", "redirection by", None::<&str>).lacking(!is_asked_for, || {
            "nothing leads clients of cluster IPs to its listeners: it is used only where it is asked for"
                .to_owned()
        });
    let who = "this process carries every connection itself, of those clients that dial an address of this node: no rule leads \
               others to it";
    Probe {
        mode: Mode::Userspace,
        requirements: vec![Requirement::kernel(host), Requirement::capabilities(host.capabilities), redirect],
        remarks: vec![who.to_owned(), "connections end with this process".to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::mode::recorded::Host;

    #[rstest]
    #[case::asked_for(RequestedMode::Userspace, true)]
    #[case::in_place_of_another(RequestedMode::Ipvs, false)]
    #[case::nothing_asked(RequestedMode::Automatic, false)]
    fn it_runs_only_where_it_is_asked_for(#[case] mode: RequestedMode, #[case] expected: bool) {
        let probe = probe(&Config { mode, ..Config::default() }, &Host::named("debian 6.1").facts());
        assert_eq!(probe.can_run(), expected);
        assert_eq!(probe.remarks.len(), 2);
    }
}
