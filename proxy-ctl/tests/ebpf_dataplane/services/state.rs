//! Tests of what a resync leaves in the maps, and of what a restart finds.

use std::{
    io::{self, Write},
    net::IpAddr,
    ops::Range,
    sync::{Arc, Mutex},
};

use proxy_ctl::{
    config::Limits,
    model::{
        desired::{Changes, DesiredPort},
        node::Host,
        objects::Protocol,
    },
    modes::{
        Applied, Dataplane, FrontendSnapshot, MapUsage, Programmed as _,
        ebpf::{EbpfDataplane, Error, cleanup::cleanup, view::status::Pinned},
    },
    sys::{bpf::writing_calls, proc::lock::Holder},
};
use rstest::rstest;
use tracing::Level;

use crate::{
    desired::{change, endpoint, port, shared, with_node_port},
    sandbox::{Sandbox, TakeHost as _, run, serve},
};

fn web(backends: &[&str]) -> Vec<Arc<DesiredPort>> {
    let all = backends.iter().map(|address| endpoint(address, 8080)).collect();
    shared([
        with_node_port(port("web", "10.96.0.1", all), 30080),
        port("web", "fd00::1", vec![endpoint("fd00:10::1", 8080)]),
        port("empty", "10.96.0.2", Vec::new()),
    ])
}

#[test]
fn a_resync_writes_what_is_desired() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&web(&["10.0.0.1", "10.0.0.2"])).unwrap();
    let snapshot = sandbox.snapshot();

    let services = snapshot.services;
    let shown: Vec<_> = services
        .iter()
        .map(|service| {
            let frontends: Vec<_> = service
                .frontends
                .iter()
                .map(|f| format!("{}:{}", f.address.map_or("node".into(), |ip| ip.to_string()), f.port))
                .collect();
            let cluster: Vec<_> = service.cluster.iter().map(|e| e.address.to_string()).collect();
            (service.name.to_string(), frontends.join(" "), cluster.join(" "), service.any_endpoints)
        })
        .collect();
    let expected = [
        ("test/empty:http", "10.96.0.2:80", "", false),
        ("test/web:http", "node:30080 10.96.0.1:80", "10.0.0.1:8080 10.0.0.2:8080", true),
        ("test/web:http", "fd00::1:80", "[fd00:10::1]:8080", true),
    ];
    assert_eq!(shown, expected.map(|(n, f, c, any)| (n.into(), f.into(), c.into(), any)));
    let backends = snapshot.backends;
    assert_eq!(backends.len(), 3);
    assert!(backends.iter().all(|backend| backend.uses == 1 && !backend.terminating));
}

#[test]
fn a_connection_to_a_service_reaches_its_backend() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let listening = serve("127.0.0.1", "first");
    dataplane
        .resync(&shared([
            port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)]),
            port("empty", "10.96.0.2", Vec::new()),
        ]))
        .unwrap();
    assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("first".into()));
    let refused = sandbox.dial("10.96.0.2", 80).unwrap_err();
    assert!(refused.contains("refused") || refused.contains("not permitted"), "{refused}");
    drop(dataplane);
    assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("first".into()), "without a controller");
}

#[test]
fn a_backend_stays_as_long_as_its_endpoint_serves() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    // There are two service ports, one for each protocol. A UDP port has backends of its own, and
    // TCP ports share theirs.
    let ports = |used: &[&str], unused: &[&str]| {
        let with = |mut port: DesiredPort, protocol| {
            port.name.protocol = protocol;
            port.endpoints.unused = unused.iter().map(|one| endpoint(one, 53)).collect();
            port
        };
        let all = || used.iter().map(|one| endpoint(one, 53)).collect();
        shared([
            with(port("dns", "10.96.0.1", all()), Protocol::Udp),
            with(port("web", "10.96.0.2", all()), Protocol::Tcp),
        ])
    };
    let backends = || -> Vec<_> {
        let found = sandbox.snapshot().backends.into_iter();
        found.map(|one| (one.id, one.address.ip().to_string(), one.uses, one.terminating)).collect()
    };
    dataplane.resync(&ports(&["10.0.0.1"], &["10.0.0.9"])).unwrap();
    let before = backends();
    let as_before = |uses, terminating| -> Vec<_> {
        let of = |(id, address, ..): &(u32, String, u32, bool)| (*id, address.clone(), uses, terminating);
        before.iter().map(of).collect()
    };
    assert_eq!(before, as_before(1, false));
    assert_eq!(before.len(), 2, "none for an endpoint that was never used");

    let changed = ports(&[], &["10.0.0.1"]);
    dataplane.apply(&change(changed.clone())).unwrap();
    assert_eq!(backends(), as_before(0, true));
    drop(dataplane);
    let mut dataplane = sandbox.open();
    assert_eq!(dataplane.resync(&changed).unwrap(), Applied::default(), "nor by the next controller");

    let back = ports(&["10.0.0.1"], &[]);
    dataplane.apply(&change(back)).unwrap();
    assert_eq!(backends(), as_before(1, false), "with the ids that flows and sockets know");
    dataplane.apply(&change(changed)).unwrap();
    dataplane.apply(&change(ports(&[], &[]))).unwrap();
    assert_eq!(backends(), []);
}

