//! The commands and their flags, as clap parses them.

use std::{ffi::OsString, path::PathBuf};

use clap::{
    Args as ClapArgs, Parser, Subcommand, ValueEnum, ValueHint,
    builder::{PossibleValuesParser, TypedValueParser},
};
use clap_complete::Shell;
use ipnet::IpNet;
use proxy_common::{event::EventKind, reason::Reason};

use super::service_filter::ServiceFilter;
use crate::{model::objects::Protocol, modes::FlowState, version};

/// A service proxy for Kubernetes nodes that replaces kube-proxy.
#[derive(Debug, Parser)]
#[command(name = "proxy-ctl", version, long_version = version::long(), after_help = EXAMPLES, max_term_width = 100)]
pub(super) struct Args {
    /// Folder of the pinned maps [default: ebpf.bpffs of the configuration, else /sys/fs/bpf]
    #[arg(long, global = true, value_name = "DIR", value_parser = absolute, value_hint = ValueHint::DirPath)]
    pub(super) bpffs: Option<PathBuf>,
    #[command(subcommand)]
    pub(super) command: Command,
}

const EXAMPLES: &str = "Examples:
  proxy-ctl run --config /var/lib/kube-proxy/config.conf
  # Serve what YAML files say, without a cluster.
  proxy-ctl run --manifests ./services
  # Show what is served now, also if the controller is down.
  proxy-ctl services default/web
  # Show who connects, and who is refused, as it happens.
  proxy-ctl monitor --service default/web
  proxy-ctl status --output json | jq .maps";

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    Run(RunArgs),
    Status(StatusArgs),
    Services(ServicesArgs),
    Backends(BackendsArgs),
    Flows(FlowsArgs),
    Monitor(MonitorArgs),
    Cleanup(CleanupArgs),
    RolloutStatus(RolloutArgs),
    Probe(ProbeArgs),
    Config(ConfigArgs),
    Completion(CompletionArgs),
    Man(ManArgs),
}

/// Serve this node: watch Services and EndpointSlices, program the kernel
#[derive(Debug, ClapArgs)]
#[command(after_help = RUN_HELP, disable_help_flag = true, override_usage = "proxy-ctl run [FLAGS]")]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub(super) flags: RunFlags,
}

/// The flags of kube-proxy and ours, which are not clap's: see [`crate::config::FLAGS`].
#[derive(Debug, ClapArgs)]
pub(super) struct RunFlags {
    #[arg(hide = true, num_args = 0.., trailing_var_arg = true, allow_hyphen_values = true)]
    pub(super) flags: Vec<OsString>,
}

const RUN_HELP: &str = "Examples:
  proxy-ctl run --config /var/lib/kube-proxy/config.conf
  proxy-ctl run --manifests ./services --v 4

The process needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, and CAP_SYS_ADMIN if it has to mount a bpffs.

It ends on SIGTERM and SIGINT. What it has programmed goes on working until `proxy-ctl cleanup` removes it.

Called by the name kube-proxy, the program takes these flags without `run`.";

/// Show what this node can do, and which mode it would run in
#[derive(Debug, ClapArgs)]
#[command(after_help = PROBE_HELP, disable_help_flag = true, override_usage = "proxy-ctl probe [--output FORMAT] [FLAGS OF run]")]
pub(super) struct ProbeArgs {
    #[command(flatten)]
    pub(super) flags: RunFlags,
}

const PROBE_HELP: &str = "Examples:
  proxy-ctl probe
  proxy-ctl probe --config config.conf --output json | jq .choice.mode

This command changes nothing. The exit code is 1 if the mode that was asked for cannot run here, even if another mode replaces it.

