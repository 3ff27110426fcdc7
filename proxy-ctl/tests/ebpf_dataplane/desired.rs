//! Builders of desired states in short form.

use std::{net::IpAddr, sync::Arc};

use proxy_ctl::model::{
    desired::{Changes, DesiredPort, Endpoint, Endpoints, Frontend, FrontendKind, ServicePortName},
    objects::{IpFamily, ObjectName, Protocol, TrafficPolicy},
};

pub fn name(service: &str, family: IpFamily) -> ServicePortName {
    ServicePortName {
        service: ObjectName::new("test", service),
        port: "http".into(),
        protocol: Protocol::Tcp,
        family,
    }
}

pub fn endpoint(address: &str, port: u16) -> Endpoint {
    Endpoint { address: address.parse().unwrap(), port, local: false, terminating: false, weight: 1 }
}

/// Returns endpoints that are in every set.
pub fn endpoints(all: Vec<Endpoint>) -> Endpoints {
    let every: Arc<[u32]> = (0..all.len() as u32).collect();
    let any = !all.is_empty();
    Endpoints {
        all,
        cluster: Arc::clone(&every),
        internal: Arc::clone(&every),
        external: every,
        any,
        need_snat: false,
        unused: Box::default(),
    }
}

/// Returns a service port with a cluster IP on port 80.
pub fn port(service: &str, cluster_ip: &str, all: Vec<Endpoint>) -> DesiredPort {
    let address: IpAddr = cluster_ip.parse().unwrap();
    DesiredPort {
        name: name(service, IpFamily::of(address)),
        frontends: vec![Frontend { kind: FrontendKind::ClusterIp, address, port: 80 }],
        unserved: Box::default(),
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        endpoints: endpoints(all),
        affinity_seconds: None,
        source_ranges: Vec::new(),
        algorithm: None,
        forwarding: None,
    }
}

pub fn with_node_port(mut port: DesiredPort, node_port: u16) -> DesiredPort {
    let address = match port.name.family {
        IpFamily::Ipv4 => IpAddr::from([0; 4]),
        IpFamily::Ipv6 => IpAddr::from([0; 16]),
    };
    port.frontends.push(Frontend { kind: FrontendKind::NodePort, address, port: node_port });
    port
}

pub const fn change(changed: Vec<Arc<DesiredPort>>) -> Changes {
    Changes { changed, removed: Vec::new() }
}

pub fn shared(ports: impl IntoIterator<Item = DesiredPort>) -> Vec<Arc<DesiredPort>> {
    ports.into_iter().map(Arc::new).collect()
}