/// A writer that keeps log lines in memory.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_refused_client_is_logged_while_debug_lines_are_told() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&shared([port("empty", "10.96.0.2", Vec::new())])).unwrap();
    let mut told_at = |level: Level| {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            dataplane.collect_garbage().unwrap();
            sandbox.dial("10.96.0.2", 80).unwrap_err();
            dataplane.collect_garbage().unwrap();
        });
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    };
    let line = "no_endpoints: protocol 6, from 0.0.0.0 port 0 to 10.96.0.2 port 80";
    let quiet = told_at(Level::INFO);
    assert!(!quiet.contains(line), "{quiet}");
    let told = told_at(Level::DEBUG);
    assert!(told.contains(line), "{told}");
}

/// Returns the connections of each Service that is counted, and the number of Services that are
/// not.
fn service_connections(dataplane: &EbpfDataplane) -> (Vec<(String, u64)>, u64) {
    let families = dataplane.metrics().unwrap();
    let samples = |name| &families.iter().find(|family| family.name == name).unwrap().samples;
    let counted = samples("proxy_service_connections").iter();
    let counted = counted.map(|(labels, count)| (labels[1].1.to_string(), *count)).collect();
    (counted, samples("proxy_uncounted_service_ports")[0].1)
}

#[test]
fn connections_are_counted_for_their_service() {
    let Some(sandbox) = Sandbox::new() else { return };
    // The id 0 is no service, so there is room for one.
    let limits = Limits { services: 2, ..sandbox.config.limits };
    let mut dataplane = sandbox.open_with(limits);
    let listening = serve("127.0.0.1", "first");
    let web = |name: &str| shared([port(name, "10.96.0.1", vec![endpoint("127.0.0.1", listening)])]);
    let connections = |dataplane: &EbpfDataplane| {
        let (counted, uncounted) = service_connections(dataplane);
        assert_eq!(uncounted, 0);
        counted
    };
    dataplane.resync(&web("old")).unwrap();
    for _ in 0..3 {
        assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("first".into()));
    }
    assert_eq!(connections(&dataplane), [("old".to_owned(), 3)]);
    assert_eq!(sandbox.snapshot().services[0].id, 1);
    dataplane.resync(&[]).unwrap();
    dataplane.resync(&web("new")).unwrap();
    assert_eq!(sandbox.snapshot().services[0].id, 1);
    assert_eq!(connections(&dataplane), [("new".to_owned(), 0)]);
}

