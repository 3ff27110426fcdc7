//! Defaults, the file and the flags into one configuration, with the origin of each value.

use std::{
    fmt,
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;

use super::{
    Config, Error, HEALTHZ_PORT, LocalMode, LogFormat, METRICS_PORT, NodePortAddress, OutputRouting,
    RequestedMode, Word as _,
    access::Why,
    command_line::CommandLine,
    document::{self, Document},
    duration, feature_gates,
    fields::{Counts, DECIDING, FIELDS, Field},
    flags::{Flag, Group, Sets},
    network,
};

/// Where a value comes from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Origin {
    Default,
    File,
    /// With its name, without dashes.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File => f.write_str("file"),
            Self::Flag(name) => write!(f, "--{name}"),
        }
    }
}

/// What counts in the end.
#[derive(Clone, Debug)]
pub struct Effective {
    pub config: Config,
    /// Of each of [`FIELDS`].
    origins: Vec<Origin>,
    /// What an operator should hear: unknown fields, flags that are ignored.
    pub warnings: Vec<String>,
}

impl Effective {
    /// Reads the file, if there is one, and checks everything. Unknown and duplicate fields are warnings, as with
    /// kube-proxy; where there is a file, flags for what the file can say are ignored, with a warning.
    pub fn load(path: Option<&Path>, line: &CommandLine) -> Result<Self, Error> {
        let Some(path) = path else { return Self::resolve_flags(line) };
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Self::of_text(path, &text, line)
    }

    pub(super) fn of_text(path: &Path, text: &str, line: &CommandLine) -> Result<Self, Error> {
        let document = document::parse(path, text)?;
        Self::resolve(Some(&File { path: path.to_owned(), document }), line)
    }

    /// `None`: there is something wrong with it.
    pub(super) fn of_document(root: Value) -> Option<Self> {
        let document = Document { root, warnings: Vec::new() };
        Self::resolve(Some(&File { path: PathBuf::new(), document }), &CommandLine::default()).ok()
    }

    pub(super) fn resolve_flags(line: &CommandLine) -> Result<Self, Error> {
        Self::resolve(None, line)
    }

    fn resolve(file: Option<&File>, line: &CommandLine) -> Result<Self, Error> {
        let mut resolution = Resolution::new(file, line);
        resolution.shape();
        let (deciding, others) = FIELDS.split_at(DECIDING);
        deciding.iter().for_each(|field| resolution.read(field));
        resolution.defaults_of_the_file();
        others.iter().for_each(|field| resolution.read(field));
        resolution.what_kube_proxy_changes();
        resolution.deprecated_ports();
        resolution.ignored_flags();
        resolution.platform_defaults();
        resolution.check();
        let Resolution { config, origins, warnings, problems, .. } = resolution;
        if problems.is_empty() {
            Ok(Self { config, origins, warnings })
        } else {
            Err(Error::Values(problems))
        }
    }

    /// Every field with its value, as the file would say it, and where that comes from. Fields of a section that the
    /// mode does not use are left out.
    pub fn values(&self) -> Vec<(&'static Field, Value, Origin)> {
        let used = FIELDS.iter().zip(&self.origins).filter(|(field, _)| field.counts_in(self.config.mode));
        used.map(|(field, origin)| (field, field.value(&self.config), *origin)).collect()
    }

    pub fn origin(&self, path: &str) -> Option<Origin> {
        let index = FIELDS.iter().position(|field| field.path == path)?;
        self.origins.get(index).copied()
    }
}

const ALPHA_LOGGING: &str = "LoggingAlphaOptions";

struct File {
    path: PathBuf,
    document: Document,
}

struct Resolution<'a> {
    file: Option<&'a File>,
    line: &'a CommandLine,
    config: Config,
    origins: Vec<Origin>,
    warnings: Vec<String>,
    problems: Vec<String>,
}

