use rstest::rstest;

use super::{
    recorded::{ALL, Host},
    *,
};

fn probe(mode: Mode, missing: &[&str]) -> Probe {
    let all = Requirement::new("key", "name", true);
    let lacking = missing
        .iter()
        .map(|why| Requirement::new("other", "name", false).lacking(true, || (*why).to_owned()));
    Probe {
        mode,
        requirements: [all].into_iter().chain(lacking).collect(),
        remarks: vec![format!("{mode} is fast")],
    }
}

/// Returns the probes of a node on which these modes can run.
fn probes(able: &[Mode]) -> Vec<Probe> {
    let probe =
        |mode: Mode| if able.contains(&mode) { probe(mode, &[]) } else { probe(mode, &["no A", "no B"]) };
    Mode::ALL.into_iter().map(probe).collect()
}

const AUTOMATIC: RequestedMode = RequestedMode::Automatic;
const ALL_MODES: &[Mode] = &Mode::ALL;
const ALL_BUT_EBPF: &[Mode] = &[Mode::Nftables, Mode::Iptables, Mode::Ipvs, Mode::Userspace];
const LAST: &[Mode] = &[Mode::Userspace];

#[rstest]
#[case::default(AUTOMATIC, ALL_MODES, Mode::Ebpf)]
#[case::default_without_ebpf(AUTOMATIC, ALL_BUT_EBPF, Mode::Iptables)]
#[case::default_without_ebpf_and_iptables(AUTOMATIC, &[Mode::Nftables, Mode::Ipvs, Mode::Userspace], Mode::Nftables)]
#[case::default_as_last_resort(AUTOMATIC, LAST, Mode::Userspace)]
#[case::ebpf(RequestedMode::Ebpf, ALL_MODES, Mode::Ebpf)]
#[case::nftables(RequestedMode::Nftables, ALL_MODES, Mode::Nftables)]
#[case::iptables(RequestedMode::Iptables, ALL_MODES, Mode::Iptables)]
#[case::ipvs(RequestedMode::Ipvs, ALL_MODES, Mode::Ipvs)]
#[case::userspace(RequestedMode::Userspace, ALL_MODES, Mode::Userspace)]
fn without_a_fallback(#[case] requested: RequestedMode, #[case] able: &[Mode], #[case] mode: Mode) {
    for may_fall_back in [true, false] {
        let chosen = choose(requested, may_fall_back, &probes(able)).unwrap();
        assert_eq!((chosen.mode, chosen.requested, chosen.fallback), (mode, requested, None));
        assert_eq!(chosen.reasons.last(), Some(&format!("{mode} is fast")));
    }
}

#[rstest]
#[case::ebpf(RequestedMode::Ebpf, ALL_BUT_EBPF, Mode::Iptables)]
#[case::ebpf_without_iptables(RequestedMode::Ebpf, &[Mode::Nftables, Mode::Ipvs, Mode::Userspace], Mode::Nftables)]
#[case::nftables(RequestedMode::Nftables, &[Mode::Ebpf, Mode::Iptables, Mode::Userspace], Mode::Iptables)]
#[case::nftables_at_last(RequestedMode::Nftables, LAST, Mode::Userspace)]
#[case::ipvs(RequestedMode::Ipvs, &[Mode::Ebpf, Mode::Nftables, Mode::Iptables], Mode::Iptables)]
#[case::ipvs_without_iptables(RequestedMode::Ipvs, &[Mode::Nftables, Mode::Userspace], Mode::Nftables)]
#[case::ipvs_at_last(RequestedMode::Ipvs, LAST, Mode::Userspace)]
#[case::iptables(RequestedMode::Iptables, &[Mode::Nftables, Mode::Userspace], Mode::Nftables)]
#[case::iptables_at_last(RequestedMode::Iptables, LAST, Mode::Userspace)]
fn another_mode_is_chosen(#[case] requested: RequestedMode, #[case] able: &[Mode], #[case] mode: Mode) {
    let chosen = choose(requested, true, &probes(able)).unwrap();
    assert_eq!(chosen.mode, mode);
    let fallback = chosen.fallback.unwrap();
    let first = format!("mode {requested} cannot run here: no A; no B");
    assert!(fallback.starts_with(&first), "{fallback}");
    assert!(fallback.ends_with(&format!("mode {mode} replaces it")), "{fallback}");
    assert_eq!(chosen.reasons[..2], [format!("{requested} was asked for"), first.clone()]);

    let refusal = choose(requested, false, &probes(able)).unwrap_err();
    assert_eq!(refusal.to_string(), first);
}

#[test]
fn without_a_request_the_modes_that_cannot_run_are_reasons_and_no_fallback() {
    let chosen = choose(AUTOMATIC, false, &probes(LAST)).unwrap();
    let reasons = [
        "no mode was asked for, and this node can do userspace",
        "mode ebpf cannot run here: no A; no B",
        "mode iptables cannot run here: no A; no B",
        "mode nftables cannot run here: no A; no B",
        "userspace is fast",
    ];
    assert_eq!(chosen.reasons, reasons);
}

