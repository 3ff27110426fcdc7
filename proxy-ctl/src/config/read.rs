//! A document into a [`Config`]: every field of `kubeproxy.config.k8s.io/v1alpha1`, its default and its limits.

use std::{
    cell::RefCell,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use serde_json::Value;
use serde_saphyr::DuplicateKeyPolicy;

use super::{
    ClientConnection, Config, Conntrack, DetectLocal, Error, Iptables, Ipvs, Loaded, LogFormat, Logging,
    Nftables, NodePortAddress, RequestedMode, SyncPeriods, duration, ebpf,
    fields::{Fields, Findings},
};

const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";

const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;
const SECOND: Duration = Duration::from_secs(1);
const SYNC_PERIOD: Duration = Duration::from_secs(30);
const HIGHEST_I32: i64 = i32::MAX as i64;

pub(super) fn document(path: &Path, text: &str) -> Result<Loaded, Error> {
    let (document, duplicates) = parse(path, text)?;
    let findings = RefCell::new(Findings::default());
    let config = config(&Fields::root(&document, &findings));
    let Findings { problems, unknown } = findings.into_inner();
    if !problems.is_empty() {
        return Err(Error::Fields { path: path.to_owned(), problems });
    }
    let at = path.display();
    let duplicates =
        duplicates.map(|problem| format!("{at}: the last of two equal fields counts: {problem}"));
    let unknown = unknown.into_iter().map(|field| format!("{at}: {field} is not a known field, ignored"));
    Ok(Loaded { config, warnings: duplicates.into_iter().chain(unknown).collect() })
}

/// Strict first; what fails only because a field is there twice is read again with its last value.
fn parse(path: &Path, text: &str) -> Result<(Value, Option<String>), Error> {
    let read = |duplicates| {
        let options = serde_saphyr::options! { duplicate_keys: duplicates, with_snippet: false };
        serde_saphyr::from_str_with_options::<Value>(text, options)
    };
    match read(DuplicateKeyPolicy::Error) {
        Ok(document) => Ok((document, None)),
        Err(strict) => match read(DuplicateKeyPolicy::LastWins) {
            Ok(document) => Ok((document, Some(strict.to_string()))),
            Err(error) => Err(Error::Syntax { path: path.to_owned(), problem: problem(&error) }),
        },
    }
}

fn problem(error: &serde_saphyr::Error) -> String {
    match (error.without_snippet(), error.location()) {
        (serde_saphyr::Error::MultipleDocuments { .. }, Some(second)) => {
            format!("must be one document, found a second at line {}", second.line())
        }
        _ => format!("is neither YAML nor JSON: {error}"),
    }
}

/// What an empty document means.
pub(super) fn defaults(bind_address: IpAddr) -> Config {
    let findings = RefCell::new(Findings::default());
    body(&Fields::root(&Value::Null, &findings), bind_address)
}

fn config(root: &Fields<'_>) -> Config {
    for (name, right) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        match root.text(name) {
            Some(text) if text == right => {}
            Some(text) => root.problem(name, right, text),
            None => root.problem(name, right, "nothing"),
        }
    }
    body(root, root.address("bindAddress").unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
}

fn body(root: &Fields<'_>, bind_address: IpAddr) -> Config {
    let (any, loopback): (IpAddr, IpAddr) = match bind_address {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
    };
    // Accepted and of no meaning: for Windows, or of the userspace mode that kube-proxy once had.
    windows(root);
    root.text("portRange");
    root.period("udpIdleTimeout");
    Config {
        feature_gates: root.switches("featureGates"),
        client_connection: client_connection(&root.section("clientConnection")),
        logging: logging(&root.section("logging")),
        hostname_override: root.text("hostnameOverride").map(|name| name.trim().to_lowercase()),
        bind_address,
        healthz_bind_address: listen_address(root, "healthzBindAddress", SocketAddr::new(any, HEALTHZ_PORT)),
        metrics_bind_address: listen_address(
            root,
            "metricsBindAddress",
            SocketAddr::new(loopback, METRICS_PORT),
        ),
        bind_address_hard_fail: root.flag("bindAddressHardFail").unwrap_or(false),
        enable_profiling: root.flag("enableProfiling").unwrap_or(false),
        show_hidden_metrics_for_version: root.parsed(
            "showHiddenMetricsForVersion",
            "<major>.<minor>",
            version,
        ),
        mode: root.choice("mode", &RequestedMode::WORDS).unwrap_or_default(),
        iptables: iptables(&root.section("iptables")),
        ipvs: ipvs(&root.section("ipvs")),
        nftables: nftables(&root.section("nftables")),
        detect_local: detect_local(root),
        cluster_cidrs: cluster_cidrs(root),
        node_port_addresses: root.list(
            "nodePortAddresses",
            "a network such as \"10.0.0.0/8\", or primary, localhost or all",
            NodePortAddress::parse,
        ),
        oom_score_adj: root
            .integer("oomScoreAdj", -1000..=1000)
            .and_then(|score| i32::try_from(score).ok())
            .unwrap_or(-999),
        conntrack: conntrack(&root.section("conntrack")),
        config_sync_period: root.period("configSyncPeriod").unwrap_or(Duration::from_secs(900)),
        ebpf: ebpf::read(&root.section("ebpf")),
    }
}

fn version(text: &str) -> Option<String> {
    let (major, minor) = text.split_once('.')?;
    (major.parse::<u32>().is_ok() && minor.parse::<u32>().is_ok()).then(|| text.to_owned())
}

fn client_connection(client: &Fields<'_>) -> ClientConnection {
    let burst = client.integer("burst", 0..=HIGHEST_I32).filter(|burst| *burst != 0);
    ClientConnection {
        kubeconfig: client.text("kubeconfig").map(PathBuf::from),
        accept_content_types: client.text("acceptContentTypes").map(str::to_owned),
        content_type: client.text("contentType").unwrap_or("application/vnd.kubernetes.protobuf").to_owned(),
        qps: client.number("qps").filter(|qps| *qps != 0.0).unwrap_or(5.0),
        burst: burst.and_then(|burst| u32::try_from(burst).ok()).unwrap_or(10),
    }
}

fn logging(logging: &Fields<'_>) -> Logging {
    for module in logging.sections("vmodule") {
        module.text("filePattern");
        module.integer("verbosity", 0..=HIGHEST_I32);
    }
    let options = logging.section("options");
    for format in [options.section("text"), options.section("json")] {
        format.flag("splitStream");
        format.quantity("infoBufferSize");
    }
    let verbosity = logging.integer("verbosity", 0..=HIGHEST_I32);
    Logging {
        format: logging
            .choice("format", &[("text", Some(LogFormat::Text)), ("json", Some(LogFormat::Json))])
            .unwrap_or_default(),
        flush_frequency: logging.duration_or_nanoseconds("flushFrequency").unwrap_or(5 * SECOND),
        verbosity: verbosity.and_then(|verbosity| u32::try_from(verbosity).ok()).unwrap_or(0),
    }
}

/// An address and port; an address alone takes the default port.
fn listen_address(root: &Fields<'_>, name: &'static str, default: SocketAddr) -> SocketAddr {
    let parse = |text: &str| {
        let alone = text.parse::<IpAddr>().map(|address| SocketAddr::new(address, default.port()));
        text.parse::<SocketAddr>().or(alone).ok().filter(|address| address.port() != 0)
    };
    let allowed = format!("an IP address and a port from 1 to 65535, such as \"{default}\"");
    root.parsed(name, allowed, parse).unwrap_or(default)
}

fn periods(mode: &Fields<'_>, min_sync_default: Duration) -> SyncPeriods {
    let sync = mode.period("syncPeriod").unwrap_or(SYNC_PERIOD);
    let min_sync = mode.period("minSyncPeriod");
    if let Some(min_sync) = min_sync.filter(|min_sync| *min_sync > sync) {
        let allowed = format!("at most syncPeriod, {}", duration::format(sync));
        mode.problem("minSyncPeriod", allowed, duration::format(min_sync));
    }
    SyncPeriods { sync, min_sync: min_sync.unwrap_or(min_sync_default.min(sync)) }
}

fn masquerade_bit(mode: &Fields<'_>) -> u8 {
    mode.integer("masqueradeBit", 0..=31).and_then(|bit| u8::try_from(bit).ok()).unwrap_or(14)
}

fn iptables(iptables: &Fields<'_>) -> Iptables {
    Iptables {
        masquerade_bit: masquerade_bit(iptables),
        masquerade_all: iptables.flag("masqueradeAll").unwrap_or(false),
        localhost_node_ports: iptables.flag("localhostNodePorts").unwrap_or(true),
        periods: periods(iptables, SECOND),
    }
}

fn ipvs(ipvs: &Fields<'_>) -> Ipvs {
    Ipvs {
        periods: periods(ipvs, Duration::ZERO),
        scheduler: ipvs.text("scheduler").map(str::to_owned),
        exclude_cidrs: ipvs.list("excludeCIDRs", NETWORK, network),
        strict_arp: ipvs.flag("strictARP").unwrap_or(false),
        tcp_timeout: ipvs.duration("tcpTimeout").unwrap_or_default(),
        tcp_fin_timeout: ipvs.duration("tcpFinTimeout").unwrap_or_default(),
        udp_timeout: ipvs.duration("udpTimeout").unwrap_or_default(),
    }
}

fn nftables(nftables: &Fields<'_>) -> Nftables {
    Nftables {
        masquerade_bit: masquerade_bit(nftables),
        masquerade_all: nftables.flag("masqueradeAll").unwrap_or(false),
        periods: periods(nftables, SECOND),
    }
}

const NETWORK: &str = "a network such as \"10.0.0.0/8\" or \"fd00::/108\"";

fn network(text: &str) -> Option<IpNet> {
    text.trim().parse().ok()
}

fn detect_local(root: &Fields<'_>) -> DetectLocal {
    #[derive(Clone, Copy)]
    enum Mode {
        ClusterCidr,
        NodeCidr,
        BridgeInterface,
        InterfaceNamePrefix,
    }
    let detail = root.section("detectLocal");
    let bridge = detail.text("bridgeInterface");
    let prefix = detail.text("interfaceNamePrefix");
    let needed = |name, text: Option<&str>| {
        if text.is_none() {
            detail.problem(name, "an interface name because of detectLocalMode", "nothing");
        }
        text.unwrap_or_default().to_owned()
    };
    let mode = root.choice(
        "detectLocalMode",
        &[
            ("ClusterCIDR", Some(Mode::ClusterCidr)),
            ("NodeCIDR", Some(Mode::NodeCidr)),
            ("BridgeInterface", Some(Mode::BridgeInterface)),
            ("InterfaceNamePrefix", Some(Mode::InterfaceNamePrefix)),
        ],
    );
    match mode.unwrap_or(Mode::ClusterCidr) {
        Mode::ClusterCidr => DetectLocal::ClusterCidr,
        Mode::NodeCidr => DetectLocal::NodeCidr,
        Mode::BridgeInterface => DetectLocal::BridgeInterface(needed("bridgeInterface", bridge)),
        Mode::InterfaceNamePrefix => DetectLocal::InterfaceNamePrefix(needed("interfaceNamePrefix", prefix)),
    }
}

fn cluster_cidrs(root: &Fields<'_>) -> Vec<IpNet> {
    let allowed = "one network, or two of different families separated by a comma";
    let parse = |text: &str| {
        let networks: Option<Vec<IpNet>> = text.split(',').map(network).collect();
        networks.filter(|networks| match networks.as_slice() {
            [_] => true,
            [one, other] => one.addr().is_ipv4() != other.addr().is_ipv4(),
            _ => false,
        })
    };
    root.parsed("clusterCIDR", allowed, parse).unwrap_or_default()
}

fn conntrack(conntrack: &Fields<'_>) -> Conntrack {
    let number = |name, default| {
        let number = conntrack.integer(name, 0..=i64::MAX);
        number.map_or(default, |number| u32::try_from(number).unwrap_or(u32::MAX))
    };
    Conntrack {
        max_per_core: number("maxPerCore", 32_768),
        min: number("min", 131_072),
        tcp_established_timeout: conntrack
            .duration("tcpEstablishedTimeout")
            .unwrap_or(Duration::from_secs(86_400)),
        tcp_close_wait_timeout: conntrack
            .duration("tcpCloseWaitTimeout")
            .unwrap_or(Duration::from_secs(3_600)),
        udp_timeout: conntrack.duration("udpTimeout").unwrap_or_default(),
        udp_stream_timeout: conntrack.duration("udpStreamTimeout").unwrap_or_default(),
        tcp_be_liberal: conntrack.flag("tcpBeLiberal").unwrap_or(false),
    }
}

fn windows(root: &Fields<'_>) {
    root.flag("windowsRunAsService");
    let winkernel = root.section("winkernel");
    for name in ["networkName", "sourceVip", "rootHnsEndpointName"] {
        winkernel.text(name);
    }
    for name in ["enableDSR", "forwardHealthCheckVip"] {
        winkernel.flag(name);
    }
}
