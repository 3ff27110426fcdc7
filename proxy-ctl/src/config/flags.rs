//! The table of every flag of `run`: kube-proxy's, those of its older versions, and our own. clap
//! parses and shows flags from it.

use clap::{Arg, ArgAction, ValueHint, builder::PossibleValuesParser};

/// A flag of the command line.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// The name without dashes. Each `-` in it may also be written as `_`.
    pub name: &'static str,
    pub short: Option<char>,
    pub value: ValueKind,
    pub sets: Sets,
    pub group: Group,
    /// The reason why it should not be used any more. None if it is not deprecated.
    pub deprecated: Option<&'static str>,
    pub help: &'static str,
}

/// The kind of value that follows a flag.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ValueKind {
    /// A switch: `--flag` or `--flag=false`.
    Switch,
    /// A text. The value in brackets is its placeholder in the help text.
    Text(&'static str),
    /// A whole number of 32 bits.
    Integer,
    /// A whole number of 31 bits that is not negative.
    Level,
    Number,
    Duration,
    /// A list, separated by commas. Each time that the flag is given adds to it.
    List(&'static str),
    /// Feature gates: `A=true,B=false`.
    Gates,
    /// Verbosities of modules: `pattern=N,...`.
    Modules,
    /// The form of the version: `--version` or `--version=raw`.
    Version,
}

impl ValueKind {
    /// Returns the placeholder in the help text. `None` if the flag needs no value.
    pub fn placeholder(self) -> Option<&'static str> {
        match self {
            Self::Switch | Self::Version => None,
            Self::Text(name) | Self::List(name) => Some(name),
            Self::Integer => Some("INTEGER"),
            Self::Level => Some("LEVEL"),
            Self::Number => Some("NUMBER"),
            Self::Duration => Some("DURATION"),
            Self::Gates => Some("GATE=BOOL,..."),
            Self::Modules => Some("PATTERN=N,..."),
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sets {
    /// These fields, whichever of them the mode uses. The flag is ignored if there is a file.
    Fields(&'static [&'static str]),
    /// This field. The flag overrides the file.
    Override(&'static str),
    /// A setting that the file does not have.
    Other,
    Nothing,
}

/// The group of a flag, which has a heading in the help text.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Group {
    Main,
    Settings,
    Logging,
    Own,
    Legacy,
}

impl Group {
    pub const ALL: [Self; 5] = [Self::Main, Self::Own, Self::Logging, Self::Settings, Self::Legacy];

    pub const fn heading(self) -> &'static str {
        match self {
            Self::Main => "What to do",
            Self::Own => "Only in proxy-ctl",
            Self::Logging => "Logging (wins over the file)",
            Self::Settings => "Settings (ignored if --config is given)",
            Self::Legacy => "Deprecated",
        }
    }
}

const fn flag(group: Group, name: &'static str, value: ValueKind, sets: Sets, help: &'static str) -> Flag {
    Flag { name, short: None, value, sets, group, deprecated: None, help }
}

const fn main(name: &'static str, value: ValueKind, sets: Sets, help: &'static str) -> Flag {
    flag(Group::Main, name, value, sets, help)
}

const fn own(name: &'static str, value: ValueKind, sets: Sets, help: &'static str) -> Flag {
    flag(Group::Own, name, value, sets, help)
}

const fn logging(name: &'static str, value: ValueKind, field: &'static str, help: &'static str) -> Flag {
    flag(Group::Logging, name, value, Sets::Override(field), help)
}

/// Returns a flag that sets fields. Its help text is that of the first field.
const fn set(name: &'static str, value: ValueKind, fields: &'static [&'static str]) -> Flag {
    flag(Group::Settings, name, value, Sets::Fields(fields), "")
}

/// Returns a flag of the logger that kube-proxy had before 1.26.
const fn klog(name: &'static str, value: ValueKind) -> Flag {
    Flag {
        deprecated: Some("it has no effect: the log goes to stderr"),
        ..flag(Group::Legacy, name, value, Sets::Nothing, "A flag of kube-proxy before 1.26, without effect.")
    }
}

use ValueKind::{Duration, Gates, Integer, Level, List, Modules, Number, Switch, Text, Version};

pub static FLAGS: &[Flag] = &[
    main("config", Text("FILE"), Sets::Other, "The KubeProxyConfiguration file, YAML or JSON."),
    main(
        "write-config-to",
        Text("FILE"),
        Sets::Other,
        "Write the configuration, with every default, to this file and exit.",
    ),
    main(
        "cleanup",
        Switch,
        Sets::Other,
        "Remove everything of proxy-ctl and of another kube-proxy, in any mode, from this node and exit.",
    ),
    main("init-only", Switch, Sets::Other, "Do what needs all privileges, and exit."),
    main(
        "hostname-override",
        Text("NAME"),
        Sets::Override("hostnameOverride"),
        "The name of this node's Node object [default: the host's name in lower case].",
    ),
    main("master", Text("URL"), Sets::Other, "The API server's address, instead of the kubeconfig's."),
    Flag { short: Some('h'), ..main("help", Switch, Sets::Other, "Print help.") },
    main("version", Version, Sets::Other, "Print the version and exit; --version=raw prints more."),
    own(
        "manifests",
        Text("DIR"),
        Sets::Other,
        "Serve the Services, EndpointSlices, ServiceCIDRs and the Node in the YAML and JSON files of this folder, without an API server.",
    ),
    own(
        "follow-config",
        Switch,
        Sets::Other,
        "With --follow-config=false, a change of the configuration file applies from the next start on, not at once.",
    ),
    own("bpffs", Text("DIR"), Sets::Override("ebpf.bpffs"), "The folder in which the maps are pinned."),
    own(
        "mode-fallback",
        Switch,
        Sets::Override("ebpf.modeFallback"),
        "With --mode-fallback=false, it is an error if the mode that is asked for cannot run here; no other mode replaces it.",
    ),
    Flag {
        short: Some('v'),
        ..logging("v", Level, "logging.verbosity", "The amount that is logged: 0 to 10.")
    },
    logging(
        "vmodule",
        Modules,
        "logging.vmodule",
        "The verbosity of single source files, added to that of the file.",
    ),
    logging("logging-format", Text("FORMAT"), "logging.format", "The form of the log: text or json."),
    logging(
        "log-flush-frequency",
        Duration,
        "logging.flushFrequency",
        "The longest time between two flushes of the log.",
    ),
    logging(
        "log-text-split-stream",
        Switch,
        "logging.options.text.splitStream",
        "In format text, only errors go to stderr.",
    ),
    logging(
        "log-text-info-buffer-size",
        Text("QUANTITY"),
        "logging.options.text.infoBufferSize",
        "The bytes that are buffered in format text; without effect.",
    ),
    logging(
        "log-json-split-stream",
        Switch,
        "logging.options.json.splitStream",
        "In format json, only errors go to stderr.",
    ),
    logging(
        "log-json-info-buffer-size",
        Text("QUANTITY"),
        "logging.options.json.infoBufferSize",
        "The bytes that are buffered in format json; without effect.",
    ),
    set("proxy-mode", Text("MODE"), &["mode"]),
    set("kubeconfig", Text("FILE"), &["clientConnection.kubeconfig"]),
    set("feature-gates", Gates, &["featureGates"]),
    set("kube-api-content-type", Text("TYPE"), &["clientConnection.contentType"]),
    set("kube-api-qps", Number, &["clientConnection.qps"]),
    set("kube-api-burst", Integer, &["clientConnection.burst"]),
    set("bind-address", Text("ADDRESS"), &["bindAddress"]),
    set("bind-address-hard-fail", Switch, &["bindAddressHardFail"]),
    set("healthz-bind-address", Text("ADDRESS:PORT"), &["healthzBindAddress"]),
    set("metrics-bind-address", Text("ADDRESS:PORT"), &["metricsBindAddress"]),
    set("profiling", Switch, &["enableProfiling"]),
    set("show-hidden-metrics-for-version", Text("VERSION"), &["showHiddenMetricsForVersion"]),
    set("config-sync-period", Duration, &["configSyncPeriod"]),
    set("masquerade-all", Switch, &["iptables.masqueradeAll", "nftables.masqueradeAll"]),
    set("iptables-masquerade-bit", Integer, &["iptables.masqueradeBit"]),
    set("iptables-localhost-nodeports", Switch, &["iptables.localhostNodePorts"]),
    set("iptables-sync-period", Duration, &["iptables.syncPeriod", "nftables.syncPeriod"]),
    set("iptables-min-sync-period", Duration, &["iptables.minSyncPeriod", "nftables.minSyncPeriod"]),
    set("ipvs-sync-period", Duration, &["ipvs.syncPeriod"]),
    set("ipvs-min-sync-period", Duration, &["ipvs.minSyncPeriod"]),
    set("ipvs-scheduler", Text("SCHEDULER"), &["ipvs.scheduler"]),
    set("ipvs-exclude-cidrs", List("NETWORK,..."), &["ipvs.excludeCIDRs"]),
    set("ipvs-strict-arp", Switch, &["ipvs.strictARP"]),
    set("ipvs-tcp-timeout", Duration, &["ipvs.tcpTimeout"]),
    set("ipvs-tcpfin-timeout", Duration, &["ipvs.tcpFinTimeout"]),
    set("ipvs-udp-timeout", Duration, &["ipvs.udpTimeout"]),
    set("detect-local-mode", Text("MODE"), &["detectLocalMode"]),
    set("pod-bridge-interface", Text("NAME"), &["detectLocal.bridgeInterface"]),
    set("pod-interface-name-prefix", Text("PREFIX"), &["detectLocal.interfaceNamePrefix"]),
    set("cluster-cidr", Text("NETWORK[,NETWORK]"), &["clusterCIDR"]),
    set("nodeport-addresses", List("NETWORK,..."), &["nodePortAddresses"]),
    set("oom-score-adj", Integer, &["oomScoreAdj"]),
    set("conntrack-max-per-core", Integer, &["conntrack.maxPerCore"]),
    set("conntrack-min", Integer, &["conntrack.min"]),
    set("conntrack-tcp-timeout-established", Duration, &["conntrack.tcpEstablishedTimeout"]),
    set("conntrack-tcp-timeout-close-wait", Duration, &["conntrack.tcpCloseWaitTimeout"]),
    set("conntrack-tcp-be-liberal", Switch, &["conntrack.tcpBeLiberal"]),
    set("conntrack-udp-timeout", Duration, &["conntrack.udpTimeout"]),
    set("conntrack-udp-timeout-stream", Duration, &["conntrack.udpStreamTimeout"]),
    Flag {
        deprecated: Some("use --healthz-bind-address"),
        ..flag(
            Group::Legacy,
            "healthz-port",
            Integer,
            Sets::Fields(&[]),
            "The port for a --healthz-bind-address that has none; 0 means not served.",
        )
    },
    Flag {
        deprecated: Some("use --metrics-bind-address"),
        ..flag(
            Group::Legacy,
            "metrics-port",
            Integer,
            Sets::Fields(&[]),
            "The port for a --metrics-bind-address that has none; 0 means not served.",
        )
    },
    flag(Group::Legacy, "boot-id-file", Text("FILE,..."), Sets::Nothing, "Accepted without effect."),
    flag(Group::Legacy, "machine-id-file", Text("FILE,..."), Sets::Nothing, "Accepted without effect."),
    klog("add-dir-header", Switch),
    klog("alsologtostderr", Switch),
    klog("log-backtrace-at", Text("FILE:LINE")),
    klog("log-dir", Text("DIR")),
    klog("log-file", Text("FILE")),
    klog("log-file-max-size", Integer),
    klog("logtostderr", Switch),
    klog("one-output", Switch),
    klog("skip-headers", Switch),
    klog("skip-log-headers", Switch),
    klog("stderrthreshold", Text("SEVERITY")),
];

/// The flags that kube-proxy no longer has, and what to use instead.
pub static REMOVED: &[(&str, &str)] = &[
    ("azure-container-registry-config", "nothing replaces it, leave it out"),
    ("cleanup-iptables", "use --cleanup"),
    ("cleanup-ipvs", "use --cleanup"),
    ("conntrack-max", "use --conntrack-max-per-core and --conntrack-min"),
    ("enable-dsr", "it is for Windows, leave it out"),
    ("forward-healthcheck-vip", "it is for Windows, leave it out"),
    ("google-json-key", "nothing replaces it, leave it out"),
    ("network-name", "it is for Windows, leave it out"),
    ("proxy-port-range", "nothing replaces it, leave it out: no port is opened for a service"),
    ("resource-container", "nothing replaces it, leave it out: use the resources of the pod"),
    ("root-hnsendpoint-name", "it is for Windows, leave it out"),
    ("source-vip", "it is for Windows, leave it out"),
    ("udp-timeout", "use --conntrack-udp-timeout or --conntrack-udp-timeout-stream"),
    ("windows-service", "it is for Windows, leave it out"),
];

impl Flag {
    /// Returns the fields that the flag sets.
    pub fn fields(&'static self) -> &'static [&'static str] {
        match &self.sets {
            Sets::Fields(fields) => fields,
            Sets::Override(field) => std::slice::from_ref(field),
            Sets::Other | Sets::Nothing => &[],
        }
    }

    /// Returns the help text of the flag, or that of its first field.
    pub fn description(&'static self) -> &'static str {
        if !self.help.is_empty() {
            return self.help;
        }
        let field = self.fields().first().and_then(|path| super::fields::field(path));
        field.map_or("", |field| field.help)
    }

    /// Returns the flag as an argument of clap, for help texts, completions and manual pages.
    pub fn argument(&'static self) -> Arg {
        let help = match self.deprecated {
            Some(why) => format!("{} Deprecated: {why}.", self.description()),
            None => self.description().to_owned(),
        };
        let argument = Arg::new(self.name).long(self.name).help(help).help_heading(self.group.heading());
        let argument = match self.short {
            Some(letter) => argument.short(letter),
            None => argument,
        };
        let Some(name) = self.value.placeholder() else { return argument.action(ArgAction::SetTrue) };
        let argument = argument.value_name(name).action(ArgAction::Append).value_hint(match name {
            "FILE" => ValueHint::FilePath,
            "DIR" => ValueHint::DirPath,
            _ => ValueHint::Other,
        });
        let words = self.words();
        if words.is_empty() {
            argument
        } else {
            argument.value_parser(PossibleValuesParser::new(words)).hide_possible_values(true)
        }
    }

    /// Returns all values that the flag takes, if these are a few words.
    fn words(&'static self) -> Vec<&'static str> {
        let field = self.fields().first().and_then(|path| super::fields::field(path));
        field.map(super::fields::Field::words).unwrap_or_default()
    }
}
