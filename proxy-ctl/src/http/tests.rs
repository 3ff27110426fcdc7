//! Tests of the servers over real sockets on the loopback.

use std::{future::Future, pin::Pin, time::Duration};

use http::StatusCode;
use rstest::rstest;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};

use super::*;
use crate::{
    free_port::free_port,
    http::report::{
        Health, Heartbeats, ModeFamilies, ModeInForce, Moment, STUCK_AFTER, SharedHealth, SyncKind,
    },
    kubernetes::{
        ListMethod, ResourceKind, SourceState,
        convert::invalid::InvalidObjects,
        failure::{Failure, FailureReason},
    },
    model::{
        mode::Mode,
        objects::{IpFamily, Node},
    },
    modes::{self, Applied, MetricFamily, Modes},
};

pub(super) struct SampleFamilies;

impl ModeFamilies for SampleFamilies {
    fn families(&self) -> Pin<Box<dyn Future<Output = Option<Vec<MetricFamily>>> + Send + '_>> {
        Box::pin(async { Some(modes::sample_metrics()) })
    }
}

struct Servers {
    healthz: SocketAddr,
    metrics: SocketAddr,
    health: Arc<SharedHealth>,
    heartbeats: Heartbeats,
    sources: SourceState,
    families: Arc<Metrics>,
    _stop: tokio_util::sync::DropGuard,
}

fn free_address() -> SocketAddr {
    ([127, 0, 0, 1], free_port()).into()
}

fn pages() -> Pages {
    Pages {
        mode: watch::channel(ModeInForce::new(Modes { active: Mode::Ebpf, secondary: None })).1,
        configuration: watch::channel(serde_json::json!({"kind": "KubeProxyConfiguration", "mode": "ebpf"}))
            .1,
        flags: Some([("v".to_owned(), "2".to_owned())].into()),
        status: true,
        profiling: true,
    }
}

async fn servers() -> Servers {
    servers_with(pages()).await
}

async fn servers_with(pages: Pages) -> Servers {
    let stop = CancellationToken::new();
    let health = Arc::new(SharedHealth::new(Health::new(Duration::from_secs(30))));
    let families = Arc::new(Metrics::new(Some(Box::new(SampleFamilies)), InvalidObjects::default(), |_| {}));
    let (healthz_address, metrics_address) = (free_address(), free_address());
    let (heartbeats, sources) = (Heartbeats::default(), SourceState::new());
    let pages_of_health = HealthPages {
        health: Arc::clone(&health),
        heartbeats: heartbeats.clone(),
        sources: Some(sources.clone()),
        metrics: Arc::clone(&families),
    };
    let task = healthz(healthz_address, true, pages_of_health, stop.clone());
    tokio::spawn(async move { task.await.unwrap() });
    let task = metrics(metrics_address, true, pages, Arc::clone(&families), stop.clone());
    tokio::spawn(async move { task.await.unwrap() });
    let (healthz, metrics, _stop) = (healthz_address, metrics_address, stop.drop_guard());
    Servers { healthz, metrics, health, heartbeats, sources, families, _stop }
}

/// Returns status, headers and body of an answer.
async fn get(address: SocketAddr, path: &str, header: &str) -> (u16, String, String) {
    let answer = String::from_utf8(ask(address, path, header).await).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_lowercase(), body.to_owned())
}

/// The time limit of an answer, which includes the start of the server.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// Returns the whole answer to a GET request.
async fn ask(address: SocketAddr, path: &str, header: &str) -> Vec<u8> {
    request(address, "GET", path, header).await
}

/// Returns the whole answer to a request.
async fn request(address: SocketAddr, method: &str, path: &str, header: &str) -> Vec<u8> {
    let answer = tokio::time::timeout(ANSWERS_WITHIN, request_of(address, method, path, header)).await;
    answer.expect("it is answered")
}

