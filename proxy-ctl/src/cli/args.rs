//! Commands and flags.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use crate::config::RequestedMode;

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\nBPF object: ", env!("PROXY_EBPF_BUILT_WITH"));

/// Service proxy for Kubernetes nodes: takes the place of kube-proxy.
#[derive(Debug, Parser)]
#[command(name = "proxy-ctl", version, long_version = VERSION, after_help = EXAMPLES, max_term_width = 100)]
pub(super) struct Args {
    /// Where the tables are pinned [default: ebpf.bpffs of the configuration, else /sys/fs/bpf]
    #[arg(long, global = true, value_name = "DIR", value_parser = absolute)]
    pub(super) bpffs: Option<PathBuf>,
    #[command(subcommand)]
    pub(super) command: Command,
}

const EXAMPLES: &str = "Examples:
  proxy-ctl run --config /var/lib/kube-proxy/config.conf --hostname-override \"$NODE_NAME\"
  proxy-ctl run --manifests ./services     # without a cluster: serve what the YAML files say
  proxy-ctl services default/web           # what is served right now, also while the controller is down
  proxy-ctl status --output json | jq .tables";

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    Run(RunArgs),
    Status(StatusArgs),
    Services(ServicesArgs),
    Backends(BackendsArgs),
    Cleanup(CleanupArgs),
}

/// Serve this node: watch Services and EndpointSlices, program the kernel
#[derive(Clone, Debug, Default, ClapArgs)]
#[command(after_help = RUN_HELP)]
pub(super) struct RunArgs {
    /// KubeProxyConfiguration file, YAML or JSON; what it says wins over --kubeconfig and --proxy-mode
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Credentials for the API server; without it the pod's service account
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// Name of this node's Node object [default: the host's name in lower case]
    #[arg(long, value_name = "NAME")]
    pub(super) hostname_override: Option<String>,
    /// Only ebpf is built so far
    #[arg(long, value_name = "MODE", value_parser = str::parse::<RequestedMode>)]
    pub(super) proxy_mode: Option<RequestedMode>,
    /// Serve the Services, EndpointSlices and the Node in the YAML and JSON files of this folder
    #[arg(long, value_name = "DIR", conflicts_with = "kubeconfig")]
    pub(super) manifests: Option<PathBuf>,
    /// How much is logged, 0 to 10
    #[arg(short, long = "v", value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10))]
    pub(super) v: Option<u32>,
}

const RUN_HELP: &str = "Examples:
  proxy-ctl run --config /var/lib/kube-proxy/config.conf --hostname-override \"$NODE_NAME\"
  proxy-ctl run --manifests ./services --v 4

The process needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, and CAP_SYS_ADMIN where it has to mount a bpffs.
It ends on SIGTERM and SIGINT; what it has programmed goes on working. To remove it: proxy-ctl cleanup.";

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

/// Show the mode, whether the controller runs, what is attached, how full the tables are
#[derive(Debug, ClapArgs)]
#[command(after_help = STATUS_HELP)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const STATUS_HELP: &str = "Example:
  proxy-ctl status

JSON: {mode, reasons[], node, controller: {running, pid}, sources[]: {name, connected, objects, problem},
  hooks[]: {name, interface, role, kind}, tables[]: {name, used, capacity, bytes},
  counters[]: {reason, count}}; what is not known is null.";

/// List what is served, or one service
#[derive(Debug, ClapArgs)]
#[command(after_help = SERVICES_HELP)]
pub(super) struct ServicesArgs {
    /// NAMESPACE/NAME, or NAME in any namespace; with :PORT only that port
    pub(super) name: Option<String>,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const SERVICES_HELP: &str = "Examples:
  proxy-ctl services
  proxy-ctl services kube-system/kube-dns:dns

ENDPOINTS is local/all, for clients in the cluster. POLICY: which clients get endpoints of this node only.

JSON: a list of {namespace, name, port, protocol, family, id, policy, frontends[]: {kind, address, port},
  endpoints[]: {address, port, local, state}, internalEndpoints, externalEndpoints}.";

/// List the endpoints that some service uses
#[derive(Debug, ClapArgs)]
#[command(after_help = BACKENDS_HELP)]
pub(super) struct BackendsArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const BACKENDS_HELP: &str = "Example:
  proxy-ctl backends --output json

JSON: a list of {id, address, port, protocol, state, local, services}.";

/// Remove everything of ours from this node, and nothing else
#[derive(Debug, ClapArgs)]
#[command(after_help = CLEANUP_HELP)]
pub(super) struct CleanupArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

const CLEANUP_HELP: &str = "Example:
  proxy-ctl cleanup

Connections to services that the packet programs translate end with it. JSON: {removed: {links[], filters, tables[]}}.";

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("must be an absolute path".to_owned()) }
}
