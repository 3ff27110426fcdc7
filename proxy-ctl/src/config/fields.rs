//! The table of every field of the file: where a value is stored, what it may be, when it applies,
//! and what it means.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{
    Config, HEALTHZ_PORT, LocalMode, METRICS_PORT, ModuleVerbosity, NodePortAddress, RequestedMode,
    access::{
        Access, InvalidValue, ListItem, Locate, MAX_I32, Problem, TypedField, accept_header, address,
        as_whole, duration_if, duration_or_nanoseconds, encoding, file, folder, integer, integer_not_zero,
        is_empty_text, keyword, list, listen_address, number, optional_folder, optional_text,
        optional_timeout, parsed, period, port_range, quantity, scheduler, switch, text, timeout, typed,
    },
    ebpf::{MAX_ENTRIES, MAX_NEW_CONNECTIONS_PER_CORE, NamePattern, SHORTEST_LIFETIME},
};

pub(super) const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
pub(super) const KIND: &str = "KubeProxyConfiguration";

/// A field of the file.
pub struct Field {
    /// The path of the field, such as `conntrack.maxPerCore`.
    pub path: &'static str,
    pub(super) access: &'static dyn Access,
    pub(super) applies: Applies,
    /// The meaning of the field, as a text for users.
    pub help: &'static str,
}

/// The condition under which a field's value applies.
#[derive(Clone, Copy)]
pub(super) enum Applies {
    Always,
    /// The value applies in some modes. Several sections set the same setting, and only the section
    /// of the mode applies, as in kube-proxy.
    InMode(fn(RequestedMode) -> bool),
    /// The value applies if it is valid. An invalid value is an error only if the function returns
    /// true, which means that the configuration uses the field. Otherwise the default replaces it.
    WhenUsed(fn(&Config) -> bool),
}

impl Field {
    /// Returns the allowed values as a text that follows "must be".
    pub fn allowed(&self) -> String {
        self.access.allowed()
    }