async fn request_of(address: SocketAddr, method: &str, path: &str, header: &str) -> Vec<u8> {
    let mut stream = loop {
        match TcpStream::connect(address).await {
            Ok(stream) => break stream,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn healthz_asks_the_node_and_livez_does_not() {
    let servers = servers().await;
    servers.health.lock().updated(IpFamily::Ipv4, Moment::now());
    let (status, head, body) = get(servers.healthz, "/healthz", "").await;
    assert_eq!(status, 503);
    assert!(head.contains("content-type: application/json"), "{head}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    assert!(body.contains(r#""nodeEligible":false,"healthy":true,"status":{"IPv4":{"#), "{body}");
    let (status, _, body) = get(servers.healthz, "/livez", "").await;
    assert_eq!(status, 200);
    assert!(!body.contains("nodeEligible"), "{body}");

    servers.health.lock().set_node(Some(&Node::default()));
    assert_eq!(get(servers.healthz, "/healthz", "").await.0, 200);
    assert_eq!(get(servers.healthz, "/metrics", "").await.0, 404);

    let (_, _, metrics) = get(servers.metrics, "/metrics", "").await;
    for line in [
        r#"kubeproxy_proxy_healthz_total{code="503"} 1"#,
        r#"kubeproxy_proxy_healthz_total{code="200"} 1"#,
        r#"kubeproxy_proxy_livez_total{code="200"} 1"#,
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn readyz_says_whether_everything_listed_is_programmed() {
    let servers = servers().await;
    let readyz = async || {
        let (status, _, body) = get(servers.healthz, "/readyz", "").await;
        (status, body)
    };
    let (status, body) = readyz().await;
    let begun = "[-]programmed failed: the process has just begun\nreadyz check failed\n";
    assert_eq!((status, body.as_str()), (503, begun));
    servers.health.lock().set_programmed(Err("Services are not written".to_owned()));
    assert!(readyz().await.1.starts_with("[-]programmed failed: Services are not written\n"));
    servers.health.lock().set_programmed(Ok(()));
    assert_eq!(readyz().await, (200, "ok".to_owned()));

    // A failure of the Node alone does not make the process unready.
    let failure = Failure::new(FailureReason::Forbidden, "user x cannot list");
    servers.sources.failed(ResourceKind::Nodes, &failure);
    assert_eq!(readyz().await.0, 200);
    servers.sources.failed(ResourceKind::EndpointSlices, &failure);
    let unlisted = "[-]sources failed: endpointslices cannot be watched\nreadyz check failed\n";
    assert_eq!(readyz().await, (503, unlisted.to_owned()));
    servers.sources.listed(ResourceKind::EndpointSlices, ListMethod::Whole, 1);
    assert_eq!(readyz().await.0, 200);
    // What was listed is served while the API server is away.
    servers
        .sources
        .failed(ResourceKind::EndpointSlices, &Failure::new(FailureReason::Unreachable, "refused"));
    assert_eq!(readyz().await.0, 200);
}

#[tokio::test]
async fn only_a_stuck_loop_fails_the_liveness_probe() {
    let servers = servers().await;
    // No write has succeeded for longer than a change may wait. /healthz and /livez fail, so load
    // balancers leave the node. /livez/threads, which our manifests probe, succeeds, so nothing is
    // restarted.
    let long_ago = Moment { instant: std::time::Instant::now() - Duration::from_secs(61), ..Moment::now() };
    servers.health.lock().updated(IpFamily::Ipv4, long_ago);
    servers.health.lock().queued(IpFamily::Ipv4, long_ago.instant);
    assert_eq!(get(servers.healthz, "/livez", "").await.0, 503);
    let threads = async || get(servers.healthz, "/livez/threads", "").await;
    let (status, _, body) = threads().await;
    assert_eq!((status, body.as_str()), (200, "ok"));

    let _dataplane = servers.heartbeats.begin_at("dataplane", long_ago.instant - STUCK_AFTER);
    let (status, _, body) = threads().await;
    assert_eq!(status, 503);
    let silence = body.strip_prefix("[-]dataplane failed: no sign of life for ");
    let silence = silence.and_then(|rest| rest.strip_suffix(" s\nlivez/threads check failed\n"));
    assert!(silence.is_some_and(|seconds| seconds.parse::<u64>().is_ok_and(|found| found >= 361)), "{body}");
}

#[tokio::test]
async fn metrics_in_the_text_format_that_kube_proxy_gives() {
    let servers = servers().await;
    servers.families.own.applied(Applied { written: 5, removed: 2 });
    servers.families.kube_proxy.synced(IpFamily::Ipv4, SyncKind::Full, Duration::from_millis(3));
    servers.families.kube_proxy.endpoint_changes.received(2);
    servers.families.kube_proxy.service_changes.received(1);
    servers.families.kube_proxy.service_changes.written();
    let (status, head, body) = get(servers.metrics, "/metrics", "").await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    for line in [
        "# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram",
        r#"kubeproxy_sync_proxy_rules_duration_seconds_bucket{le="0.002",ip_family="IPv4"} 0"#,
        r#"kubeproxy_sync_proxy_rules_duration_seconds_bucket{le="0.004",ip_family="IPv4"} 1"#,
        r#"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"} 0"#,
        "# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge",
        "# TYPE kubeproxy_sync_proxy_rules_endpoint_changes_total counter",
        "kubeproxy_sync_proxy_rules_endpoint_changes_total 2",
        "kubeproxy_sync_proxy_rules_endpoint_changes_pending 2",
        "kubeproxy_sync_proxy_rules_service_changes_total 1",
        "kubeproxy_sync_proxy_rules_service_changes_pending 0",
        "# TYPE kubeproxy_sync_proxy_rules_no_local_endpoints_total gauge",
        r#"kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="internal",ip_family="IPv4"} 0"#,
        "# TYPE proxy_writes_total counter",
        "proxy_writes_total 5",
        "proxy_removals_total 2",
        r#"proxy_map_used{map="frontends4"} 3"#,
        r#"proxy_map_capacity{map="frontends4"} 100"#,
        r#"proxy_map_bytes{map="frontends4"} 4096"#,
        "# TYPE proxy_reasons_total counter",
        r#"proxy_reasons_total{reason="no_endpoints",verdict="refuse"} 7"#,
        r#"proxy_service_connections_total{namespace="default",service="web",port="http",protocol="TCP",ip_family="IPv4"} 2"#,
        r#"proxy_service_bytes_total{namespace="default",service="web",port="http",protocol="TCP",ip_family="IPv4"} 1500"#,
        "proxy_uncounted_service_ports 3",
        "# TYPE process_cpu_seconds_total counter",
    ] {
        assert!(body.lines().any(|found| found == line), "{line} is not in\n{body}");
    }
    assert!(!body.contains("# EOF") && !body.contains("_total_total"), "{body}");
    assert!(body.lines().any(|line| line.starts_with("process_resident_memory_bytes ")), "{body}");
}

#[tokio::test]
async fn metrics_as_open_metrics_for_those_who_ask() {
    let servers = servers().await;
    let accept = "Accept: application/openmetrics-text;version=1.0.0\r\n";
    let (_, head, body) = get(servers.metrics, "/metrics", accept).await;
    assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(body.contains("# TYPE proxy_writes counter\nproxy_writes_total 0\n"), "{body}");
    assert!(body.ends_with("# EOF\n"), "{body}");
}

#[tokio::test]
async fn an_address_in_use_fails_at_once_only_if_asked_to() {
    let address = free_address();
    let taken = TcpListener::bind(address).await.unwrap();
    let families = Arc::new(Metrics::new(None, InvalidObjects::default(), |_| {}));
    let stop = CancellationToken::new();
    let error = metrics(address, true, pages(), Arc::clone(&families), stop.clone()).await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");

    let waiting = tokio::spawn(metrics(address, false, pages(), families, stop.clone()));
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    drop(taken);
    // The paused clock moves on to the next attempt, 5 s after the first, because nothing else is
    // left to do.
    tokio::time::pause();
    let deadline = std::time::Instant::now() + ANSWERS_WITHIN;
    while TcpStream::connect(address).await.is_err() {
        assert!(std::time::Instant::now() < deadline, "it does not listen");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::resume();
    let (status, ..) = get(address, "/metrics", "").await;
    assert_eq!(status, 200);
    stop.cancel();
    waiting.await.unwrap().unwrap();
}

#[tokio::test]
async fn what_is_switched_off_is_not_there() {
    let servers = servers_with(Pages { flags: None, status: false, profiling: false, ..pages() }).await;
    for path in ["/flagz", "/statusz", "/debug/flags/v"] {
        assert_eq!(get(servers.metrics, path, "").await.0, 404, "{path}");
    }
}

#[tokio::test]
async fn health_checks_of_the_metrics_server_are_counted_until_reset() {
    let servers = servers().await;
    get(servers.metrics, "/healthz", "").await;
    get(servers.metrics, "/healthz?verbose", "").await;
    let (_, _, text) = get(servers.metrics, "/metrics/slis", "").await;
    let line = r#"kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 2"#;
    assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    request(servers.metrics, "DELETE", "/metrics/slis", "").await;
    let (_, _, text) = get(servers.metrics, "/metrics/slis", "").await;
    assert!(!text.contains("kubernetes_health"), "{text}");
}

#[rstest]
#[case(true)]
#[case(false)]
#[tokio::test]
async fn who_asks_for_a_profile_is_told_of_perf(#[case] profiling: bool) {
    let servers = servers_with(Pages { profiling, ..pages() }).await;
    for path in ["/debug/pprof", "/debug/pprof/", "/debug/pprof/profile?seconds=1", "/debug/pprof/heap"] {
        let (status, _, body) = get(servers.metrics, path, "").await;
        assert_eq!(status, 404, "{path}");
        assert!(body.contains("perf record") && body.lines().count() == 1, "{path}: {body}");
    }
}

#[tokio::test]
async fn the_unspecified_address_answers_over_both_families() {
    let stop = CancellationToken::new();
    let health = Arc::new(SharedHealth::new(Health::new(Duration::from_secs(30))));
    let families = Arc::new(Metrics::new(None, InvalidObjects::default(), |_| {}));
    let port = free_address().port();
    let (heartbeats, sources) = (Heartbeats::default(), None);
    let pages = HealthPages { health, heartbeats, sources, metrics: families };
    let server = healthz(([0, 0, 0, 0], port).into(), true, pages, stop.clone());
    let server = tokio::spawn(server);
    assert_eq!(get(([127, 0, 0, 1], port).into(), "/livez", "").await.0, 200);
    match TcpListener::bind("[::1]:0").await {
        Ok(_) => assert_eq!(get(([0, 0, 0, 0, 0, 0, 0, 1], port).into(), "/livez", "").await.0, 200),
        Err(error) => println!("skipped: whether it answers over IPv6: this machine has no ::1: {error}"),
    }
    stop.cancel();
    server.await.unwrap().unwrap();
}

/// Awaits `outcome` while tokio's clock stands still, so that no timeout of the servers ends a
/// connection meanwhile.
async fn without_timeouts<T>(outcome: impl Future<Output = T>) -> T {
    let (is_over, waiting) = std::sync::mpsc::channel::<()>();
    tokio::time::pause();
    // A paused clock does not move on by itself while a blocking task runs.
    let limit = tokio::task::spawn_blocking(move || waiting.recv_timeout(ANSWERS_WITHIN));
    let outcome = tokio::select! {
        outcome = outcome => outcome,
        _ = limit => panic!("it takes longer than {ANSWERS_WITHIN:?}"),
    };
    drop(is_over);
    tokio::time::resume();
    outcome
}

#[tokio::test]
async fn silent_connections_keep_nobody_from_an_answer() {
    let servers = servers().await;
    get(servers.healthz, "/livez", "").await;
    let mut silent = Vec::new();
    // Without timeouts the server does not close the silent connections meanwhile.
    let (status, ..) = without_timeouts(async {
        for _ in 0..300 {
            silent.push(TcpStream::connect(servers.healthz).await.unwrap());
        }
        get(servers.healthz, "/livez", "").await
    })
    .await;
    assert_eq!(status, 200);
    assert_eq!(silent[0].read(&mut [0]).await.unwrap_or(0), 0);
}

/// Awaits `outcome` while tokio's clock moves on to the next timeout as soon as nobody has anything
/// else to do. `outcome` may have no timeout of its own.
async fn at_the_next_timeout<T>(outcome: impl Future<Output = T>) -> T {
    let (late, is_late) = tokio::sync::oneshot::channel::<()>();
    // tokio's clock moves on at once, so this limit uses the machine's clock.
    std::thread::spawn(move || {
        std::thread::sleep(ANSWERS_WITHIN);
        // If `outcome` has come already, nobody listens any more.
        drop(late);
    });
    tokio::time::pause();
    let outcome = tokio::select! {
        outcome = outcome => outcome,
        _ = is_late => panic!("it takes longer than {ANSWERS_WITHIN:?}"),
    };
    tokio::time::resume();
    outcome
}

#[tokio::test]
async fn a_connection_without_a_whole_header_is_closed_soon() {
    let servers = servers().await;
    get(servers.healthz, "/livez", "").await;
    let mut slow = TcpStream::connect(servers.healthz).await.unwrap();
    slow.write_all(b"GET /livez HTTP/1.1\r\n").await.unwrap();
    // The server accepts connections one after the other, so by now it waits for the rest of the
    // header.
    get(servers.healthz, "/livez", "").await;
    let before = tokio::time::Instant::now();
    at_the_next_timeout(slow.read_to_end(&mut Vec::new())).await.unwrap();
    assert!(before.elapsed() < Duration::from_secs(8), "{:?}", before.elapsed());
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let servers = servers().await;
    get(servers.metrics, "/healthz", "").await;
    let mut slow = TcpStream::connect(servers.metrics).await.unwrap();
    let head = b"PUT /debug/flags/v HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\n";
    slow.write_all(head).await.unwrap();
    // The server accepts connections one after the other, so by now it waits for the body.
    get(servers.metrics, "/healthz", "").await;
    let (before, mut answer) = (tokio::time::Instant::now(), Vec::new());
    at_the_next_timeout(slow.read_to_end(&mut answer)).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&answer));
    assert!(before.elapsed() < Duration::from_secs(30), "{:?}", before.elapsed());
}

/// Connects to `to` from another address of the loopback.
async fn connect_from(source: [u8; 4], to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    socket.bind((source, 0).into())?;
    socket.connect(to).await
}

/// A flood of connections from one or many sources. The last connections are kept open.
struct Flood {
    /// One permit for each connection that may be tried.
    allowed: Semaphore,
    /// One permit for each connection that was tried.
    tried: Semaphore,
}

impl Flood {
    async fn open(&self, sources: u32, to: SocketAddr) {
        /// The number of open connections, which is larger than the number of the server's slots.
        const HELD: usize = 160;
        let mut held = std::collections::VecDeque::new();
        for number in (0..sources).cycle() {
            self.allowed.acquire().await.unwrap().forget();
            let source = std::net::Ipv4Addr::from_bits(0x7f01_0000 + number).octets();
            held.extend(connect_from(source, to).await);
            if held.len() > HELD {
                held.pop_front();
            }
            self.tried.add_permits(1);
        }
    }

    /// Tries this number of further connections while `beside` is done.
    async fn further<T>(&self, connections: u32, beside: impl Future<Output = T>) -> T {
        self.allowed.add_permits(connections as usize);
        let outcome = beside.await;
        self.tried.acquire_many(connections).await.unwrap().forget();
        outcome
    }
}

/// If the server had one order for all connections, a flood would end the probes that connected
/// before it. Among many sources that have one connection each, the oldest gives way. The flood
/// therefore opens half as many connections beside a probe as the server has slots. How many come
/// before the probe asks must not depend on who gets a CPU.
#[rstest]
#[case::one_source(1, 8)]
#[case::many_sources(50_000, 0)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_keeps_no_other_source_from_an_answer(#[case] sources: u32, #[case] connected_before: usize) {
    const PROBES: usize = 100;
    const BESIDE_A_PROBE: u32 = 64;
    const PROBING: [u8; 4] = [127, 0, 0, 3];
    let servers = servers().await;
    get(servers.healthz, "/livez", "").await;
    let flood = Arc::new(Flood { allowed: Semaphore::new(0), tried: Semaphore::new(0) });
    let flooding = tokio::spawn({
        let (flood, address) = (Arc::clone(&flood), servers.healthz);
        async move { flood.open(sources, address).await }
    });
    // The server gives up clients that are silent for two seconds. If the flood has taken half of
    // that, the probes are connected anew.
    let mut probes = loop {
        let connected = std::time::Instant::now();
        let mut probes = Vec::new();
        for _ in 0..connected_before {
            probes.push(connect_from(PROBING, servers.healthz).await.unwrap());
        }
        flood.further(300, async {}).await;
        if connected.elapsed() < Duration::from_secs(1) {
            break probes;
        }
    };
    for number in 0..PROBES {
        let answer = async {
            let mut stream = match probes.pop() {
                Some(stream) => stream,
                None => connect_from(PROBING, servers.healthz).await?,
            };
            stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.map(|_| answer)
        };
        // The probes that are connected already are asked one after the other, and soon.
        let beside = if number < connected_before { BESIDE_A_PROBE / 4 } else { BESIDE_A_PROBE };
        let answer = flood.further(beside, tokio::time::timeout(ANSWERS_WITHIN, answer)).await;
        let answer = answer.expect("it is answered");
        assert!(answer.is_ok_and(|text| text.starts_with(b"HTTP/1.1 200")), "probe {number}");
    }
    flooding.abort();
}

#[tokio::test]
async fn the_log_level_is_for_loopback_only() {
    let families = Metrics::new(None, InvalidObjects::default(), |_| {});
    let slis = pages::Slis::default();
    let ask = async |path: &str| {
        let request = http::Request::get(path).body(http_body_util::Empty::<bytes::Bytes>::new()).unwrap();
        pages().answer(request, &families, &slis).await.status()
    };
    for path in ["/debug/flags/v", "/debug/flags"] {
        assert_eq!(ask(path).await, StatusCode::FORBIDDEN, "{path}");
    }
    assert_eq!(ask("/metrics").await, StatusCode::OK);
}
