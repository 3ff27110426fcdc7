//! The limits of this mode, and what it does instead.

use std::{collections::BTreeMap, io, net::SocketAddr};

use super::{listen::ListenError, plan::ListenerKey};
use crate::{
    model::{
        desired::{DesiredPort, Frontend, FrontendKind},
        objects::{Protocol, TrafficPolicy},
    },
    modes::{
        Effect, UnservedField,
        unserved::{balancing, field},
    },
};

/// The number of addresses that a text names. The other ones are counted.
const MOST_NAMED: usize = 3;

const SCTP: UnservedField = UnservedField::new(
    "spec.ports[].protocol",
    Effect::NotServed,
    "mode userspace has no SCTP: the port is not served",
);

const EXTERNAL_POLICY: UnservedField = UnservedField::new(
    "spec.externalTrafficPolicy",
    Effect::ServedDifferently,
    "endpoints of this node only, but they see the node's address: mode userspace makes connections of its own",
);

pub(super) fn unserved_fields(port: &DesiredPort) -> Vec<UnservedField> {
    let is_external = || port.frontends.iter().any(|one| one.kind != FrontendKind::ClusterIp);
    let is_sctp = port.name.protocol == Protocol::Sctp;
    let asked = [
        (is_sctp, SCTP),
        (!is_sctp && port.external_policy == TrafficPolicy::Local && is_external(), EXTERNAL_POLICY),
    ];
    let own = asked.into_iter().filter(|(asked, _)| *asked).map(|(_, one)| one);
    own.chain(balancing(port, "mode userspace takes endpoints in turn, each alike")).collect()
}

/// A listener that could not be opened.
#[derive(Debug)]
pub(super) struct Unlistened {
    pub(super) key: ListenerKey,
    pub(super) frontends: Vec<Frontend>,
    pub(super) why: String,
}

/// Returns why nothing can listen there, for people.
pub(super) fn why(error: &ListenError, at: Option<SocketAddr>) -> String {
    let ListenError::Bind(error) = error else { return error.to_string() };
    match (error.raw_os_error(), at) {
        (Some(libc::EADDRNOTAVAIL), _) => {
            "it is no address of this node, and no rule redirects its clients here".to_owned()
        }
        (Some(libc::EACCES), Some(at)) => {
            format!("port {} needs CAP_NET_BIND_SERVICE (net.ipv4.ip_unprivileged_port_start)", at.port())
        }
        (Some(libc::EADDRINUSE), _) => "another program listens there".to_owned(),
        _ => io::Error::to_string(error),
    }
}

/// Returns what is not served for want of listeners, by field and reason, in an order that does not
/// change.
pub(super) fn without_listener(unlistened: &[Unlistened]) -> Vec<UnservedField> {
    let mut texts: BTreeMap<(&'static str, &str), Vec<String>> = BTreeMap::new();
    for Unlistened { key, frontends, why } in unlistened {
        for frontend in frontends {
            let address = key.at.unwrap_or(SocketAddr::new(frontend.address, frontend.port));
            texts.entry((field(frontend.kind), why)).or_default().push(address.to_string());
        }
    }
    let unserved_fields = texts.into_iter().map(|((field, why), addresses)| {
        let named = addresses[..addresses.len().min(MOST_NAMED)].join(", ");
        let more = addresses.len().saturating_sub(MOST_NAMED);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        UnservedField {
            field,
            effect: Effect::PartlyServed,
            instead: format!("not served: {named}{more}; {why}").into(),
        }
    });
    unserved_fields.collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        model::objects::Service,
        modes::userspace::{
            plan::Entrance,
            test_support::{changed_web, web},
        },
    };

    #[rstest]
    #[case::nothing_special(|_: &mut Service| {}, &[])]
    #[case::affinity(|service: &mut Service| service.affinity_seconds = Some(7), &[])]
    #[case::source_ranges(
        |service: &mut Service| service.source_ranges = vec!["10.0.0.0/8".parse().unwrap()],
        &[]
    )]
    #[case::internal_policy(|service: &mut Service| service.internal_policy = TrafficPolicy::Local, &[])]
    #[case::external_policy(
        |service: &mut Service| service.external_policy = TrafficPolicy::Local,
        &["spec.externalTrafficPolicy"]
    )]
    #[case::sctp(
        |service: &mut Service| {
            service.external_policy = TrafficPolicy::Local;
            service.ports[0].protocol = Protocol::Sctp;
        },
        &["spec.ports[].protocol"]
    )]
    fn fields_that_are_not_served_as_asked(
        #[case] change: impl FnOnce(&mut Service),
        #[case] expected: &[&str],
    ) {
        let port = changed_web(&["10.0.0.1:80"], change);
        let fields: Vec<_> = unserved_fields(&port).iter().map(|one| one.field).collect();
        assert_eq!(fields, expected);
    }

    #[test]
    fn an_external_policy_without_outside_clients_is_honoured() {
        let mut port = web(&["10.0.0.1:80"], TrafficPolicy::Local);
        std::sync::Arc::make_mut(&mut port).frontends.retain(|one| one.kind == FrontendKind::ClusterIp);
        assert_eq!(unserved_fields(&port), []);
    }

    #[rstest]
    #[case::not_ours(libc::EADDRNOTAVAIL, "it is no address of this node, and no rule redirects")]
    #[case::privileged(libc::EACCES, "port 80 needs CAP_NET_BIND_SERVICE")]
    #[case::taken(libc::EADDRINUSE, "another program listens there")]
    #[case::out_of_files(libc::EMFILE, "Too many open files")]
    fn addresses_that_cannot_be_listened_on(#[case] errno: i32, #[case] expected: &str) {
        let at: SocketAddr = "10.96.0.1:80".parse().unwrap();
        let why = why(&ListenError::Bind(io::Error::from_raw_os_error(errno)), Some(at));
        assert!(why.starts_with(expected), "{why}");
        let port = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
        let key = ListenerKey { name: port.name.clone(), entrance: Entrance::ClusterIp, at: Some(at) };
        let frontends = vec![port.frontends[0]];
        let [one] = without_listener(&[Unlistened { key, frontends, why }]).try_into().unwrap();
        assert_eq!(one.field, "spec.clusterIPs");
        assert!(one.instead.starts_with("not served: 10.96.0.1:80; "), "{}", one.instead);
        assert!(one.leaves_unserved() && one.may_be_served_by_another());
    }
}