    /// Returns all values that the field takes, if these are a few words. Empty for every other
    /// type.
    pub fn words(&self) -> Vec<&'static str> {
        self.access.words()
    }

    /// Returns the word for the field's type.
    pub fn type_name(&self) -> &'static str {
        self.access.type_name()
    }

    /// Returns the value of the field as the file would have it.
    pub fn value(&self, config: &Config) -> Value {
        self.access.write(&mut config.clone())
    }

    /// Returns true if the value is meant for this mode, because it is not in the section of
    /// another mode.
    pub fn is_meant_for(&self, mode: RequestedMode) -> bool {
        let is_of_section = match self.path.split_once('.').map_or("", |(section, _)| section) {
            "iptables" => not_in_nftables(mode),
            "ipvs" => in_ipvs(mode),
            "nftables" => in_nftables(mode),
            _ => true,
        };
        is_of_section && self.applies_in(mode)
    }

    pub(super) fn applies_in(&self, mode: RequestedMode) -> bool {
        match self.applies {
            Applies::InMode(applies) => applies(mode),
            Applies::Always | Applies::WhenUsed(_) => true,
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

fn in_userspace(mode: RequestedMode) -> bool {
    mode == RequestedMode::Userspace
}

fn in_others(mode: RequestedMode) -> bool {
    !in_ipvs(mode) && !in_nftables(mode)
}

const IPVS: Applies = Applies::WhenUsed(|config| in_ipvs(config.mode));
const NFTABLES: Applies = Applies::WhenUsed(|config| in_nftables(config.mode));

const MAX_BIT: i64 = 31;

macro_rules! fields {
    ($($path:literal, $access:expr $(, $applies:expr)?; $help:literal;)*) => {
        &[$(Field { path: $path, access: &$access, applies: fields!(@ $($applies)?), help: $help },)*]
    };
    (@) => { Applies::Always };
    (@ $applies:expr) => { $applies };
}

/// The number of fields that are read before the others. The mode decides which section applies,
/// and the bind address decides the defaults of healthz and metrics.
pub(super) const DECIDING: usize = 2;

/// All fields, in the order in which they are read.
pub static FIELDS: &[Field] = fields! {
    "mode", keyword(|c| &mut c.mode);
        "The way in which the node is programmed. Empty means the first of ebpf, iptables, nftables and \
         userspace that can run on the node. kube-proxy knows iptables, ipvs and nftables. If another mode \
         replaces the one that is asked for (ebpf.modeFallback), the settings of the latter still apply.";
    "bindAddress", address(|c| &mut c.bind_address);
        "The node's own address, if it is not that of its Node object. Nothing is bound to it. An IPv6 address \
         in the file makes healthz and metrics default to IPv6.";
    "hostnameOverride", optional_text(|c| &mut c.hostname_override);
        "The name of this node's Node object. Empty means the host's name, in lower case.";
    "healthzBindAddress", listen_address::<HEALTHZ_PORT>(|c| &mut c.healthz_bind_address);
        "The address at which /healthz and /livez are served. An address without a port gets port 10256.";
    "metricsBindAddress", listen_address::<METRICS_PORT>(|c| &mut c.metrics_bind_address);
        "The address at which /metrics, /proxyMode and /configz are served. An address without a port gets port 10249.";
    "bindAddressHardFail", switch(|c| &mut c.bind_address_hard_fail);
        "A healthz or metrics address that cannot be bound ends the process.";
    "enableProfiling", switch(|c| &mut c.enable_profiling);
        "Serve the log level beside the metrics, to clients on loopback.";
    "showHiddenMetricsForVersion", HIDDEN_METRICS;
        "Show metrics that were hidden since this version. Only the previous minor version is allowed.";
    "featureGates", FEATURE_GATES;
        "Kubernetes feature gates by name. These have an effect: AllAlpha, AllBeta, AllowServiceExternalIPs \
         (false: no externalIPs are served), ComponentFlagz, ComponentStatusz, LoggingAlphaOptions, \
         LoggingBetaOptions, WatchListClient (false: plain lists only).";

    "clientConnection.kubeconfig", file(|c| &mut c.client_connection.kubeconfig);
        "The file with the credentials for the API server. Empty means the pod's service account.";
    "clientConnection.acceptContentTypes", accept_header(|c| &mut c.client_connection.accept_content_types);
        "The encodings in which the API server may answer (the Accept header). Empty means that of contentType, or any if contentType is empty too.";
    "clientConnection.contentType", encoding(|c| &mut c.client_connection.content_type);
        "The encoding of what is sent to the API server, and in which it is asked to answer.";
    "clientConnection.qps", number(|c| &mut c.client_connection.qps);
        "The requests a second to the API server. A negative number means no limit.";
    "clientConnection.burst", integer_not_zero::<_, 0, MAX_I32>(|c| &mut c.client_connection.burst);
        "The requests that may be sent at once before qps limits them.";

    "logging.format", keyword(|c| &mut c.logging.format);
        "The form of the log. json needs the feature gate LoggingBetaOptions, which is on.";
    "logging.flushFrequency", duration_or_nanoseconds(|c| &mut c.logging.flush_frequency);
        "The longest time between two flushes of the log. It has no effect, because each line is written at once.";
    "logging.verbosity", integer::<_, 0, MAX_I32>(|c| &mut c.logging.verbosity);
        "The amount that is logged: 0 is what an operator needs, 4 is for the search for a fault, 6 and more are for developers.";
    "logging.vmodule", VMODULE;
        "The verbosity of single source files, by pattern. It applies in format text only.";
    "logging.options.text.splitStream", switch(|c| &mut c.logging.text.split_stream);
        "In format text, only errors go to stderr. This needs the feature gate LoggingAlphaOptions.";
    "logging.options.text.infoBufferSize", quantity(|c| &mut c.logging.text.info_buffer_size);
        "The bytes that are buffered in format text. It has no effect, because each line is written at once. It needs the feature gate LoggingAlphaOptions.";
    "logging.options.json.splitStream", switch(|c| &mut c.logging.json.split_stream);
        "In format json, only errors go to stderr. This needs the feature gate LoggingAlphaOptions.";
    "logging.options.json.infoBufferSize", quantity(|c| &mut c.logging.json.info_buffer_size);
        "The bytes that are buffered in format json. It has no effect, because each line is written at once. It needs the feature gate LoggingAlphaOptions.";

    "iptables.masqueradeBit", integer::<_, 0, MAX_BIT>(|c| &mut c.iptables.masquerade_bit);
        "The bit of the fwmark that asks for masquerading, in modes iptables and ipvs.";
    "iptables.masqueradeAll", switch(|c| &mut c.masquerade_all), Applies::InMode(not_in_nftables);
        "Masquerade everything that is sent to a cluster IP, in modes iptables and ipvs.";
    "iptables.localhostNodePorts", switch(|c| &mut c.iptables.localhost_node_ports);
        "Serve node ports on 127.0.0.1, in modes iptables, ebpf and userspace. No node port is served on ::1.";
    "iptables.syncPeriod", period(|c| &mut c.periods.sync), Applies::InMode(in_others);
        "The time between two comparisons of everything with what is programmed, and the longest pause after a \
         failure. It also applies in modes ebpf and userspace. Mode ebpf compares large maps less often, so \
         that it takes half a percent of a CPU at most, but at least every ten minutes.";
    "iptables.minSyncPeriod", period(|c| &mut c.periods.min_sync), Applies::InMode(in_others);
        "The shortest pause between two syncs, in mode iptables. Modes ebpf, nftables and userspace write each change at once.";

    "ipvs.syncPeriod", period(|c| &mut c.periods.sync), Applies::InMode(in_ipvs);
        "The same as iptables.syncPeriod, in mode ipvs.";
    "ipvs.minSyncPeriod", period(|c| &mut c.periods.min_sync), Applies::InMode(in_ipvs);
        "The same as iptables.minSyncPeriod, in mode ipvs. Its default is 0s in a file.";
    "ipvs.scheduler", scheduler(|c| &mut c.ipvs.scheduler), IPVS;
        "The IPVS scheduler. Empty means rr.";
    "ipvs.excludeCIDRs", list(|c| &mut c.ipvs.exclude_cidrs), IPVS;
        "The networks whose virtual servers are left alone.";
    "ipvs.strictARP", switch(|c| &mut c.ipvs.strict_arp);
        "Set arp_ignore to 1 and arp_announce to 2.";
    "ipvs.tcpTimeout", timeout(|c| &mut c.ipvs.tcp_timeout), IPVS;
        "The idle time of an IPVS TCP connection. 0s leaves the kernel's value.";
    "ipvs.tcpFinTimeout", timeout(|c| &mut c.ipvs.tcp_fin_timeout), IPVS;
        "The idle time of an IPVS TCP connection after a FIN. 0s leaves the kernel's value.";
    "ipvs.udpTimeout", timeout(|c| &mut c.ipvs.udp_timeout), IPVS;
        "The idle time of IPVS UDP. 0s leaves the kernel's value.";

    "nftables.masqueradeBit", integer::<_, 0, MAX_BIT>(|c| &mut c.nftables.masquerade_bit), NFTABLES;
        "The bit of the fwmark that asks for masquerading, in mode nftables.";
    "nftables.masqueradeAll", switch(|c| &mut c.masquerade_all), Applies::InMode(in_nftables);
        "The same as iptables.masqueradeAll, in mode nftables.";
    "nftables.syncPeriod", period(|c| &mut c.periods.sync), Applies::InMode(in_nftables);
        "The same as iptables.syncPeriod, in mode nftables.";
    "nftables.minSyncPeriod", period(|c| &mut c.periods.min_sync), Applies::InMode(in_nftables);
        "It has no effect, because mode nftables writes each change at once.";

    "detectLocalMode", keyword(|c| &mut c.detect_local_mode);
        "The way in which traffic of the node's own pods is told from other traffic. Mode ebpf does not need \
         it: there, NodeCIDR only waits for spec.podCIDRs of the Node, and ends the process when they change.";
    "detectLocal.bridgeInterface", text(|c| &mut c.bridge_interface);
        "The bridge of the pods. It is needed if detectLocalMode is BridgeInterface. Mode ebpf does not use it.";
    "detectLocal.interfaceNamePrefix", text(|c| &mut c.interface_name_prefix);
        "The text with which the names of the pods' interfaces begin. It is needed if detectLocalMode is \
         InterfaceNamePrefix. Mode ebpf does not use it.";
    "clusterCIDR", CLUSTER_CIDR, Applies::WhenUsed(|config| config.detect_local_mode == LocalMode::ClusterCidr);
        "The pods' networks. Mode ebpf does not use them, but checks them: on a single-stack node, a network \
         of the other family ends the process.";
    "nodePortAddresses", list(|c| &mut c.node_port_addresses);
        "The node's addresses on which node ports are served. Empty means all, or primary in mode nftables.";
    "oomScoreAdj", integer::<_, -1000, 1000>(|c| &mut c.oom_score_adj);
        "The oom_score_adj of this process.";

    "conntrack.maxPerCore", integer::<_, 0, MAX_I32>(|c| &mut c.conntrack.max_per_core);
        "The lowest nf_conntrack_max for each core. A higher one stays. 0 leaves the kernel's value, and min is ignored.";
    "conntrack.min", integer::<_, 0, MAX_I32>(|c| &mut c.conntrack.min);
        "The lowest nf_conntrack_max.";
    "conntrack.tcpEstablishedTimeout", optional_timeout(|c| &mut c.conntrack.tcp_established_timeout);
        "The nf_conntrack_tcp_timeout_established, and the time for which established flows of mode ebpf are \
         kept without a packet. 0s leaves the kernel's value, and means 24h for flows.";
    "conntrack.tcpCloseWaitTimeout", optional_timeout(|c| &mut c.conntrack.tcp_close_wait_timeout);
        "The nf_conntrack_tcp_timeout_close_wait, and the time for which flows that one side has closed are \
         kept without a packet. 0s leaves the kernel's value, and means 1h for flows.";
    "conntrack.tcpBeLiberal", switch(|c| &mut c.conntrack.tcp_be_liberal);
        "Set nf_conntrack_tcp_be_liberal to 1. false leaves the kernel's value.";
    "conntrack.udpTimeout", timeout(|c| &mut c.conntrack.udp_timeout);
        "The nf_conntrack_udp_timeout, and the time for which UDP flows of mode ebpf that are not answered for \
         longer than two seconds are kept without a packet. 0s leaves the kernel's value, and means 30s for \
         flows.";
    "conntrack.udpStreamTimeout", timeout(|c| &mut c.conntrack.udp_stream_timeout);
        "The nf_conntrack_udp_timeout_stream, and the time for which the other UDP flows of mode ebpf are kept \
         without a packet. 0s leaves the kernel's value, and means 2m for flows.";
    "configSyncPeriod", period(|c| &mut c.config_sync_period);
        "The time after which the API server is asked anew. It has no effect, because watches and relists make it needless.";
    "portRange", port_range(|c| &mut c.port_range), Applies::InMode(in_userspace);
        "The ports on which mode userspace listens if rules redirect clients to it.";
    "udpIdleTimeout", period(|c| &mut c.udp_idle_timeout), Applies::InMode(in_userspace);
        "The time for which a UDP session of mode userspace lasts without a datagram.";

    "winkernel.networkName", text(|c| &mut c.winkernel.network_name);
        "This field is for Windows, and has no effect.";
    "winkernel.sourceVip", text(|c| &mut c.winkernel.source_vip); "This field is for Windows, and has no effect.";
    "winkernel.enableDSR", switch(|c| &mut c.winkernel.enable_dsr); "This field is for Windows, and has no effect.";
    "winkernel.rootHnsEndpointName", text(|c| &mut c.winkernel.root_hns_endpoint_name); "This field is for Windows, and has no effect.";
    "winkernel.forwardHealthCheckVip", switch(|c| &mut c.winkernel.forward_health_check_vip); "This field is for Windows, and has no effect.";
    "windowsRunAsService", switch(|c| &mut c.windows_run_as_service); "This field is for Windows, and has no effect.";

    "ebpf.socketLoadBalancing", keyword(|c| &mut c.ebpf.socket_load_balancing);
        "The processes whose connections are sent to their backend when they connect. all: every process on \
         the node. host: the processes in the node's own network namespace, for sidecars that redirect a pod's \
         connections. off: no process, so that every packet is translated.";
    "ebpf.sourceAddress", keyword(|c| &mut c.ebpf.source_address);
        "The source address that a backend sees. preserve: the client's, if the answer comes back through this \
         node. masquerade: the node's wherever kube-proxy masquerades; for this, packets of pods are \
         translated, as with socketLoadBalancing: host.";
    "ebpf.xdp", keyword(|c| &mut c.ebpf.xdp);
        "The uplinks on which XDP forwards packets from outside to their backends, and the answers, before \
         they reach the network stack. The first packets of each flow go through the stack; no netfilter rule \
         sees the others. auto: hardware devices whose driver has XDP. native: all uplinks whose driver has \
         it; a veth also needs an XDP program at its other end, and senders that fill in their checksums. \
         generic: all uplinks, for tests: the stack runs XDP, which is no faster, and receive offload must be \
         off. XDP forwards by another uplink or to a pod if the driver of that interface takes such frames; a \
         pod's veth takes them if GRO is on in the pod. All other packets go through the stack; `proxy-ctl \
         status` and `proxy-ctl probe` say why.";
    "ebpf.forwarding", keyword(|c| &mut c.ebpf.forwarding);
        "The way in which packets from outside reach a backend on another node, if their Service has no \
         annotation proxy-ctl.dev/forwarding. snat: with an address of this node as their source, so that \
         answers come back through it. dsr (direct server return): unchanged inside a packet of this node to \
         the backend (see ebpf.encapsulation). The backend's node takes it out, the backend sees the client's \
         address, and the node answers the client itself. hybrid: dsr for TCP, snat for UDP. With dsr and \
         hybrid, all nodes with endpoints must run mode ebpf with this setting, and such packets must pass \
         between them (docs/dsr.md). Running connections stay as they are.";
    "ebpf.allowForwardingAnnotation", switch(|c| &mut c.ebpf.allow_forwarding_annotation);
        "Services may ask for more than ebpf.forwarding by their annotation proxy-ctl.dev/forwarding: for \
         direct server return if the node's setting is snat, or hybrid and the protocol is UDP. A node with an \
         endpoint of such a Service takes packets out of others, whoever has sent them. Whoever may annotate a \
         Service can therefore cause that. A Service may always ask for less.";
    "ebpf.encapsulation", keyword(|c| &mut c.ebpf.encapsulation);
        "The encapsulation of packets to backends on other nodes in direct server return. ip: IPv4 in IPv4 \
         (protocol 4), and IPv6 in IPv6 (41). geneve: UDP to port 6081, for networks that drop these \
         protocols, or that spread packets by their ports; it takes 16 bytes more. Nodes take packets out of \
         both, so that they can be changed one after the other while connections go on.";
    "ebpf.algorithm", keyword(|c| &mut c.ebpf.algorithm);
        "The way in which the backend of a new connection is chosen, if its Service has no annotation \
         proxy-ctl.dev/algorithm. random: by weight. maglev: by a hash of the connection, so that every node \
         chooses the same backend; each service port then takes at least a hundred slots for each endpoint. \
         leastConnection: two backends are drawn by weight, and the one with fewer open connections of this \
         node for its weight is chosen. The annotation proxy-ctl.dev/weights of EndpointSlices sets weights. \
         Running connections stay where they are.";
    "ebpf.interfaces.include", list(|c| &mut c.ebpf.interfaces.include);
        "The interfaces to which packet programs are attached. Empty means all.";
    "ebpf.interfaces.exclude", list(|c| &mut c.ebpf.interfaces.exclude);
        "The interfaces to which no packet program is attached.";
    "ebpf.interfaces.uplinks", list(|c| &mut c.ebpf.interfaces.uplinks);
        "The interfaces that lead to other nodes and the outside, whatever their addresses and routes say.";
    "ebpf.interfaces.workloads", list(|c| &mut c.ebpf.interfaces.workloads);
        "The interfaces that lead to pods, whatever their addresses and routes say. An interface in uplinks is not among them.";
    "ebpf.limits.frontends", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.frontends);
        "The most elements of the maps frontends4 and frontends6 each. They have room for 131072 at first, and grow when more is desired.";
    "ebpf.limits.services", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.services);
        "The most elements of the map services. It has room for 131072 at first, and grows when more is desired.";
    "ebpf.limits.slots", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.slots);
        "The most elements of the maps slots4 and slots6 each: endpoints, counted for each service port. They \
         have room for 524288 at first, and grow when more is desired.";
    "ebpf.limits.backends", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.backends);
        "The most elements of the maps backends4, backends6, connections and collected each. They have room for 262144 at first, and grow when more is desired.";
    "ebpf.limits.flows", integer::<_, 0, MAX_ENTRIES>(|c| &mut c.ebpf.limits.flows);
        "The entries of the maps flows4 and flows6 each; a flow takes two or three. 0 means 524288, or three \
         for each entry that conntrack.maxPerCore gives the node's cores if these are more. It means fewer if \
         they would take more than 2 % of the machine's memory at once, or a quarter of the process's memory \
         limit when they are full. An entry takes 32 bytes at once, and 200 to 300 more while it is used.";
    "ebpf.limits.openingFlows", integer::<_, 0, MAX_ENTRIES>(|c| &mut c.ebpf.limits.opening_flows);
        "The entries of the maps opening_flows4, opening_flows6, host_connections4 and host_connections6 each. A \
         full map first evicts flows that were not answered: at 50,000 new connections a second, 65536 entries \
         keep such a flow for 50 to 150 ms. Raise it on nodes that meet so many; 100,000 entries take 61 MB of \
         kernel memory. 0 means 65536 for each core and 1048576 at most. It means fewer if all flow maps would \
         take more than 2 % of the machine's memory at once, or a quarter of the process's memory limit.";
    "ebpf.limits.affinity", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.affinity);
        "The elements of the maps affinity4 and affinity6 each: clients of each service port with session \
         affinity. A full map evicts clients that have not connected lately. The default takes 14 MB of kernel \
         memory.";
    "ebpf.limits.sourceRanges", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.source_ranges);
        "The most elements of the maps source_ranges4 and source_ranges6 each: loadBalancerSourceRanges, \
         counted for each service port. They take kernel memory only for elements in use.";
    "ebpf.limits.fragments", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.fragments);
        "The elements of the maps fragments4 and fragments6 each: packets that come in fragments.";
    "ebpf.limits.nodeAddresses", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.node_addresses);
        "The elements of the maps node_addresses4, node_addresses6, interfaces, vlan_devices and pod_namespaces each.";
    "ebpf.limits.serviceCounters", integer::<_, 1, MAX_ENTRIES>(|c| &mut c.ebpf.limits.service_counters);
        "The elements of the map service_counters: service ports whose connections and bytes are counted.";
    "ebpf.newConnectionsPerCore", integer::<_, 0, MAX_NEW_CONNECTIONS_PER_CORE>(|c| &mut c.ebpf.new_connections_per_core);
        "The flood limit: how many connections and UDP flows of each family packets may open on one core in a \
         second. Beyond it, those of a service port that has had its share are dropped. A flood then neither \
         fills the maps of opening flows nor keeps other Services from being served (docs/floods.md). It \
         applies in steps of 60. 0 means any number.";
    "ebpf.flowLifetimes.tcpOpening", lifetime(|c| &mut c.ebpf.flow_lifetimes.tcp_opening);
        "The time for which a TCP flow is kept whose client has not acknowledged an answer yet. \
         conntrack.tcpEstablishedTimeout and the fields after it are for the other states.";
    "ebpf.flowLifetimes.tcpClosed", lifetime(|c| &mut c.ebpf.flow_lifetimes.tcp_closed);
        "The time for which a TCP flow is kept that both sides have closed.";
    "ebpf.flowLifetimes.tcpReset", lifetime(|c| &mut c.ebpf.flow_lifetimes.tcp_reset);
        "The time for which a TCP flow is kept that was reset.";
    "ebpf.cgroup", optional_folder(|c| &mut c.ebpf.cgroup);
        "The cgroup v2 folder whose processes are served. Empty means a mount that can be opened; if there is none, the hierarchy is mounted.";
    "ebpf.bpffs", folder(|c| &mut c.ebpf.bpffs);
        "The folder in which the maps are pinned.";
    "ebpf.removeKubeProxyRules", switch(|c| &mut c.ebpf.remove_kube_proxy_rules);
        "Remove what another kube-proxy has left in the kernel, once, when every service port is served. \
         Otherwise it would go on leading to endpoints that are gone. false leaves it, to try both side by \
         side. With --manifests nothing is removed.";
    "ebpf.modeFallback", switch(|c| &mut c.ebpf.mode_fallback);
        "If the mode that is asked for cannot run on the node, the first of iptables, nftables and userspace \
         that can replaces it. A warning in the log, an event and metrics tell of that. With false, it is an \
         error, as with kube-proxy.";
    "ebpf.withdrawAfter", WITHDRAW_AFTER;
        "The time for which the node serves what was programmed after its controller has gone. From then on \
         nothing is translated, so that another proxy's rules apply, and flows of the packet programs end. \
         Choose more than any restart takes. 0s means without end.";
    "ebpf.resetConnectionsToGoneEndpoints", switch(|c| &mut c.ebpf.reset_connections_to_gone_endpoints);
        "Reset TCP connections as soon as their endpoint has left its Services, or is not ready and does not \
         serve while it terminates. Clients then need not wait for their timeouts. A connection that a socket \
         hook sent to the endpoint is reset at once. One that the packet programs translate is reset with the \
         client's next segment, and the endpoint is not told. false leaves them, as kube-proxy does, because \
         such an endpoint may still answer.";
    "ebpf.unallocatedServiceAddresses", keyword(|c| &mut c.ebpf.unallocated_service_addresses);
        "The treatment of traffic to addresses of ServiceCIDRs that no Service has. pass: it goes where its \
         route leads, as with kube-proxy's mode iptables. drop: it is dropped, and a connect or sendmsg fails, \
         as in mode nftables. Do not choose drop if another proxy serves Services of this cluster \
         (service.kubernetes.io/service-proxy-name). The field has no effect without ServiceCIDRs: in an API \
         server before Kubernetes 1.33, or in a folder of manifests without any.";
    "ebpf.answerPing", switch(|c| &mut c.ebpf.answer_ping);
        "The node answers pings of ClusterIPs, also those of its own processes that leave by an uplink. An \
         answer says that the node serves the address, not that an endpoint is ready. No rate limits the \
         answers; fragments are not answered. With false nobody answers, as with kube-proxy.";
};

