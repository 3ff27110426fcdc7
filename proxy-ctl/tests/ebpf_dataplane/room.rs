//! Who is served where `frontends4` has not room for all.

use std::{collections::BTreeMap, sync::Arc};

use proxy_ctl::{
    config::{Ebpf, Limits},
    dataplane::{Applied, Dataplane, ebpf::EbpfDataplane},
    model::desired::{Changes, DesiredPort, Frontend, FrontendKind},
};

use super::{
    desired::{endpoint, port, shared, with_node_port},
    sandbox::Sandbox,
};

const ROOM: usize = 8;

fn open(sandbox: &Sandbox) -> EbpfDataplane {
    let limits = Limits { frontends: ROOM as u32, ..sandbox.config.limits };
    EbpfDataplane::open(&Ebpf { limits, ..sandbox.config.clone() }).unwrap()
}

fn with_external_ips(mut port: DesiredPort, network: u8, count: u8) -> DesiredPort {
    port.frontends.extend((0..count).map(|last| Frontend {
        kind: FrontendKind::ExternalIp,
        address: [192, 0, network, last].into(),
        port: 80,
    }));
    port
}

fn hog() -> DesiredPort {
    with_external_ips(port("hog", "10.96.0.1", vec![endpoint("10.0.0.1", 80)]), 1, 20)
}

fn plain(name: &str, last: u8) -> DesiredPort {
    port(name, &format!("10.96.0.{last}"), vec![endpoint("10.0.0.2", 80)])
}

/// Frontends of each service port.
fn served(sandbox: &Sandbox) -> BTreeMap<String, usize> {
    let services = sandbox.snapshot().services.into_iter();
    services.map(|service| (service.name.service.name.to_string(), service.frontends.len())).collect()
}

fn is(all: &[(&str, usize)]) -> BTreeMap<String, usize> {
    all.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

/// Names of service ports, and the fields that there is no room for.
fn without_room(dataplane: &mut EbpfDataplane) -> Option<Vec<(String, &'static str)>> {
    let all = dataplane.take_without_room()?;
    let fields = all.into_iter().flat_map(|(name, all)| {
        all.into_iter().map(move |one| {
            assert!(one.instead.contains("frontends4") && one.instead.contains("limits.frontends"));
            (name.service.name.to_string(), one.field)
        })
    });
    Some(fields.collect())
}

fn change(changed: Vec<Arc<DesiredPort>>) -> Changes {
    Changes { changed, removed: Vec::new() }
}

#[test]
fn external_addresses_give_way_to_later_cluster_ips_and_node_ports_and_come_back() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    dataplane.resync(&shared([hog()])).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM)]));
    let hog_lacks = || Some(vec![("hog".to_owned(), "spec.externalIPs")]);
    assert_eq!(without_room(&mut dataplane), hog_lacks());
    assert_eq!(without_room(&mut dataplane), None);

    let later = with_node_port(plain("later", 2), 30080);
    dataplane.apply(&change(shared([later.clone()]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM - 2), ("later", 2)]));
    // Another restart writes nothing, and a change of what is served already moves nobody.
    drop(dataplane);
    let mut dataplane = open(&sandbox);
    let all = shared([hog(), later.clone()]);
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    assert_eq!(without_room(&mut dataplane), hog_lacks());

    let removed = vec![later.name.clone()];
    dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM)]));
    let few = with_external_ips(port("hog", "10.96.0.1", vec![endpoint("10.0.0.1", 80)]), 1, 3);
    dataplane.apply(&change(shared([few]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", 4)]));
    assert_eq!(without_room(&mut dataplane), Some(Vec::new()));
}

#[test]
fn a_service_with_many_addresses_does_not_take_those_of_its_neighbours() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    dataplane.resync(&shared([hog()])).unwrap();
    dataplane.apply(&change(shared([with_external_ips(plain("small", 2), 2, 2)]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM - 3), ("small", 3)]));
    let lacking = without_room(&mut dataplane).unwrap();
    assert_eq!(lacking, [("hog".to_owned(), "spec.externalIPs")]);
}

#[test]
fn cluster_ips_beyond_the_table_are_named_and_served_when_others_go() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    let all: Vec<_> = (0..=ROOM as u8).map(|n| plain(&format!("s{n}"), n + 1)).collect();
    dataplane.resync(&shared(all.clone())).unwrap();
    let lacking = without_room(&mut dataplane).unwrap();
    let [(name, "spec.clusterIPs")] = lacking.as_slice() else { panic!("{lacking:?}") };
    assert_eq!(served(&sandbox)[name], 0);
    let other = all.iter().find(|port| *port.name.service.name != **name).unwrap();
    dataplane.apply(&Changes { changed: Vec::new(), removed: vec![other.name.clone()] }).unwrap();
    assert_eq!(served(&sandbox)[name], 1);
    assert_eq!(without_room(&mut dataplane), Some(Vec::new()));
}
