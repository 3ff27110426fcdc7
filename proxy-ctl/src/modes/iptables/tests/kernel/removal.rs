//! Cleanup in the kernel, beside rules of others.

use super::*;

/// Returns the rules without those that the kubelet shares with this mode. They stay.
fn saved_of_mode(backend: Backend) -> Vec<String> {
    let mut lines = saved(backend);
    lines.retain(|line| !line.contains("KUBE-FIREWALL"));
    lines.sort_unstable();
    lines
}

pub(super) fn cleanup() -> Result<Removed, modes::Error> {
    (ENTRY.cleanup)(Path::new("/none"), &[])
}

/// Does the same as [`cleanup`], once no controller is active.
fn cleanup_at_rest() -> Result<Removed, modes::Error> {
    at_rest(cleanup)
}

/// Repeats a cleanup until the mode's lock is free. A thread of another test may have just forked.
/// Its child holds all descriptors, the lock among them, until it runs its program.
fn at_rest(cleanup: impl Fn() -> Result<Removed, modes::Error>) -> Result<Removed, modes::Error> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match cleanup() {
            Err(error) if error.is_taken_over() && Instant::now() < deadline => thread::yield_now(),
            removed => return removed,
        }
    }
}

pub(super) fn is_programmed() -> bool {
    (ENTRY.read)(Path::new("/none")).unwrap().is_some()
}

#[rstest]
#[ignore = "needs root"]
fn as_root_cleanup_leaves_what_was_there_before(#[values(Backend::Legacy, Backend::Nft)] backend: Backend) {
    if !enter(backend) {
        return;
    }
    for family in ["", "6"] {
        assert!(tool(backend, family, "-N MINE").is_some());
        assert!(tool(backend, family, "-A FORWARD -j MINE").is_some());
        assert!(tool(backend, family, "-t nat -A POSTROUTING -j ACCEPT").is_some());
        assert!(tool(backend, family, "-t nat -N KUBE-KUBELET-CANARY").is_some());
    }
    let before = saved_of_mode(backend);
    assert_eq!(cleanup().unwrap(), Removed::default());
    let (services, slices) = several();
    let mut dataplane = open(backend);
    assert!(dataplane.resync(&desired(services, slices)).unwrap().written > 20);
    assert!(is_programmed());
    let programmed = saved_of_mode(backend);
    let refused = cleanup().unwrap_err();
    assert!(refused.is_taken_over(), "{refused}");
    assert_eq!(saved_of_mode(backend), programmed);
    drop(dataplane);
    assert!(cleanup_at_rest().unwrap().objects.len() >= 4);
    assert_eq!(saved_of_mode(backend), before);
    assert!(!is_programmed());
    assert_eq!(cleanup().unwrap(), Removed::default());
}

#[rstest]
#[ignore = "needs root"]
fn as_root_cleanup_leaves_a_running_kube_proxys_rules(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
) {
    let Some(Node { ports, dataplane }) = Node::serving(backend) else { return };
    drop(dataplane);
    // A sync of kube-proxy begins with emptying these chains.
    for family in ["", "6"] {
        for chain in ["KUBE-SERVICES", "KUBE-NODEPORTS"] {
            assert!(tool(backend, family, &format!("-t nat -F {chain}")).is_some());
        }
    }
    let rule =
        "-t nat -A KUBE-SERVICES -d 172.30.0.41/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-XPGD46QRK7WJZT7O";
    assert!(tool(backend, "", rule).is_some());
    let of_kube_proxy = saved(backend);
    assert!(!is_programmed());
    assert_eq!(cleanup().unwrap(), Removed::default());
    assert_eq!(saved(backend), of_kube_proxy);
    // This proxy takes over again.
    let mut dataplane = open(backend);
    dataplane.resync(&ports).unwrap();
    drop(dataplane);
    assert!(is_programmed());
    assert!(cleanup_at_rest().unwrap().objects.len() >= 2);
    assert!(saved_of_mode(backend).iter().all(|line| !line.contains("KUBE-")));
}

