//! Tests of the mode against a kernel that has IPVS. On other kernels they are skipped by name.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    model::{
        Model,
        test_support::{HERE, ip, local, service, slice},
    },
    sys::net::ipvs::tests::of_own_namespace,
};

const CLUSTER_IP: &str = "10.96.0.1";
const ENDPOINTS: [&str; 2] = ["192.0.2.1", "192.0.2.2"];

fn run(program: &str, arguments: &str) {
    let status = Command::new(program).args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "{program} {arguments}");
}

/// Returns a dataplane on a node with the endpoints' addresses on lo. Its network namespace ends
/// with the test's thread. `None`: the kernel has no IPVS.
fn node(config: &config::Ipvs) -> Option<IpvsDataplane> {
    of_own_namespace()?;
    run("ip", "link set lo up");
    for address in ENDPOINTS {
        run("ip", &format!("address add {address}/32 dev lo"));
    }
    Some(open(config))
}

fn open(config: &config::Ipvs) -> IpvsDataplane {
    let mut dataplane = IpvsDataplane::open(config).unwrap();
    let host = Host {
        node_port_addresses: [ip(ENDPOINTS[0])].into(),
        masquerade_addresses: vec![ip(ENDPOINTS[0])],
        masquerade_bit: 14,
        ..Host::default()
    };
    dataplane.set_host(&host).unwrap();
    dataplane
}

fn model(endpoints: &[&str]) -> Model {
    let mut model = Model::new(HERE);
    model.apply_service(service("default/web", &[CLUSTER_IP]).node_port(30_080));
    model.apply_slice(web(endpoints));
    model
}

fn web(endpoints: &[&str]) -> crate::model::objects::EndpointSlice {
    slice("default/web-1", "web", endpoints.iter().map(|address| local(address)).collect())
}

fn desired(endpoints: &[&str]) -> Vec<Arc<DesiredPort>> {
    model(endpoints).take_changes().changed
}

fn destinations(dataplane: &IpvsDataplane) -> Vec<(String, bool, bool)> {
    let socket = VirtualSocket { protocol: 6, address: SocketAddr::new(ip(CLUSTER_IP), 80) };
    let mut listed: Vec<_> = dataplane
        .kernel
        .destinations(socket)
        .unwrap()
        .into_iter()
        .map(|one| (one.address.ip().to_string(), one.is_used, one.connections > 0))
        .collect();
    listed.sort();
    listed
}

#[test]
#[ignore = "needs root"]
fn as_root_a_restart_writes_nothing_and_what_is_not_desired_goes() {
    let config = config::Ipvs::default();
    let Some(mut dataplane) = node(&config) else { return };
    let desired = desired(&ENDPOINTS);
    assert!(dataplane.resync(&desired).unwrap().written > 0);
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    let before = dataplane.snapshot().unwrap();
    assert_eq!(before.services.len(), 1);
    assert_eq!(before.services[0].frontends.len(), 2);
    drop(dataplane);

    let unnamed = read().unwrap().unwrap().snapshot().unwrap();
    assert_eq!(unnamed.backends, before.backends);
    let mut dataplane = open(&config);
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    assert_eq!(dataplane.snapshot().unwrap(), before);
    assert!(dataplane.resync(&[]).unwrap().removed > 0);
    assert_eq!(dataplane.snapshot().unwrap().services, []);
    assert_eq!(dataplane.read(&BTreeSet::new()).unwrap(), KernelObjects::default());
}

#[test]
#[ignore = "needs root"]
fn as_root_connections_to_an_endpoint_that_goes_live_on_and_it_comes_back_as_it_was() {
    let config = config::Ipvs::default();
    let Some(mut dataplane) = node(&config) else { return };
    let listener = TcpListener::bind((ip(ENDPOINTS[0]), 8080)).unwrap();
    let mut model = model(&ENDPOINTS[..1]);
    dataplane.resync(&model.take_changes().changed).unwrap();
    let client = TcpStream::connect((CLUSTER_IP, 80)).unwrap();
    let (accepted, _) = listener.accept().unwrap();

    model.apply_slice(web(&ENDPOINTS[1..]));
    dataplane.apply(&model.take_changes()).unwrap();
    dataplane.collect_garbage().unwrap();
    let [one, other] = ENDPOINTS.map(str::to_owned);
    assert_eq!(destinations(&dataplane), [(one.clone(), false, true), (other.clone(), true, false)]);
    // The destination's weight shows the next controller that it is drained.
    drop(dataplane);
    let mut dataplane = open(&config);
    dataplane.resync(&desired(&ENDPOINTS[1..])).unwrap();
    assert_eq!(destinations(&dataplane)[0], (one.clone(), false, true));

    model.apply_slice(web(&ENDPOINTS));
    dataplane.apply(&model.take_changes()).unwrap();
    assert_eq!(destinations(&dataplane)[0], (one.clone(), true, true));
    std::io::Write::write_all(&mut &client, b"x").unwrap();
    let mut byte = [0];
    std::io::Read::read_exact(&mut &accepted, &mut byte).unwrap();

    model.apply_slice(web(&ENDPOINTS[1..]));
    dataplane.apply(&model.take_changes()).unwrap();
    // A socket with unread data ends with a reset. IPVS remembers such a connection for only 10
    // seconds.
    std::io::Write::write_all(&mut &client, b"y").unwrap();
    drop(accepted);
    drop(client);
    let limit = Instant::now() + Duration::from_mins(1);
    while destinations(&dataplane).len() > 1 {
        assert!(Instant::now() < limit, "its connections are known for ever");
        std::thread::sleep(Duration::from_millis(200));
        dataplane.collect_garbage().unwrap();
    }
    assert_eq!(destinations(&dataplane), [(other, true, false)]);
}

