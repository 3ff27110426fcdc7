//! A test load of rules that use every match and target of this mode. It runs in a network
//! namespace of its own, which ends afterwards, so nothing on the node is changed.
//!
//! The versions of the tools do not show what the kernel lacks. With nf_tables but without
//! NFT_COMPAT, or without a match or target, each write of this mode would fail, and nothing would
//! be served.

use std::{io, thread};

use nix::sched::{CloneFlags, unshare};

use super::{
    base::{Abilities, BaseRules},
    families,
    plan::{self, PortDifference, Script},
    rules::{PortRules, PortSettings, port_rules},
    state::State,
};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, Endpoints, Frontend, FrontendKind, ServicePortName},
        mode::Requirement,
        node::{Host, LocalTraffic},
        objects::{IpFamily, ObjectName, Protocol, TrafficPolicy},
    },
    sys::xtables::{Backend, ToolError, Tools},
};

#[derive(Debug)]
enum Trial {
    Passed(Vec<IpFamily>),
    /// The kernel was not asked, because there was no network namespace, no thread, or no run of
    /// the tool.
    NotMade(io::Error),
    Refused(IpFamily, ToolError),
}

/// Asks the kernel what it would refuse of this mode's rules.
pub(super) fn requirement(backend: Backend) -> Requirement {
    answer(make(|| families(backend)))
}

fn make(tools: impl FnOnce() -> Vec<(IpFamily, Tools)> + Send) -> Trial {
    let in_own_namespace = || {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            return Trial::NotMade(error.into());
        }
        let tools = tools();
        for (family, tools) in &tools {
            if let Err(error) = tools.restore(&rules(*family, tools.has_random_fully())) {
                return match error {
                    ToolError::Failed { .. } => Trial::Refused(*family, error),
                    // A lock that others hold, or a process that cannot be made, says nothing about
                    // the kernel.
                    ToolError::Busy { .. } | ToolError::Run { .. } => Trial::NotMade(io::Error::other(error)),
                };
            }
        }
        Trial::Passed(tools.into_iter().map(|(family, _)| family).collect())
    };
    thread::scope(|scope| match thread::Builder::new().spawn_scoped(scope, in_own_namespace) {
        Ok(trial) => {
            trial.join().unwrap_or_else(|_| Trial::NotMade(io::Error::other("the trial has failed")))
        }
        Err(error) => Trial::NotMade(error),
    })
}

fn answer(trial: Trial) -> Requirement {
    let mut requirement = Requirement::new("iptablesRules", "rules on trial", serde_json::Value::Null);
    match trial {
        Trial::Passed(families) if families.is_empty() => requirement.missing.push(
            "no family can be served by iptables: the tools of IPv4 are missing, and IPv6 is missing, or its nat table"
                .to_owned(),
        ),
        Trial::Passed(families) => {
            let names: Vec<_> = families.iter().map(|family| family.name()).collect();
            requirement.found = names.join(", ").into();
        }
        Trial::NotMade(error) => requirement.found = format!("not tried: {error}").into(),
        Trial::Refused(family, error) => requirement.missing.push(format!(
            "the kernel refuses rules of iptables in family {}: {error}; it needs the matches and targets of xtables, and for the \
             backend nft CONFIG_NFT_COMPAT",
            family.name()
        )),
    }
    requirement
}

