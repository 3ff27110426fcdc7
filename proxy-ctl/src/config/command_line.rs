//! The command line of `run`. kube-proxy's spellings are made regular, then clap parses it with the
//! table [`FLAGS`].

use std::{error::Error as _, ffi::OsString};

use clap::{
    Arg, ArgAction, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use serde_json::{Map, Number, Value, json};

use super::{
    duration,
    flags::{FLAGS, Flag, REMOVED, ValueKind},
};

/// The flags that were given. The configuration that they make up is checked when it is resolved.
#[derive(Clone, Debug, Default)]
pub struct CommandLine {
    /// The flags, each with the value as the file would have it.
    given: Vec<(&'static Flag, Value)>,
}

/// The amount of text that `--version` prints.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum VersionFormat {
    Short,
    Long,
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FlagError {
    #[error("{flag} is not a known flag{}", similar.as_ref().map(|flag| format!(": did you mean {flag}?")).unwrap_or_default())]
    Unknown { flag: String, similar: Option<String> },
    #[error("--{flag} is gone: {instead}")]
    Removed { flag: &'static str, instead: &'static str },
    #[error("{0} needs a value")]
    NoValue(String),
    #[error("{flag} must be {allowed}, found {found:?}")]
    Invalid { flag: String, allowed: String, found: String },
    #[error("{0:?} is not a flag: nothing but flags is taken")]
    Argument(String),
    #[error("{0:?} is not text")]
    NotText(OsString),
    #[error("{0}")]
    Other(String),
}

impl CommandLine {
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, FlagError> {
        Self::parse_with(&[], arguments)
    }

    /// Parses a command line with the flags that a command has in addition to those of `run`.
    pub fn parse_with(
        more: &'static [Flag],
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, FlagError> {
        let arguments: Result<Vec<String>, _> = arguments.into_iter().map(OsString::into_string).collect();
        let arguments = regular(arguments.map_err(FlagError::NotText)?);
        let flags = || FLAGS.iter().chain(more);
        let matches = command(flags()).try_get_matches_from(arguments).map_err(|error| flag_error(&error))?;
        let value = |flag: &Flag| matches.get_many::<Value>(flag.name)?.cloned().reduce(merged);
        Ok(Self { given: flags().filter_map(|flag| Some((flag, value(flag)?))).collect() })
    }

    /// Adds the value of a flag that was not parsed here.
    pub fn give_text(&mut self, name: &str, text: &str) {
        self.given.extend(FLAGS.iter().find(|flag| flag.name == name).map(|flag| (flag, text.into())));
    }

    pub(super) fn value(&self, name: &str) -> Option<&Value> {
        self.given().find(|(flag, _)| flag.name == name).map(|(_, value)| value)
    }

    pub(super) fn given(&self) -> impl Iterator<Item = (&'static Flag, &Value)> {
        self.given.iter().map(|(flag, value)| (*flag, value))
    }

    /// Returns the text of a flag. `None` if it was not given or is empty.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.value(name).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    pub fn is_on(&self, name: &str) -> bool {
        self.value(name) == Some(&Value::Bool(true))
    }

    /// Returns true if the configuration file is followed while the process runs.
    pub fn follows_config(&self) -> bool {
        self.value("follow-config") != Some(&Value::Bool(false))
    }

    pub fn version(&self) -> Option<VersionFormat> {
        if self.text("version").is_some() {
            return Some(VersionFormat::Long);
        }
        self.is_on("version").then_some(VersionFormat::Short)
    }

    /// Returns warnings for the operator about the flags themselves.
    pub fn warnings(&self) -> Vec<String> {
        let warning =
            |(flag, _): (&Flag, _)| Some(format!("--{} is deprecated: {}", flag.name, flag.deprecated?));
        self.given().filter_map(warning).collect()
    }
}

/// Replaces `_` by `-` in the names of flags, as kube-proxy does. clap reads everything else as
/// kube-proxy does.
fn regular(arguments: Vec<String>) -> Vec<String> {
    let mut flags_ended = false;
    let regular = |argument: String| {
        flags_ended |= argument == "--";
        let name = argument.split('=').next().unwrap_or_default();
        if flags_ended || !name.starts_with("--") {
            return argument;
        }
        format!("{}{}", name.replace('_', "-"), &argument[name.len()..])
    };
    arguments.into_iter().map(regular).collect()
}

fn command(flags: impl Iterator<Item = &'static Flag>) -> Command {
    // Templates may leave an empty argument, which means nothing.
    let empty = |text: &str| if text.is_empty() { Ok(Value::Null) } else { Err("empty") };
    let arguments = Arg::new(ARGUMENTS).action(ArgAction::Append).num_args(0..).value_parser(empty);
    Command::new("run")
        .no_binary_name(true)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .args(flags.map(parsed))
        .arg(arguments)
}

const ARGUMENTS: &str = "ARGUMENTS";

fn parsed(flag: &'static Flag) -> Arg {
    let argument =
        flag.argument().action(ArgAction::Append).value_parser(|text: &str| read(flag.value, text));
    match flag.value.placeholder() {
        Some(_) => argument.allow_hyphen_values(true),
        None => argument.num_args(0..=1).require_equals(true).default_missing_value("true"),
    }
}

/// Returns the value of a flag that is given again. The last value counts, but lists grow.
fn merged(before: Value, again: Value) -> Value {
    match (before, again) {
        (Value::Array(before), Value::Array(again)) => before.into_iter().chain(again).collect(),
        (Value::Object(before), Value::Object(again)) => {
            Value::Object(before.into_iter().chain(again).collect())
        }
        (_, again) => again,
    }
}

/// Returns the error in one line, like all errors of the configuration.
fn flag_error(error: &clap::Error) -> FlagError {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let argument = context(ContextKind::InvalidArg).unwrap_or_default();
    let flag = argument.split([' ', '=', '[']).next().unwrap_or_default().to_owned();
    let found = context(ContextKind::InvalidValue).unwrap_or_default();
    let kind = error.kind();
    if kind == ErrorKind::UnknownArgument {
        let removed = REMOVED.iter().find(|(removed, _)| flag.strip_prefix("--") == Some(removed));
        removed.map_or_else(
            || FlagError::Unknown { flag, similar: context(ContextKind::SuggestedArg) },
            |(flag, instead)| FlagError::Removed { flag, instead },
        )
    } else if kind == ErrorKind::ValueValidation && argument.contains(ARGUMENTS) {
        FlagError::Argument(found)
    } else if kind == ErrorKind::ValueValidation {
        let allowed = error.source().map(ToString::to_string).unwrap_or_default();
        FlagError::Invalid { flag, allowed, found }
    } else if kind == ErrorKind::InvalidValue {
        FlagError::NoValue(flag)
    } else {
        FlagError::Other(error.to_string())
    }
}

/// Returns the value that the file would have, or a text that says what is allowed.
fn read(kind: ValueKind, text: &str) -> Result<Value, &'static str> {
    match kind {
        ValueKind::Switch => boolean(text).map(Value::Bool).ok_or("true or false"),
        ValueKind::Text(_) => Ok(text.into()),
        ValueKind::Integer => text.parse::<i32>().map(Value::from).map_err(|_| "a whole number of 32 bits"),
        ValueKind::Level => level(text).map(Value::from).ok_or("a whole number of 0 or more"),
        ValueKind::Number => {
            text.parse().ok().and_then(Number::from_f64).map(Value::Number).ok_or("a number")
        }
        ValueKind::Duration => {
            duration::parse(text).map(|_| text.into()).ok_or("a duration such as 30s or 1h0m0s")
        }
        ValueKind::List(_) if text.is_empty() => Ok(Value::Array(Vec::new())),
        ValueKind::List(_) => Ok(text.split(',').map(unquoted).collect()),
        ValueKind::Gates => {
            let gate = |pair: &str| {
                let (name, on) = pair.split_once('=')?;
                Some((name.trim().to_owned(), Value::Bool(boolean(on.trim())?)))
            };
            let gates = pairs(text).map(gate).collect::<Option<Map<_, _>>>();
            gates.map(Value::Object).ok_or("a list such as A=true,B=false")
        }
        ValueKind::Modules => {
            let module = |pair: &str| {
                let (pattern, verbosity) = pair.split_once('=').filter(|(pattern, _)| !pattern.is_empty())?;
                Some(json!({"filePattern": pattern, "verbosity": level(verbosity)?}))
            };
            pairs(text).map(module).collect::<Option<Value>>().ok_or("a list such as file=2,other*=4")
        }
        ValueKind::Version if text == "raw" => Ok(text.into()),
        ValueKind::Version => boolean(text).map(Value::Bool).ok_or("true, false or raw"),
    }
}

/// Removes the quotes that a manifest has around a value. No shell removes them there.
fn unquoted(part: &str) -> &str {
    part.strip_prefix('"').and_then(|part| part.strip_suffix('"')).unwrap_or(part)
}

fn pairs(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').filter(|part| !part.is_empty())
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn level(text: &str) -> Option<i32> {
    text.parse().ok().filter(|level| *level >= 0)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<CommandLine, FlagError> {
        CommandLine::parse(arguments.iter().map(OsString::from))
    }

    #[rstest]
    #[case::underscores(&["--conntrack_min=5", "--config-sync_period", "1s"], &["--conntrack-min=5", "--config-sync-period", "1s"])]
    #[case::not_in_values(&["--hostname_override=a_b", "a_b"], &["--hostname-override=a_b", "a_b"])]
    #[case::not_in_letters(&["-v=4", "-a_b"], &["-v=4", "-a_b"])]
    #[case::not_after_the_end_of_flags(&["--a_b", "--", "--a_b"], &["--a-b", "--", "--a_b"])]
    fn spellings_are_made_regular(#[case] given: &[&str], #[case] expected: &[&str]) {
        assert_eq!(regular(given.iter().map(ToString::to_string).collect()), expected);
    }

    #[rstest]
    #[case::equals(&["--conntrack-min=5"], "conntrack-min", json!(5))]
    #[case::apart(&["--conntrack-min", "5"], "conntrack-min", json!(5))]
    #[case::underscores(&["--conntrack_min=5"], "conntrack-min", json!(5))]
    #[case::negative(&["--oom-score-adj=-1"], "oom-score-adj", json!(-1))]
    #[case::negative_apart(&["--oom-score-adj", "-1"], "oom-score-adj", json!(-1))]
    #[case::empty(&["--hostname-override="], "hostname-override", json!(""))]
    #[case::empty_apart(&["--hostname-override", ""], "hostname-override", json!(""))]
    #[case::last_value_counts(&["--conntrack-min=5", "--conntrack-min=6"], "conntrack-min", json!(6))]
    #[case::switch(&["--profiling"], "profiling", json!(true))]
    #[case::switch_off(&["--profiling=F"], "profiling", json!(false))]
    #[case::switch_on_and_off(&["--profiling", "--profiling=false"], "profiling", json!(false))]
    #[case::short(&["-v", "2"], "v", json!(2))]
    #[case::short_equals(&["-v=2"], "v", json!(2))]
    #[case::short_attached(&["-v2"], "v", json!(2))]
    #[case::long_of_one_letter(&["--v", "2"], "v", json!(2))]
    #[case::value_that_looks_like_a_flag(&["--config", "--v"], "config", json!("--v"))]
    #[case::lists_grow(&["--nodeport-addresses=a,b", "--nodeport-addresses", "c"], "nodeport-addresses", json!(["a", "b", "c"]))]
    #[case::gates_merge(&["--feature-gates=A=true,B=false", "--feature-gates= B = 1,"], "feature-gates", json!({"A": true, "B": true}))]
    #[case::modules(&["--vmodule=a=1,b*=2"], "vmodule", json!([{"filePattern": "a", "verbosity": 1}, {"filePattern": "b*", "verbosity": 2}]))]
    #[case::quotes_of_a_manifest(&["--nodeport-addresses=\"a\",b"], "nodeport-addresses", json!(["a", "b"]))]
    #[case::empty_list(&["--nodeport-addresses="], "nodeport-addresses", json!([]))]
    #[case::empty_list_part(&["--nodeport-addresses=a,"], "nodeport-addresses", json!(["a", ""]))]
    #[case::duration(&["--config-sync-period=1h"], "config-sync-period", json!("1h"))]
    #[case::empty_arguments(&["", "--v=1", "", "--", ""], "v", json!(1))]
    fn valid(#[case] arguments: &[&str], #[case] flag: &str, #[case] value: Value) {
        assert_eq!(parse(arguments).unwrap().value(flag), Some(&value));
    }

    #[rstest]
    #[case(&["--no-such"], "--no-such is not a known flag")]
    #[case(&["--conntrack-minn=1"], "--conntrack-minn is not a known flag: did you mean --conntrack-min?")]
    #[case(&["-x"], "-x is not a known flag")]
    #[case(&["--cleanup-iptables"], "--cleanup-iptables is gone: use --cleanup")]
    #[case(&["--resource_container=/"], "--resource-container is gone: nothing replaces it, leave it out: use the resources of the pod")]
    #[case(&["--conntrack-min"], "--conntrack-min needs a value")]
    #[case(&["--conntrack-min=1e3"], "--conntrack-min must be a whole number of 32 bits, found \"1e3\"")]
    #[case(&["--conntrack-min=99999999999"], "--conntrack-min must be a whole number of 32 bits, found \"99999999999\"")]
    #[case(&["--profiling=yes"], "--profiling must be true or false, found \"yes\"")]
    #[case(&["--profiling", "false"], "\"false\" is not a flag: nothing but flags is taken")]
    #[case(&["--", "x"], "\"x\" is not a flag: nothing but flags is taken")]
    #[case(&["-v", "-1"], "--v must be a whole number of 0 or more, found \"-1\"")]
    #[case(&["--config-sync-period=15"], "--config-sync-period must be a duration such as 30s or 1h0m0s, found \"15\"")]
    #[case(&["--feature-gates=A"], "--feature-gates must be a list such as A=true,B=false, found \"A\"")]
    #[case(&["--vmodule=a"], "--vmodule must be a list such as file=2,other*=4, found \"a\"")]
    #[case(&["--version=v1.2.3"], "--version must be true, false or raw, found \"v1.2.3\"")]
    fn invalid(#[case] arguments: &[&str], #[case] message: &str) {
        assert_eq!(parse(arguments).unwrap_err().to_string(), message);
    }

    #[test]
    fn deprecated_flags_are_warnings() {
        let line = parse(&["--healthz-port=0", "--logtostderr=true", "--v=2"]).unwrap();
        let warnings = line.warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].starts_with("--healthz-port is deprecated: use --healthz-bind-address"));
    }
}
