//! The requirements of mode ipvs: modules and parameters of the kernel, ipset, and iptables for
//! what IPVS does not do.

use super::parameters::wanted;
use crate::{
    config::Config,
    model::mode::{HostFacts, KernelModule, KernelVersion, Mode, Probe, Requirement},
    modes::netfilter::requirements::{iptables, net_admin, unserved_family},
};

/// The first kernel in which one module tracks connections of both families.
const ONE_CONNTRACK: KernelVersion = KernelVersion::new(4, 19, 0);
/// The oldest protocol of ipset that is enough. Version 6.0 of the tools has it.
const OLDEST_IPSET: u8 = 6;
/// The path below /proc/sys of parameters that exist once the kernel has loaded IPVS.
const OF_IPVS: &str = "net/ipv4/vs/";

/// Fields without effect in this mode. It uses the section `ipvs`, and the bit of the fwmark from
/// `iptables`.
pub(in crate::modes) const UNUSED_FIELDS: &[&str] = &["nftables.masqueradeBit"];

pub(in crate::modes) fn probe(config: &Config, host: &HostFacts) -> Probe {
    let ipset = Requirement::new("ipsetProtocol", "protocol of ipset", host.ipset_protocol)
        .lacking(host.ipset_protocol.is_some_and(|protocol| protocol < OLDEST_IPSET), || {
            format!("the kernel's ipset is older than version 6.0 (protocol {OLDEST_IPSET}, Linux 2.6.39)")
        });
    let modules = modules(&config.ipvs.scheduler, host);
    Probe {
        mode: Mode::Ipvs,
        requirements: vec![
            Requirement::kernel(host),
            net_admin(host),
            Requirement::modules("ipvsModules", "modules of ipvs", host, &modules),
            parameters(config, host),
            ipset,
            iptables(host),
        ],
        remarks: unserved_family(host).into_iter().collect(),
    }
}