#[test]
#[ignore = "needs root"]
fn as_root_a_service_port_that_the_kernel_refuses_is_named_and_its_neighbours_are_served() {
    let Some(mut dataplane) = node(&config::Ipvs::default()) else { return };
    let listener = TcpListener::bind((ip(ENDPOINTS[0]), 8080)).unwrap();
    let mut model = model(&ENDPOINTS[..1]);
    model.apply_service(service("default/odd", &["10.96.0.2"]));
    // IPVS takes no multicast group as a destination.
    let odd = |endpoint| slice("default/odd-1", "odd", vec![local(endpoint)]);
    model.apply_slice(odd("224.0.0.1"));
    dataplane.resync(&model.take_changes().changed).unwrap();
    let refused = dataplane.take_waiting().unwrap();
    let refused: Vec<_> = refused.keys().map(|name| name.service.to_string()).collect();
    assert_eq!(refused, ["default/odd"]);
    let _client = TcpStream::connect((CLUSTER_IP, 80)).unwrap();
    listener.accept().unwrap();

    model.apply_slice(odd(ENDPOINTS[0]));
    dataplane.apply(&model.take_changes()).unwrap();
    assert_eq!(dataplane.take_waiting(), Some(BTreeMap::new()));
    let _client = TcpStream::connect(("10.96.0.2", 80)).unwrap();
    listener.accept().unwrap();
    let families = dataplane.metrics().unwrap();
    let counted = |family: &MetricFamily| family.samples.iter().map(|(_, count)| *count).sum();
    assert_eq!(families.iter().map(counted).collect::<Vec<u64>>(), [0]);
}

#[test]
#[ignore = "needs root"]
fn as_root_a_service_without_endpoints_and_an_unknown_port_of_an_address_refuse() {
    let Some(mut dataplane) = node(&config::Ipvs::default()) else { return };
    let everywhere = TcpListener::bind(("0.0.0.0", 81)).unwrap();
    dataplane.resync(&desired(&[])).unwrap();
    for port in [80, 81] {
        let error = TcpStream::connect((CLUSTER_IP, port)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{port}");
    }
    drop(everywhere);
}

#[test]
#[ignore = "needs root"]
fn as_root_excluded_virtual_servers_stay_and_other_schedulers_are_named() {
    let mut config =
        config::Ipvs { exclude_cidrs: vec!["198.51.100.0/24".parse().unwrap()], ..config::Ipvs::default() };
    let Some(mut dataplane) = node(&config) else { return };
    let ipvs = Ipvs::open().unwrap().unwrap();
    let real: SocketAddr = (ip(ENDPOINTS[0]), 80).into();
    for address in ["198.51.100.1:80", "203.0.113.1:80"] {
        crate::sys::net::ipvs::tests::serve(&ipvs, address, &[real]);
    }
    let excluded = VirtualSocket { protocol: 6, address: "198.51.100.1:80".parse().unwrap() };
    let drained = ServerChange::UseDestination(excluded, real, false);
    assert!(ipvs.write(&[drained]).unwrap().is_empty());
    dataplane.resync(&[]).unwrap();
    dataplane.collect_garbage().unwrap();
    assert_eq!(ipvs.destinations(excluded).unwrap().len(), 1);
    assert_eq!(dataplane.snapshot().unwrap().services, []);
    let left: Vec<_> = ipvs.servers().unwrap().iter().map(|one| one.socket).collect();
    assert_eq!(left, [excluded]);
    let taken = IpvsDataplane::open(&config).err().unwrap().to_string();
    assert!(taken.contains(&format!("process {}", std::process::id())), "{taken}");
    for scheduler in ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "mh"] {
        check_scheduler(&ipvs, scheduler).unwrap();
    }
    drop(dataplane);
    config.scheduler = "mh".to_owned();
    let mut dataplane = open(&config);
    dataplane.resync(&desired(&ENDPOINTS)).unwrap();
    assert_eq!(dataplane.resync(&desired(&ENDPOINTS)).unwrap(), Applied::default());
    drop(dataplane);
    config.scheduler = "odd".to_owned();
    let error = IpvsDataplane::open(&config).err().unwrap().to_string();
    assert!(error.contains("ip_vs_odd"), "{error}");
}

#[test]
fn timeouts_are_whole_seconds_and_zero_stays_zero() {
    let config = config::Ipvs {
        tcp_timeout: Duration::from_secs(900),
        udp_timeout: Duration::from_millis(5_900),
        ..config::Ipvs::default()
    };
    assert_eq!(timeouts(&config), Timeouts { tcp: 900, tcp_fin: 0, udp: 5 });
}
