//! Merging of defaults, file and flags into one configuration, with the origin of each value.

use std::{
    fmt,
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;

use super::{
    Config, Error, HEALTHZ_PORT, Keyword as _, LocalMode, LogFormat, METRICS_PORT, NodePortAddress,
    RequestedMode,
    access::{InvalidValue, Problem},
    command_line::CommandLine,
    document::{self, Document},
    duration, feature_gates,
    fields::{Applies, DECIDING, FIELDS, Field},
    flags::{Flag, Group, Sets},
};

/// The origin of a value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Origin {
    Default,
    File,
    /// The name of the flag, without dashes.
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

/// The configuration that applies.
#[derive(Clone, Debug)]
pub struct Effective {
    pub config: Config,
    /// The origin of each of [`FIELDS`], in their order.
    origins: Vec<Origin>,
    /// Messages for the operator about unknown fields and ignored flags.
    pub warnings: Vec<String>,
}

impl Effective {
    /// Reads the file, if there is one, and checks everything. As in kube-proxy, unknown and
    /// duplicate fields are warnings. If there is a file, flags for settings of the file are
    /// ignored with a warning.
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

    /// Resolves a document without flags. Returns `None` if it is invalid.
    pub(super) fn of_document(root: Value) -> Option<Self> {
        let document = Document { root, warnings: Vec::new() };
        Self::resolve(Some(&File { path: PathBuf::new(), document }), &CommandLine::default()).ok()
    }

    pub(super) fn resolve_flags(line: &CommandLine) -> Result<Self, Error> {
        Self::resolve(None, line)
    }

    fn resolve(file: Option<&File>, line: &CommandLine) -> Result<Self, Error> {
        let mut resolution = Resolution::new(file, line);
        resolution.check_structure();
        let (deciding, others) = FIELDS.split_at(DECIDING);
        deciding.iter().for_each(|field| resolution.read(field));
        resolution.defaults_of_the_file();
        others.iter().for_each(|field| resolution.read(field));
        resolution.normalize_host_name();
        resolution.drop_split_streams_of_the_file();
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

    /// Returns every field with its value, as the file would have it, and its origin. Fields of a
    /// section that the mode does not use are left out.
    pub fn values(&self) -> Vec<(&'static Field, Value, Origin)> {
        let used = FIELDS.iter().zip(&self.origins).filter(|(field, _)| field.applies_in(self.config.mode));
        used.map(|(field, origin)| (field, field.value(&self.config), *origin)).collect()
    }
}

const ALPHA_LOGGING: &str = "LoggingAlphaOptions";
const TEXT_SPLIT_STREAM: &str = "logging.options.text.splitStream";
const JSON_SPLIT_STREAM: &str = "logging.options.json.splitStream";

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

    fn check_structure(&mut self) {
        let Some(file) = self.file else { return };
        let at = file.path.display();
        let structure = file.document.structure();
        self.problems.extend(structure.problems.iter().map(|problem| format!("{at}: {problem}")));
        let unknown = structure.unknown.iter();
        self.warnings.extend(unknown.map(|field| format!("{at}: {}", document::unknown(field))));
    }

    /// Returns the flag that sets `field`, if one is given that is not ignored.
    fn flag(&self, field: &Field) -> Option<(&'static Flag, Value)> {
        let applies = |flag: &Flag| match flag.sets {
            Sets::Fields(_) => self.file.is_none(),
            Sets::Override(_) => true,
            Sets::Other | Sets::Nothing => false,
        };
        let mut given = self.line.given();
        let (flag, value) = given.find(|(flag, _)| applies(flag) && flag.fields().contains(&field.path))?;
        // As in kube-proxy, a flag with an empty text changes nothing, but a zero is a value. The
        // flags of the logger are an exception: their empty text counts.
        (value != "" || flag.group == Group::Logging).then(|| (flag, value.clone()))
    }

    fn given_value(&self, field: &Field) -> (Origin, Option<Value>) {
        let from_file = self.file.and_then(|file| file.document.value(field.path));
        let from_file = from_file.filter(|value| !field.access.unset(value));
        match (self.flag(field), from_file) {
            // The modules of both apply, and those of the flag come first.
            (Some((flag, Value::Array(mut modules))), Some(Value::Array(more)))
                if flag.sets == Sets::Override(field.path) =>
            {
                modules.extend(more.iter().cloned());
                (Origin::Flag(flag.name), Some(Value::Array(modules)))
            }
            (Some((flag, value)), _) => (Origin::Flag(flag.name), Some(value)),
            (None, Some(value)) => (Origin::File, Some(value.clone())),
            (None, None) => (Origin::Default, None),
        }
    }

    fn read(&mut self, field: &'static Field) {
        let (origin, value) = self.given_value(field);
        let applies = field.applies_in(self.config.mode);
        let mut discarded = (!applies).then(|| self.config.clone());
        let config = discarded.as_mut().unwrap_or(&mut self.config);
        let result = value.map_or(Ok(()), |value| field.access.read(config, &value));
        self.origins.push(if applies { origin } else { Origin::Default });
        let Err(invalid) = result else { return };
        let used = match field.applies {
            Applies::Always => true,
            Applies::InMode(_) => applies,
            Applies::WhenUsed(used) => used(&self.config),
        };
        self.report(field, origin, &invalid, used);
    }

    fn report(&mut self, field: &Field, origin: Origin, invalid: &InvalidValue, used: bool) {
        let InvalidValue { part, found, problem } = invalid;
        let (name, allowed) = (self.name(field.path, origin, part), field.allowed());
        if !used && *problem == Problem::NotAllowed {
            if let Some(origin) = self.origins.last_mut() {
                *origin = Origin::Default;
            }
            self.warnings.push(format!("{name} is ignored, and should be {allowed}, found {found}"));
        } else {
            self.problems.push(format!("{name} must be {allowed}, found {found}"));
        }
    }

    /// Returns the name of a field for errors, with the file or the flag that set it.
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

    /// Sets the defaults of a file that depend on its other fields. The defaults of flags do not
    /// depend on other flags.
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

    /// Normalizes the node's name if a flag set it. A name from the file is normalized when it is
    /// used, and written back as it is.
    fn normalize_host_name(&mut self) {
        if let (Some(Origin::Flag(_)), Some(name)) =
            (self.origin("hostnameOverride"), self.config.node_name())
        {
            self.config.hostname_override = Some(name);
        }
    }

    /// Ignores split streams of the file if the feature gate is off, as kube-proxy does. In a flag
    /// they are an error.
    fn drop_split_streams_of_the_file(&mut self) {
        if feature_gates::is_on(&self.config.feature_gates, ALPHA_LOGGING) {
            return;
        }
        let from_file =
            [TEXT_SPLIT_STREAM, JSON_SPLIT_STREAM].map(|path| self.origin(path) == Some(Origin::File));
        let logging = &mut self.config.logging;
        let streams = [(TEXT_SPLIT_STREAM, &mut logging.text), (JSON_SPLIT_STREAM, &mut logging.json)];
        for ((path, routing), from_file) in streams.into_iter().zip(from_file) {
            if from_file && std::mem::take(&mut routing.split_stream) {
                self.warnings.push(format!("{path} is ignored: the feature gate {ALPHA_LOGGING} is off"));
            }
        }
    }

    fn origin(&self, path: &str) -> Option<Origin> {
        let index = FIELDS.iter().position(|field| field.path == path)?;
        self.origins.get(index).copied()
    }

    /// Applies `--healthz-port` and `--metrics-port`, which give an address its port if it has
    /// none. 0 disables the server, which a file cannot do.
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
            let alone = self.line.text(address_flag).and_then(|text| text.parse().ok());
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
            format!("--{} is ignored: the file {} is used instead", flag.name, file.path.display())
        };
        let ignored: Vec<_> = ignored.map(warning).collect();
        self.warnings.extend(ignored);
    }

    fn platform_defaults(&mut self) {
        if self.config.mode == RequestedMode::Nftables && self.config.node_port_addresses.is_empty() {
            self.config.node_port_addresses = vec![NodePortAddress::Primary];
        }
    }

    /// Checks the rules that concern several fields.
    fn check(&mut self) {
        self.check_periods();
        self.check_local_detection();
        self.check_logging();
        self.check_feature_gates();
        let name = self.line.value("hostname-override").and_then(Value::as_str).unwrap_or_default();
        if !name.is_empty() && name.trim().is_empty() {
            self.problem("hostnameOverride", "the name of a Node, found nothing");
        }
    }

    fn check_local_detection(&mut self) {
        let (path, name) = match self.config.detect_local_mode {
            LocalMode::BridgeInterface => ("detectLocal.bridgeInterface", &self.config.bridge_interface),
            LocalMode::InterfaceNamePrefix => {
                ("detectLocal.interfaceNamePrefix", &self.config.interface_name_prefix)
            }
            LocalMode::ClusterCidr | LocalMode::NodeCidr => return,
        };
        if name.is_empty() {
            let mode = self.config.detect_local_mode.word();
            let must = format!("an interface name because of detectLocalMode {mode}, found nothing");
            self.problem(path, must);
        }
    }

    fn check_feature_gates(&mut self) {
        let name = self.named("featureGates");
        let gates = &self.config.feature_gates;
        let invalid = feature_gates::invalid(gates);
        self.problems.extend(invalid.map(|(gate, problem)| format!("{name}.{gate} {problem}")));
        let gone = gates.iter().filter(|(gate, _)| feature_gates::is_gone(gate));
        let warning =
            |(gate, _): &(String, bool)| format!("{name}.{gate} is ignored: the gate is gone, and always on");
        self.warnings.extend(gone.map(warning));
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
        let mut needs_gate = Vec::new();
        for (split_stream, buffer_size, routing) in [
            (TEXT_SPLIT_STREAM, "logging.options.text.infoBufferSize", &self.config.logging.text),
            (JSON_SPLIT_STREAM, "logging.options.json.infoBufferSize", &self.config.logging.json),
        ] {
            needs_gate.extend(routing.split_stream.then_some((split_stream, "false")));
            needs_gate.extend((routing.info_buffer_size != "0").then_some((buffer_size, "0")));
        }
        for (path, allowed) in needs_gate {
            self.problem(path, format_args!("{allowed}, unless the feature gate {ALPHA_LOGGING} is on"));
        }
    }
}