#[test]
fn services_beyond_the_room_for_counters_are_told() {
    let Some((_sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let addresses = (1..=6).map(|n| format!("10.96.1.{n}"));
    let ports = addresses.map(|address| port(&format!("to-{address}"), &address, Vec::new()));
    dataplane.resync(&ports.map(Arc::new).collect::<Vec<_>>()).unwrap();
    let (counted, uncounted) = service_connections(&dataplane);
    // There is room for 4, and the id 0 is no service.
    assert_eq!((counted.len(), uncounted), (3, 3));
}

/// Returns how many service ports use each backend of two Services with the same endpoint, before
/// and after it has left the first Service.
fn backends_after_an_endpoint_left_one_of_two(protocol: Protocol) -> Option<[Vec<u32>; 2]> {
    let sandbox = Sandbox::new()?;
    let mut dataplane = sandbox.open();
    let of = |service: &str, address: &str, all: &[&str]| {
        let all = all.iter().map(|address| endpoint(address, 53)).collect();
        let mut port = port(service, address, all);
        port.name.protocol = protocol;
        port
    };
    let uses = || {
        let backends = sandbox.snapshot().backends;
        let mut uses: Vec<u32> = backends.iter().map(|backend| backend.uses).collect();
        uses.sort_unstable();
        uses
    };
    dataplane
        .resync(&shared([of("a", "10.96.0.1", &["10.0.0.1"]), of("b", "10.96.0.2", &["10.0.0.1"])]))
        .unwrap();
    let before = uses();
    let changes = change(shared([of("a", "10.96.0.1", &["10.0.0.2"])]));
    dataplane.apply(&changes).unwrap();
    drop(dataplane);
    let after = uses();
    let mut again = sandbox.open();
    let desired = shared([of("a", "10.96.0.1", &["10.0.0.2"]), of("b", "10.96.0.2", &["10.0.0.1"])]);
    assert_eq!(again.resync(&desired).unwrap(), Applied::default());
    Some([before, after])
}

#[test]
fn services_share_the_backends_of_tcp() {
    let Some(uses) = backends_after_an_endpoint_left_one_of_two(Protocol::Tcp) else { return };
    assert_eq!(uses, [vec![2], vec![1, 1]]);
}

/// If they shared one, a flow of the first Service would go on to an endpoint that only the second
/// still has.
#[test]
fn each_service_has_its_own_backends_for_udp() {
    let Some(uses) = backends_after_an_endpoint_left_one_of_two(Protocol::Udp) else { return };
    assert_eq!(uses, [vec![1, 1], vec![1, 1]]);
}

#[test]
fn a_restart_writes_nothing() {
    let Some(sandbox) = Sandbox::new() else { return };
    let desired = web(&["10.0.0.1", "10.0.0.2"]);
    let host = Host {
        node_port_addresses: ["192.0.2.1".parse().unwrap(), IpAddr::from([127, 0, 0, 1])].into(),
        masquerade_addresses: vec!["192.0.2.1".parse().unwrap()],
        ..Host::default()
    };
    let mut first = sandbox.open();
    assert_ne!(first.take_host(&host).unwrap(), Applied::default());
    assert_ne!(first.resync(&desired).unwrap(), Applied::default());
    drop(first);
    let before = sandbox.snapshot().services;
    let mut second = sandbox.open();
    assert_eq!(second.take_host(&host).unwrap(), Applied::default());
    assert_eq!(second.resync(&desired).unwrap(), Applied::default());
    assert_eq!(sandbox.snapshot().services, before);
}

#[test]
fn changes_while_nobody_was_there_are_caught_up() {
    let Some((sandbox, mut first)) = Sandbox::opened() else { return };
    first.resync(&web(&["10.0.0.1", "10.0.0.2"])).unwrap();
    drop(first);
    let before = sandbox.snapshot().backends;
    let mut second = sandbox.open();
    let desired =
        shared([port("web", "10.96.0.1", vec![endpoint("10.0.0.2", 8080), endpoint("10.0.0.3", 8080)])]);
    second.resync(&desired).unwrap();
    let snapshot = sandbox.snapshot();
    let services = snapshot.services;
    assert_eq!(services.len(), 1);
    assert_eq!(services[0].frontends.len(), 1, "the node port is gone");
    let after = snapshot.backends;
    let addresses: Vec<_> = after.iter().map(|backend| backend.address.to_string()).collect();
    assert_eq!(addresses, ["10.0.0.2:8080", "10.0.0.3:8080"]);
    let largest = before.iter().map(|backend| backend.id).max().unwrap();
    assert_eq!(after[0].id, before.iter().find(|b| b.address == after[0].address).unwrap().id);
    assert!(after[1].id > largest, "an id is never given twice");
}

#[test]
fn a_frontend_moves_to_another_service_without_a_hole() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&shared([port("old", "10.96.0.1", vec![endpoint("10.0.0.1", 80)])])).unwrap();
    let new = port("new", "10.96.0.1", vec![endpoint("10.0.0.2", 80)]);
    let removed = vec![crate::desired::name("old", new.name.family)];
    let applied = dataplane.apply(&Changes { changed: shared([new]), removed }).unwrap();
    // The service, its name and the backend were removed. The frontend itself was overwritten.
    assert_eq!(applied.removed, 3);
    let services = sandbox.snapshot().services;
    assert_eq!(services.len(), 1);
    assert_eq!(services[0].frontends.len(), 1);
    assert_eq!(&*services[0].name.service.name, "new");
}

