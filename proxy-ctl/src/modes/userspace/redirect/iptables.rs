//! Rules of iptables that redirect clients of frontends to the listeners, in the chains that
//! kube-proxy had in its mode userspace (up to 1.25). They are written whole, because the backend
//! legacy copies the table for each change anyway.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use super::{DIALLING_GROUP, PortRedirects, RedirectError, RedirectRules, Wanted, of_port};
use crate::{
    model::{
        desired::FrontendKind,
        mode::Mode,
        objects::{IpFamily, Protocol},
    },
    modes::netfilter::{
        chains::{Chains, FamilyChains, Jump},
        own_rules,
    },
    names::{
        NODE_PORT_CONTAINER, NODE_PORT_HOST, NODE_PORTS_COMMENT, PORTALS_COMMENT, PORTALS_CONTAINER,
        PORTALS_HOST,
    },
    sys::xtables::Backend,
};

const TABLE: &str = "nat";

const JUMPS: [Jump; 2] = [
    Jump { table: TABLE, from: "PREROUTING", to: PORTALS_CONTAINER, comment: PORTALS_COMMENT },
    Jump { table: TABLE, from: "OUTPUT", to: PORTALS_HOST, comment: PORTALS_COMMENT },
];

/// Returns the chains of one family with all their rules.
fn chains(family: IpFamily, wanted: &Wanted) -> Chains {
    // REDIRECT would take an address of the interface, and an interface that leads to a pod may
    // have none.
    let arriving = |port: u16| match wanted.own(family) {
        Some(own) => format!("DNAT --to-destination {}", SocketAddr::new(own, port)),
        None => format!("REDIRECT --to-ports {port}"),
    };
    let (mut portals_container, mut portals_host) = (Vec::new(), Vec::new());
    let (mut node_container, mut node_host) = (Vec::new(), Vec::new());
    // When no rule uses connection tracking any more, the kernel ends it, and with it the
    // translation of established connections. So the owner tag is a rule that uses it.
    let tag = own_rules::owner_tag(Mode::Userspace);
    portals_container.extend(tag.map(|tag| format!("-m conntrack --ctstate NEW {tag}")));
    portals_host.push(format!("-m owner --gid-owner {DIALLING_GROUP} -j RETURN"));
    for (name, redirects) in wanted.ports.iter().filter(|(name, _)| name.family == family) {
        for (redirected, port) in of_port(name, redirects) {
            let (container, host, address) = match redirected.frontend.kind {
                FrontendKind::NodePort => (&mut node_container, &mut node_host, String::new()),
                FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
                    let address = format!("-d {} ", IpNet::from(redirected.frontend.address));
                    (&mut portals_container, &mut portals_host, address)
                }
            };
            let protocol = match redirected.protocol {
                Protocol::Tcp => "tcp",
                Protocol::Udp => "udp",
                // Nothing listens for SCTP.
                Protocol::Sctp => continue,
            };
            let matches = format!(
                "{address}-p {protocol} -m comment --comment \"{name}\" -m {protocol} --dport {}",
                redirected.frontend.port
            );
            container.push(format!("{matches} -j {}", arriving(port)));
            host.push(format!("{matches} -j REDIRECT --to-ports {port}"));
        }
    }
    let to_node_ports = |address: IpAddr, chain: &str| {
        format!("-d {} -m comment --comment \"{NODE_PORTS_COMMENT}\" -j {chain}", IpNet::from(address))
    };
    for address in wanted.node_addresses(family) {
        portals_container.push(to_node_ports(address, NODE_PORT_CONTAINER));
        portals_host.push(to_node_ports(address, NODE_PORT_HOST));
    }
    Chains::from([
        ((TABLE, PORTALS_CONTAINER), portals_container),
        ((TABLE, PORTALS_HOST), portals_host),
        ((TABLE, NODE_PORT_CONTAINER), node_container),
        ((TABLE, NODE_PORT_HOST), node_host),
    ])
}

pub(super) struct PortalChains {
    families: Vec<FamilyChains>,
}

