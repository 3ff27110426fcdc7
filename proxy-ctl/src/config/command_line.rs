//! Flags as kube-proxy reads them: `--flag=value`, `--flag value`, `--switch`, `--switch=false`, `-v2`, and `_` for `-`.

use std::{collections::BTreeMap, ffi::OsString, slice};

use serde_json::{Map, Number, Value, json};

use super::{
    duration,
    flags::{FLAGS, Flag, REMOVED, Takes},
};

/// The flags that were given. What they say about the configuration is checked when it is resolved.
#[derive(Clone, Debug, Default)]
pub struct CommandLine {
    more: &'static [Flag],
    given: BTreeMap<&'static str, Given>,
}

#[derive(Clone, Debug)]
struct Given {
    flag: &'static Flag,
    /// As the file would say it.
    value: Value,
}

/// What `--version` asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Version {
    Short,
    Long,
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FlagError {
    #[error("{0} is not a known flag")]
    Unknown(String),
    #[error("--{flag} is gone: {instead}")]
    Removed { flag: &'static str, instead: &'static str },
    #[error("--{0} needs a value")]
    NoValue(&'static str),
    #[error("--{flag} must be {allowed}, found {found:?}")]
    Wrong { flag: &'static str, allowed: &'static str, found: String },
    #[error("{0:?} is not a flag: nothing but flags is taken")]
    Argument(String),
    #[error("{0:?} is not text")]
    NotText(OsString),
}

impl CommandLine {
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, FlagError> {
        Self::parse_with(&[], arguments)
    }

    /// With the flags that a command has beside those of `run`.
    pub fn parse_with(
        more: &'static [Flag],
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, FlagError> {
        let texts: Result<Vec<String>, _> = arguments.into_iter().map(OsString::into_string).collect();
        let texts = texts.map_err(FlagError::NotText)?;
        let mut line = Self { more, ..Self::default() };
        let mut rest = texts.iter();
        while let Some(argument) = rest.next() {
            if argument == "--" {
                rest.find(|argument| !argument.is_empty())
                    .map_or(Ok(()), |argument| Err(FlagError::Argument(argument.clone())))?;
            } else if let Some(long) = argument.strip_prefix("--") {
                line.long(long, &mut rest)?;
            } else if let Some(letters) = argument.strip_prefix('-').filter(|letters| !letters.is_empty()) {
                line.short(letters, &mut rest)?;
            } else if !argument.is_empty() {
                return Err(FlagError::Argument(argument.clone()));
            }
        }
        Ok(line)
    }

    fn find(&self, is: impl Fn(&Flag) -> bool) -> Option<&'static Flag> {
        FLAGS.iter().chain(self.more).find(|flag| is(flag))
    }

    fn long(&mut self, text: &str, rest: &mut slice::Iter<'_, String>) -> Result<(), FlagError> {
        let (name, value) =
            text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value.to_owned())));
        let name = name.replace('_', "-");
        let flag = self.find(|flag| flag.name == name).ok_or_else(|| {
            let removed = REMOVED.iter().find(|(removed, _)| *removed == name);
            removed.map_or_else(
                || FlagError::Unknown(format!("--{name}")),
                |(flag, instead)| FlagError::Removed { flag, instead },
            )
        })?;
        let value = match (value, flag.takes.value_name()) {
            (Some(value), _) => value,
            (None, None) => "true".to_owned(),
            (None, Some(_)) => rest.next().cloned().ok_or(FlagError::NoValue(flag.name))?,
        };
        self.give(flag, &value)
    }

    /// `-v2`, `-v=2`, `-v 2`; letters of switches can stand together.
    fn short(&mut self, letters: &str, rest: &mut slice::Iter<'_, String>) -> Result<(), FlagError> {
        let mut letters = letters.chars();
        while let Some(letter) = letters.next() {
            let flag = self
                .find(|flag| flag.short == Some(letter))
                .ok_or_else(|| FlagError::Unknown(format!("-{letter}")))?;
            let attached = letters.as_str();
            if let Some(value) = attached.strip_prefix('=') {
                return self.give(flag, value);
            }
            if flag.takes.value_name().is_none() {
                self.give(flag, "true")?;
            } else if attached.is_empty() {
                return self.give(flag, &rest.next().cloned().ok_or(FlagError::NoValue(flag.name))?);
            } else {
                return self.give(flag, attached);
            }
        }
        Ok(())
    }

    /// One more time that `flag` is given: the last counts, but lists grow.
    fn give(&mut self, flag: &'static Flag, text: &str) -> Result<(), FlagError> {
        let wrong = |allowed| FlagError::Wrong { flag: flag.name, allowed, found: text.to_owned() };
        let value = read(flag.takes, text).map_err(wrong)?;
        let value = match (self.given.remove(flag.name).map(|before| before.value), value) {
            (Some(Value::Array(mut before)), Value::Array(more)) => {
                before.extend(more);
                Value::Array(before)
            }
            (Some(Value::Object(mut before)), Value::Object(more)) => {
                before.extend(more);
                Value::Object(before)
            }
            (_, value) => value,
        };
        self.given.insert(flag.name, Given { flag, value });
        Ok(())
    }

    /// A flag that was read elsewhere.
    pub fn give_named(&mut self, name: &str, text: &str) -> Result<(), FlagError> {
        let flag =
            self.find(|flag| flag.name == name).ok_or_else(|| FlagError::Unknown(format!("--{name}")))?;
        self.give(flag, text)
    }

    pub(super) fn value(&self, name: &str) -> Option<&Value> {
        self.given.get(name).map(|given| &given.value)
    }

    pub(super) fn given(&self) -> impl Iterator<Item = (&'static Flag, &Value)> {
        self.given.values().map(|given| (given.flag, &given.value))
    }

    /// `None`: not given, or given with nothing.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.value(name).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    /// `None`: not given.
    pub fn switch(&self, name: &str) -> Option<bool> {
        self.value(name).and_then(Value::as_bool)
    }

    pub fn is_on(&self, name: &str) -> bool {
        self.switch(name) == Some(true)
    }

    pub fn version(&self) -> Option<Version> {
        let asked = self.value("version")?;
        let long = asked.is_string().then_some(Version::Long);
        long.or_else(|| (asked.as_bool() == Some(true)).then_some(Version::Short))
    }

    /// What an operator should hear about the flags themselves.
    pub fn warnings(&self) -> Vec<String> {
        let deprecated = self.given.values().filter_map(|given| {
            given.flag.deprecated.map(|why| format!("--{} is deprecated: {why}", given.flag.name))
        });
        deprecated.collect()
    }
}

