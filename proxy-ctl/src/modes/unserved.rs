//! Texts that say what of a service port is not served as its Service asks, because the mode cannot
//! do it or because it must not be done.

use std::{borrow::Cow, collections::BTreeMap, net::SocketAddr, sync::Arc};

use crate::model::{
    desired::{DesiredPort, Frontend, FrontendKind, UnservedReason, weigh_alike},
    objects::{Algorithm, Forwarding},
};

/// The number of frontends that a text names. The other ones are counted.
const MOST_NAMED: usize = 3;

/// A field of a Service that is not served as asked.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct UnservedField {
    /// The field's name in Kubernetes, such as `spec.sessionAffinity`.
    pub field: &'static str,
    pub effect: Effect,
    /// A text for people that says what happens instead.
    pub instead: Cow<'static, str>,
}

/// The part of the service port that is served nevertheless.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Effect {
    /// Every frontend is served, but not as the field says.
    ServedDifferently,
    /// Every frontend is served, but those of this kind not to processes of the own node.
    NotToOwnNode(FrontendKind),
    /// Every frontend is served but those that the model leaves out, because nobody may take them.
    Refused,
    /// Some frontends are not served, or only their former endpoints are. There is no room for
    /// more, nothing can listen there, or the kernel refuses it.
    PartlyServed,
    /// Every frontend is served, some of them by the secondary mode.
    Delegated,
    /// Every frontend is served but those at which the node itself listens.
    LeftToNode,
    NotServed,
}

impl Effect {
    /// Returns the name that `status` shows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ServedDifferently => "servedDifferently",
            Self::NotToOwnNode(_) | Self::Refused | Self::PartlyServed => "partlyServed",
            Self::Delegated => "delegated",
            Self::LeftToNode => "leftToNode",
            Self::NotServed => "notServed",
        }
    }
}

impl UnservedField {
    pub const fn new(field: &'static str, effect: Effect, instead: &'static str) -> Self {
        Self { field, effect, instead: Cow::Borrowed(instead) }
    }

    /// Returns true if some frontend of the service port is not served.
    pub fn leaves_unserved(&self) -> bool {
        !matches!(self.effect, Effect::ServedDifferently | Effect::Delegated | Effect::LeftToNode)
    }

    /// Returns true if another kube-proxy may and should serve what is not served here.
    pub fn may_be_served_by_another(&self) -> bool {
        self.leaves_unserved() && self.effect != Effect::Refused
    }
}

/// Returns the annotations for mode ebpf that another mode does not honour. `instead` says how that
/// mode chooses.
pub(super) fn balancing(port: &DesiredPort, instead: &'static str) -> Vec<UnservedField> {
    let is_direct = |forwarding: Forwarding| forwarding.of_protocol(port.name.protocol) == Forwarding::Dsr;
    let forwarding = UnservedField::new(
        "metadata.annotations[proxy-ctl.dev/forwarding]",
        Effect::ServedDifferently,
        "answers of other nodes come back through this one",
    );
    let asked = [
        (
            port.algorithm.is_some_and(|algorithm| algorithm != Algorithm::Random),
            "metadata.annotations[proxy-ctl.dev/algorithm]",
        ),
        (!weigh_alike(&port.endpoints.all), "EndpointSlice metadata.annotations[proxy-ctl.dev/weights]"),
    ];
    let unserved = |field| UnservedField::new(field, Effect::ServedDifferently, instead);
    let balancing = asked.into_iter().filter(|(asked, _)| *asked).map(|(_, field)| unserved(field));
    balancing.chain(port.forwarding.is_some_and(is_direct).then_some(forwarding)).collect()
}

/// Returns the port, unless the mode serves nothing of it.
pub fn servable(port: Arc<DesiredPort>, unserved_fields: &[UnservedField]) -> Option<Arc<DesiredPort>> {
    let is_served = unserved_fields.iter().all(|one| one.effect != Effect::NotServed);
    is_served.then_some(port)
}

/// Returns the frontends that the model leaves out, grouped by field and reason.
pub fn refused(port: &DesiredPort) -> Vec<UnservedField> {
    let mut texts: BTreeMap<(&'static str, &'static str), (Vec<String>, usize)> = BTreeMap::new();
    for unserved in &port.unserved {
        let (why, by) = match &unserved.reason {
            // The Service asks for such frontends to be left out.
            UnservedReason::NotVirtual => continue,
            UnservedReason::OwnedBy(owner) => ("another Service has it", format!(" ({owner})")),
            UnservedReason::ClusterIpOf(owner) => {
                ("the address is another Service's ClusterIP", format!(" ({owner})"))
            }
            UnservedReason::SpecialAddress => {
                ("loopback, link-local, multicast and unspecified addresses are not served", String::new())
            }
        };
        let (named, more) = texts.entry((field(unserved.frontend.kind), why)).or_default();
        if named.len() < MOST_NAMED {
            named.push(format!("{}{by}", shown(&unserved.frontend)));
        } else {
            *more += 1;
        }
    }
    let unserved_fields = texts.into_iter().map(|((field, why), (named, more))| {
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let instead = format!("not served: {}{more}; {why}", named.join(", ")).into();
        UnservedField { field, effect: Effect::Refused, instead }
    });
    unserved_fields.collect()
}