/// kube-proxy leaves the chains that it does not write itself.
#[rstest]
#[ignore = "needs root"]
fn as_root_cleanup_leaves_what_a_running_kube_proxy_of_mode_ipvs_writes(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
) {
    let Some(Node { dataplane, .. }) = Node::serving(backend) else { return };
    drop(dataplane);
    let synced = "*filter\n:KUBE-FORWARD - [0:0]\n:KUBE-PROXY-FIREWALL - [0:0]\n:KUBE-IPVS-FILTER - [0:0]\n\
                  -I INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL\nCOMMIT\n\
                  *nat\n:KUBE-SERVICES - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n\
                  :KUBE-LOAD-BALANCER - [0:0]\n-A KUBE-SERVICES -j KUBE-LOAD-BALANCER\nCOMMIT\n";
    let restore = |family, text: &str| Tools::find(family, backend).unwrap().restore(text).unwrap();
    restore(TableFamily::Ipv4, synced);
    // kube-proxy has made its chains of IPv6, and has not written their rules.
    restore(TableFamily::Ipv6, "*nat\n:KUBE-LOAD-BALANCER - [0:0]\nCOMMIT\n");
    let of_ipv6 = || {
        let mut lines = saved_of_mode(backend);
        lines.retain(|line| line.starts_with('6'));
        lines
    };
    let before = of_ipv6();
    let refused = cleanup_at_rest().unwrap_err().to_string();
    assert!(refused.contains("mode ipvs has made its chains"), "{refused}");
    assert_eq!(of_ipv6(), before);
    restore(TableFamily::Ipv6, synced);
    assert!(!cleanup_at_rest().unwrap().is_empty());
    let left = saved_of_mode(backend);
    for family in ["", "6"] {
        let of_family = left.iter().filter_map(|line| line.strip_prefix(family)?.strip_prefix(' '));
        assert_eq!(
            of_family.filter(|line| line.contains("KUBE-")).collect::<Vec<_>>(),
            [
                "-A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD",
                "-A INPUT -m comment --comment \"kube-proxy firewall rules\" -j KUBE-PROXY-FIREWALL",
                "-A KUBE-SERVICES -j KUBE-LOAD-BALANCER",
                "-A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
                "-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING",
                "-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES",
                ":KUBE-FORWARD -",
                ":KUBE-IPVS-FILTER -",
                ":KUBE-LOAD-BALANCER -",
                ":KUBE-MARK-MASQ -",
                ":KUBE-POSTROUTING -",
                ":KUBE-PROXY-FIREWALL -",
                ":KUBE-SERVICES -",
            ]
        );
    }
    assert_eq!(cleanup().unwrap(), Removed::default());
}

/// A process that is killed on its way from mode ipvs to mode iptables leaves such rules.
#[rstest]
#[case::before_the_removal(&[TableFamily::Ipv4, TableFamily::Ipv6])]
#[case::before_the_second_family(&[TableFamily::Ipv4])]
#[ignore = "needs root"]
fn as_root_cleanup_removes_the_rules_of_two_modes(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
    #[case] switched: &[TableFamily],
) {
    if !enter(backend) {
        return;
    }
    let before = saved_of_mode(backend);
    let of_chains = |mode| own_rules::owner_tag_of_own_chains(mode).unwrap();
    for family in TableFamily::ALL {
        let is_switched = switched.contains(&family);
        let common = own_rules::owner_tag(if is_switched { Mode::Iptables } else { Mode::Ipvs }).unwrap();
        let of_mode_iptables = is_switched.then(|| ("KUBE-NODEPORTS", of_chains(Mode::Iptables)));
        let rules = [("KUBE-SERVICES", common), ("KUBE-LOAD-BALANCER", of_chains(Mode::Ipvs))];
        let mut text = "*nat\n:KUBE-MARK-MASQ - [0:0]\n".to_owned();
        for (chain, rule) in rules.into_iter().chain(of_mode_iptables) {
            text += &format!(":{chain} - [0:0]\n-A {chain} {rule}\n");
        }
        text += "-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ\nCOMMIT\n";
        Tools::find(family, backend).unwrap().restore(&text).unwrap();
    }
    let removed = at_rest(|| modes::cleanup(Path::new("/none"), &[])).unwrap();
    assert!(!removed.objects.is_empty());
    assert_eq!(saved_of_mode(backend), before);
}

#[rstest]
#[ignore = "needs root"]
fn as_root_the_owner_tag_of_another_mode_goes(#[values(Backend::Legacy, Backend::Nft)] backend: Backend) {
    if !enter(backend) {
        return;
    }
    assert!(tool(backend, "", "-t nat -N KUBE-SERVICES").is_some());
    let tag = own_rules::owner_tag(Mode::Ipvs).unwrap();
    let restored = format!("*nat\n-A KUBE-SERVICES {tag}\nCOMMIT\n");
    Tools::find(TableFamily::Ipv4, backend).unwrap().restore(&restored).unwrap();
    assert!(cleanup::has_owner_tag(Mode::Ipvs).unwrap());
    let mut dataplane = open(backend);
    dataplane.resync(&[]).unwrap();
    assert!(!cleanup::has_owner_tag(Mode::Ipvs).unwrap());
    assert!(cleanup::has_owner_tag(Mode::Iptables).unwrap());
    assert_eq!(dataplane.resync(&[]).unwrap(), NOTHING);
}
