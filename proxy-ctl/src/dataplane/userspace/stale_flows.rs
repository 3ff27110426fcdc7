//! UDP flows that rules led elsewhere before: the kernel would go on so as long as the client goes on sending.

use std::{collections::BTreeSet, net::IpAddr};

use nix::sys::socket::AddressFamily;

use super::redirect::{ElementKey, Elements};
use crate::{
    model::objects::{IpFamily, Protocol},
    sys::{
        CallError,
        conntrack::{Conntrack, UdpFlow},
    },
};

/// What leads elsewhere, or nowhere, since flows were ended last.
#[derive(Debug, Default)]
pub(super) struct StaleFlows {
    pending: Elements,
}

impl StaleFlows {
    pub(super) fn note(&mut self, go: &Elements, come: &Elements) {
        let udp = |(key, _): &(&ElementKey, &Option<u16>)| key.protocol == Some(Protocol::Udp);
        self.pending.extend(go.iter().filter(udp).map(|(key, _)| (key.clone(), None)));
        self.pending.extend(come.iter().filter(udp).map(|(key, port)| (key.clone(), *port)));
    }

    fn is_stale(&self, family: IpFamily, flow: &UdpFlow, node_addresses: &BTreeSet<IpAddr>) -> bool {
        let (address, port) = (flow.destination.ip(), flow.destination.port());
        let of_address = self.pending.get(&ElementKey::frontend(family, Protocol::Udp, address, port));
        let of_node_port = || {
            let found = self.pending.get(&ElementKey::node_port(family, Protocol::Udp, port));
            found.filter(|_| node_addresses.contains(&address))
        };
        of_address.or_else(of_node_port).is_some_and(|leads_to| *leads_to != Some(flow.replier.port()))
    }

    /// What fails stays pending for the next change.
    pub(super) fn end(&mut self, node_addresses: &BTreeSet<IpAddr>) {
        if self.pending.is_empty() {
            return;
        }
        match self.try_end(node_addresses) {
            Ok(()) => self.pending.clear(),
            Err(error) => tracing::warn!(
                %error,
                "UDP flows to listeners that are gone could not be ended; it is tried again with the next change"
            ),
        }
    }

    fn try_end(&self, node_addresses: &BTreeSet<IpAddr>) -> Result<(), CallError> {
        let conntrack = Conntrack::open()?;
        let families: BTreeSet<IpFamily> = self.pending.keys().map(|key| key.family).collect();
        for family in families {
            let kernels = match family {
                IpFamily::Ipv4 => AddressFamily::Inet,
                IpFamily::Ipv6 => AddressFamily::Inet6,
            };
            let flows = conntrack.udp_flows(kernels)?;
            for flow in flows.iter().filter(|flow| self.is_stale(family, flow, node_addresses)) {
                conntrack.remove(kernels, flow)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::another_listener("10.96.0.10:53", "192.0.2.1:40001", true)]
    #[case::the_same_listener("10.96.0.10:53", "127.0.0.1:40002", false)]
    #[case::not_led_before("10.96.0.10:53", "10.96.0.10:53", true)]
    #[case::another_port("10.96.0.10:54", "192.0.2.1:40001", false)]
    #[case::led_nowhere_now("10.96.0.11:53", "192.0.2.1:40001", true)]
    #[case::node_port("192.0.2.1:30053", "192.0.2.1:40001", true)]
    #[case::node_port_of_another_node("192.0.2.2:30053", "192.0.2.2:30053", false)]
    fn flows_after_a_change(#[case] destination: &str, #[case] replier: &str, #[case] expected: bool) {
        let (family, udp) = (IpFamily::Ipv4, Protocol::Udp);
        let key = |address: &str| ElementKey::frontend(family, udp, address.parse().unwrap(), 53);
        let node_port = ElementKey::node_port(family, udp, 30_053);
        let go = Elements::from([(key("10.96.0.10"), Some(40_001)), (key("10.96.0.11"), Some(40_001))]);
        let come = Elements::from([(key("10.96.0.10"), Some(40_002)), (node_port, Some(40_003))]);
        let mut stale = StaleFlows::default();
        stale.note(&go, &come);
        let node = BTreeSet::from(["192.0.2.1".parse().unwrap()]);
        let flow = UdpFlow::new(destination.parse().unwrap(), replier.parse().unwrap());
        assert_eq!(stale.is_stale(family, &flow, &node), expected);
    }

    #[test]
    fn connections_of_tcp_are_not_asked_for() {
        let key = ElementKey::node_port(IpFamily::Ipv4, Protocol::Tcp, 30_080);
        let mut stale = StaleFlows::default();
        stale.note(&Elements::from([(key, Some(40_001))]), &Elements::new());
        assert!(stale.pending.is_empty());
    }
}
