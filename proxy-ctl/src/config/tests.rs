use std::path::Path;

use proxy_common::flow::FlowLifetimes;
use rstest::rstest;

use super::*;

fn read(name: &str, text: &str) -> Result<Effective, Error> {
    Effective::of_text(Path::new(name), text, &CommandLine::default())
}

fn parse(body: &str) -> Result<Effective, Error> {
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    read("config.yaml", &format!("{head}{body}"))
}

fn line(flags: &[&str]) -> CommandLine {
    CommandLine::parse(flags.iter().map(std::ffi::OsString::from)).unwrap()
}

/// The defaults as kube-proxy itself writes them.
const DEFAULT_DOCUMENT: &str = r#"
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 10, contentType: application/vnd.kubernetes.protobuf, kubeconfig: "", qps: 5}
clusterCIDR: ""
configSyncPeriod: 15m0s
conntrack: {maxPerCore: 32768, min: 131072, tcpBeLiberal: false, tcpCloseWaitTimeout: 1h0m0s, tcpEstablishedTimeout: 24h0m0s, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: 0.0.0.0:10256
hostnameOverride: ""
iptables: {localhostNodePorts: true, masqueradeAll: false, masqueradeBit: 14, minSyncPeriod: 1s, syncPeriod: 30s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 30s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 5s, format: text, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: 127.0.0.1:10249
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: 14, minSyncPeriod: 1s, syncPeriod: 30s}
nodePortAddresses: null
oomScoreAdj: -999
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"#;

/// The ConfigMap `kube-proxy` as kubeadm writes it: with zero values wherever nothing was set.
const KUBEADM_DOCUMENT: &str = r#"
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"#;

#[test]
fn the_defaults_of_kube_proxy_are_ours() {
    let loaded = parse(DEFAULT_DOCUMENT).unwrap();
    assert_eq!(loaded.config, Config::default());
    assert_eq!(loaded.warnings, [""; 0]);
}

#[test]
fn zero_values_of_kubeadm_mean_the_defaults() {
    let loaded = parse(KUBEADM_DOCUMENT).unwrap();
    let mut expected = Config::default();
    expected.client_connection.kubeconfig = Some("/var/lib/kube-proxy/kubeconfig.conf".into());
    expected.cluster_cidrs = vec!["10.244.0.0/16".parse().unwrap()];
    assert_eq!(loaded.config, expected);
    assert_eq!(loaded.warnings, [""; 0]);
}

#[test]
fn json_is_read_too() {
    let text = r#"{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration",
        "mode":"ebpf","ebpf":{"socketLoadBalancing":"host","limits":{"flows":1000}}}"#;
    let config = read("config.json", text).unwrap().config;
    assert_eq!(config.mode, RequestedMode::Ebpf);
    assert_eq!(config.ebpf.socket_load_balancing, SocketLoadBalancing::Host);
    assert_eq!(config.ebpf.limits, Limits { flows: 1000, opening_flows: 0, ..Limits::default() });
}