JSON: {facts: {kernel, btf, programs, cgroup2, bpffs, capabilities[], packetHook, refusesWith, endsSocketsOf, nftablesModules, iptables[], routeLocalnet, ipvsModules, ipvsParameters, ipsetProtocol, redirect}, modes[]: {mode, canRun, needs[]: name of a fact, missing[], remarks[]}, requested, choice: {mode, reasons[], fallback: text or null} or null, refusal: text or null, formerKubeProxy: {left[]: {location, what, count}, blockedBy[], unknown[]}, xdp: {requested, uplinks[]: {interface, xdp, reason, forwarded, notForwarded: text or null}}}.

xdp.requested is the value of ebpf.xdp. If it is off, uplinks says what auto would do. forwarded says which frames from other uplinks XDP forwards to this one: all, unfragmented or no.";

/// Show the configuration that `run` would have, and where each value comes from
#[derive(Debug, ClapArgs)]
#[command(after_help = CONFIG_HELP, disable_help_flag = true, override_usage = "proxy-ctl config [--output FORMAT] [FLAGS OF run]")]
pub(super) struct ConfigArgs {
    #[command(flatten)]
    pub(super) flags: RunFlags,
}

const CONFIG_HELP: &str = "Examples:
  proxy-ctl config --config /var/lib/kube-proxy/config.conf
  proxy-ctl config --conntrack-min=0 --output yaml > config.conf

YAML is a file that gives the same configuration, as --write-config-to writes it. A warning names each value that a file cannot express, such as the zero of --iptables-min-sync-period=0 or --healthz-port=0.

JSON: {config, values[]: {field, value, origin}, warnings[]}; origin is default, file or --FLAG.";

/// Print the script with which a shell completes commands and flags
#[derive(Debug, ClapArgs)]
#[command(after_help = COMPLETION_HELP)]
pub(super) struct CompletionArgs {
    pub(super) shell: Shell,
}

const COMPLETION_HELP: &str = "Examples:
  proxy-ctl completion bash > /etc/bash_completion.d/proxy-ctl
  proxy-ctl completion zsh > \"${fpath[1]}/_proxy-ctl\"
  proxy-ctl completion fish > ~/.config/fish/completions/proxy-ctl.fish";