impl<'a> Resolution<'a> {
    fn new(file: Option<&'a File>, line: &'a CommandLine) -> Self {
        let mut warnings = line.warnings();
        warnings.extend(file.iter().flat_map(|file| file.document.warnings.clone()));
        let origins = Vec::with_capacity(FIELDS.len());
        Self { file, line, config: Config::default(), origins, warnings, problems: Vec::new() }
    }

    fn shape(&mut self) {
        let Some(file) = self.file else { return };
        let at = file.path.display();
        let shape = file.document.shape();
        self.problems.extend(shape.problems.iter().map(|problem| format!("{at}: {problem}")));
        let unknown =
            shape.unknown.iter().map(|field| format!("{at}: {field} is not a known field, ignored"));
        self.warnings.extend(unknown);
    }

    /// The flag that says what `field` is, if one is given that counts.
    fn flag(&self, field: &Field) -> Option<(&'static Flag, Value)> {
        let counts = |flag: &Flag| match flag.sets {
            Sets::Fields(_) => self.file.is_none(),
            Sets::Wins(_) => true,
            Sets::Other | Sets::Nothing => false,
        };
        let mut given = self.line.given();
        let (flag, value) = given.find(|(flag, _)| counts(flag) && flag.fields().contains(&field.path))?;
        // Text that says nothing changes nothing, but to the logger; as with kube-proxy, a flag's zero is a value of its own.
        (value != "" || flag.group == Group::Logging).then(|| (flag, value.clone()))
    }

    fn read(&mut self, field: &'static Field) {
        let from_file = self.file.and_then(|file| file.document.value(field.path));
        let from_file = from_file.filter(|value| !field.access.unset(value));
        let (origin, value) = match (self.flag(field), from_file) {
            // The modules of both count, the flag's first.
            (Some((flag, Value::Array(mut modules))), Some(Value::Array(more)))
                if flag.sets == Sets::Wins(field.path) =>
            {
                modules.extend(more.iter().cloned());
                (Origin::Flag(flag.name), Some(Value::Array(modules)))
            }
            (Some((flag, value)), _) => (Origin::Flag(flag.name), Some(value)),
            (None, Some(value)) => (Origin::File, Some(value.clone())),
            (None, None) => (Origin::Default, None),
        };
        let elsewhere = !field.counts_in(self.config.mode);
        self.origins.push(if elsewhere { Origin::Default } else { origin });
        let Some(value) = value else { return };
        let result = if elsewhere {
            field.access.read(&mut self.config.clone(), &value)
        } else {
            field.access.read(&mut self.config, &value)
        };
        let Err(wrong) = result else {
            let left_out = field.access.left_out(&value);
            if !left_out.is_empty() {
                let (name, left_out) = (self.name(field.path, origin, ""), left_out.join(", "));
                self.warnings.push(format!("{name}: {left_out} cannot be read here and is left out"));
            }
            return;
        };
        let unused = match field.counts {
            Counts::Always => false,
            Counts::InMode(_) => elsewhere,
            Counts::Used(used) => !used(&self.config),
        };
        let (part, allowed, found) = (&wrong.part, field.allowed(), &wrong.found);
        let name = self.name(field.path, origin, part);
        if unused && wrong.why == Why::Limit {
            if let Some(origin) = self.origins.last_mut() {
                *origin = Origin::Default;
            }
            self.warnings.push(format!("{name} is ignored, and should be {allowed}, found {found}"));
        } else {
            let later = if wrong.why == Why::NotBuilt { ", which is not built yet" } else { "" };
            self.problems.push(format!("{name} must be {allowed}, found {found}{later}"));
        }
    }

    /// What an error calls a field: by the file or the flag that said it.
    fn name(&self, path: &str, origin: Origin, part: &str) -> String {
        match (origin, self.file) {
            (Origin::Flag(flag), _) => format!("--{flag} ({path}{part})"),
            (Origin::File | Origin::Default, Some(file)) => format!("{}: {path}{part}", file.path.display()),
            (Origin::File | Origin::Default, None) => format!("{path}{part}"),
        }
    }