/// Returns the requirement that the mode's parameters exist, and are writable where they have
/// another value.
fn parameters(config: &Config, host: &HostFacts) -> Requirement {
    let dotted = |name: &str| name.replace('/', ".");
    let has_ipvs = host.modules.has(&KernelModule::named("ip_vs"));
    let lacking = |(name, value): (&'static str, u32)| match host.ipvs_parameters.get(name) {
        Some(found) if *found == value || host.parameters_writable => None,
        Some(found) => Some(format!(
            "{} is {found} and must be {value}, and /proc/sys is read-only: run once with --init-only and privileges",
            dotted(name)
        )),
        None if name.starts_with(OF_IPVS) && !has_ipvs => None,
        None => {
            let option = if name.ends_with("/conntrack") { " (CONFIG_IP_VS_NFCT)" } else { "" };
            Some(format!("the kernel has no parameter {}{option}, or /proc is not mounted", dotted(name)))
        }
    };
    let wanted = wanted(config.ipvs.strict_arp, &host.kernel_release);
    let found =
        |(name, _): &(&'static str, u32)| Some((dotted(name), (*host.ipvs_parameters.get(name)?).into()));
    let found: serde_json::Map<_, _> = wanted.iter().filter_map(found).collect();
    let missing = wanted.into_iter().filter_map(lacking).collect();
    Requirement { missing, ..Requirement::new("ipvsParameters", "parameters of ipvs", found) }
}

/// Returns the modules that the mode needs. `scheduler` is empty for round robin.
pub(super) fn modules(scheduler: &str, host: &HostFacts) -> Vec<KernelModule> {
    let schedulers = ["rr", "wrr", "sh"].into_iter();
    let chosen =
        (!scheduler.is_empty() && !schedulers.clone().any(|one| one == scheduler)).then_some(scheduler);
    let schedulers =
        schedulers.chain(chosen).map(|scheduler| KernelModule::named(&format!("ip_vs_{scheduler}")));
    let others = [
        KernelModule::named("ip_vs"),
        conntrack(host),
        KernelModule::named("ip_set"),
        KernelModule::new("xt_set", "CONFIG_NETFILTER_XT_SET"),
    ];
    others.into_iter().chain(schedulers).collect()
}

fn conntrack(host: &HostFacts) -> KernelModule {
    let of_ipv4 = KernelModule::named("nf_conntrack_ipv4");
    let is_older = host.kernel().is_some_and(|version| version < ONE_CONNTRACK);
    // The kernel 4.18 of RHEL 8 has the one module too.
    if is_older && host.modules.missing(&of_ipv4).is_none() {
        of_ipv4
    } else {
        KernelModule::named("nf_conntrack")
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::mode::{IPVS_PARAMETERS, RequestedMode, choose, recorded::Host};

    fn obstacles(host: &Host, scheduler: &str) -> Vec<String> {
        let mut config = Config::default();
        config.ipvs.scheduler = scheduler.to_owned();
        probe(&config, &host.facts()).obstacles().map(str::to_owned).collect()
    }

    #[rstest]
    #[case::to_be_loaded(Host::named("debian 5.10"))]
    #[case::loaded(Host::named("debian 6.1").loaded())]
    #[case::newest(Host::named("debian 7.2"))]
    #[case::boot_config_only(Host::named("debian 6.12").without(&["dep", "builtin", "modules"]))]
    #[case::container(Host::named("debian 6.12").contained())]
    #[case::built_in(Host::named("debian 6.12").without(&["dep", "modules"]).with(
        "config",
        "CONFIG_IP_VS=y\nCONFIG_IP_VS_RR=y\nCONFIG_IP_VS_WRR=y\nCONFIG_IP_VS_SH=y\nCONFIG_IP_VS_MH=y\n\
         CONFIG_NF_CONNTRACK=y\nCONFIG_IP_SET=y\nCONFIG_NETFILTER_XT_SET=y\nCONFIG_NF_TABLES=y\n"
    ))]
    fn possible(#[case] host: Host, #[values("", "rr", "mh")] scheduler: &str) {
        assert_eq!(obstacles(&host, scheduler), [""; 0]);
    }

    #[rstest]
    #[case::no_ipvs(Host::named("microvm 6.18"), "", "CONFIG_IP_VS")]
    #[case::no_such_scheduler(Host::named("debian 6.12"), "best", "CONFIG_IP_VS_BEST")]
    #[case::no_ipset(Host::named("debian 6.12").with("config", "CONFIG_NF_TABLES=m\nCONFIG_IP_VS=m\n"), "", "CONFIG_IP_SET")]
    #[case::no_iptables(Host::named("debian 6.12").without(&["iptables", "ip6tables"]), "", "no iptables on PATH")]
    fn impossible(#[case] host: Host, #[case] scheduler: &str, #[case] why: &str) {
        let obstacles = obstacles(&host, scheduler);
        assert!(obstacles.iter().any(|obstacle| obstacle.contains(why)), "{obstacles:?}");
    }

    /// Returns the facts of a node that has loaded IPVS, and whose parameters are as this mode
    /// wants them.
    fn prepared() -> HostFacts {
        let mut facts = Host::named("debian 6.1").loaded().facts();
        facts.ipvs_parameters.extend(wanted(true, &facts.kernel_release));
        facts
    }

    fn read_only(facts: &mut HostFacts, parameter: &'static str, value: u32) {
        facts.parameters_writable = false;
        facts.ipvs_parameters.insert(parameter, value);
    }

    #[rstest]
    #[case::read_only_and_as_wanted(|facts: &mut HostFacts| facts.parameters_writable = false, None)]
    #[case::writable(
        |facts: &mut HostFacts| { facts.ipvs_parameters.insert("net/ipv4/vs/conntrack", 0); },
        None
    )]
    #[case::read_only(
        |facts: &mut HostFacts| read_only(facts, "net/ipv4/vs/conntrack", 0),
        Some("net.ipv4.vs.conntrack is 0 and must be 1, and /proc/sys is read-only")
    )]
    #[case::read_only_without_forwarding(
        |facts: &mut HostFacts| read_only(facts, "net/ipv4/ip_forward", 0),
        Some("net.ipv4.ip_forward is 0 and must be 1")
    )]
    #[case::read_only_and_not_strict(
        |facts: &mut HostFacts| read_only(facts, "net/ipv4/conf/all/arp_ignore", 0),
        None
    )]
    #[case::without_conntrack_of_ipvs(
        |facts: &mut HostFacts| { facts.ipvs_parameters.remove("net/ipv4/vs/conntrack"); },
        Some("the kernel has no parameter net.ipv4.vs.conntrack (CONFIG_IP_VS_NFCT)")
    )]
    #[case::read_only_and_not_loaded_yet(
        |facts: &mut HostFacts| {
            *facts = HostFacts { modules: Host::named("debian 6.1").facts().modules, ..facts.clone() };
            facts.parameters_writable = false;
            facts.ipvs_parameters.retain(|name, _| !name.starts_with(OF_IPVS));
        },
        None
    )]
    fn mode_by_parameters(#[case] change: fn(&mut HostFacts), #[case] why: Option<&str>) {
        let mut facts = prepared();
        change(&mut facts);
        let able = Probe { mode: Mode::Iptables, requirements: Vec::new(), remarks: Vec::new() };
        let probes = [able, probe(&Config::default(), &facts)];
        let chosen = choose(RequestedMode::Ipvs, true, &probes).unwrap();
        assert_eq!(chosen.mode, if why.is_some() { Mode::Iptables } else { Mode::Ipvs });
        let fallback = chosen.fallback.unwrap_or_default();
        assert!(fallback.contains(why.unwrap_or_default()), "{fallback}");
    }

    #[test]
    fn the_facts_have_each_parameter_that_is_wanted() {
        for (name, _) in wanted(true, "5.8.0") {
            assert!(IPVS_PARAMETERS.contains(&name), "{name}");
        }
    }

    #[rstest]
    #[case::two_modules(
        "4.15.0-213-generic",
        "nf_conntrack.ko:\nnf_conntrack_ipv4.ko:\n",
        "nf_conntrack_ipv4"
    )]
    #[case::rhel_8("4.18.0-553.el8_10.x86_64", "nf_conntrack.ko.xz:\n", "nf_conntrack")]
    #[case::one_module("4.19.0-27-amd64", "nf_conntrack.ko:\n", "nf_conntrack")]
    fn conntrack_by_release(#[case] release: &str, #[case] installed: &str, #[case] module: &str) {
        let host = Host::named("debian 5.10").without(&["config"]);
        let facts = host.with("osrelease", release).with("dep", installed).facts();
        assert_eq!(conntrack(&facts).name, module);
    }

    #[test]
    fn an_ipset_of_before_version_6_is_refused() {
        let ask = |protocol| {
            let facts = HostFacts { ipset_protocol: Some(protocol), ..Host::named("debian 6.1").facts() };
            probe(&Config::default(), &facts).obstacles().count()
        };
        assert_eq!((ask(5), ask(6), ask(7)), (1, 0, 0));
    }
}