#[rstest]
#[case::healthz_without_port("healthzBindAddress: 10.0.0.1", |config: &Config| {
    config.healthz_bind_address == Some("10.0.0.1:10256".parse().unwrap())
})]
#[case::family_of_the_bind_address("bindAddress: '::'", |config: &Config| {
    config.healthz_bind_address == Some("[::]:10256".parse().unwrap())
        && config.metrics_bind_address == Some("[::1]:10249".parse().unwrap())
})]
#[case::ipv4_bind_address_as_ipv6("bindAddress: '::ffff:10.0.0.1'", |config: &Config| {
    config.healthz_bind_address == Some("0.0.0.0:10256".parse().unwrap())
        && config.bind_address == IpAddr::from([10, 0, 0, 1])
})]
#[case::leading_zero_of_yaml_1_1("conntrack: {min: 010}", |config: &Config| config.conntrack.min == 8)]
#[case::large_number_of_helm("conntrack: {min: 1e+06}", |config: &Config| config.conntrack.min == 1_000_000)]
#[case::hostname_is_lowered("hostnameOverride: ' Node-A '", |config: &Config| {
    config.node_name().as_deref() == Some("node-a")
})]
#[case::leave_conntrack_alone("conntrack: {maxPerCore: 0}", |config: &Config| config.conntrack.max_per_core == 0)]
#[case::two_families("clusterCIDR: 10.0.0.0/8,fd00::/48", |config: &Config| config.cluster_cidrs.len() == 2)]
#[case::bridge("detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}", |config: &Config| {
    config.detect_local_mode == LocalMode::BridgeInterface && config.bridge_interface == "cni0"
})]
#[case::a_range_of_ports("mode: userspace\nportRange: 8000-9000", |config: &Config| {
    config.port_range == Some(PortRange { first: 8000, last: 9000 })
})]
#[case::a_number_of_ports("mode: userspace\nportRange: 8000+10", |config: &Config| {
    config.port_range == Some(PortRange { first: 8000, last: 8010 })
})]
#[case::one_port("mode: userspace\nportRange: ' 8000 '", |config: &Config| {
    config.port_range == Some(PortRange { first: 8000, last: 8000 })
})]
#[case::any_port("mode: userspace\nportRange: 0-0", |config: &Config| config.port_range.is_none())]
#[case::ports_of_another_mode("portRange: 8000-9000", |config: &Config| config.port_range.is_none())]
#[case::idle_time_of_datagrams("mode: userspace\nudpIdleTimeout: 2s", |config: &Config| {
    config.udp_idle_timeout == Duration::from_secs(2)
})]
#[case::nanoseconds("logging: {flushFrequency: 5000000000}", |config: &Config| {
    config.logging.flush_frequency == Duration::from_secs(5)
})]
#[case::folders("ebpf: {bpffs: /run/bpf, cgroup: /sys/fs/cgroup/unified/x}", |config: &Config| {
    config.ebpf.bpffs == Path::new("/run/bpf")
        && config.ebpf.cgroup.as_deref() == Some(Path::new("/sys/fs/cgroup/unified/x"))
})]
#[case::withdraw_after("ebpf: {withdrawAfter: 1h}", |config: &Config| config.ebpf.withdraw_after == Duration::from_hours(1))]
#[case::no_lease("ebpf: {withdrawAfter: 0s}", |config: &Config| config.ebpf.withdraw_after == Duration::ZERO)]
#[case::lifetime("ebpf: {flowLifetimes: {tcpOpening: 5s}}", |config: &Config| config.flow_lifetimes().tcp_opening == Duration::from_secs(5))]
#[case::default_lifetime("ebpf: {flowLifetimes: {tcpClosed: 0s}}", |config: &Config| config.flow_lifetimes() == FlowLifetimes::default())]
#[case::lifetimes_of_conntrack(
    "conntrack: {tcpEstablishedTimeout: 2h, tcpCloseWaitTimeout: 30m, udpTimeout: 10s, udpStreamTimeout: 3m}",
    |config: &Config| config.flow_lifetimes() == FlowLifetimes {
        tcp_established: Duration::from_hours(2),
        tcp_close_wait: Duration::from_mins(30),
        udp: Duration::from_secs(10),
        udp_stream: Duration::from_mins(3),
        ..FlowLifetimes::default()
    }
)]
#[case::lifetimes_left_to_the_kernel(
    "conntrack: {tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s, udpTimeout: 0s, udpStreamTimeout: 0s}",
    |config: &Config| config.flow_lifetimes() == FlowLifetimes::default()
)]
#[case::too_short_for_flows("conntrack: {udpTimeout: 1s}", |config: &Config| config.flow_lifetimes().udp == Duration::from_secs(2))]
#[case::words("ebpf: {xdp: auto, forwarding: hybrid, encapsulation: geneve, algorithm: maglev, sourceAddress: preserve}", |_: &Config| true)]
fn valid(#[case] body: &str, #[case] holds: fn(&Config) -> bool) {
    let loaded = parse(body).unwrap();
    assert!(holds(&loaded.config), "{:?}", loaded.config);
    assert_eq!(loaded.warnings, [""; 0]);
}