#[rstest]
#[case(AUTOMATIC, "no mode can run here: mode ebpf cannot run here: no A; no B; mode iptables cannot")]
#[case(RequestedMode::Userspace, "no mode can run here: mode userspace cannot run here: no A; no B")]
fn nothing_can_run(#[case] requested: RequestedMode, #[case] message: &str) {
    let refusal = choose(requested, true, &probes(&[])).unwrap_err().to_string();
    assert!(refusal.starts_with(message), "{refusal}");
}

#[rstest]
#[case::to_be_loaded(Host::named("debian 6.1"), "ip_vs", "loadable")]
#[case::loaded(Host::named("debian 6.1").loaded(), "ip_vs", "loaded")]
#[case::loaded_as_a_dependency(Host::named("debian 5.10").loaded(), "nf_conntrack", "loaded")]
#[case::compressed(Host::named("debian 7.2"), "ip_vs_mh", "loadable")]
#[case::boot_config_only(Host::named("debian 6.12").without(&["dep", "builtin", "modules"]), "ip_vs", "loadable")]
#[case::installed_only(Host::named("debian 6.12").without(&["config", "builtin", "modules"]), "ip_vs", "loadable")]
#[case::container(Host::named("debian 6.12").contained(), "ip_vs", "not known")]
#[case::container_of_a_node_that_has_loaded_it(Host::named("debian 6.12").contained().loaded(), "ip_vs", "loaded")]
#[case::nothing_can_be_read(Host::named("debian 6.12").contained().without(&["modules", "folders"]), "ip_vs", "not known")]
#[case::built_in_by_configuration(Host::named("microvm 6.18"), "nf_tables", "built in")]
#[case::built_in_by_list(
    Host::named("debian 6.12").without(&["config"]).with("builtin", "kernel/net/netfilter/ipvs/ip_vs.ko\n"),
    "ip_vs",
    "built in"
)]
#[case::built_in_without_modules(Host::named("microvm 6.18").without(&["config"]), "ip_set", "loaded")]
#[case::names_with_a_dash(Host::named("debian 6.12").with("dep", "kernel/net/ip-vs.ko.zst: kernel/x.ko\n"), "ip_vs", "loadable")]
#[case::not_in_the_kernel(Host::named("microvm 6.18"), "ip_vs", "missing")]
#[case::not_installed(Host::named("debian 6.12").with("dep", ""), "ip_vs", "missing")]
#[case::unknown_name(Host::named("debian 6.12"), "ip_vs_best", "missing")]
fn modules(#[case] host: Host, #[case] name: &str, #[case] state: &str) {
    assert_eq!(host.facts().modules.state(&KernelModule::named(name)).to_string(), state);
}

#[rstest]
#[case::not_in_the_kernel(
    Host::named("microvm 6.18"),
    "the module ip_vs is missing: the kernel is built without CONFIG_IP_VS"
)]
#[case::not_installed(
    Host::named("debian 6.12").with("dep", ""),
    "the module ip_vs is missing: it is not installed below /lib/modules; install the package with the kernel's \
     further modules, then run `modprobe ip_vs`"
)]
#[case::loading_is_off(
    Host::named("debian 6.12").with("modules_disabled", "1\n"),
    "the module ip_vs is missing: kernel.modules_disabled is 1; load it at boot, before that is set \
     (/etc/modules-load.d: ip_vs)"
)]
fn missing_modules(#[case] host: Host, #[case] message: &str) {
    assert_eq!(host.facts().modules.missing(&KernelModule::named("ip_vs")).as_deref(), Some(message));
}

#[test]
fn a_module_that_was_asked_for_in_vain_is_missing_until_it_is_there() {
    let ip_vs = KernelModule::named("ip_vs");
    let refused = |host: Host| {
        let mut modules = host.facts().modules;
        modules.refused.insert("ip_vs".to_owned(), "Operation not permitted".to_owned());
        modules.missing(&ip_vs)
    };
    let why = "the module ip_vs is missing: Operation not permitted; run `modprobe ip_vs` on the node";
    assert_eq!(refused(Host::named("debian 6.1").contained()).as_deref(), Some(why));
    assert_eq!(refused(Host::named("debian 6.1").loaded()), None);
}

#[test]
fn with_loading_off_what_is_loaded_is_there() {
    let host = Host::named("debian 6.12").with("modules_disabled", "1").loaded();
    assert!(host.facts().modules.has(&KernelModule::named("ip_vs_rr")));
}

#[test]
fn recorded_hosts_are_whole() {
    for (name, _) in ALL {
        let facts = Host::named(name).facts();
        assert!(facts.kernel().is_some(), "{name}");
        assert!(facts.modules.missing(&KernelModule::named("nf_tables")).is_none(), "{name}");
        assert_eq!(facts.iptables.len(), 1, "{name}");
    }
}