/// Returns address, port and owner of each frontend.
fn owners(sandbox: &Sandbox) -> Vec<String> {
    let services = sandbox.snapshot().services;
    let owners = services.iter().flat_map(|service| {
        let shown = |frontend: &FrontendSnapshot| {
            let at = frontend.address.map_or("node".into(), |address| address.to_string());
            format!("{at}:{} {}", frontend.port, service.name.port)
        };
        service.frontends.iter().map(shown).collect::<Vec<_>>()
    });
    let mut owners: Vec<String> = owners.collect();
    owners.sort_unstable();
    owners
}

/// Each port gives up a frontend that the other has taken already.
#[test]
fn ports_that_swap_their_numbers_lose_no_frontend() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let listening = [serve("127.0.0.1", "a"), serve("127.0.0.1", "b")];
    let ports = |numbers: [u16; 2]| {
        let of = |(name, number, listening): (&str, u16, u16)| {
            let mut port = port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)]);
            (port.name.port, port.frontends[0].port) = (name.into(), number);
            with_node_port(port, 30_000 + number)
        };
        shared([("a", numbers[0], listening[0]), ("b", numbers[1], listening[1])].map(of))
    };
    dataplane.resync(&ports([80, 81])).unwrap();
    for (numbers, [at_80, at_81]) in [([81, 80], ["b", "a"]), ([80, 81], ["a", "b"])] {
        dataplane.apply(&change(ports(numbers))).unwrap();
        let expected = [
            format!("10.96.0.1:80 {at_80}"),
            format!("10.96.0.1:81 {at_81}"),
            format!("node:30080 {at_80}"),
            format!("node:30081 {at_81}"),
        ];
        assert_eq!(owners(&sandbox), expected);
        assert_eq!(sandbox.dial("10.96.0.1", 80), Ok(at_80.into()));
        assert_eq!(sandbox.dial("10.96.0.1", 81), Ok(at_81.into()));
    }
}

#[test]
fn a_port_of_one_protocol_goes_and_that_of_the_other_stays() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let of = |protocol: Protocol| {
        let mut port = with_node_port(port("web", "10.96.0.1", vec![endpoint("10.0.0.1", 80)]), 30_080);
        port.name.protocol = protocol;
        port
    };
    let (tcp, udp) = (of(Protocol::Tcp), of(Protocol::Udp));
    for (stays, goes) in [(&tcp, &udp), (&udp, &tcp)] {
        dataplane.resync(&shared([tcp.clone(), udp.clone()])).unwrap();
        assert_eq!(owners(&sandbox).len(), 4);
        dataplane.apply(&Changes { changed: Vec::new(), removed: vec![goes.name.clone()] }).unwrap();
        let services = sandbox.snapshot().services;
        assert_eq!(services.iter().map(|service| &service.name).collect::<Vec<_>>(), [&stays.name]);
        assert_eq!(services[0].frontends.len(), 2);
    }
}

#[test]
fn a_service_of_more_than_a_thousand_endpoints() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let ports = |count: u16| {
        let address = |number: u16| IpAddr::from([10, 1, number.to_be_bytes()[0], number.to_be_bytes()[1]]);
        let all = (0..count).map(|number| endpoint(&address(number).to_string(), 8080)).collect();
        shared([port("web", "10.96.0.1", all)])
    };
    for count in [1_500, 1_001, 999, 1_500] {
        dataplane.apply(&change(ports(count))).unwrap();
        let snapshot = sandbox.snapshot();
        assert_eq!(snapshot.services[0].cluster.len(), usize::from(count));
        assert_eq!(snapshot.backends.len(), usize::from(count));
    }
}