#[rstest]
#[case("conntrack: {maxPerCore: -1}", "conntrack.maxPerCore must be from 0 to 2147483647, found -1")]
#[case("conntrack: {maxPerCore: many}", "conntrack.maxPerCore must be from 0 to 2147483647, found \"many\"")]
#[case(
    "mode: kernelspace",
    "mode must be ebpf, nftables, iptables, ipvs or userspace, found \"kernelspace\""
)]
#[case(
    "iptables: {syncPeriod: 10s, minSyncPeriod: 1m}",
    "iptables.minSyncPeriod must be at most syncPeriod, 10s, found 1m0s"
)]
#[case(
    "configSyncPeriod: 15",
    "configSyncPeriod must be a duration of 0s or more, such as \"30s\" or \"1h0m0s\", found 15"
)]
#[case(
    "configSyncPeriod: -1s",
    "configSyncPeriod must be a duration of 0s or more, such as \"30s\" or \"1h0m0s\", found \"-1s\""
)]
#[case(
    "nftables: {masqueradeBit: 3000000000}",
    "nftables.masqueradeBit must be from 0 to 31, found 3000000000"
)]
#[case("clientConnection: {qps: many}", "clientConnection.qps must be a number, found \"many\"")]
#[case(
    "clientConnection: {contentType: application/yaml}",
    "clientConnection.contentType must be application/vnd.kubernetes.protobuf or application/json, found \"application/yaml\""
)]
#[case(
    "mode: userspace\nportRange: 9000-8000",
    "portRange must be ports such as 8000-9000, 8000+1000 or 8000, found \"9000-8000\""
)]
#[case(
    "mode: userspace\nportRange: 65535+1",
    "portRange must be ports such as 8000-9000, 8000+1000 or 8000, found \"65535+1\""
)]
#[case("oomScoreAdj: 1001", "oomScoreAdj must be from -1000 to 1000, found 1001")]
#[case("iptables: {masqueradeBit: 32}", "iptables.masqueradeBit must be from 0 to 31, found 32")]
#[case("bindAddress: localhost", "bindAddress must be an IP address, found \"localhost\"")]
#[case(
    "healthzBindAddress: 0.0.0.0:0",
    "healthzBindAddress must be an IP address and a port from 1 to 65535, such as \"0.0.0.0:10256\", found \"0.0.0.0:0\""
)]
#[case(
    "clusterCIDR: 10.0.0.0/8,10.1.0.0/16",
    "clusterCIDR must be one network, or two of different families separated by a comma, found \"10.0.0.0/8,10.1.0.0/16\""
)]
#[case(
    "detectLocalMode: InterfaceNamePrefix",
    "detectLocal.interfaceNamePrefix must be an interface name because of detectLocalMode InterfaceNamePrefix, found nothing"
)]
#[case(
    "nodePortAddresses: [10.0.0.0/8, private]",
    "nodePortAddresses[1] must be a network such as \"10.0.0.0/8\", or primary, localhost or all, found \"private\""
)]
#[case("featureGates: {A: maybe}", "featureGates.A must be true or false, found \"maybe\"")]
#[case("enableProfiling: 1", "enableProfiling must be true or false, found 1")]
#[case("conntrack: 5", "conntrack must be an object with fields, found 5")]
#[case(
    "ebpf: {socketLoadBalancing: pods}",
    "ebpf.socketLoadBalancing must be all, host or off, found \"pods\""
)]
#[case("ebpf: {xdp: fast}", "ebpf.xdp must be off, auto, native or generic, found \"fast\"")]
#[case("ebpf: {forwarding: geneve}", "ebpf.forwarding must be snat, dsr or hybrid, found \"geneve\"")]
#[case("ebpf: {encapsulation: ipip}", "ebpf.encapsulation must be ip or geneve, found \"ipip\"")]
#[case(
    "ebpf: {algorithm: roundRobin}",
    "ebpf.algorithm must be random, maglev or leastConnection, found \"roundRobin\""
)]
#[case("ebpf: {sourceAddress: none}", "ebpf.sourceAddress must be preserve or masquerade, found \"none\"")]
#[case("ebpf: {limits: {flows: -1}}", "ebpf.limits.flows must be from 0 to 67108864, found -1")]
#[case("ebpf: {limits: {slots: 0}}", "ebpf.limits.slots must be from 1 to 67108864, found 0")]
#[case(
    "ebpf: {newConnectionsPerCore: -1}",
    "ebpf.newConnectionsPerCore must be from 0 to 10000000, found -1"
)]
#[case(
    "ebpf: {withdrawAfter: 9s}",
    "ebpf.withdrawAfter must be 10s or more, such as \"1h\", or 0s for no end, found \"9s\""
)]
#[case(
    "ebpf: {flowLifetimes: {tcpReset: 1s}}",
    "ebpf.flowLifetimes.tcpReset must be 2s or more, such as \"30s\", or 0s for the default, found \"1s\""
)]
#[case("ebpf: {bpffs: bpf}", "ebpf.bpffs must be an absolute path, found \"bpf\"")]
#[case(
    "ebpf: {interfaces: {include: ['e*0']}}",
    "ebpf.interfaces.include[0] must be an interface name of at most 15 characters, with a * at its end for a prefix, found \"e*0\""
)]
fn invalid(#[case] body: &str, #[case] problem: &str) {
    let error = parse(body).unwrap_err();
    assert_eq!(error.to_string(), format!("config.yaml: {problem}"));
}

