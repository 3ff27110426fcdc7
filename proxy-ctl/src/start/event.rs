//! What the cluster is told about this proxy's own life: events about its Node. Reasons, actions and types are
//! kube-proxy's, so that what watches for them goes on working.

use std::{fmt, net::SocketAddr, path::PathBuf};

use crate::{
    events::{Event, Regarding, Type},
    model::objects::ObjectName,
};

const START: &str = "StartKubeProxy";

/// The node is set up, and the proxy begins to serve.
pub fn starting() -> Event {
    Event::node(Type::Normal, "Starting", START, "")
}

/// The address of /healthz cannot be bound, and `bindAddressHardFail` makes that the end.
pub fn healthz_failed(error: &dyn fmt::Display) -> Event {
    Event::node(Type::Warning, "FailedToStartProxierHealthcheck", START, error.to_string())
}

/// As [`healthz_failed`], for the address of /metrics.
pub fn metrics_failed(error: &dyn fmt::Display) -> Event {
    Event::node(Type::Warning, "FailedToStartMetricServer", START, error.to_string())
}

/// The port that a load balancer asks for a Service's endpoints cannot be bound.
pub fn service_health_failed(service: &ObjectName, address: SocketAddr, error: &dyn fmt::Display) -> Event {
    Event {
        event_type: Type::Warning,
        regarding: Regarding::Service(service.clone()),
        reason: "FailedToStartServiceHealthcheck",
        action: "Listen",
        note: format!(
            "node port {} for the health check of service {service}: {address}: {error}",
            address.port()
        ),
    }
}

/// Kernel parameters that could not be set because their file systems are mounted read-only. Newer kube-proxies end
/// instead.
pub fn read_only(paths: &[PathBuf]) -> Event {
    let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    let note = format!(
        "CRI error: /sys is read-only: cannot modify conntrack limits, problems may arise later ({})",
        paths.join(", ")
    );
    Event::node(Type::Warning, "readOnlySysFS", START, note)
}

/// Rules of another kube-proxy, and why they are still there. kube-proxy has no such event.
pub fn former_rules_stay(problem: &str) -> Event {
    Event::node(Type::Warning, "KubeProxyRulesRemain", "RemoveKubeProxyRules", problem)
}

/// Rules of another kube-proxy that were removed are there again: one is at work. kube-proxy has no such event.
pub fn former_rules_are_back(parts: &str) -> Event {
    Event::node(Type::Warning, "KubeProxyRulesReturned", "RemoveKubeProxyRules", parts)
}

/// The configuration file was replaced by one that is not valid. kube-proxy has no such event.
pub fn invalid_configuration(problem: &str) -> Event {
    Event::node(Type::Warning, "InvalidConfiguration", "ReadConfiguration", problem)
}
