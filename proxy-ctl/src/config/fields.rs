//! The table of every field of the file. Where a value goes, what it may be, when it counts, and what it means.

use serde_json::{Map, Value, json};

use super::{
    Config, HEALTHZ_PORT, LocalMode, METRICS_PORT, ModuleVerbosity, NodePortAddress, RequestedMode,
    access::{
        Access, At, Count, HIGHEST_I32, List, Listen, Place, Read, Why, Words, accepted, address, as_whole,
        bytes, duration_or_nanoseconds, encoding, file, folder, number, optional_folder, optional_text,
        optional_timeout, period, switch, text, timeout, whole, whole_not_zero, wrong_at,
    },
    ebpf::{MOST_ENTRIES, NamePattern},
    network,
};

pub(super) const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
pub(super) const KIND: &str = "KubeProxyConfiguration";

/// One field of the file.
pub struct Field {
    /// As `conntrack.maxPerCore`.
    pub path: &'static str,
    pub(super) access: &'static dyn Access,
    pub(super) counts: Counts,
    /// What it means, for people.
    pub help: &'static str,
}

/// When a field's value counts.
#[derive(Clone, Copy)]
pub(super) enum Counts {
    Always,
    /// Its place belongs to the section of the mode: in another section the value is left out, as kube-proxy does.
    InMode(fn(RequestedMode) -> bool),
    /// Where it is not used, a value that is not allowed is none.
    Used(fn(&Config) -> bool),
}

impl Field {
    /// What it may be, to follow "must be".
    pub fn allowed(&self) -> String {
        self.access.allowed()
    }

    /// The word for its type.
    pub fn kind(&self) -> &'static str {
        self.access.kind()
    }

    /// Its value as the file would say it.
    pub fn value(&self, config: &Config) -> Value {
        self.access.write(&mut config.clone())
    }

    pub(super) fn counts_in(&self, mode: RequestedMode) -> bool {
        match self.counts {
            Counts::InMode(counts) => counts(mode),
            Counts::Always | Counts::Used(_) => true,
        }
    }
}

impl std::fmt::Debug for Field {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.path)
    }
}

pub(super) fn field(path: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.path == path)
}

fn in_ipvs(mode: RequestedMode) -> bool {
    mode == RequestedMode::Ipvs
}

fn in_nftables(mode: RequestedMode) -> bool {
    mode == RequestedMode::Nftables
}

fn not_in_nftables(mode: RequestedMode) -> bool {
    !in_nftables(mode)
}

fn in_others(mode: RequestedMode) -> bool {
    !in_ipvs(mode) && !in_nftables(mode)
}

const IPVS: Counts = Counts::Used(|config| in_ipvs(config.mode));
const NFTABLES: Counts = Counts::Used(|config| in_nftables(config.mode));

const BIT: std::ops::RangeInclusive<i64> = 0..=31;
const NOT_NEGATIVE: std::ops::RangeInclusive<i64> = 0..=HIGHEST_I32;
const NETWORK: &str = "a network such as \"10.0.0.0/8\" or \"fd00::/108\"";
const PATTERN: &str = "an interface name of at most 15 characters, with a * at its end for a prefix";

macro_rules! fields {
    ($($path:literal, $access:expr $(, $counts:expr)?; $help:literal;)*) => {
        &[$(Field { path: $path, access: &$access, counts: fields!(@ $($counts)?), help: $help },)*]
    };
    (@) => { Counts::Always };
    (@ $counts:expr) => { $counts };
}

/// The first fields decide about others: about which section counts, and what healthz and metrics default to.
pub(super) const DECIDING: usize = 2;