#[test]
fn every_problem_is_named_at_once() {
    let error = parse("oomScoreAdj: 2000\nipvs: {syncPeriod: x}\n").unwrap_err().to_string();
    assert_eq!(error.lines().count(), 2, "{error}");
    assert!(
        error.contains("config.yaml: oomScoreAdj") && error.contains("config.yaml: ipvs.syncPeriod"),
        "{error}"
    );
}

#[rstest]
#[case("apiVersion: v1\nkind: ConfigMap\n", &[
    "config.yaml: apiVersion must be kubeproxy.config.k8s.io/v1alpha1, found v1",
    "config.yaml: kind must be KubeProxyConfiguration, found ConfigMap",
])]
#[case("[]", &["config.yaml: the document must be an object with fields, found []"])]
fn document_of_another_kind(#[case] text: &str, #[case] problems: &[&str]) {
    let error = read("config.yaml", text).unwrap_err().to_string();
    for problem in problems {
        assert!(error.lines().any(|line| line == *problem), "{error}");
    }
}

#[test]
fn document_that_is_not_yaml() {
    let error = parse("mode: [ebpf\nx: {").unwrap_err();
    assert!(matches!(error, Error::Syntax { .. }), "{error}");
}

#[rstest]
#[case::in_the_file("mode: ipvs\nipvs: {scheduler: nosuch}", "ipvs.scheduler must be rr, wrr, ")]
#[case::the_lists_end("mode: ipvs\nipvs: {scheduler: RR}", "mh or twos, found \"RR\"")]
fn a_scheduler_that_the_kernel_cannot_have_is_refused(#[case] body: &str, #[case] message: &str) {
    let error = parse(body).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_scheduler_is_not_refused_where_no_mode_uses_it() {
    let loaded = parse("mode: ebpf\nipvs: {scheduler: nosuch}").unwrap();
    assert_eq!(loaded.config.ipvs.scheduler, "");
    assert!(
        loaded.warnings.iter().any(|warning| warning.contains("ipvs.scheduler is ignored")),
        "{:?}",
        loaded.warnings
    );
}

#[test]
fn unknown_and_duplicate_fields_are_warnings() {
    let loaded = parse("colour: red\nconntrack: {maximum: 1, min: 5}\nmode: iptables\nmode: ebpf\n").unwrap();
    assert_eq!(loaded.config.mode, RequestedMode::Ebpf);
    assert_eq!(loaded.config.conntrack.min, 5);
    let warned = |text: &str| loaded.warnings.iter().any(|warning| warning.contains(text));
    assert!(warned("config.yaml: colour is not a known field"), "{:?}", loaded.warnings);
    assert!(warned("config.yaml: conntrack.maximum is not a known field"), "{:?}", loaded.warnings);
    assert!(warned("config.yaml: mode is given again in line"), "{:?}", loaded.warnings);
    assert_eq!(loaded.warnings.len(), 3);
}

#[rstest]
#[case::only_defaults(&[])]
#[case::mode_of_its_own_section(&["--proxy-mode=ipvs", "--ipvs-sync-period=7s", "--iptables-sync-period=9s"])]
#[case::nftables(&["--proxy-mode=nftables", "--iptables-sync-period=9s", "--masquerade-all"])]
#[case::every_form(&[
    "--feature-gates=LoggingAlphaOptions=true", "--log-text-split-stream", "--log-text-info-buffer-size=64Ki",
    "--vmodule=a=1,b*=2", "--cluster-cidr=10.0.0.0/8,fd00::/48", "--nodeport-addresses=10.0.0.0/8,primary",
    "--conntrack-tcp-timeout-established=0", "--oom-score-adj=-5", "--kube-api-qps=0.5", "--bind-address=::1",
    "--hostname-override=Node-A", "--config-sync-period=1h0.5s", "--bpffs=/run/bpf",
])]
fn written_file_gives_the_same_configuration(#[case] flags: &[&str]) {
    let config = Effective::resolve_flags(&line(flags)).unwrap().config;
    let text = serde_saphyr::to_string(&config.to_document()).unwrap();
    let read = read("config.yaml", &text).unwrap();
    assert_eq!(read.config, config, "{text}");
    assert_eq!(read.warnings, [""; 0]);
}

