//! A made-up cluster of any size.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use proxy_ctl::model::objects::{
    Endpoint, EndpointPort, EndpointSlice, IpFamily, ObjectName, Protocol, Service, ServicePort,
    TrafficPolicy,
};

pub(crate) const NODES: u32 = 100;
pub(crate) const NODE: &str = "node-0";

fn address(first: u8, number: u32) -> IpAddr {
    let [_, b, c, d] = number.to_be_bytes();
    Ipv4Addr::new(first, b, c, d).into()
}

/// Returns a Service. One in ten has a node port.
pub(crate) fn service(number: u32) -> Service {
    Service {
        name: ObjectName::new(format!("namespace-{}", number % 100), format!("service-{number}")),
        created: i64::from(number),
        ports: vec![ServicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: 80,
            node_port: number.is_multiple_of(10).then(|| 20_000 + (number / 10) as u16),
        }],
        cluster_ips: vec![address(172, number)],
        external_ips: vec![],
        load_balancer_ips: vec![],
        proxied_load_balancer_ips: vec![],
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_seconds: None,
        source_ranges: vec![],
        health_check_node_port: None,
        algorithm: None,
        forwarding: None,
    }
}

/// Returns the only slice of the Service with this number.
pub(crate) fn slice(number: u32, endpoints: u32) -> EndpointSlice {
    EndpointSlice {
        name: ObjectName::new(format!("namespace-{}", number % 100), format!("service-{number}-x7k2p")),
        service: format!("service-{number}").into(),
        family: IpFamily::Ipv4,
        ports: vec![EndpointPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 }],
        endpoints: (number * endpoints..(number + 1) * endpoints).map(endpoint).collect(),
        triggered: None,
    }
}

pub(crate) fn endpoint(number: u32) -> Endpoint {
    Endpoint {
        address: address(10, number),
        ready: true,
        serving: true,
        terminating: false,
        weight: 1,
        node: Some(Arc::from(format!("node-{}", number % NODES))),
        hints: None,
    }
}