#[test]
fn addresses_of_node_ports_come_and_go() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let listening = serve("127.0.0.1", "first");
    let web = port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)]);
    dataplane.resync(&shared([with_node_port(web, 30_080)])).unwrap();
    run("ip", "addr add 192.0.2.1/24 dev lo");
    run("ip", "addr add 192.0.2.2/24 dev lo");
    for addresses in [&[1, 2][..], &[2], &[], &[1]] {
        let served = addresses.iter().map(|last| IpAddr::from([192, 0, 2, *last])).collect();
        dataplane.take_host(&Host { node_port_addresses: served, ..Host::default() }).unwrap();
        for last in [1, 2] {
            let answer = sandbox.dial(&format!("192.0.2.{last}"), 30_080);
            assert_eq!(answer.is_ok(), addresses.contains(&last), "{addresses:?} {last}: {answer:?}");
        }
    }
}

#[test]
fn one_endpoint_more_costs_only_its_service() {
    let Some((_sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&web(&["10.0.0.1", "10.0.0.2"])).unwrap();
    let mut web = web(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
    web.truncate(1);
    let applied = dataplane.apply(&change(web)).unwrap();
    // The writes are a backend, three slots and the service.
    assert_eq!(applied, Applied { written: 5, removed: 0 });
}

/// The number of calls does not depend on how many endpoints there are, because slots and the
/// service itself are mapped into memory.
#[rstest]
#[case::an_endpoint_more(0..100, 0..101)]
#[case::an_endpoint_less(0..100, 0..99)]
#[case::an_endpoint_replaced(0..100, 1..101)]
fn an_endpoint_costs_three_calls_at_most(#[case] before: Range<u8>, #[case] after: Range<u8>) {
    let Some((_sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let web = |endpoints: Range<u8>| {
        let all = endpoints.map(|last| endpoint(&format!("10.0.0.{last}"), 8080)).collect();
        shared([port("web", "10.96.0.1", all)])
    };
    let others = (0..100).map(|last| {
        port(&format!("other-{last}"), &format!("10.96.1.{last}"), vec![endpoint("10.0.1.1", 80)])
    });
    dataplane.resync(&[web(before), shared(others)].concat()).unwrap();
    let calls = writing_calls();
    dataplane.apply(&change(web(after))).unwrap();
    let calls = writing_calls() - calls;
    assert!((1..=3).contains(&calls), "{calls}");
}

#[test]
fn a_second_controller_is_told_which_process_runs() {
    let Some((sandbox, first)) = Sandbox::opened() else { return };
    let own = Holder(Some(std::process::id()));
    let second = EbpfDataplane::open(&sandbox.config).unwrap_err();
    assert!(matches!(second, Error::Locked { holder, .. } if holder == own), "{second}");
    let cleaning = cleanup(&sandbox.config.bpffs).unwrap_err();
    assert!(matches!(cleaning, Error::Locked { holder, .. } if holder == own), "{cleaning}");
    drop(first);
    sandbox.open();
}

#[test]
fn a_map_that_may_start_empty_is_made_anew() {
    let Some(sandbox) = Sandbox::new() else { return };
    drop(sandbox.open());
    let limits = Limits { service_counters: 8, ..sandbox.config.limits };
    drop(sandbox.open_with(limits));
    assert_eq!(sandbox.room("service_counters"), 8);
}

#[test]
fn usage_counts_entries_and_memory() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&web(&["10.0.0.1", "10.0.0.2"])).unwrap();
    let by_controller = dataplane.usage().unwrap();
    let by_pins = Pinned::open(&sandbox.config.bpffs).unwrap().usage().unwrap();
    for usage in [by_controller, by_pins] {
        let used = |name| usage.maps.iter().find(|map| map.name == name).unwrap().used;
        // The numbers include the two ClusterIPs of IPv4 and the one of IPv6.
        assert_eq!([used("frontends4"), used("frontends6"), used("services")], [5, 2, 3]);
        assert_eq!([used("backends4"), used("backends6"), used("slots4"), used("slots6")], [2, 1, 2, 1]);
        // The kernel counts no memory for a trie without entries.
        let is_trie = |name: &str| name.starts_with("source_ranges") || name.starts_with("service_cidrs");
        let takes_memory = |map: &MapUsage| map.capacity > 0 && !is_trie(map.name);
        assert!(usage.maps.iter().filter(|map| takes_memory(map)).all(|map| map.bytes > 0));
        assert!(usage.reasons.iter().any(|reason| reason.name == "no_endpoints"));
    }
}