    fn named(&self, path: &str) -> String {
        self.name(path, self.origin(path).unwrap_or(Origin::Default), "")
    }

    fn problem(&mut self, path: &str, must: impl fmt::Display) {
        let problem = format!("{} must be {must}", self.named(path));
        self.problems.push(problem);
    }

    /// Two defaults of a file depend on what else it says. Those of the flags do not.
    fn defaults_of_the_file(&mut self) {
        if self.file.is_none() {
            return;
        }
        if self.config.mode == RequestedMode::Ipvs {
            self.config.periods.min_sync = Duration::ZERO;
        }
        if self.config.bind_address.is_ipv6() {
            self.config.healthz_bind_address =
                Some(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), HEALTHZ_PORT));
            self.config.metrics_bind_address =
                Some(SocketAddr::new(Ipv6Addr::LOCALHOST.into(), METRICS_PORT));
        }
    }

    /// The name of a flag is written as it is meant, that of a file as it stands there. A file's splitStream without its
    /// gate is no error: kube-proxy loses the value before it looks.
    fn what_kube_proxy_changes(&mut self) {
        if let (Some(Origin::Flag(_)), Some(name)) =
            (self.origin("hostnameOverride"), self.config.node_name())
        {
            self.config.hostname_override = Some(name);
        }
        if feature_gates::is_on(&self.config.feature_gates, ALPHA_LOGGING) {
            return;
        }
        let from_file = |path| self.origin(path) == Some(Origin::File);
        let (text, json) = ("logging.options.text.splitStream", "logging.options.json.splitStream");
        let (text_is_lost, json_is_lost) = (from_file(text), from_file(json));
        for (lost, path, routing) in [
            (text_is_lost, text, &mut self.config.logging.text),
            (json_is_lost, json, &mut self.config.logging.json),
        ] {
            if lost && std::mem::take(&mut routing.split_stream) {
                self.warnings.push(format!("{path} is ignored: the feature gate {ALPHA_LOGGING} is off"));
            }
        }
    }

    fn origin(&self, path: &str) -> Option<Origin> {
        let index = FIELDS.iter().position(|field| field.path == path)?;
        self.origins.get(index).copied()
    }

    /// The port of `--healthz-port` is for an address without one; 0 ends the server, which a file cannot say.
    fn deprecated_ports(&mut self) {
        if self.file.is_some() || self.line.text("write-config-to").is_some() {
            return;
        }
        let ports = [
            ("healthz-port", "healthz-bind-address", &mut self.config.healthz_bind_address),
            ("metrics-port", "metrics-bind-address", &mut self.config.metrics_bind_address),
        ];
        for (flag, address_flag, address) in ports {
            let Some(port) = self.line.value(flag).and_then(Value::as_i64) else { continue };
            let alone = self.line.text(address_flag).and_then(network::address);
            match (u16::try_from(port), alone) {
                (Ok(0), _) => *address = None,
                (Ok(port), Some(alone)) => *address = Some(SocketAddr::new(alone, port)),
                (Ok(_), None) => {
                    self.warnings
                        .push(format!("--{flag} is ignored: --{address_flag} has a port of its own"));
                }
                (Err(_), _) => {
                    self.problems.push(format!("--{flag} must be from 0 to 65535, found {port}"));
                }
            }
        }
    }

    fn ignored_flags(&mut self) {
        let Some(file) = self.file else { return };
        let ignored = self.line.given().filter(|(flag, _)| matches!(flag.sets, Sets::Fields(_)));
        let warning = |(flag, _): (&Flag, _)| {
            format!("--{} is ignored: what counts is the file {}", flag.name, file.path.display())
        };
        let ignored: Vec<_> = ignored.map(warning).collect();
        self.warnings.extend(ignored);
    }

    fn platform_defaults(&mut self) {
        if self.config.mode == RequestedMode::Nftables && self.config.node_port_addresses.is_empty() {
            self.config.node_port_addresses = vec![NodePortAddress::Primary];
        }
    }

    /// What can only be said of several values together.
    fn check(&mut self) {
        self.check_periods();
        let needed = match self.config.detect_local_mode {
            LocalMode::BridgeInterface => {
                Some(("detectLocal.bridgeInterface", &self.config.bridge_interface))
            }
            LocalMode::InterfaceNamePrefix => {
                Some(("detectLocal.interfaceNamePrefix", &self.config.interface_name_prefix))
            }
            LocalMode::ClusterCidr | LocalMode::NodeCidr => None,
        };
        if let Some((path, _)) = needed.filter(|(_, name)| name.is_empty()) {
            let mode = self.config.detect_local_mode.word();
            self.problem(
                path,
                format_args!("an interface name because of detectLocalMode {mode}, found nothing"),
            );
        }
        self.check_logging();
        let gates = self.named("featureGates");
        let wrong = feature_gates::wrong(&self.config.feature_gates);
        self.problems.extend(wrong.map(|(gate, problem)| format!("{gates}.{gate} {problem}")));
        let gone = self.config.feature_gates.iter().filter(|(gate, _)| feature_gates::is_gone(gate));
        let gone =
            gone.map(|(gate, _)| format!("{gates}.{gate} is ignored: the gate is gone, and always on"));
        self.warnings.extend(gone);
        if self
            .line
            .value("hostname-override")
            .and_then(Value::as_str)
            .is_some_and(|name| !name.is_empty() && name.trim().is_empty())
        {
            self.problems.push(
                "--hostname-override (hostnameOverride) must be the name of a Node, found nothing".to_owned(),
            );
        }
    }

    fn check_periods(&mut self) {
        let section = match self.config.mode {
            RequestedMode::Ipvs => "ipvs",
            RequestedMode::Nftables => "nftables",
            RequestedMode::Automatic
            | RequestedMode::Ebpf
            | RequestedMode::Iptables
            | RequestedMode::Userspace => "iptables",
        };
        let super::SyncPeriods { sync, min_sync } = self.config.periods;
        if sync.is_zero() {
            self.problem(&format!("{section}.syncPeriod"), "above 0s, found 0s");
        } else if min_sync > sync {
            let (min_sync, sync) = (duration::format(min_sync), duration::format(sync));
            self.problem(
                &format!("{section}.minSyncPeriod"),
                format_args!("at most syncPeriod, {sync}, found {min_sync}"),
            );
        }
        if self.config.config_sync_period.is_zero() {
            self.problem("configSyncPeriod", "above 0s, found 0s");
        }
    }

    fn check_logging(&mut self) {
        let logging = &self.config.logging;
        if logging.format == LogFormat::Json {
            if !logging.vmodule.is_empty() {
                self.problem("logging.vmodule", "empty, because logging.format is json");
            }
            if !feature_gates::is_on(&self.config.feature_gates, "LoggingBetaOptions") {
                self.problem("logging.format", "text, because the feature gate LoggingBetaOptions is off");
            }
        }
        if feature_gates::is_on(&self.config.feature_gates, ALPHA_LOGGING) {
            return;
        }
        let needs_gate = |routing: &OutputRouting, split, buffer| {
            let split = routing.split_stream.then_some((split, "false"));
            let buffer = (routing.info_buffer_size != "0").then_some((buffer, "0"));
            [split, buffer]
        };
        let logging = &self.config.logging;
        let text = needs_gate(
            &logging.text,
            "logging.options.text.splitStream",
            "logging.options.text.infoBufferSize",
        );
        let json = needs_gate(
            &logging.json,
            "logging.options.json.splitStream",
            "logging.options.json.infoBufferSize",
        );
        for (path, allowed) in text.into_iter().chain(json).flatten() {
            self.problem(path, format_args!("{allowed}, unless the feature gate {ALPHA_LOGGING} is on"));
        }
    }
}
