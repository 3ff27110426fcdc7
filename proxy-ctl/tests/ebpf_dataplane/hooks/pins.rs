//! Pins that another program removes come back.

use super::*;

/// A pin that cannot be made says nothing about the interface, whose programs go on.
#[test]
fn links_that_cannot_be_pinned_again_stay_attached() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (old, new) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    let before = running(old);
    fs::remove_file(sandbox.links().join(format!("{old}_egress"))).unwrap();

    let both = host(&[("dpa", Role::Workload), ("dpb", Role::Workload)]);
    let read_only = ReadOnly::begin(&sandbox.config.bpffs);
    for _ in 0..2 {
        let error = dataplane.take_host(&both).unwrap_err();
        assert_eq!(running(old), before, "{error}");
    }
    assert_eq!(dataplane.hook_problems().unattached, [].into(), "no interface has refused anything");
    drop(read_only);
    until_attached(&mut dataplane, &both);
    assert_eq!(links(&sandbox), &named(old) | &named(new));
    assert_eq!(running(old), before);
}

/// Collects garbage until an inspection has made `done` true. The kernel detaches links of others
/// in the background.
pub(super) fn until_inspected(dataplane: &mut EbpfDataplane, done: impl Fn(&mut EbpfDataplane) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(dataplane) {
        assert!(Instant::now() < deadline, "no inspection has cured it");
        dataplane.collect_garbage().unwrap();
    }
}

#[test]
fn a_link_that_somebody_removed_comes_back() {
    let Some(sandbox) = Sandbox::new() else { return };
    let first = veth("dpa");
    let mut dataplane = sandbox.open();
    let host = host(&[("dpa", Role::Workload)]);
    dataplane.take_host(&host).unwrap();
    let remove = || {
        fs::remove_file(sandbox.links().join(format!("{first}_ingress"))).unwrap();
        fs::remove_file(sandbox.links().join("cgroup_connect4")).unwrap();
    };
    let all_there = || links(&sandbox) == named(first) && sandbox.links().join("cgroup_connect4").exists();
    // The kernel detaches in the background. Until it has, it refuses the same program a second
    // time (EEXIST).
    let repaired_by = |tend: &mut dyn FnMut()| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !all_there() && Instant::now() < deadline {
            tend();
        }
        all_there()
    };
    remove();
    assert!(repaired_by(&mut || drop(dataplane.take_host(&host))), "when the host is set");
    remove();
    assert!(repaired_by(&mut || drop(dataplane.collect_garbage())), "by inspection now and then");
}

/// The number that the dataplane uses.
pub(super) const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;

#[test]
fn an_emptied_bpffs_is_filled_again_and_nobody_notices() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let listening = serve("127.0.0.1", "backend");
    let wanted = shared([port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)])]);
    let host = host(&[("dpa", Role::Workload)]);
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host).unwrap();
    dataplane.resync(&wanted).unwrap();
    let program = first_on_ingress(interface);

    let everything = sandbox.config.bpffs.join("proxy-ctl");
    fs::remove_dir_all(&everything).unwrap();
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("backend".into()));
        dataplane.collect_garbage().unwrap();
    }
    assert!(sandbox.map_pin("services").exists());
    assert_eq!(links(&sandbox), named(interface));
    assert_eq!(first_on_ingress(interface), program, "it was never detached");
    assert!(
        matches!(EbpfDataplane::open(&sandbox.config), Err(Error::Locked { .. })),
        "the new folder is locked"
    );
    drop(dataplane);
    assert_eq!(
        sandbox.dial("10.96.0.1", 80),
        Ok("backend".into()),
        "what was pinned again outlives the controller"
    );
    let mut next = sandbox.open();
    next.take_host(&host).unwrap();
    assert_eq!(next.resync(&wanted).unwrap(), Applied::default());
}

#[test]
fn the_pins_of_a_successor_are_its_own() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let host = host(&[("dpa", Role::Workload)]);
    let mut former = sandbox.open();
    former.take_host(&host).unwrap();
    fs::remove_dir_all(sandbox.config.bpffs.join("proxy-ctl")).unwrap();
    let mut successor = sandbox.open();
    successor.take_host(&host).unwrap();
    let programs = || {
        ["cgroup_connect4".to_owned(), format!("{interface}_ingress")].map(|link| program_of(&sandbox, &link))
    };
    let theirs = programs();

    assert!(former.take_host(&host).unwrap_err().is_taken_over());
    let collections = (0..COLLECTIONS_BETWEEN_INSPECTIONS).map(|_| former.collect_garbage());
    let errors: Vec<_> = collections.filter_map(Result::err).collect();
    assert!(errors.iter().any(proxy_ctl::modes::Error::is_taken_over), "{errors:?}");
    drop(former);
    assert_eq!(programs(), theirs);
}

#[test]
fn pins_of_another_map_do_not_replace_a_map() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&shared([port("web", "10.96.0.1", vec![endpoint("10.0.0.1", 80)])])).unwrap();
    let id_of = |name: &str| bpf::map_info(bpf::pinned(&sandbox.map_pin(name)).unwrap().as_fd()).unwrap().id;
    let services = id_of("services");
    fs::remove_file(sandbox.map_pin("services")).unwrap();
    bpf::pin(bpf::pinned(&sandbox.map_pin("settings")).unwrap().as_fd(), &sandbox.map_pin("services"))
        .unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    assert_eq!(id_of("services"), services);
}
