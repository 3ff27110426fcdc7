//! What this mode needs of a node, and whether it is there. Nothing is changed.

use std::path::Path;

use serde_json::Value;

use crate::{
    mode::{HostFacts, Mode, Probe, Requirement},
    sys::{
        nftables::TableFamily,
        xtables::{self, Backend, ChosenBackend, Tools},
    },
};

#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Facts {
    /// An error says why there is none.
    backend: Option<Result<ChosenBackend, String>>,
    /// For people, by family.
    tools: [Option<String>; 2],
    /// /proc/net/if_inet6 is there.
    ipv6: bool,
}

pub(super) fn probe(host: &HostFacts) -> Probe {
    let backend = xtables::choose().map_err(|error| error.to_string());
    let find = |family| {
        let backend: Backend = backend.as_ref().ok()?.backend;
        Tools::find(family, backend).map(|tools| tools.version())
    };
    let tools = TableFamily::ALL.map(find);
    answer(host, &Facts { backend: Some(backend), tools, ipv6: has_ipv6() })
}

pub(super) fn has_ipv6() -> bool {
    Path::new("/proc/net/if_inet6").exists()
}

fn answer(host: &HostFacts, facts: &Facts) -> Probe {
    let (mut remarks, mut obstacle) = (Vec::new(), None);
    match &facts.backend {
        Some(Ok(ChosenBackend { backend, reason })) => {
            remarks.push(format!("rules are written to the backend {backend} of iptables: {reason}"));
        }
        Some(Err(error)) => obstacle = Some(error.clone()),
        None => {}
    }
    let [ipv4, ipv6] = &facts.tools;
    if facts.ipv6 && ipv4.is_some() && ipv6.is_none() {
        remarks.push("IPv6 is not served: ip6tables-save and -restore are not on PATH".to_owned());
    }
    let found =
        |tools: &Option<String>| tools.as_ref().map_or(Value::Null, |version| version.as_str().into());
    let requirements = vec![
        Requirement::new("iptables", "iptables", found(ipv4)).lacking(ipv4.is_none(), || {
            obstacle.unwrap_or_else(|| "there is no iptables-restore".to_owned())
        }),
        Requirement::new("ip6tables", "ip6tables", found(ipv6)),
        Requirement::new("netAdmin", "CAP_NET_ADMIN", host.capabilities.net_admin)
            .lacking(!host.capabilities.net_admin, || "CAP_NET_ADMIN is missing, to write rules".to_owned()),
    ];
    Probe { mode: Mode::Iptables, requirements, remarks }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::mode::Capabilities;

    fn able() -> Facts {
        let chosen = ChosenBackend { backend: Backend::Nft, reason: "the kubelet's rules are there" };
        let version = || Some("1.8.9 (nft)".to_owned());
        Facts { backend: Some(Ok(chosen)), tools: [version(), version()], ipv6: true }
    }

    fn answer_of(facts: &Facts, net_admin: bool) -> Probe {
        let capabilities = Capabilities { net_admin, ..Capabilities::default() };
        answer(&HostFacts { kernel_release: "6.12".into(), capabilities }, facts)
    }

    #[rstest]
    #[case::both_families(able(), "the backend nft of iptables: the kubelet's rules are there")]
    #[case::no_ip6tables(Facts { tools: [able().tools[0].clone(), None], ..able() }, "IPv6 is not served")]
    fn possible(#[case] facts: Facts, #[case] remark: &str) {
        let probe = answer_of(&facts, true);
        assert_eq!(probe.obstacles().count(), 0, "{probe:?}");
        assert!(probe.remarks.iter().any(|given| given.contains(remark)), "{:?}", probe.remarks);
    }

    #[rstest]
    #[case::no_tools(
        Facts { backend: Some(Err("no tools on PATH".into())), tools: [None, None], ..able() },
        true,
        "no tools on PATH"
    )]
    #[case::may_not(able(), false, "CAP_NET_ADMIN is missing")]
    fn impossible(#[case] facts: Facts, #[case] net_admin: bool, #[case] expected: &str) {
        let probe = answer_of(&facts, net_admin);
        let obstacles: Vec<_> = probe.obstacles().collect();
        assert!(obstacles.len() == 1 && obstacles[0].contains(expected), "{obstacles:?}");
    }
}