/// In the order in which they are read.
pub static FIELDS: &[Field] = fields! {
    "mode", Words(|c| &mut c.mode);
        "How the node is programmed. Empty: ebpf. kube-proxy knows iptables, ipvs and nftables.";
    "bindAddress", address(|c| &mut c.bind_address);
        "The node's own address, where it is not that of its Node object. Nothing is bound to it. An IPv6 address in \
         the file makes healthz and metrics default to IPv6.";
    "hostnameOverride", optional_text(|c| &mut c.hostname_override);
        "Name of this node's Node object. Empty: the host's name, in lower case.";
    "healthzBindAddress", Listen { at: |c| &mut c.healthz_bind_address, port: HEALTHZ_PORT };
        "Where /healthz and /livez are served. An address alone takes port 10256.";
    "metricsBindAddress", Listen { at: |c| &mut c.metrics_bind_address, port: METRICS_PORT };
        "Where /metrics, /proxyMode and /configz are served. An address alone takes port 10249.";
    "bindAddressHardFail", switch(|c| &mut c.bind_address_hard_fail);
        "A healthz or metrics address that cannot be bound ends the process.";
    "enableProfiling", switch(|c| &mut c.enable_profiling);
        "Serve profiles and the log level beside the metrics.";
    "showHiddenMetricsForVersion", HIDDEN_METRICS;
        "Show metrics that were hidden since this version. Only the previous minor version is allowed.";
    "featureGates", FEATURE_GATES;
        "Kubernetes feature gates by name. Those that concern kube-proxy's own modes have no effect in mode ebpf.";

    "clientConnection.kubeconfig", file(|c| &mut c.client_connection.kubeconfig);
        "Credentials for the API server. Empty: the pod's service account.";
    "clientConnection.acceptContentTypes", accepted(|c| &mut c.client_connection.accept_content_types);
        "Encodings that the API server may answer in: the Accept header. Empty: that of contentType, or else any. What cannot be read is left out with a warning, as long as something is left.";
    "clientConnection.contentType", encoding(|c| &mut c.client_connection.content_type);
        "Encoding of what is sent to the API server, and what it is asked to answer in. application/cbor is JSON, as in kube-proxy.";
    "clientConnection.qps", number(|c| &mut c.client_connection.qps);
        "Requests a second to the API server. Negative: no limit.";
    "clientConnection.burst", whole_not_zero(|c| &mut c.client_connection.burst, NOT_NEGATIVE);
        "Requests that may be sent at once before qps counts.";

    "logging.format", Words(|c| &mut c.logging.format);
        "Form of the log. json needs the feature gate LoggingBetaOptions, which is on.";
    "logging.flushFrequency", duration_or_nanoseconds(|c| &mut c.logging.flush_frequency);
        "Longest time between two flushes of the log. Each line is written at once here.";
    "logging.verbosity", whole(|c| &mut c.logging.verbosity, NOT_NEGATIVE);
        "How much is logged: 0 is what an operator needs, 4 for looking for a fault, 6 and more for developers.";
    "logging.vmodule", VMODULE;
        "Verbosity of single source files, by pattern. Only in format text.";
    "logging.options.text.splitStream", switch(|c| &mut c.logging.text.split_stream);
        "Format text: only errors to stderr. Needs the feature gate LoggingAlphaOptions.";
    "logging.options.text.infoBufferSize", bytes(|c| &mut c.logging.text.info_buffer_size);
        "Format text: bytes that are buffered. Without effect: each line is written at once here. Needs the feature gate LoggingAlphaOptions.";
    "logging.options.json.splitStream", switch(|c| &mut c.logging.json.split_stream);
        "Format json: only errors to stderr. Needs the feature gate LoggingAlphaOptions.";
    "logging.options.json.infoBufferSize", bytes(|c| &mut c.logging.json.info_buffer_size);
        "Format json: bytes that are buffered. Without effect: each line is written at once here. Needs the feature gate LoggingAlphaOptions.";

    "iptables.masqueradeBit", whole(|c| &mut c.iptables.masquerade_bit, BIT);
        "Bit of the packet mark that asks for masquerading, in modes iptables and ipvs.";
    "iptables.masqueradeAll", switch(|c| &mut c.masquerade_all), Counts::InMode(not_in_nftables);
        "Masquerade everything that is sent to a cluster IP. In every mode but nftables.";
    "iptables.localhostNodePorts", switch(|c| &mut c.iptables.localhost_node_ports);
        "Serve node ports on 127.0.0.1 in mode iptables, on all loopback addresses in mode ebpf.";
    "iptables.syncPeriod", period(|c| &mut c.periods.sync), Counts::InMode(in_others);
        "How often everything is compared with what is programmed, and the longest pause after a failure. Also in modes \
         ebpf and userspace.";
    "iptables.minSyncPeriod", period(|c| &mut c.periods.min_sync), Counts::InMode(in_others);
        "Shortest pause between two syncs. Without effect in mode ebpf, which writes each change at once.";

    "ipvs.syncPeriod", period(|c| &mut c.periods.sync), Counts::InMode(in_ipvs);
        "As iptables.syncPeriod, in mode ipvs.";
    "ipvs.minSyncPeriod", period(|c| &mut c.periods.min_sync), Counts::InMode(in_ipvs);
        "As iptables.minSyncPeriod, in mode ipvs. Its default is 0s in a file.";
    "ipvs.scheduler", text(|c| &mut c.ipvs.scheduler);
        "IPVS scheduler. Empty: rr.";
    "ipvs.excludeCIDRs", List {
            at: |c| &mut c.ipvs.exclude_cidrs, kind: "list of networks", allowed: NETWORK, parse: network::network,
            write: ToString::to_string, null_if_empty: true,
        }, IPVS;
        "Virtual servers in these networks are left alone.";
    "ipvs.strictARP", switch(|c| &mut c.ipvs.strict_arp);
        "Set arp_ignore to 1 and arp_announce to 2.";
    "ipvs.tcpTimeout", timeout(|c| &mut c.ipvs.tcp_timeout), IPVS;
        "Idle time of an IPVS TCP connection. 0s: left as it is.";
    "ipvs.tcpFinTimeout", timeout(|c| &mut c.ipvs.tcp_fin_timeout), IPVS;
        "Idle time of an IPVS TCP connection after a FIN. 0s: left as it is.";
    "ipvs.udpTimeout", timeout(|c| &mut c.ipvs.udp_timeout), IPVS;
        "Idle time of IPVS UDP. 0s: left as it is.";

    "nftables.masqueradeBit", whole(|c| &mut c.nftables.masquerade_bit, BIT), NFTABLES;
        "Bit of the packet mark that asks for masquerading, in mode nftables.";
    "nftables.masqueradeAll", switch(|c| &mut c.masquerade_all), Counts::InMode(in_nftables);
        "As iptables.masqueradeAll, in mode nftables.";
    "nftables.syncPeriod", period(|c| &mut c.periods.sync), Counts::InMode(in_nftables);
        "As iptables.syncPeriod, in mode nftables.";
    "nftables.minSyncPeriod", period(|c| &mut c.periods.min_sync), Counts::InMode(in_nftables);
        "As iptables.minSyncPeriod, in mode nftables.";

    "detectLocalMode", Words(|c| &mut c.detect_local_mode);
        "How traffic of the node's own pods is told from other traffic. Mode ebpf does not need to tell it: all that this \
         still does is that NodeCIDR waits for spec.podCIDRs of the Node, and ends the process when they change.";
    "detectLocal.bridgeInterface", text(|c| &mut c.bridge_interface);
        "The bridge of the pods; needed where detectLocalMode is BridgeInterface. Mode ebpf does not use it.";
    "detectLocal.interfaceNamePrefix", text(|c| &mut c.interface_name_prefix);
        "How the names of the pods' interfaces begin; needed where detectLocalMode is InterfaceNamePrefix. Mode ebpf does \
         not use it.";
    "clusterCIDR", CLUSTER_CIDR, Counts::Used(|config| config.detect_local_mode == LocalMode::ClusterCidr);
        "The pods' networks. Mode ebpf does not use them, but checks them: networks of another family than a \
         single-stack node's end the process.";
    "nodePortAddresses", List {
            at: |c| &mut c.node_port_addresses, kind: "list of networks or words",
            allowed: "a network such as \"10.0.0.0/8\", or primary, localhost or all", parse: NodePortAddress::parse,
            write: ToString::to_string, null_if_empty: true,
        };
        "The node's addresses on which node ports are served. Empty: all; in mode nftables, primary.";
    "oomScoreAdj", whole(|c| &mut c.oom_score_adj, -1000..=1000);
        "oom_score_adj of this process.";

    "conntrack.maxPerCore", whole(|c| &mut c.conntrack.max_per_core, NOT_NEGATIVE);
        "nf_conntrack_max for each core. 0: left as it is, and min is ignored.";
    "conntrack.min", whole(|c| &mut c.conntrack.min, NOT_NEGATIVE);
        "Lowest nf_conntrack_max.";
    "conntrack.tcpEstablishedTimeout", optional_timeout(|c| &mut c.conntrack.tcp_established_timeout);
        "nf_conntrack_tcp_timeout_established. 0s: left as it is.";
    "conntrack.tcpCloseWaitTimeout", optional_timeout(|c| &mut c.conntrack.tcp_close_wait_timeout);
        "nf_conntrack_tcp_timeout_close_wait. 0s: left as it is.";
    "conntrack.tcpBeLiberal", switch(|c| &mut c.conntrack.tcp_be_liberal);
        "Set nf_conntrack_tcp_be_liberal to 1. false: left as it is.";
    "conntrack.udpTimeout", timeout(|c| &mut c.conntrack.udp_timeout);
        "nf_conntrack_udp_timeout. 0s: left as it is.";
    "conntrack.udpStreamTimeout", timeout(|c| &mut c.conntrack.udp_stream_timeout);
        "nf_conntrack_udp_timeout_stream. 0s: left as it is.";
    "configSyncPeriod", period(|c| &mut c.config_sync_period);
        "How often the API server is asked anew. Accepted: watches and relists make it needless here.";
    "portRange", UNUSED;
        "Once for mode userspace; without meaning.";

    "winkernel.networkName", text(|c| &mut c.winkernel.network_name);
        "For Windows; without meaning here, as the next ones.";
    "winkernel.sourceVip", text(|c| &mut c.winkernel.source_vip); "For Windows.";
    "winkernel.enableDSR", switch(|c| &mut c.winkernel.enable_dsr); "For Windows.";
    "winkernel.rootHnsEndpointName", text(|c| &mut c.winkernel.root_hns_endpoint_name); "For Windows.";
    "winkernel.forwardHealthCheckVip", switch(|c| &mut c.winkernel.forward_health_check_vip); "For Windows.";
    "windowsRunAsService", switch(|c| &mut c.windows_run_as_service); "For Windows.";

    "ebpf.socketLoadBalancing", Words(|c| &mut c.ebpf.socket_load_balancing);
        "Whose connections are sent to their backend when they connect: all, those of every process on the node; host, \
         those of the node's own network namespace; off, nobody's, every packet is translated.";
    "ebpf.sourceAddress", Words(|c| &mut c.ebpf.source_address);
        "The source address that a backend sees. preserve: the client's, where the answer comes back.";
    "ebpf.xdp", Words(|c| &mut c.ebpf.xdp);
        "Whether packets from outside are translated before the network stack. auto: where it can be done, which is \
         nowhere yet.";
    "ebpf.forwarding", Words(|c| &mut c.ebpf.forwarding);
        "How packets from outside reach a backend on another node.";
    "ebpf.algorithm", Words(|c| &mut c.ebpf.algorithm);
        "How the backend of a new connection is chosen.";
    "ebpf.interfaces.include", patterns(|c| &mut c.ebpf.interfaces.include);
        "Interfaces that packet programs are attached to. Empty: all.";
    "ebpf.interfaces.exclude", patterns(|c| &mut c.ebpf.interfaces.exclude);
        "Interfaces that no packet program is attached to.";
    "ebpf.limits.frontends", count(|c| &mut c.ebpf.limits.frontends);
        "Rows of the tables frontends4 and frontends6 each.";
    "ebpf.limits.services", count(|c| &mut c.ebpf.limits.services);
        "Rows of the table services.";
    "ebpf.limits.slots", count(|c| &mut c.ebpf.limits.slots);
        "Rows of the tables slots4 and slots6 each: endpoints, counted for each service.";
    "ebpf.limits.backends", count(|c| &mut c.ebpf.limits.backends);
        "Rows of the tables backends4 and backends6 each.";
    "ebpf.limits.flows", count(|c| &mut c.ebpf.limits.flows);
        "Rows of the tables flows4 and flows6 each; a flow takes two or three.";
    "ebpf.limits.openingFlows", count(|c| &mut c.ebpf.limits.opening_flows);
        "Rows of the tables opening_flows4 and opening_flows6 each.";
    "ebpf.limits.nodeAddresses", count(|c| &mut c.ebpf.limits.node_addresses);
        "Rows of the tables node_addresses4 and node_addresses6 each.";
    "ebpf.limits.serviceCounters", count(|c| &mut c.ebpf.limits.service_counters);
        "Rows of the table service_counters: service ports whose connections and bytes are counted.";
    "ebpf.cgroup", optional_folder(|c| &mut c.ebpf.cgroup);
        "The cgroup v2 folder whose processes are served. Empty: the mount in /proc/mounts.";
    "ebpf.bpffs", folder(|c| &mut c.ebpf.bpffs);
        "Where the tables are pinned.";
    "ebpf.removeKubeProxyRules", switch(|c| &mut c.ebpf.remove_kube_proxy_rules);
        "Remove what another kube-proxy has left in the kernel, once, when everything is served: else it would go on \
         leading to endpoints that are gone. false: leave it, to try both side by side. Not with --manifests.";
};

