//! Measurements at the size that the project promises.

use std::{sync::Arc, time::Instant};

use proxy_ctl::{
    config::{Ebpf, Limits},
    dataplane::{Applied, Dataplane, Programmed as _, ebpf::EbpfDataplane},
    model::desired::{Changes, DesiredPort},
};

use super::{
    desired::{endpoint, port},
    sandbox::Sandbox,
};

const SERVICES: u32 = 10_000;

fn service(n: u32, endpoints: u32) -> Arc<DesiredPort> {
    let all = (0..endpoints).map(|e| {
        let id = n * 10 + e;
        endpoint(&format!("10.{}.{}.{}", 1 + (id >> 16), id >> 8 & 255, id & 255), 8080)
    });
    Arc::new(port(&format!("service-{n}"), &format!("10.96.{}.{}", n >> 8, n & 255), all.collect()))
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "a measurement: run with --release -- --ignored --nocapture"]
fn ten_thousand_services_with_ten_endpoints() {
    let Some(sandbox) = Sandbox::new() else { return };
    let config = Ebpf { limits: Limits::default(), ..sandbox.config.clone() };
    let desired: Vec<_> = (0..SERVICES).map(|n| service(n, 10)).collect();
    let began = Instant::now();
    let mut dataplane = EbpfDataplane::open(&config).unwrap();
    println!("open: {:?}", began.elapsed());
    let before = resident_kib();
    let began = Instant::now();
    let applied = dataplane.resync(&desired).unwrap();
    println!("cold resync: {:?}, {applied:?}", began.elapsed());
    println!("resident: {} KiB more, shared mappings included", resident_kib() - before);

    let mut slowest = std::time::Duration::ZERO;
    let mut total = std::time::Duration::ZERO;
    for round in 0..200 {
        let changed = vec![service(round, 9)];
        let began = Instant::now();
        dataplane.apply(&Changes { changed, removed: Vec::new() }).unwrap();
        slowest = slowest.max(began.elapsed());
        total += began.elapsed();
    }
    println!("one endpoint less: {:?} on average, {slowest:?} at most", total / 200);
    let began = Instant::now();
    dataplane.collect_garbage().unwrap();
    println!("garbage collection: {:?}", began.elapsed());
    dataplane.resync(&desired).unwrap();
    drop(dataplane);

    let began = Instant::now();
    let mut dataplane = EbpfDataplane::open(&config).unwrap();
    println!("open again: {:?}", began.elapsed());
    let began = Instant::now();
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    println!("resync after a restart: {:?}", began.elapsed());
    let bytes: u64 = dataplane.usage().unwrap().tables.iter().map(|table| table.bytes).sum();
    println!("tables: {} MiB", bytes >> 20);
}
