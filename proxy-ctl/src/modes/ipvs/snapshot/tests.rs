use super::*;
use crate::{
    model::test_support::{ip, port_name},
    sys::net::ipvs::Balancing,
};

fn socket(address: &str) -> VirtualSocket {
    VirtualSocket { protocol: 6, address: address.parse().unwrap() }
}

/// Returns a ClusterIP, and a node port on two addresses. Both have a local endpoint and one that
/// is drained.
fn objects() -> KernelObjects {
    let (here, gone) = ("10.244.0.1:8080".parse().unwrap(), "10.244.1.1:8080".parse().unwrap());
    let server = ProgrammedServer {
        balancing: Balancing { scheduler: "rr".into(), affinity_seconds: Some(600), by_source_port: false },
        destinations: [(here, true), (gone, false)].into(),
    };
    let sockets = ["10.96.0.1:80", "192.0.2.10:30080", "198.51.100.10:30080"].map(socket);
    let set = |role| Set { role, family: IpFamily::Ipv4 };
    let itself = Member::SocketAndNetwork(socket("10.244.0.1:8080"), ip("10.244.0.1").into());
    KernelObjects {
        servers: sockets.into_iter().map(|socket| (socket, server.clone())).collect(),
        addresses: [(ip("10.96.0.1"), true)].into(),
        members: [
            (set(SetRole::ClusterIp), Member::Socket(sockets[0])),
            (set(SetRole::NodePort(Protocol::Tcp)), Member::Port(30_080)),
            (set(SetRole::NodePortLocal(Protocol::Tcp)), Member::Port(30_080)),
            (set(SetRole::Hairpin), itself),
        ]
        .into(),
    }
}

#[test]
fn a_service_port_with_its_name() {
    let name = port_name("default/web", "", IpFamily::Ipv4);
    let snapshot = snapshot(&objects(), |_| Some(name.clone()));
    let [service] = &snapshot.services[..] else { panic!("{snapshot:?}") };
    assert_eq!(service.name, name);
    let frontend =
        |address: Option<&str>, port, external| FrontendSnapshot { address: address.map(ip), port, external };
    assert_eq!(service.frontends, [frontend(Some("10.96.0.1"), 80, false), frontend(None, 30_080, true)]);
    let endpoint = EndpointSnapshot { address: "10.244.0.1:8080".parse().unwrap(), local: true, backend: 1 };
    for set in [&service.cluster, &service.internal, &service.external] {
        assert_eq!(*set, [endpoint]);
    }
    assert_eq!(
        (service.internal_policy, service.external_policy, service.affinity_seconds),
        (TrafficPolicy::Cluster, TrafficPolicy::Local, 600)
    );
    let backends: Vec<_> = snapshot
        .backends
        .iter()
        .map(|one| (one.address.to_string(), one.local, one.terminating, one.uses))
        .collect();
    assert_eq!(
        backends,
        [("10.244.0.1:8080".to_owned(), true, false, 3), ("10.244.1.1:8080".to_owned(), false, true, 3)]
    );
    let on = snapshot.node.node_port_addresses;
    assert_eq!(on, [(ip("192.0.2.10"), false), (ip("198.51.100.10"), false)]);
}

#[test]
fn without_a_controller_virtual_servers_have_their_address_for_a_name() {
    let names: Vec<_> =
        snapshot(&objects(), |_| None).services.iter().map(|one| one.name.service.name.to_string()).collect();
    assert_eq!(names, ["10.96.0.1:80", "192.0.2.10:30080", "198.51.100.10:30080"]);
}