/// The shortest lease. The lease is renewed about once a second at most, and not while much is
/// being written.
const SHORTEST_LEASE: Duration = Duration::from_secs(10);

const WITHDRAW_AFTER: TypedField<Duration> = TypedField {
    allowed: || "10s or more, such as \"1h\", or 0s for no end".to_owned(),
    read: |value| duration_if(value, |found| found.is_zero() || *found >= SHORTEST_LEASE),
    ..optional_timeout(|c| &mut c.ebpf.withdraw_after)
};

const fn lifetime(locate: Locate<Duration>) -> TypedField<Duration> {
    TypedField {
        allowed: || "2s or more, such as \"30s\", or 0s for the default".to_owned(),
        read: |value| duration_if(value, |found| *found >= SHORTEST_LIFETIME),
        ..period(locate)
    }
}

impl ListItem for ipnet::IpNet {
    const LIST: &'static str = "list of networks";
    const ALLOWED: &'static str = "a network such as \"10.0.0.0/8\" or \"fd00::/108\"";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl ListItem for NodePortAddress {
    const LIST: &'static str = "list of networks or words";
    const ALLOWED: &'static str = "a network such as \"10.0.0.0/8\", or primary, localhost or all";

    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
}

impl ListItem for NamePattern {
    const LIST: &'static str = "list of names";
    const ALLOWED: &'static str =
        "an interface name of at most 15 characters, with a * at its end for a prefix";
    const EMPTY: Value = Value::Array(Vec::new());

    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
}