const fn count(at: Place<Option<u32>>) -> Count {
    Count { at, most: MOST_ENTRIES }
}

const fn patterns(at: Place<Vec<NamePattern>>) -> List<NamePattern> {
    List {
        at,
        kind: "list of names",
        allowed: PATTERN,
        parse: NamePattern::parse,
        write: ToString::to_string,
        null_if_empty: false,
    }
}

/// Those before 1.36, which this program takes the place of, and before 1.37, the newest.
const PREVIOUS_VERSIONS: [&str; 2] = ["1.35", "1.36"];

const HIDDEN_METRICS: At<Option<String>> = At {
    allowed: "1.35 or 1.36, the version before, or nothing",
    read: |value| match value.as_str() {
        Some(version) if PREVIOUS_VERSIONS.contains(&version) => Ok(Some(version.to_owned())),
        Some(_) => Err(wrong_at(String::new(), Why::Limit, value)),
        None => Err(wrong_at(String::new(), Why::Form, value)),
    },
    ..optional_text(|c| &mut c.show_hidden_metrics_for_version)
};

const FEATURE_GATES: At<Vec<(String, bool)>> = At {
    at: |c| &mut c.feature_gates,
    kind: "names with true or false",
    allowed: "true or false",
    unset: Value::is_null,
    read: |value| {
        let object = value.as_object().ok_or_else(|| wrong_at(String::new(), Why::Form, value))?;
        let gate = |(name, on): (&String, &Value)| {
            // Go's zero value.
            let on_or_zero = on.as_bool().or_else(|| on.is_null().then_some(false));
            let on = on_or_zero.ok_or_else(|| wrong_at(format!(".{name}"), Why::Form, on))?;
            Ok((name.clone(), on))
        };
        object.iter().map(gate).collect()
    },
    write: |gates| gates.iter().map(|(name, on)| (name.clone(), json!(on))).collect::<Map<_, _>>().into(),
};