#[test]
fn settings_that_a_file_cannot_have() {
    let lost = |flags: &[&str]| {
        let config = Effective::resolve_flags(&line(flags)).unwrap().config;
        let lost =
            config.not_for_a_file().into_iter().map(|(field, meant)| format!("{} {meant}", field.path));
        lost.collect::<Vec<_>>()
    };
    assert_eq!(
        lost(&["--healthz-port=0", "--iptables-min-sync-period=0", "--kube-api-qps=0"]),
        ["healthzBindAddress \"0.0.0.0:10256\"", "clientConnection.qps 5", "iptables.minSyncPeriod \"1s\"",]
    );
    assert_eq!(lost(&["--proxy-mode=nftables", "--profiling", "--conntrack-min=0"]), [""; 0]);
}

#[rstest]
#[case::of_a_file("iptables: {masqueradeBit: 3}", &["--iptables-masquerade-bit=4"], "iptables.masqueradeBit", Some(Origin::File))]
#[case::default("", &["--iptables-masquerade-bit=4"], "iptables.masqueradeBit", Some(Origin::Default))]
#[case::zero_means_default("iptables: {syncPeriod: 0s}", &[], "iptables.syncPeriod", Some(Origin::Default))]
#[case::logging("logging: {verbosity: 3}", &["-v4"], "logging.verbosity", Some(Origin::Flag("v")))]
#[case::another_section("ipvs: {syncPeriod: 3s}", &[], "ipvs.syncPeriod", None)]
fn origins(#[case] body: &str, #[case] flags: &[&str], #[case] field: &str, #[case] origin: Option<Origin>) {
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let effective = Effective::of_text(Path::new("f"), &format!("{head}{body}"), &line(flags)).unwrap();
    let told = effective.values().into_iter().find(|(known, ..)| known.path == field);
    assert_eq!(told.map(|(.., origin)| origin), origin);
}

#[test]
fn gate_of_older_versions_is_a_warning() {
    let loaded = parse("featureGates: {TopologyAwareHints: false, AllAlpha: false}").unwrap();
    let warning = "config.yaml: featureGates.TopologyAwareHints is ignored: the gate is gone, and always on";
    assert_eq!(loaded.warnings, [warning]);
}

#[rstest]
#[case(&["--oom-score-adj=1001"], "--oom-score-adj (oomScoreAdj) must be from -1000 to 1000, found 1001")]
#[case(&["--config-sync-period=0"], "--config-sync-period (configSyncPeriod) must be above 0s, found 0s")]
#[case(
    &["--iptables-sync-period=5s", "--iptables-min-sync-period=1m"],
    "--iptables-min-sync-period (iptables.minSyncPeriod) must be at most syncPeriod, 5s, found 1m0s"
)]
#[case(&["--feature-gates=NoSuch=true"], "--feature-gates (featureGates).NoSuch must be the name of a feature gate")]
#[case(
    &["--log-json-split-stream"],
    "--log-json-split-stream (logging.options.json.splitStream) must be false, unless the feature gate LoggingAlphaOptions is on"
)]
#[case(
    &["--logging-format=json", "--vmodule=a=1"],
    "--vmodule (logging.vmodule) must be empty, because logging.format is json"
)]
#[case(&["--logging-format="], "--logging-format (logging.format) must be text or json, found \"\"")]
#[case(
    &["--nodeport-addresses=10.0.0.0/8,"],
    "--nodeport-addresses (nodePortAddresses[1]) must be a network such as \"10.0.0.0/8\", or primary, localhost or all, found \"\""
)]
#[case(&["--healthz-port=70000"], "--healthz-port must be from 0 to 65535, found 70000")]
#[case(
    &["--hostname-override= "],
    "--hostname-override (hostnameOverride) must be the name of a Node, found nothing"
)]
#[case(
    &["--detect-local-mode=BridgeInterface"],
    "detectLocal.bridgeInterface must be an interface name because of detectLocalMode BridgeInterface, found nothing"
)]
fn invalid_flag_is_named(#[case] flags: &[&str], #[case] problem: &str) {
    assert_eq!(Effective::resolve_flags(&line(flags)).unwrap_err().to_string(), problem);
}