/// Returns the rules of Services that use every match and target, and the base rules that jump to
/// them.
fn rules(family: IpFamily, random_fully: bool) -> String {
    let (address, node) = match family {
        IpFamily::Ipv4 => ([192, 0, 2, 1].into(), [127, 0, 0, 1].into()),
        IpFamily::Ipv6 => {
            ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(), [0x2001, 0xdb8, 0, 0, 0, 0, 0, 2].into())
        }
    };
    let host = Host {
        node_ports_everywhere: true,
        node_port_addresses: [node].into(),
        masquerade_addresses: vec![node],
        local_traffic: LocalTraffic::FromBridge("probe0".to_owned()),
        masquerade_bit: 14,
        ..Host::default()
    };
    let port = |name: &str, kind, endpoints: &[u32]| DesiredPort {
        name: ServicePortName {
            service: ObjectName::new("probe", name),
            port: "".into(),
            protocol: Protocol::Tcp,
            family,
        },
        frontends: vec![
            Frontend { kind, address, port: 80 },
            Frontend { kind: FrontendKind::NodePort, address, port: 30_080 },
        ],
        unserved: Box::default(),
        endpoints: Endpoints {
            all: vec![
                Endpoint { address, port: 80, local: true, terminating: false, weight: 1 };
                endpoints.len()
            ],
            cluster: endpoints.into(),
            internal: endpoints.into(),
            external: endpoints.into(),
            any: false,
            need_snat: false,
            unused: Box::default(),
        },
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Local,
        health_check_node_port: Some(30_081),
        affinity_seconds: Some(10_800),
        source_ranges: vec![address.into()],
        algorithm: None,
        forwarding: None,
    };
    // One service port is balanced, and the other is refused.
    let ports =
        [port("served", FrontendKind::LoadBalancer, &[0, 1]), port("refused", FrontendKind::ClusterIp, &[])];
    // The test load does not count packets, because the mode also works without counters.
    let abilities =
        Abilities { random_fully, drop_invalid: true, counts_packets: false, routes_localnet: true };
    let mut script = Script::default();
    plan::base(&State::default(), &BaseRules::new(family, &host, abilities), &mut script);
    let settings = PortSettings::new(family, &host, abilities, true);
    let difference = |port| PortDifference::between(&PortRules::default(), port_rules(port, &settings));
    plan::ports(&ports.each_ref().map(difference), usize::MAX, &mut script);
    script.text
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[ignore = "needs root"]
    fn as_root_a_kernel_with_iptables_takes_the_rules(
        #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
    ) {
        let requirement = requirement(backend);
        let has_legacy = std::path::Path::new("/proc/net/ip_tables_names").exists();
        if backend == Backend::Legacy && !has_legacy {
            println!("skipped: the kernel has no iptables-legacy");
            return;
        }
        assert_eq!(requirement.missing, [""; 0]);
        assert_eq!(requirement.found, "IPv4, IPv6");
    }

    /// The error is the one that iptables-nft reports on a kernel without CONFIG_NFT_COMPAT.
    #[test]
    #[ignore = "needs root"]
    fn as_root_a_mode_whose_rules_are_refused_cannot_run() {
        let folder = tempfile::tempdir().unwrap();
        let restore = folder.path().join("iptables-restore");
        let refusal = "line 9: RULE_APPEND failed (No such file or directory): rule in chain KUBE-MARK-MASQ";
        fs::write(&restore, format!("#!/bin/sh\ncat > /dev/null\necho '{refusal}' >&2\nexit 1\n")).unwrap();
        fs::set_permissions(&restore, fs::Permissions::from_mode(0o755)).unwrap();
        let tools = Tools::of_programs(restore.clone(), restore);
        let requirement = answer(make(|| vec![(IpFamily::Ipv4, tools)]));
        assert!(
            requirement.missing.len() == 1 && requirement.missing[0].contains(refusal),
            "{requirement:?}"
        );
    }

    /// Exit status 4 is how iptables says that another process holds /run/xtables.lock.
    #[rstest]
    #[case::lock_is_held(Some("#!/bin/sh\nexit 4\n"))]
    #[case::no_such_program(None)]
    #[ignore = "needs root"]
    fn as_root_a_tool_that_did_not_ask_the_kernel_refuses_nothing(#[case] script: Option<&str>) {
        let folder = tempfile::tempdir().unwrap();
        let restore = folder.path().join("iptables-restore");
        if let Some(script) = script {
            fs::write(&restore, script).unwrap();
            fs::set_permissions(&restore, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let tools = Tools::of_programs(restore.clone(), restore);
        let requirement = answer(make(|| vec![(IpFamily::Ipv4, tools)]));
        assert_eq!(requirement.missing, [""; 0]);
        assert!(requirement.found.as_str().unwrap().starts_with("not tried: "), "{requirement:?}");
    }

    #[test]
    fn a_node_without_a_family_that_can_be_served_cannot_run_the_mode() {
        let requirement = answer(Trial::Passed(Vec::new()));
        assert_eq!(requirement.missing.len(), 1, "{requirement:?}");
    }

    #[test]
    fn a_trial_that_cannot_be_made_is_no_obstacle() {
        let requirement = answer(Trial::NotMade(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(requirement.missing, [""; 0]);
        assert!(requirement.found.as_str().unwrap().starts_with("not tried: "), "{requirement:?}");
    }
}