/// The previous versions that are allowed: the one before 1.36, which this program replaces, and
/// the one before 1.37, the newest.
const PREVIOUS_VERSIONS: [&str; 2] = ["1.35", "1.36"];

const HIDDEN_METRICS: TypedField<Option<String>> = TypedField {
    allowed: || "1.35 or 1.36, the version before, or nothing".to_owned(),
    read: |value| {
        parsed(value, |version| PREVIOUS_VERSIONS.contains(&version).then(|| Some(version.to_owned())))
    },
    ..optional_text(|c| &mut c.show_hidden_metrics_for_version)
};

const FEATURE_GATES: TypedField<Vec<(String, bool)>> = TypedField {
    locate: |c| &mut c.feature_gates,
    type_name: "names with true or false",
    allowed: || "true or false".to_owned(),
    words: Vec::new,
    unset: Value::is_null,
    read: |value| {
        let gate = |(name, on): (&String, &Value)| {
            // Go reads null as false.
            let on = if on.is_null() { Ok(false) } else { typed(on, Value::as_bool) };
            Ok((name.clone(), on.map_err(|invalid| invalid.at(format!(".{name}")))?))
        };
        typed(value, Value::as_object)?.iter().map(gate).collect()
    },
    write: |gates| gates.iter().map(|(name, on)| (name.clone(), json!(on))).collect::<Map<_, _>>().into(),
};

