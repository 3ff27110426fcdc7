//! Lists the fields of a service port that this mode does not serve as asked, and what it does
//! instead.

use crate::{
    config::SocketLoadBalancing,
    model::{
        desired::{DesiredPort, FrontendKind},
        objects::{NodeForwarding, Protocol},
    },
    modes::{Effect, UnservedField},
};

const SCTP: UnservedField = UnservedField::new(
    "spec.ports[].protocol",
    Effect::NotServed,
    "SCTP is not built yet: the port is not served",
);

/// Packets that the node sends to itself meet no packet program.
const OWN_NODE_PORTS: UnservedField = UnservedField::new(
    "spec.ports[].nodePort",
    Effect::NotToOwnNode(FrontendKind::NodePort),
    "processes of this node do not reach its own node ports: ebpf.socketLoadBalancing is off",
);

/// A Service cannot make a node accept encapsulated packets.
const DIRECT: UnservedField = UnservedField::new(
    "metadata.annotations[proxy-ctl.dev/forwarding]",
    Effect::ServedDifferently,
    "answers of other nodes come back through this one: it asks for more than ebpf.forwarding, and \
     ebpf.allowForwardingAnnotation is false",
);

pub(super) fn unserved_fields(
    port: &DesiredPort,
    balancing: SocketLoadBalancing,
    forwarding: NodeForwarding,
) -> Vec<UnservedField> {
    let has_node_port = port.frontends.iter().any(|one| one.kind == FrontendKind::NodePort);
    let asked = [
        (balancing == SocketLoadBalancing::Off && has_node_port, OWN_NODE_PORTS),
        (forwarding.refuses(port.forwarding, port.name.protocol), DIRECT),
        (port.name.protocol == Protocol::Sctp, SCTP),
    ];
    asked.into_iter().filter(|(asked, _)| *asked).map(|(_, one)| one).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rstest::rstest;

    use super::*;
    use crate::{
        model::{
            Model,
            desired::DesiredPort,
            objects::{Forwarding, Service, ServicePort},
            test_support::service,
        },
        modes::servable,
    };

    /// Returns the only port of the Service, in IPv4.
    fn port(change: impl FnOnce(&mut Service)) -> Arc<DesiredPort> {
        let mut service = service("default/web", &["10.0.0.1"]);
        service.load_balancer_ips = vec!["203.0.113.1".parse().unwrap()];
        service.source_ranges = vec!["10.0.0.0/8".parse().unwrap()];
        change(&mut service);
        let mut model = Model::new("node");
        model.apply_service(service);
        Arc::clone(&model.take_changes().changed[0])
    }

    #[test]
    fn a_port_without_special_wishes_is_supported() {
        let port = port(|service| service.affinity_seconds = Some(10_800));
        assert_eq!(unserved_fields(&port, SocketLoadBalancing::All, NodeForwarding::default()), []);
        assert_eq!(servable(Arc::clone(&port), &[]), Some(port));
    }

    #[test]
    fn sctp_is_not_served() {
        let port = port(|service| {
            service.ports =
                vec![ServicePort { name: "".into(), protocol: Protocol::Sctp, port: 81, node_port: None }];
        });
        assert_eq!(unserved_fields(&port, SocketLoadBalancing::All, NodeForwarding::default()), [SCTP]);
        assert_eq!(
            servable(
                Arc::clone(&port),
                &unserved_fields(&port, SocketLoadBalancing::All, NodeForwarding::default())
            ),
            None
        );
    }

    #[test]
    fn direct_server_return_beyond_the_nodes_setting_is_told() {
        let port = port(|service| service.forwarding = Some(Forwarding::Dsr));
        let told = |forwarding| unserved_fields(&port, SocketLoadBalancing::All, forwarding);
        let node = NodeForwarding::default();
        assert_eq!(told(node), [DIRECT]);
        assert_eq!(told(NodeForwarding { allows_more: true, ..node }), []);
        assert_eq!(told(NodeForwarding { by_default: Forwarding::Dsr, ..node }), []);
    }

    #[rstest]
    #[case::all(SocketLoadBalancing::All, &[])]
    #[case::host(SocketLoadBalancing::Host, &[])]
    #[case::off(SocketLoadBalancing::Off, &[OWN_NODE_PORTS])]
    fn own_node_ports_need_socket_hooks(
        #[case] balancing: SocketLoadBalancing,
        #[case] expected: &[UnservedField],
    ) {
        let port = port(|service| service.ports[0].node_port = Some(30_080));
        let told = unserved_fields(&port, balancing, NodeForwarding::default());
        assert_eq!(told, expected);
        assert_eq!(servable(Arc::clone(&port), &told), Some(port), "others reach them");
    }
}