impl PortalChains {
    /// Makes the chains, without rules that redirect clients. Needs CAP_NET_ADMIN. `None`: it
    /// cannot be done, or there are no tools.
    pub(super) fn open(backend: Backend) -> Option<Self> {
        let make = |mut of: FamilyChains| match of.write(&chains(of.family, &Wanted::default()), &JUMPS) {
            Ok(_) => Some(of),
            Err(error) => {
                tracing::debug!(%error, family = of.family.name(), "no rules of iptables");
                None
            }
        };
        let families: Vec<_> = FamilyChains::open(backend).into_iter().filter_map(make).collect();
        (!families.is_empty()).then_some(Self { families })
    }
}

impl RedirectRules for PortalChains {
    fn by(&self) -> String {
        let tools = self.families.first().map(|of| of.tools.version());
        format!("iptables {}", tools.unwrap_or_default())
    }

    fn families(&self) -> Vec<IpFamily> {
        self.families.iter().map(|of| of.family).collect()
    }

    fn change(
        &mut self,
        wanted: &Wanted,
        _go: &PortRedirects,
        _come: &PortRedirects,
    ) -> Result<(), RedirectError> {
        self.rewrite(wanted)
    }

    fn rewrite(&mut self, wanted: &Wanted) -> Result<(), RedirectError> {
        self.restore(wanted).map(drop)
    }

    fn restore(&mut self, wanted: &Wanted) -> Result<bool, RedirectError> {
        let mut written = 0;
        for of in &mut self.families {
            written += of.write(&chains(of.family, wanted), &JUMPS)?;
        }
        Ok(written > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::objects::TrafficPolicy,
        modes::userspace::{redirect::PortRedirect, test_support::web},
        names::{self, is_chain, is_comment_of_jump},
    };

    #[test]
    fn each_frontend_has_a_rule_for_those_who_come_in_and_one_for_the_node() {
        let port = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
        let redirects =
            port.frontends.iter().map(|frontend| PortRedirect { frontend: *frontend, port: 40_000 });
        let mut wanted = Wanted {
            addresses: ["192.0.2.1", "fd00::1"].map(|address| address.parse().unwrap()).into(),
            own: vec!["192.0.2.1".parse().unwrap()],
            ..Wanted::default()
        };
        wanted.change(vec![(port.name.clone(), redirects.collect())]);
        let of_ipv4 = chains(IpFamily::Ipv4, &wanted);
        let matches = "-p tcp -m comment --comment \"default/web\" -m tcp --dport";
        let [container, host] = [PORTALS_CONTAINER, PORTALS_HOST].map(|chain| &of_ipv4[&(TABLE, chain)]);
        let tag = "-m conntrack --ctstate NEW -m comment --comment \"proxy-ctl in mode userspace\"";
        assert_eq!(container[0], tag);
        let cluster_ip = format!("-d 10.96.0.1/32 {matches} 80 -j ");
        assert_eq!(container[1], format!("{cluster_ip}DNAT --to-destination 192.0.2.1:40000"));
        assert_eq!(host[0], "-m owner --gid-owner 65529 -j RETURN", "before all that redirect");
        assert_eq!(host[1], format!("{cluster_ip}REDIRECT --to-ports 40000"));
        let node_ports = format!("-d 192.0.2.1/32 -m comment --comment \"{NODE_PORTS_COMMENT}\" -j ");
        assert_eq!(container[4..], [format!("{node_ports}{NODE_PORT_CONTAINER}")]);
        assert_eq!(host[4..], [format!("{node_ports}{NODE_PORT_HOST}")]);
        let node_port = &of_ipv4[&(TABLE, NODE_PORT_CONTAINER)];
        assert_eq!(*node_port, [format!("{matches} 30080 -j DNAT --to-destination 192.0.2.1:40000")]);

        let of_ipv6 = chains(IpFamily::Ipv6, &wanted);
        assert_eq!(of_ipv6[&(TABLE, PORTALS_CONTAINER)].len(), 2, "the owner tag, and node ports");
        for (table, chain) in of_ipv4.keys() {
            assert!(is_chain(table, chain, names::Scope::default()), "{table} {chain}");
        }
        assert!(JUMPS.iter().all(|jump| is_comment_of_jump(jump.comment)));
    }
}
