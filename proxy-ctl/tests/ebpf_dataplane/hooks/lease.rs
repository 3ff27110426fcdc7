//! Tests of `ebpf.withdrawAfter`, which limits how long the programs serve without their
//! controller.

use std::time::{Duration, Instant};

use proxy_common::layout::Lease;
use proxy_ctl::{
    modes::{Dataplane as _, PacketMode as _},
    sys::bpf::map::Map,
};

use crate::{
    desired::{endpoint, port, shared},
    sandbox::{Sandbox, serve},
};

fn map(sandbox: &Sandbox) -> Map<u32, Lease> {
    sandbox.map("lease")
}

fn end(sandbox: &Sandbox) -> u64 {
    map(sandbox).get(&0).unwrap().unwrap().end
}

#[test]
fn after_its_end_services_are_those_of_others_until_a_controller_has_listed() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.withdraw_after = Duration::from_hours(1);
    let listening = serve("127.0.0.1", "backend");
    let wanted = shared([port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)])]);
    let served = |sandbox: &Sandbox| sandbox.dial("10.96.0.1", 80) == Ok("backend".into());
    let mut dataplane = sandbox.open();
    dataplane.resync(&wanted).unwrap();
    drop(dataplane);
    assert!(served(&sandbox), "the lease outlives the controller");
    let left = sandbox.snapshot().lease.unwrap();
    assert!(left <= Duration::from_hours(1) && left > Duration::from_mins(50), "{left:?}");

    map(&sandbox).set(&0, &Lease { end: 1 }).unwrap();
    assert!(!served(&sandbox), "the lease has ended");
    assert_eq!(sandbox.snapshot().lease, Some(Duration::ZERO));

    let mut next = sandbox.open();
    next.renew_lease().unwrap();
    next.collect_garbage().unwrap();
    assert!(!served(&sandbox), "the maps are as old as before");
    next.resync(&wanted).unwrap();
    assert!(served(&sandbox), "everything is as desired");
    drop(next);

    // A lease that goes on is renewed at once, while everything is being listed.
    let before = end(&sandbox);
    let next = sandbox.open();
    assert!(end(&sandbox) > before);
    drop(next);

    sandbox.config.withdraw_after = Duration::ZERO;
    drop(sandbox.open());
    assert_eq!(sandbox.snapshot().lease, None);
    map(&sandbox).set(&0, &Lease { end: 1 }).unwrap();
    assert!(served(&sandbox), "these programs do not ask for a lease");
}

#[test]
fn it_is_renewed_long_before_its_end() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.withdraw_after = Duration::from_secs(2);
    let mut dataplane = sandbox.open();
    let (first, begun) = (end(&sandbox), Instant::now());
    dataplane.collect_garbage().unwrap();
    while end(&sandbox) == first && begun.elapsed() < Duration::from_secs(60) {
        dataplane.collect_garbage().unwrap();
    }
    let renewed = Duration::from_nanos(end(&sandbox) - first);
    assert!(renewed >= Duration::from_millis(500), "not with each call: after {renewed:?}");
}