const SWITCH: &str = "true or false";
const INTEGER: &str = "a whole number of 32 bits";
const LEVEL: &str = "a whole number of 0 or more";
const GATES: &str = "a list such as A=true,B=false";
const LIST: &str = "a list such as a,b or \"a\",\"b\"";
const MODULES: &str = "a list such as file=2,other*=4";

/// The text of a flag as the value that the file would have; or what it must be.
fn read(takes: Takes, text: &str) -> Result<Value, &'static str> {
    match takes {
        Takes::Switch => boolean(text).map(Value::Bool).ok_or(SWITCH),
        Takes::Text(_) => Ok(Value::String(text.to_owned())),
        Takes::Integer => integer(text).map(Value::from).ok_or(INTEGER),
        Takes::Level => level(text).map(Value::from).ok_or(LEVEL),
        Takes::Number => {
            let number = text.parse::<f64>().ok().and_then(Number::from_f64);
            number.map(Value::Number).ok_or("a number")
        }
        Takes::Duration => duration::parse(text)
            .map(|_| Value::String(text.to_owned()))
            .ok_or("a duration such as 30s or 1h0m0s"),
        Takes::List(_) => list(text).map(|parts| parts.into_iter().map(Value::from).collect()).ok_or(LIST),
        Takes::Gates => {
            let gate = |pair: &str| {
                let (name, on) = pair.split_once('=')?;
                Some((name.trim().to_owned(), Value::Bool(boolean(on.trim())?)))
            };
            listed(text).map(gate).collect::<Option<Map<_, _>>>().map(Value::Object).ok_or(GATES)
        }
        Takes::Modules => {
            let module = |pair: &str| {
                let (pattern, verbosity) = pair.split_once('=').filter(|(pattern, _)| !pattern.is_empty())?;
                Some(json!({"filePattern": pattern, "verbosity": level(verbosity)?}))
            };
            listed(text).map(module).collect::<Option<Vec<_>>>().map(Value::Array).ok_or(MODULES)
        }
        Takes::Version => match text {
            "raw" => Ok(Value::from("raw")),
            _ => boolean(text).map(Value::Bool).ok_or("true, false or raw"),
        },
    }
}

