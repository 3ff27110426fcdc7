//! Tests of the addresses that are ClusterIPs, and of the ranges for them: what the maps have of
//! them, and what the node's sockets reach.

use std::{collections::BTreeSet, net::Ipv4Addr, sync::Arc};

use proxy_common::layout::{Frontend, FrontendKey, PrefixKey};
use proxy_ctl::{
    config::{Limits, UnallocatedServiceAddresses},
    model::{
        desired::{self, Changes, DesiredPort, FrontendKind},
        node::Host,
    },
    modes::{Applied, Dataplane as _, Programmed as _, ebpf::EbpfDataplane},
    sys::bpf::map::Map,
};

use crate::{
    desired::{endpoint, name, port, shared},
    sandbox::{Sandbox, TakeHost as _, serve},
};

const WEB: &str = "10.96.0.1";
const OTHER: &str = "10.96.0.2";
const EXTERNAL: &str = "203.0.113.1";

type Frontends = Map<FrontendKey<[u8; 4]>, Frontend>;

fn map(sandbox: &Sandbox) -> Frontends {
    sandbox.map("frontends4")
}

/// Returns the addresses that have a cluster-IP entry in the maps.
fn cluster_ips(sandbox: &Sandbox) -> Vec<String> {
    let all = map(sandbox).read_all().unwrap().into_iter();
    let addresses = all.filter(|(key, _)| key.is_cluster_ip()).map(|(key, value)| {
        assert_eq!(value, Frontend::NONE);
        Ipv4Addr::from(key.address).to_string()
    });
    addresses.collect::<BTreeSet<_>>().into_iter().collect()
}

fn cidrs(sandbox: &Sandbox) -> usize {
    let map: Map<PrefixKey<[u8; 4]>, u32> = sandbox.map("service_cidrs4");
    map.read_all().unwrap().len()
}

fn served(service: &str, cluster_ip: &str, number: u16) -> DesiredPort {
    let mut port = port(service, cluster_ip, vec![endpoint("10.0.0.1", 8080)]);
    port.name.port = format!("port-{number}").into();
    port.frontends[0].port = number;
    port
}

fn external(mut port: DesiredPort) -> DesiredPort {
    let address = EXTERNAL.parse().unwrap();
    port.frontends.push(desired::Frontend { kind: FrontendKind::ExternalIp, address, port: 80 });
    port
}

fn apply(dataplane: &mut EbpfDataplane, changed: Vec<Arc<DesiredPort>>, removed: &[&DesiredPort]) -> Applied {
    let removed = removed.iter().map(|port| port.name.clone()).collect();
    dataplane.apply(&Changes { changed, removed }).unwrap()
}

#[test]
fn cluster_ips_are_marked_as_long_as_a_service_port_has_them() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (http, https) = (external(served("web", WEB, 80)), served("web", WEB, 443));
    let mut dataplane = sandbox.open();
    dataplane.resync(&shared([http.clone(), https.clone()])).unwrap();
    assert_eq!(cluster_ips(&sandbox), [WEB], "an external address may be somebody's");
    let usage = dataplane.usage().unwrap();
    let used = usage.maps.iter().find(|map| map.name == "frontends4").unwrap().used;
    assert_eq!(used, 4);
    let snapshot = sandbox.snapshot();
    assert_eq!(snapshot.services.iter().map(|service| service.frontends.len()).sum::<usize>(), 3);
    drop(dataplane);

    let mut next = sandbox.open();
    assert_eq!(next.resync(&shared([http.clone(), https.clone()])).unwrap(), Applied::default());
    apply(&mut next, Vec::new(), &[&http]);
    assert_eq!(cluster_ips(&sandbox), [WEB]);
    // The address passes to another Service, in one step and in two.
    let other = served("other", WEB, 8080);
    apply(&mut next, shared([other.clone()]), &[&https]);
    assert_eq!(cluster_ips(&sandbox), [WEB]);
    apply(&mut next, Vec::new(), &[&other]);
    assert_eq!(cluster_ips(&sandbox), [""; 0]);
    apply(&mut next, shared([https.clone()]), &[]);
    assert_eq!(cluster_ips(&sandbox), [WEB]);
    // The Service gets another address.
    apply(&mut next, shared([served("web", OTHER, 443)]), &[]);
    assert_eq!(cluster_ips(&sandbox), [OTHER]);
    drop(next);

    let mut next = sandbox.open();
    next.resync(&shared([served("web", WEB, 443)])).unwrap();
    assert_eq!(cluster_ips(&sandbox), [WEB], "what a predecessor has left is gone");
    next.resync(&[]).unwrap();
    assert_eq!(map(&sandbox).read_all().unwrap(), []);
}