#[test]
fn deprecated_ports() {
    let config = |flags: &[&str]| Effective::resolve_flags(&line(flags)).unwrap().config;
    assert_eq!(config(&["--healthz-port=0"]).healthz_bind_address, None);
    let own = config(&["--healthz-port=1", "--healthz-bind-address=10.0.0.1"]).healthz_bind_address;
    assert_eq!(own, Some("10.0.0.1:1".parse().unwrap()));
    let ignored = config(&["--metrics-port=1"]).metrics_bind_address;
    assert_eq!(ignored, Config::default().metrics_bind_address);
}

#[test]
fn flags_are_ignored_beside_a_file() {
    let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let flags = line(&["--proxy-mode=ipvs", "--healthz-port=0", "--hostname-override=b"]);
    let effective = Effective::of_text(Path::new("f"), head, &flags).unwrap();
    assert_eq!(effective.config, Config { hostname_override: Some("b".into()), ..Config::default() });
    let ignored =
        |flag| effective.warnings.contains(&format!("--{flag} is ignored: the file f is used instead"));
    assert!(ignored("proxy-mode") && ignored("healthz-port"), "{:?}", effective.warnings);
}

#[test]
fn every_flag_sets_fields_that_exist_and_the_deciding_ones_are_first() {
    for field in FLAGS.iter().flat_map(|flag| flag.fields()) {
        assert!(fields::field(field).is_some(), "{field}");
    }
    assert_eq!(
        FIELDS[..fields::DECIDING].iter().map(|field| field.path).collect::<Vec<_>>(),
        ["mode", "bindAddress"]
    );
}

#[rstest]
#[case::nothing_said(&[], "10.0.0.1", true)]
#[case::in_the_network(&["10.0.0.0/8"], "10.0.0.1", true)]
#[case::elsewhere(&["10.0.0.0/8"], "192.168.0.1", false)]
#[case::the_other_family_is_not_mentioned(&["10.0.0.0/8"], "fd00::1", true)]
#[case::primary(&["primary"], "192.168.0.2", true)]
#[case::not_primary(&["primary"], "fd00::1", false)]
#[case::localhost(&["localhost"], "127.0.0.1", true)]
#[case::all(&["10.0.0.0/8", "all"], "192.168.0.1", true)]
fn node_port_addresses(#[case] words: &[&str], #[case] address: &str, #[case] served: bool) {
    let config = Config {
        node_port_addresses: words.iter().filter_map(|word| NodePortAddress::parse(word)).collect(),
        ..Config::default()
    };
    assert_eq!(config.node_port_addresses.len(), words.len());
    let node = ["192.168.0.2".parse().unwrap()];
    assert_eq!(config.serves_node_ports_on(address.parse().unwrap(), &node), served);
}

#[rstest]
#[case(&[], &[], "eth0", true)]
#[case(&["eth*"], &[], "eth0", true)]
#[case(&["eth*"], &[], "ens3", false)]
#[case(&[], &["docker0", "br-*"], "br-12", false)]
#[case(&["*"], &["eth1"], "eth1", false)]
#[case(&["eth0"], &[], "eth01", false)]
fn interfaces(
    #[case] include: &[&str],
    #[case] exclude: &[&str],
    #[case] name: &str,
    #[case] selected: bool,
) {
    let patterns = |texts: &[&str]| texts.iter().filter_map(|text| NamePattern::parse(text)).collect();
    let interfaces =
        Interfaces { include: patterns(include), exclude: patterns(exclude), ..Interfaces::default() };
    assert_eq!(interfaces.select(name), selected);
}