/// A line of CSV; what follows it says nothing, as with kube-proxy.
fn list(text: &str) -> Option<Vec<String>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    let mut rest = text.trim_start_matches(['\r', '\n']);
    if rest.is_empty() {
        return None;
    }
    let mut parts = Vec::new();
    loop {
        let (part, after) = match rest.strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let (part, after) = rest.split_at(rest.find([',', '\n']).unwrap_or(rest.len()));
                if part.contains('"') {
                    return None;
                }
                (part.strip_suffix('\r').unwrap_or(part).to_owned(), after)
            }
        };
        parts.push(part);
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None => return Some(parts),
        }
    }
}

/// The text before the quote that ends it, in which two quotes are one; and what comes after.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut part = String::new();
    let mut rest = text;
    loop {
        let (before, after) = rest.split_once('"')?;
        part.push_str(before);
        let Some(next) = after.strip_prefix('"') else {
            let ends = after.is_empty() || after.starts_with([',', '\n']) || after.starts_with("\r\n");
            return ends.then_some((part, after));
        };
        part.push('"');
        rest = next;
    }
}

fn listed(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').filter(|part| !part.is_empty())
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn level(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|level| digits && *level <= i32::MAX.unsigned_abs())
}

/// Underscores stand between digits.
fn without_underscores(digits: &str) -> Option<String> {
    let misplaced = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!misplaced).then(|| digits.replace('_', ""))
}

