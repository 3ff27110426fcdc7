//! Events about this node's proxy. Reasons, actions and types are kube-proxy's, so that existing
//! alerts work. The files beside this one say when some of them are sent.

pub(super) mod filling_maps;
pub(super) mod unattached_interfaces;
pub(super) mod unserved_fields;

use std::{fmt, io, net::SocketAddr, path::PathBuf};

use crate::{
    events::{Event, Regarding, Type},
    model::{mode::Mode, objects::ObjectName},
};

const START: &str = "StartKubeProxy";

/// Returns the event for a node that is set up, when the proxy begins to serve.
pub(in crate::process) fn starting() -> Event {
    Event::node(Type::Normal, "Starting", START, "")
}

/// Returns the event for an address of /healthz that cannot be bound, which ends the process
/// because of `bindAddressHardFail`.
pub(in crate::process) fn healthz_failed(error: &dyn fmt::Display) -> Event {
    Event::node(Type::Warning, "FailedToStartProxierHealthcheck", START, error.to_string())
}

/// Returns the event for an address of /metrics that cannot be bound, which ends the process
/// because of `bindAddressHardFail`.
pub(in crate::process) fn metrics_failed(error: &dyn fmt::Display) -> Event {
    Event::node(Type::Warning, "FailedToStartMetricServer", START, error.to_string())
}

/// Returns the event for a port that cannot be bound and at which a load balancer asks for a
/// Service's endpoints. `node` is the own Node's name.
pub(in crate::process) fn service_health_failed(
    node: &str,
    service: &ObjectName,
    address: SocketAddr,
    error: &io::Error,
) -> Event {
    let port = address.port();
    let network = if address.is_ipv4() { "tcp4" } else { "tcp6" };
    Event {
        event_type: Type::Warning,
        regarding: Regarding::Service(service.clone()),
        reason: "FailedToStartServiceHealthcheck",
        action: "Listen",
        note: format!(
            "node {node} failed to start healthcheck \"{service}\" on port {port}: listen {network} {address}: bind: {}",
            in_go(error)
        ),
        of_all_nodes: false,
    }
}

/// Returns the text of an error as Go's library words it, without a capital and without the number.
fn in_go(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let mut chars = text.chars();
    chars.next().into_iter().flat_map(char::to_lowercase).chain(chars).collect()
}

/// Returns the event for kernel parameters that could not be set because their file systems are
/// mounted read-only. Newer kube-proxies end instead.
pub(in crate::process) fn read_only(paths: &[PathBuf]) -> Event {
    let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    let note = format!(
        "CRI error: /sys is read-only: cannot modify conntrack limits, problems may arise later ({})",
        paths.join(", ")
    );
    Event::node(Type::Warning, "readOnlySysFS", START, note)
}

/// Returns the event for rules of another kube-proxy that are still there, with the reason.
/// kube-proxy has no such event.
pub(in crate::process) fn former_rules_stay(problem: &str) -> Event {
    Event::node(Type::Warning, "KubeProxyRulesRemain", "RemoveKubeProxyRules", problem)
}

/// Returns the event for rules that are there again after their removal, because another kube-proxy
/// runs. kube-proxy has no such event.
pub(in crate::process) fn former_rules_are_back(parts: &str) -> Event {
    Event::node(Type::Warning, "KubeProxyRulesReturned", "RemoveKubeProxyRules", parts)
}

/// Returns the event for a Service that is not served as it asks. If `leaves_unserved` is true,
/// clients cannot reach some of its frontends. kube-proxy has no such event.
pub(in crate::process) fn service_not_served_as_asked(
    service: ObjectName,
    leaves_unserved: bool,
    note: String,
) -> Event {
    Event {
        event_type: Type::Warning,
        regarding: Regarding::Service(service),
        reason: if leaves_unserved { "ServiceNotServed" } else { "FieldNotHonoured" },
        action: "ServeService",
        note,
        of_all_nodes: true,
    }
}

/// Returns the event for a workload's interface that packet programs cannot be attached to, with
/// the reason. kube-proxy has no such event.
pub(in crate::process) fn interface_not_attached(problem: &str) -> Event {
    let note = format!("{problem}; packets of this workload do not reach the programs of mode ebpf");
    Event::node(Type::Warning, "InterfaceNotAttached", "AttachPrograms", note)
}

/// Returns the event for a flow map that is three quarters full. kube-proxy has no such event.
pub(in crate::process) fn flows_filling(name: &str, capacity: u64) -> Event {
    let note = format!(
        "map {name} of established flows is three quarters full ({capacity} entries): when it is full, new \
         connections may be forgotten while they are open; raise ebpf.limits.flows"
    );
    Event::node(Type::Warning, "FlowMapFilling", "KeepFlows", note)
}

/// Returns the event for a mode that was chosen instead of the one that was asked for, with the
/// reason. kube-proxy has no such event.
pub(in crate::process) fn mode_fallback(why: &str) -> Event {
    Event::node(Type::Warning, "ProxyModeFallback", "ChooseMode", why)
}

/// Returns the event that kube-proxy sends from version 1.35 on.
pub(in crate::process) fn ipvs_is_deprecated() -> Event {
    let note =
        "mode ipvs is deprecated in Kubernetes, which may remove it; mode nftables is meant to replace it";
    Event::node(Type::Warning, "IPVSDeprecation", "StartKubeProxy", note)
}

/// Returns the event for a mode that the configuration asks for and that could not take over.
/// kube-proxy has no such event.
pub(in crate::process) fn mode_refused(wanted: Mode, active_mode: Mode, problem: &str) -> Event {
    let note = format!("mode {wanted} cannot take over, mode {active_mode} stays active: {problem}");
    Event::node(Type::Warning, "ProxyModeRefused", "SwitchMode", &note)
}

/// Returns the event for a configuration file that was replaced by one that is not valid.
/// kube-proxy has no such event.
pub(in crate::process) fn invalid_configuration(problem: &str) -> Event {
    Event::node(Type::Warning, "InvalidConfiguration", "ReadConfiguration", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_is_told_in_the_words_of_kube_proxy() {
        let error = io::Error::from_raw_os_error(libc::EADDRINUSE);
        let service = ObjectName::new("shop", "web");
        let event = service_health_failed("a", &service, "192.0.2.1:32456".parse().unwrap(), &error);
        let note = "node a failed to start healthcheck \"shop/web\" on port 32456: listen tcp4 192.0.2.1:32456: bind: \
                    address already in use";
        assert_eq!(event.note, note);
    }
}
