//! The requirements of mode iptables.

use super::trial;
use crate::{
    config::Config,
    model::mode::{HostFacts, Mode, Probe, Requirement},
    modes::netfilter::requirements::{iptables, net_admin, unserved_family},
    sys::xtables::{self, ChosenBackend},
};

/// Fields without effect in this mode. The other fields of `ipvs` have an effect if mode ipvs was
/// asked for.
pub(in crate::modes) const UNUSED_FIELDS: &[&str] =
    &["ipvs.scheduler", "ipvs.strictARP", "ipvs.tcpFinTimeout", "ipvs.tcpTimeout", "ipvs.udpTimeout"];

pub(in crate::modes) fn probe(config: &Config, host: &HostFacts) -> Probe {
    let mut probe = answer(config, host);
    if probe.can_run() {
        probe.remarks.push(match xtables::choose() {
            Ok(ChosenBackend { backend, reason }) => {
                probe.requirements.push(trial::requirement(backend));
                format!("rules are written to the backend {backend} of iptables: {reason}")
            }
            Err(error) => format!("which backend of iptables the node uses is not known: {error}"),
        });
    }
    probe
}

fn answer(config: &Config, host: &HostFacts) -> Probe {
    let cannot_set = host.route_localnet == Some(false) && !host.parameters_writable;
    let route_localnet = Requirement::new("routeLocalnet", "route_localnet", host.route_localnet)
        .lacking(host.route_localnet.is_none(), || {
            "the kernel has no parameter net.ipv4.conf.all.route_localnet (3.6), or /proc is not mounted"
                .to_owned()
        })
        .lacking(config.serves_node_ports_on_loopback() && cannot_set, || {
            "net.ipv4.conf.all.route_localnet is 0 and /proc/sys is read-only: run once with --init-only and \
             privileges, or set iptables.localhostNodePorts to false"
                .to_owned()
        });
    Probe {
        mode: Mode::Iptables,
        requirements: vec![Requirement::kernel(host), net_admin(host), iptables(host), route_localnet],
        remarks: unserved_family(host).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{config::NodePortAddress, model::mode::recorded::Host};

    fn told(host: &Host, change: fn(&mut HostFacts)) -> (Vec<String>, Vec<String>) {
        let mut facts = host.facts();
        change(&mut facts);
        let probe = answer(&Config::default(), &facts);
        (probe.obstacles().map(str::to_owned).collect(), probe.remarks)
    }

    #[rstest]
    fn possible(
        #[values("debian 5.10", "debian 6.1", "debian 6.12", "debian 7.2", "microvm 6.18")] name: &str,
        #[values(false, true)] contained: bool,
    ) {
        let host = if contained { Host::named(name).contained() } else { Host::named(name) };
        assert_eq!(told(&host, |_| ()), (Vec::new(), Vec::new()));
    }

    #[rstest]
    #[case::no_tool(Host::named("debian 6.12").without(&["iptables", "ip6tables"]), "there is no iptables on PATH")]
    #[case::old_tool(
        Host::named("debian 6.12").with("iptables", "iptables v1.4.21").without(&["ip6tables"]),
        "iptables 1.6.2 or newer is needed"
    )]
    #[case::tool_of_the_other_backend(
        Host::named("microvm 6.18").with("config", "CONFIG_NETFILTER_XTABLES=y\n"),
        "the kernel is built without CONFIG_NF_TABLES"
    )]
    #[case::no_parameter(Host::named("debian 6.12").without(&["route_localnet"]), "route_localnet")]
    fn impossible(#[case] host: Host, #[case] why: &str) {
        let (obstacles, _) = told(&host, |_| ());
        assert!(obstacles.len() == 1 && obstacles[0].contains(why), "{obstacles:?}");
    }

    #[rstest]
    #[case::no_ip6tables(|facts: &mut HostFacts| facts.ip6tables.clear(), Some("IPv6 is not served"))]
    #[case::no_ipv6(|facts: &mut HostFacts| { facts.ip6tables.clear(); facts.ipv6 = false; }, None)]
    #[case::no_iptables(|facts: &mut HostFacts| facts.iptables.clear(), Some("IPv4 is not served"))]
    #[case::read_only_proc_that_is_set(
        |facts: &mut HostFacts| { facts.parameters_writable = false; facts.route_localnet = Some(true); },
        None
    )]
    fn less_than_all(#[case] change: fn(&mut HostFacts), #[case] remark: Option<&str>) {
        let (obstacles, remarks) = told(&Host::named("debian 6.1"), change);
        assert_eq!((obstacles.len(), remarks.len()), (0, remark.iter().len()), "{obstacles:?} {remarks:?}");
        assert!(remarks.iter().zip(remark).all(|(found, text)| found.contains(text)), "{remarks:?}");
    }

    #[rstest]
    #[case::everywhere(true, &[], Some("--init-only"))]
    #[case::switched_off(false, &[], None)]
    #[case::on_addresses_without_loopback(true, &["192.0.2.0/24"], None)]
    #[case::on_addresses_of_the_other_family(true, &["2001:db8::/64"], Some("--init-only"))]
    #[case::on_loopback_too(true, &["192.0.2.0/24", "127.0.0.0/8"], Some("--init-only"))]
    fn a_read_only_proc_is_enough_only_without_node_ports_on_localhost(
        #[case] localhost_node_ports: bool,
        #[case] addresses: &[&str],
        #[case] why: Option<&str>,
    ) {
        let facts = HostFacts { parameters_writable: false, ..Host::named("debian 6.1").facts() };
        let mut config = Config {
            node_port_addresses: addresses
                .iter()
                .map(|one| NodePortAddress::Network(one.parse().unwrap()))
                .collect(),
            ..Config::default()
        };
        config.iptables.localhost_node_ports = localhost_node_ports;
        let obstacles: Vec<_> = answer(&config, &facts).obstacles().map(str::to_owned).collect();
        assert_eq!(obstacles.len(), why.iter().len(), "{obstacles:?}");
        assert!(obstacles.iter().zip(why).all(|(found, why)| found.contains(why)), "{obstacles:?}");
    }
}