/// With Go's underscores and prefixes: 0x, 0o, 0b, and 0 alone for octal.
fn integer(text: &str) -> Option<i32> {
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = rest.to_ascii_lowercase();
    let (digits, radix) = match (lower.get(..2), lower.strip_prefix('0')) {
        (Some("0x"), _) => (lower.get(2..)?, 16),
        (Some("0o"), _) => (lower.get(2..)?, 8),
        (Some("0b"), _) => (lower.get(2..)?, 2),
        (_, Some(octal)) if !octal.is_empty() => (octal, 8),
        _ => (lower.as_str(), 10),
    };
    // One may follow a prefix.
    let digits = if radix == 10 { digits } else { digits.strip_prefix('_').unwrap_or(digits) };
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let number = i64::from_str_radix(&without_underscores(digits)?, radix).ok()?;
    i32::try_from(if negative { -number } else { number }).ok()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<CommandLine, FlagError> {
        CommandLine::parse(arguments.iter().map(OsString::from))
    }

    #[rstest]
    #[case::equals(&["--conntrack-min=5"], "conntrack-min", json!(5))]
    #[case::apart(&["--conntrack-min", "5"], "conntrack-min", json!(5))]
    #[case::underscores(&["--conntrack_min=5"], "conntrack-min", json!(5))]
    #[case::hexadecimal(&["--conntrack-min=0x10"], "conntrack-min", json!(16))]
    #[case::octal(&["--conntrack-min=010"], "conntrack-min", json!(8))]
    #[case::negative(&["--conntrack-min=-1"], "conntrack-min", json!(-1))]
    #[case::the_last_counts(&["--conntrack-min=5", "--conntrack-min=6"], "conntrack-min", json!(6))]
    #[case::switch(&["--profiling"], "profiling", json!(true))]
    #[case::switch_off(&["--profiling=F"], "profiling", json!(false))]
    #[case::short(&["-v", "2"], "v", json!(2))]
    #[case::short_equals(&["-v=2"], "v", json!(2))]
    #[case::short_attached(&["-v2"], "v", json!(2))]
    #[case::long_of_one_letter(&["--v", "2"], "v", json!(2))]
    #[case::a_value_that_looks_like_a_flag(&["--config", "--v"], "config", json!("--v"))]
    #[case::lists_grow(&["--nodeport-addresses=a,b", "--nodeport-addresses", "c"], "nodeport-addresses", json!(["a", "b", "c"]))]
    #[case::gates_merge(&["--feature-gates=A=true,B=false", "--feature-gates= B = 1,"], "feature-gates", json!({"A": true, "B": true}))]
    #[case::modules(&["--vmodule=a=1,b*=2"], "vmodule", json!([{"filePattern": "a", "verbosity": 1}, {"filePattern": "b*", "verbosity": 2}]))]
    #[case::csv(&["--nodeport-addresses=\"a\",\"b\"\",c\"\r\nd"], "nodeport-addresses", json!(["a", "b\",c"]))]
    #[case::csv_on_the_second_line(&["--nodeport-addresses=\na,,b\n"], "nodeport-addresses", json!(["a", "", "b"]))]
    #[case::an_empty_list(&["--nodeport-addresses="], "nodeport-addresses", json!([]))]
    #[case::underscores(&["--conntrack-min=1_000"], "conntrack-min", json!(1000))]
    #[case::underscores_after_a_prefix(&["--conntrack-min=0x_1_0"], "conntrack-min", json!(16))]
    #[case::underscores_after_a_zero(&["--conntrack-min=0_7"], "conntrack-min", json!(7))]
    #[case::duration(&["--config-sync-period=1h"], "config-sync-period", json!("1h"))]
    #[case::nothing_after_the_dashes(&["--v=1", "--", ""], "v", json!(1))]
    fn good(#[case] arguments: &[&str], #[case] flag: &str, #[case] value: Value) {
        assert_eq!(parse(arguments).unwrap().value(flag), Some(&value));
    }

    #[rstest]
    #[case(&["--no-such"], "--no-such is not a known flag")]
    #[case(&["-x"], "-x is not a known flag")]
    #[case(&["--=x"], "-- is not a known flag")]
    #[case(&["--cleanup-iptables"], "--cleanup-iptables is gone: use --cleanup")]
    #[case(&["--resource_container=/"], "--resource-container is gone: nothing takes its place, leave it out: use the resources of the pod")]
    #[case(&["--conntrack-min"], "--conntrack-min needs a value")]
    #[case(&["--conntrack-min=1e3"], "--conntrack-min must be a whole number of 32 bits, found \"1e3\"")]
    #[case(&["--conntrack-min=99999999999"], "--conntrack-min must be a whole number of 32 bits, found \"99999999999\"")]
    #[case(&["--conntrack-min=_1"], "--conntrack-min must be a whole number of 32 bits, found \"_1\"")]
    #[case(&["--conntrack-min=1__0"], "--conntrack-min must be a whole number of 32 bits, found \"1__0\"")]
    #[case(&["--conntrack-min=0x__1"], "--conntrack-min must be a whole number of 32 bits, found \"0x__1\"")]
    #[case(&["--nodeport-addresses=\"a"], "--nodeport-addresses must be a list such as a,b or \"a\",\"b\", found \"\\\"a\"")]
    #[case(&["--nodeport-addresses=\"a\"b"], "--nodeport-addresses must be a list such as a,b or \"a\",\"b\", found \"\\\"a\\\"b\"")]
    #[case(&["--nodeport-addresses=a\"b"], "--nodeport-addresses must be a list such as a,b or \"a\",\"b\", found \"a\\\"b\"")]
    #[case(&["--profiling=yes"], "--profiling must be true or false, found \"yes\"")]
    #[case(&["--profiling", "false"], "\"false\" is not a flag: nothing but flags is taken")]
    #[case(&["--", "x"], "\"x\" is not a flag: nothing but flags is taken")]
    #[case(&["-v", "-1"], "--v must be a whole number of 0 or more, found \"-1\"")]
    #[case(&["--config-sync-period=15"], "--config-sync-period must be a duration such as 30s or 1h0m0s, found \"15\"")]
    #[case(&["--feature-gates=A"], "--feature-gates must be a list such as A=true,B=false, found \"A\"")]
    #[case(&["--vmodule=a"], "--vmodule must be a list such as file=2,other*=4, found \"a\"")]
    #[case(&["--version=v1.2.3"], "--version must be true, false or raw, found \"v1.2.3\"")]
    fn bad(#[case] arguments: &[&str], #[case] message: &str) {
        assert_eq!(parse(arguments).unwrap_err().to_string(), message);
    }

    #[test]
    fn what_is_deprecated_is_said() {
        let line = parse(&["--healthz-port=0", "--logtostderr=true", "--v=2"]).unwrap();
        let warnings = line.warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].starts_with("--healthz-port is deprecated: use --healthz-bind-address"));
    }
}