/// Returns the field of a Service that asks for frontends of this kind.
pub(super) fn field(kind: FrontendKind) -> &'static str {
    match kind {
        FrontendKind::ClusterIp => "spec.clusterIPs",
        FrontendKind::NodePort => "spec.ports[].nodePort",
        FrontendKind::ExternalIp => "spec.externalIPs",
        FrontendKind::LoadBalancer => "status.loadBalancer.ingress[].ip",
    }
}

fn shown(frontend: &Frontend) -> String {
    match frontend.kind {
        FrontendKind::NodePort => frontend.port.to_string(),
        FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
            SocketAddr::new(frontend.address, frontend.port).to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::{
        Model,
        objects::{Endpoint, Service},
        test_support::{port, remote, service, slice},
    };

    #[rstest]
    #[case::nothing(None, None, [1, 1], &[])]
    #[case::random(Some(Algorithm::Random), Some(Forwarding::Snat), [7, 7], &[])]
    #[case::maglev(Some(Algorithm::Maglev), None, [1, 1], &["metadata.annotations[proxy-ctl.dev/algorithm]"])]
    #[case::least_connection(Some(Algorithm::LeastConnection), None, [1, 1], &["metadata.annotations[proxy-ctl.dev/algorithm]"])]
    #[case::hybrid(None, Some(Forwarding::Hybrid), [1, 1], &["metadata.annotations[proxy-ctl.dev/forwarding]"])]
    #[case::weights(None, None, [1, 2], &["EndpointSlice metadata.annotations[proxy-ctl.dev/weights]"])]
    fn what_only_mode_ebpf_honours_is_told(
        #[case] algorithm: Option<Algorithm>,
        #[case] forwarding: Option<Forwarding>,
        #[case] weights: [u8; 2],
        #[case] fields: &[&str],
    ) {
        let mut model = Model::new("node");
        model.apply_service(Service { algorithm, forwarding, ..service("a/web", &["10.96.0.1"]) });
        let endpoints = ["10.0.0.1", "10.0.0.2"].iter().zip(weights);
        let endpoints = endpoints.map(|(address, weight)| Endpoint { weight, ..remote(address) }).collect();
        model.apply_slice(slice("a/web-1", "web", endpoints));
        let told = balancing(&model.take_changes().changed[0], "each alike");
        assert_eq!(told.iter().map(|one| one.field).collect::<Vec<_>>(), fields);
        assert!(told.iter().all(|one| one.effect == Effect::ServedDifferently && !one.leaves_unserved()));
    }

    #[test]
    fn what_the_model_leaves_out_is_told_by_field_with_some_addresses() {
        let mut thief = service("a/thief", &["10.96.0.1"]).created(-1).node_port(30080);
        for address in ["10.96.0.2", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"] {
            thief = thief.external_ip(address);
        }
        let victim = service("b/victim", &["10.96.0.2"]).ports(vec![port("http", 80).node_port(30080)]);
        let mut model = Model::new("node");
        model.replace_services(vec![thief, victim]);
        let ports = model.take_changes().changed;
        let told: Vec<_> = refused(&ports[0]).into_iter().map(|one| (one.field, one.instead)).collect();
        let cluster_ip =
            "not served: 10.96.0.2:80 (b/victim); the address is another Service's ClusterIP".into();
        let special = "not served: 127.0.0.1:80, 127.0.0.2:80, 127.0.0.3:80 and 2 more; \
                       loopback, link-local, multicast and unspecified addresses are not served";
        assert_eq!(told, [("spec.externalIPs", special.into()), ("spec.externalIPs", cluster_ip)]);
        let [lost] = refused(&ports[1]).try_into().unwrap();
        assert_eq!(lost.field, "spec.ports[].nodePort");
        assert_eq!(lost.instead, "not served: 30080 (a/thief); another Service has it");
        assert!(lost.leaves_unserved() && !lost.may_be_served_by_another());
        assert_eq!(servable(Arc::clone(&ports[1]), &[lost]), Some(Arc::clone(&ports[1])));
    }
}