/// Write the manual pages
#[derive(Debug, ClapArgs)]
#[command(after_help = "Example:\n  proxy-ctl man --directory /usr/local/share/man/man1")]
pub(super) struct ManArgs {
    /// The folder for proxy-ctl.1, proxy-ctl-run.1 and so on
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(super) directory: PathBuf,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
pub(super) enum Output {
    #[default]
    Table,
    Json,
}

#[derive(Clone, Copy, Debug, Default, ClapArgs)]
pub(super) struct OutputArgs {
    /// A table for people, or JSON for programs
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(super) output: Output,
}

/// Show the mode, whether the controller runs, what is attached, how full the maps are
#[derive(Debug, ClapArgs)]
#[command(after_help = STATUS_HELP)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const STATUS_HELP: &str = "Example:
  proxy-ctl status

The exit code is 1 if the caller may not read everything.

JSON: {mode, reasons[], fallback, node, controller: {running, starting, pid}, sources[]: {name, connected, objects, problem}, hooks[]: {name, interface, role, reason, kind, others[]: {name, hook, isBefore}}, xdp[]: as xdp.uplinks[] of `probe`, workloadInterfaces, with ebpf.xdp: {forwardedTo: number of interfaces to which XDP forwards packets for pods, notForwardedTo: {reason: count}}, withdrawsIn: seconds, maps[]: {name, used, capacity, bytes} (in other modes: other objects), counters[]: {reason, count}, formerKubeProxy: {left[]: {location, what, count}, blockedBy[], unknown[]}, unservedFields[]: {namespace, name, port, protocol, family, field, effect, instead}, unreadable[]: what the caller may not read, and why}.

A value that is not known is null. effect is servedDifferently, delegated, leftToNode, partlyServed or notServed.";

/// List what is served, or one service
#[derive(Debug, ClapArgs)]
#[command(after_help = SERVICES_HELP)]
pub(super) struct ServicesArgs {
    /// NAMESPACE/NAME, or NAME in any namespace; with :PORT only that port
    pub(super) name: Option<ServiceFilter>,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const SERVICES_HELP: &str = "Examples:
  proxy-ctl services
  proxy-ctl services kube-system/kube-dns:dns

LOCAL/ALL ENDPOINTS counts the endpoints on this node and all endpoints, for clients in the cluster.

POLICY says which clients get endpoints of this node only. The algorithm, the forwarding and the encapsulation follow, unless they are random, snat and ip. `by mode nftables` says that this secondary mode serves what the active mode cannot.

JSON: a list of {namespace, name, port, protocol, family, id, policy, algorithm, forwarding, encapsulation or null, frontends[]: {kind, address, port}, endpoints[]: {address, port, local, state}, internalEndpoints, externalEndpoints, delegatedTo: a mode, or null}.";

/// List the endpoints that some service uses
#[derive(Debug, ClapArgs)]
#[command(after_help = BACKENDS_HELP)]
pub(super) struct BackendsArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const BACKENDS_HELP: &str = "Example:
  proxy-ctl backends --output json

JSON: a list of {id, address, port, protocol, state, local, services, connections: of this node, or null}.";

/// List the connections that the packet programs translate, the newest first
#[derive(Debug, ClapArgs)]
#[command(after_help = FLOWS_HELP)]
pub(super) struct FlowsArgs {
    /// Show only this Service: NAMESPACE/NAME, or NAME in any namespace; with :PORT only that port
    #[arg(long, value_name = "SERVICE", value_hint = ValueHint::Other)]
    pub(super) service: Option<ServiceFilter>,
    /// Show only flows from clients of this address or range
    #[arg(long, value_name = "ADDRESS", value_parser = range, value_hint = ValueHint::Other)]
    pub(super) client: Option<IpNet>,
    /// Show only flows to backends of this address or range
    #[arg(long, value_name = "ADDRESS", value_parser = range, value_hint = ValueHint::Other)]
    pub(super) backend: Option<IpNet>,
    /// Show only flows of this protocol
    #[arg(long, value_name = "PROTOCOL", value_parser = protocol(), ignore_case = true)]
    pub(super) protocol: Option<Protocol>,
    /// Show only flows in these states [default: all but ended]
    #[arg(long, value_enum, value_name = "STATE", value_delimiter = ',')]
    pub(super) state: Vec<FlowState>,
    /// Show at most this many flows; 0 means all
    #[arg(long, value_name = "COUNT", default_value_t = 1_000)]
    pub(super) limit: usize,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const FLOWS_HELP: &str = "Examples:
  proxy-ctl flows --service default/web
  proxy-ctl flows --client 10.244.1.0/24 --state opening,closing
  proxy-ctl flows --limit 0 --output json | jq '.[].backend'

Connections that socket hooks have sent to a backend are not listed, because they are plain connections to it, without a flow. The list is the same if the controller is down. An address after `via` is the source that the backend sees.

JSON: a list of {service: {namespace, name, port} or null, protocol, client, frontend, backend, masquerade, dsr, state, age: seconds, idle: seconds}; a value that is not known is null.";

/// Show who connects, and who is refused or dropped, as it happens
#[derive(Debug, ClapArgs)]
#[command(after_help = MONITOR_HELP)]
pub(super) struct MonitorArgs {
    /// Show only this Service: NAMESPACE/NAME, or NAME in any namespace; with :PORT only that port
    #[arg(long, value_name = "SERVICE", value_hint = ValueHint::Other)]
    pub(super) service: Option<ServiceFilter>,
    /// Show only events whose client, frontend or backend has this address or is in this range
    #[arg(long, value_name = "ADDRESS", value_parser = range, value_hint = ValueHint::Other)]
    pub(super) address: Option<IpNet>,
    /// Show only events with these reasons, as `proxy-ctl status` names them
    #[arg(long, value_name = "REASON", value_delimiter = ',', value_parser = reason(), hide_possible_values = true)]
    pub(super) reason: Vec<Reason>,
    /// Show one of N events, at random
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) sample: u32,
    /// End after N events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) count: Option<u64>,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const MONITOR_HELP: &str = "Examples:
  proxy-ctl monitor --service default/web
  proxy-ctl monitor --reason no_endpoints,source_not_allowed
  proxy-ctl monitor --sample 100 --output json | jq .client

Each event is a flow that opens, a flow whose client gets another backend (rebound), a socket that is connected or sends to a backend, or a client that is refused or dropped, with the reason. Packets of open connections are not shown. Ctrl-C ends it.

The kernel programs make events only while this command runs. --reason and --sample reduce what they make; the other filters reduce only what is shown. One process at a time can watch. The command must be run as root.

JSON: one line an event, {time, kind, reason, by: packet or socket, service: {namespace, name, port} or null, protocol, client, frontend, backend}; a value that is not known is null, and so is the address of a socket's client.";

/// Parses an address or a range of addresses.
fn range(text: &str) -> Result<IpNet, String> {
    let one = || text.parse::<std::net::IpAddr>().map(IpNet::from);
    text.parse()
        .or_else(|_| one())
        .map_err(|_| "must be an address, or a range such as 10.0.0.0/8".to_owned())
}

const PROTOCOLS: [(&str, Protocol); 2] = [("tcp", Protocol::Tcp), ("udp", Protocol::Udp)];

/// Returns a parser of protocols, in upper or lower case.
fn protocol() -> impl TypedValueParser<Value = Protocol> {
    let find = |text: String| {
        let found = PROTOCOLS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(&text));
        found.map(|(_, protocol)| protocol).ok_or("must be tcp or udp")
    };
    PossibleValuesParser::new(PROTOCOLS.map(|(name, _)| name)).try_map(find)
}

/// Returns a parser of the reasons that events can have.
fn reason() -> impl TypedValueParser<Value = Reason> {
    let with_events = || Reason::ALL.iter().copied().filter(|reason| EventKind::of(*reason).is_some());
    let find =
        move |text: String| with_events().find(|reason| reason.name() == text).ok_or("is not a reason");
    PossibleValuesParser::new(with_events().map(Reason::name)).try_map(find)
}

/// Remove everything of proxy-ctl from this node, and nothing else
#[derive(Debug, ClapArgs)]
#[command(after_help = CLEANUP_HELP)]
pub(super) struct CleanupArgs {
    /// Also remove what another kube-proxy has programmed, in any mode; not while one runs
    #[arg(long)]
    pub(super) kube_proxy: bool,
    /// Wait for SIGTERM afterwards, because a pod of a DaemonSet must not end
    #[arg(long)]
    pub(super) stay: bool,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const CLEANUP_HELP: &str = "Examples:
  # Remove what proxy-ctl has left, before kube-proxy serves the node again.
  proxy-ctl cleanup
  # Remove what any service proxy has left, as `kube-proxy --cleanup` does.
  proxy-ctl cleanup --kube-proxy

Connections to Services that the packet programs translate end. The exit code is 1 if something could not be removed.

JSON: {removed: {links[], filters, objects[]}, problems[]}; with --kube-proxy also kubeProxy: {removed[]: {location, what, count}, kept[]: {location, name, reason}}.";

/// Wait until a DaemonSet is ready on every node, as `kubectl rollout status` does
#[derive(Debug, ClapArgs)]
#[command(after_help = ROLLOUT_HELP)]
pub(super) struct RolloutArgs {
    /// The DaemonSet
    #[arg(value_name = "NAMESPACE/NAME", value_hint = ValueHint::Other)]
    pub(super) daemon_set: String,
}

const ROLLOUT_HELP: &str = "Example:
  proxy-ctl rollout-status kube-system/proxy-ctl-cleanup

This is for a pod whose service account may get the DaemonSet. The chart uses it to wait until all nodes are cleaned.";

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("must be an absolute path".to_owned()) }
}
