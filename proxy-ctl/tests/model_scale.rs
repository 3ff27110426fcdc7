//! Tests of the memory and work that the model needs for a large cluster. They have a process of
//! their own and run one at a time, so that only the model's memory is measured.

#[path = "../benches/support/cluster.rs"]
mod cluster;

use std::sync::{Mutex, MutexGuard, PoisonError};

use proxy_ctl::model::{Model, objects::Endpoint};

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the memory of this process that does not belong to files, in KiB.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

#[test]
fn ten_thousand_services_fit_in_30_mb_and_one_change_is_one_port() {
    let _alone = alone();
    const SERVICES: u32 = 10_000;
    let before = resident_kib().unwrap();
    let mut model = Model::new(cluster::NODE);
    for number in 0..SERVICES {
        model.apply_service(cluster::service(number));
        model.apply_slice(cluster::slice(number, 10));
    }
    let changes = model.take_changes();
    assert_eq!(changes.changed.len(), SERVICES as usize);
    drop(changes);
    let kib = resident_kib().unwrap() - before;
    println!("{kib} KiB");
    assert!(kib <= 30 * 1024, "{kib} KiB");
    assert_eq!(model.ports_computed(), u64::from(SERVICES));

    let mut slice = cluster::slice(5_000, 10);
    slice.endpoints.push(cluster::endpoint(SERVICES * 10));
    model.apply_slice(slice);
    let changes = model.take_changes();
    assert_eq!(changes.changed.len(), 1);
    assert_eq!(changes.changed[0].endpoints.all.len(), 11);
    assert_eq!(model.ports_computed(), u64::from(SERVICES) + 1);
}

#[test]
fn one_change_is_one_health_check_however_many_there_are() {
    let _alone = alone();
    const SERVICES: u32 = 1_000;
    let mut model = Model::new(cluster::NODE);
    for number in 0..SERVICES {
        let mut service = cluster::service(number);
        service.health_check_node_port = Some(30_000 + number as u16);
        model.apply_service(service);
        model.apply_slice(cluster::slice(number, 10));
    }
    model.take_changes();
    assert_eq!(model.take_health_checks().len(), SERVICES as usize);
    assert_eq!(model.health_checks_computed(), u64::from(SERVICES));

    let mut slice = cluster::slice(500, 10);
    slice.endpoints.push(Endpoint { node: Some(cluster::NODE.into()), ..cluster::endpoint(SERVICES * 10) });
    model.apply_slice(slice);
    model.take_changes();
    assert_eq!(model.take_health_checks().len(), 1);
    assert_eq!(model.health_checks_computed(), u64::from(SERVICES) + 1);
    assert!(model.take_changes().is_empty() && model.take_health_checks().is_empty());
    assert_eq!(model.health_checks_computed(), u64::from(SERVICES) + 1);
}

/// Each Service claims the external address of another one.
#[test]
fn one_change_looks_at_no_conflict_but_its_own() {
    let _alone = alone();
    const CLAIMED: u32 = 5_000;
    let mut model = Model::new(cluster::NODE);
    let claiming = |number: u32| {
        let mut service = cluster::service(number);
        service.external_ips = vec![std::net::Ipv4Addr::from_bits(0xcb00_7100 + number % CLAIMED).into()];
        service
    };
    (0..2 * CLAIMED).for_each(|number| model.apply_service(claiming(number)));
    model.take_changes();
    assert_eq!(model.take_new_conflicts(), CLAIMED as usize);
    assert_eq!(model.conflicts_computed(), u64::from(CLAIMED));

    let mut service = claiming(7);
    service.affinity_seconds = Some(9);
    model.apply_service(service);
    assert_eq!(model.take_changes().changed.len(), 1);
    assert_eq!(model.take_new_conflicts(), 0, "it has the same claimants");
    assert_eq!(model.conflicts_computed(), u64::from(CLAIMED) + 1);

    model.delete_service(&claiming(7).name);
    model.apply_service(claiming(2 * CLAIMED + 8));
    model.take_changes();
    assert_eq!(model.take_new_conflicts(), 1, "one is over, another has one claimant more");
    assert_eq!(model.conflicts_computed(), u64::from(CLAIMED) + 3);
    assert_eq!(model.conflicts().len(), CLAIMED as usize - 1);
}