const VMODULE: TypedField<Vec<ModuleVerbosity>> = TypedField {
    locate: |c| &mut c.logging.vmodule,
    type_name: "list of {filePattern, verbosity}",
    allowed: || {
        "a list of {filePattern, verbosity}: a file name without = and comma, and 0 or more".to_owned()
    },
    words: Vec::new,
    unset: Value::is_null,
    read: |value| {
        let module = |(index, module): (usize, &Value)| {
            read_module(module).map_err(|problem| InvalidValue::new(problem, module).at(format!("[{index}]")))
        };
        typed(value, Value::as_array)?.iter().enumerate().map(module).collect()
    },
    write: |modules| {
        let module = |module: &ModuleVerbosity| json!({"filePattern": module.file_pattern, "verbosity": module.verbosity});
        modules.iter().map(module).collect()
    },
};

fn read_module(module: &Value) -> Result<ModuleVerbosity, Problem> {
    let object = module.as_object().ok_or(Problem::WrongType)?;
    let given = |name: &str| object.get(name).filter(|value| !value.is_null());
    let pattern = given("filePattern").map_or(Some(""), Value::as_str).ok_or(Problem::WrongType)?;
    let verbosity = given("verbosity").map_or(Some(0), as_whole).ok_or(Problem::WrongType)?;
    let verbosity = i32::try_from(verbosity).ok().and_then(|verbosity| u32::try_from(verbosity).ok());
    match verbosity {
        Some(verbosity) if !pattern.is_empty() && !pattern.contains(['=', ',']) => {
            Ok(ModuleVerbosity { file_pattern: pattern.to_owned(), verbosity })
        }
        _ => Err(Problem::NotAllowed),
    }
}

const CLUSTER_CIDR: TypedField<Vec<ipnet::IpNet>> = TypedField {
    locate: |c| &mut c.cluster_cidrs,
    type_name: "text",
    allowed: || "one network, or two of different families separated by a comma".to_owned(),
    words: Vec::new,
    unset: is_empty_text,
    read: |value| parsed(value, cluster_cidrs),
    write: |networks| {
        let texts: Vec<_> = networks.iter().map(ToString::to_string).collect();
        Value::String(texts.join(","))
    },
};

fn cluster_cidrs(text: &str) -> Option<Vec<ipnet::IpNet>> {
    let networks: Vec<ipnet::IpNet> =
        text.split(',').map(|network| network.parse().ok()).collect::<Option<_>>()?;
    let allowed = match networks.as_slice() {
        [_] => true,
        [one, other] => one.addr().is_ipv4() != other.addr().is_ipv4(),
        _ => false,
    };
    allowed.then_some(networks)
}