#[test]
fn marks_have_the_room_that_frontends_leave() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.limits = Limits { frontends: 4, ..sandbox.config.limits };
    let services =
        |count: u8| shared((0..count).map(|n| served(&format!("service-{n}"), &format!("10.96.0.{n}"), 80)));
    let mut dataplane = sandbox.open();
    dataplane.resync(&services(2)).unwrap();
    assert_eq!(cluster_ips(&sandbox).len(), 2);
    dataplane.resync(&services(3)).unwrap();
    assert_eq!(cluster_ips(&sandbox).len(), 1, "a cluster-IP entry gives way to a frontend");
    assert_eq!(dataplane.take_waiting().unwrap_or_default().len(), 0);
    dataplane.resync(&services(5)).unwrap();
    assert_eq!(cluster_ips(&sandbox).len(), 0);
    assert_eq!(dataplane.take_waiting().unwrap().len(), 1);
    // No address has a cluster-IP entry while a Service waits for room, because its port may
    // be another port of it.
    dataplane.resync(&services(2)).unwrap();
    assert_eq!(cluster_ips(&sandbox).len(), 2);
}

#[test]
fn another_port_is_refused_to_sockets() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let target = serve("127.0.0.1", "web");
    let mut web = port("web", WEB, vec![endpoint("127.0.0.1", target)]);
    web.name = name("web", web.name.family);
    dataplane.resync(&shared([web])).unwrap();
    assert_eq!(sandbox.dial(WEB, 80).as_deref(), Ok("web"));
    let refused = sandbox.dial(WEB, 81).unwrap_err();
    assert!(refused.contains("refused") || refused.contains("not permitted"), "{refused}");
    // Resolvers connect to any port to learn their source, and send nothing.
    crate::sandbox::run("ip", "route add default dev lo");
    let connected = sandbox.in_cgroup(&format!("exec 3<>/dev/udp/{WEB}/53"));
    assert!(connected.status.success(), "{}", String::from_utf8_lossy(&connected.stderr));
    let unknown = dataplane.usage().unwrap().reasons;
    assert_eq!(unknown.iter().find(|reason| reason.name == "unknown_port").unwrap().count, 1);
}

#[test]
fn ranges_are_written_when_everything_is_served_and_nobody_has_an_address_of_them() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let host = Host {
        service_cidrs: Some(["10.96.0.0/16", "fd00:10:96::/112"].map(|cidr| cidr.parse().unwrap()).into()),
        ..Host::default()
    };
    let target = serve("127.0.0.1", "web");
    let desired = shared([port("web", WEB, vec![endpoint("127.0.0.1", target)])]);
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host).unwrap();
    dataplane.resync(&desired).unwrap();
    assert_eq!(cidrs(&sandbox), 0, "traffic to them passes");
    drop(dataplane);

    sandbox.config.unallocated_service_addresses = UnallocatedServiceAddresses::Drop;
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host).unwrap();
    assert_eq!(cidrs(&sandbox), 0, "nothing is known to be served yet");
    dataplane.resync(&desired).unwrap();
    assert_eq!(cidrs(&sandbox), 1);
    let failed = sandbox.dial("10.96.9.9", 80).unwrap_err();
    assert!(failed.contains("refused") || failed.contains("not permitted"), "{failed}");
    assert_eq!(sandbox.dial(WEB, 80).as_deref(), Ok("web"));
    drop(dataplane);

    let mut dataplane = sandbox.open();
    dataplane.take_host(&Host::default()).unwrap();
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    assert_eq!(cidrs(&sandbox), 1, "what a predecessor knew holds until they are listed");
    assert_eq!(dataplane.take_host(&host).unwrap(), Applied::default());
    drop(dataplane);
    let fewer = Host { service_cidrs: Some(Vec::new()), ..host.clone() };
    let mut dataplane = sandbox.open();
    dataplane.take_host(&fewer).unwrap();
    dataplane.resync(&desired).unwrap();
    assert_eq!(cidrs(&sandbox), 0, "the last one was removed meanwhile");
    dataplane.take_host(&host).unwrap();
    assert_eq!(cidrs(&sandbox), 1);
    while !dataplane.drain().unwrap() {}
    assert_eq!(cidrs(&sandbox), 0);
    drop(dataplane);

    sandbox.config.unallocated_service_addresses = UnallocatedServiceAddresses::Pass;
    let mut dataplane = sandbox.open();
    dataplane.resync(&desired).unwrap();
    assert_eq!(cidrs(&sandbox), 0);
}
