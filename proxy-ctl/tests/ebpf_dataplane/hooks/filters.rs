//! Filters on clsact qdiscs, where the kernel has no tcx.

use super::*;

/// Returns true, and says that the test is skipped, if the kernel cannot attach filters.
fn is_without_clsact(dataplane: &mut EbpfDataplane) -> bool {
    let unattached = dataplane.hook_problems().unattached;
    let is_missing = unattached.values().any(|reason| reason.contains("No such file"));
    if is_missing {
        println!("skipped: the kernel has no clsact qdisc or no cls_bpf");
    }
    is_missing
}

#[test]
fn clsact_filters_do_the_same_where_tcx_is_missing() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let open = || sandbox.open().without_tcx();
    let host = host(&[("dpa", Role::Workload)]);
    let mut dataplane = open();
    dataplane.take_host(&host).unwrap();
    if is_without_clsact(&mut dataplane) {
        return;
    }
    let ours = |direction| tc::filters(interface, direction).unwrap();
    let (ingress, egress) = (ours(Direction::Ingress), ours(Direction::Egress));
    assert_eq!((ingress.len(), egress.len()), (1, 1));
    assert_eq!((ingress[0].priority, egress[0].priority), (1, 1));
    assert_eq!(links(&sandbox), [format!("{interface}_clsact")].into());

    drop(dataplane);
    let mut dataplane = open();
    dataplane.take_host(&host).unwrap();
    let swapped = ours(Direction::Ingress);
    assert_eq!(swapped.len(), 1);
    assert_ne!(swapped[0].program, ingress[0].program);

    run("tc", "qdisc del dev dpa clsact");
    for _ in 0..20 {
        dataplane.collect_garbage().unwrap();
    }
    assert_eq!(ours(Direction::Ingress), swapped, "removed programs are attached again");
    assert_eq!(ours(Direction::Egress).len(), 1);

    // Another's filter keeps the qdisc alive.
    let theirs = packet_program(-1);
    tc::put_filter(tc::REPLACE_FILTER, interface, Direction::Egress, 7, 1, theirs.as_fd(), "theirs").unwrap();
    drop(dataplane);
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert_eq!(removed.filters, 2);
    assert_eq!(ours(Direction::Ingress), []);
    assert_eq!(ours(Direction::Egress).len(), 1);
    assert!(run("tc", "qdisc show dev dpa").contains("clsact"));
}

#[test]
fn a_clsact_qdisc_of_ours_goes_with_the_last_filter() {
    let Some(sandbox) = Sandbox::new() else { return };
    veth("dpa");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    if is_without_clsact(&mut dataplane) {
        return;
    }
    assert!(run("tc", "qdisc show dev dpa").contains("clsact"));
    dataplane.take_host(&Host::default()).unwrap();
    assert!(!run("tc", "qdisc show dev dpa").contains("clsact"));
    assert_eq!(links(&sandbox), BTreeSet::new());

    // Filters of other kinds than ours keep it alive, too.
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    until_inspected(&mut dataplane, |_| run("tc", "qdisc show dev dpa").contains("clsact"));
    run("tc", "filter add dev dpa ingress protocol ip prio 9 u32 match u32 0 0");
    dataplane.take_host(&Host::default()).unwrap();
    assert!(run("tc", "filter show dev dpa ingress").contains("u32"));
    run("tc", "qdisc del dev dpa clsact");

    // A qdisc that was there before us stays.
    run("tc", "qdisc add dev dpa clsact");
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    assert!(run("tc", "qdisc show dev dpa").contains("clsact"));
}

#[test]
fn a_filter_gives_way_to_others_that_hold_its_priority() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    run("tc", "qdisc add dev dpa clsact");
    run("tc", "filter add dev dpa ingress protocol ip prio 1 u32 match u32 0 0");
    run("tc", "filter add dev dpa ingress protocol ip prio 2 u32 match u32 0 0");
    let host = host(&[("dpa", Role::Workload)]);
    let priorities = || -> Vec<u16> {
        tc::filters(interface, Direction::Ingress).unwrap().iter().map(|filter| filter.priority).collect()
    };
    for _ in 0..2 {
        let mut dataplane = sandbox.open().without_tcx();
        dataplane.take_host(&host).unwrap();
        assert_eq!(priorities(), [3], "and a restart finds it there");
    }
    run("tc", "filter del dev dpa ingress prio 1");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&host).unwrap();
    assert_eq!(priorities(), [3], "it stays where it is");
    drop(dataplane);
    assert_eq!(cleanup(&sandbox.config.bpffs).unwrap().filters, 2);
    assert!(run("tc", "filter show dev dpa ingress").contains("u32"));
}

/// The kernel gives each priority its own handles, so that another's filter can have ours.
#[test]
fn a_filter_of_another_with_our_handle_is_told_as_anothers() {
    const OUR_HANDLE: u32 = 0x7063;
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    if is_without_clsact(&mut dataplane) {
        return;
    }
    let theirs = packet_program(-1);
    let put = |direction, priority| {
        tc::put_filter(tc::ADD_FILTER, interface, direction, priority, OUR_HANDLE, theirs.as_fd(), "theirs")
    };
    put(Direction::Egress, 9).unwrap();
    let others: Vec<_> = sandbox.snapshot().hooks.into_iter().flat_map(|hook| hook.others).collect();
    let told: Vec<_> =
        others.iter().map(|other| (other.name.as_str(), other.hook, other.is_before)).collect();
    assert_eq!(told, [("theirs", "egress", false)]);
}