const VMODULE: At<Vec<ModuleVerbosity>> = At {
    at: |c| &mut c.logging.vmodule,
    kind: "list of {filePattern, verbosity}",
    allowed: "a list of {filePattern, verbosity}: a file name without = and comma, and 0 or more",
    unset: Value::is_null,
    read: |value| {
        let list = value.as_array().ok_or_else(|| wrong_at(String::new(), Why::Form, value))?;
        list.iter().enumerate().map(|(index, module)| read_module(index, module)).collect()
    },
    write: |modules| {
        let module = |module: &ModuleVerbosity| json!({"filePattern": module.file_pattern, "verbosity": module.verbosity});
        modules.iter().map(module).collect()
    },
};

fn read_module(index: usize, module: &Value) -> Read<ModuleVerbosity> {
    let wrong = |why| wrong_at(format!("[{index}]"), why, module);
    let object = module.as_object().ok_or_else(|| wrong(Why::Form))?;
    let pattern = match object.get("filePattern") {
        None | Some(Value::Null) => "",
        Some(pattern) => pattern.as_str().ok_or_else(|| wrong(Why::Form))?,
    };
    let verbosity = match object.get("verbosity") {
        None | Some(Value::Null) => 0,
        Some(verbosity) => as_whole(verbosity).ok_or_else(|| wrong(Why::Form))?,
    };
    let verbosity = u32::try_from(verbosity).ok().filter(|verbosity| i64::from(*verbosity) <= HIGHEST_I32);
    match verbosity {
        Some(verbosity) if !pattern.is_empty() && !pattern.contains(['=', ',']) => {
            Ok(ModuleVerbosity { file_pattern: pattern.to_owned(), verbosity })
        }
        _ => Err(wrong(Why::Limit)),
    }
}

const CLUSTER_CIDR: At<Vec<ipnet::IpNet>> = At {
    at: |c| &mut c.cluster_cidrs,
    kind: "text",
    allowed: "one network, or two of different families separated by a comma",
    unset: |value| value.is_null() || value.as_str() == Some(""),
    read: |value| {
        let text = value.as_str().ok_or_else(|| wrong_at(String::new(), Why::Form, value))?;
        let networks: Option<Vec<_>> = text.split(',').map(network::network).collect();
        let allowed = |networks: &Vec<ipnet::IpNet>| match networks.as_slice() {
            [_] => true,
            [one, other] => one.addr().is_ipv4() != other.addr().is_ipv4(),
            _ => false,
        };
        networks.filter(allowed).ok_or_else(|| wrong_at(String::new(), Why::Limit, value))
    },
    write: |networks| {
        let texts: Vec<_> = networks.iter().map(ToString::to_string).collect();
        Value::String(texts.join(","))
    },
};

/// Text that is read and dropped, as kube-proxy does.
struct Dropped;

const UNUSED: Dropped = Dropped;

impl Access for Dropped {
    fn allowed(&self) -> String {
        "text".to_owned()
    }

    fn kind(&self) -> &'static str {
        "text"
    }

    fn unset(&self, value: &Value) -> bool {
        value.is_null()
    }

    fn read(&self, _: &mut Config, value: &Value) -> Read<()> {
        if value.is_string() { Ok(()) } else { Err(wrong_at(String::new(), Why::Form, value)) }
    }

    fn write(&self, _: &mut Config) -> Value {
        Value::String(String::new())
    }
}
