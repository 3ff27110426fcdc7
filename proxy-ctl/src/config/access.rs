//! The types of the fields: what each allows, and how a value of the file or a flag is read into a
//! [`Config`] and written back.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use serde_json::{Number, Value};

use super::{Config, Encoding, PortRange, duration, media};

/// A value that a field does not take.
#[derive(Debug)]
pub(super) struct InvalidValue {
    /// The part of the value, such as `[1]`. It is empty for the whole value.
    pub(super) part: String,
    pub(super) found: String,
    pub(super) problem: Problem,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Problem {
    /// The value has another type. kube-proxy refuses the whole file for it.
    WrongType,
    /// The value has the right type, but is outside the allowed values.
    NotAllowed,
}

impl InvalidValue {
    pub(super) fn new(problem: Problem, found: &Value) -> Self {
        Self { part: String::new(), found: found.to_string(), problem }
    }

    pub(super) fn at(self, part: String) -> Self {
        Self { part, ..self }
    }
}

pub(super) type ParseResult<T> = Result<T, InvalidValue>;

/// A field of any type. Values of flags are turned into the JSON that the file would have.
pub(super) trait Access: Sync {
    /// Returns the allowed values as a text that follows "must be".
    fn allowed(&self) -> String;
    /// Returns the word for the field's type in the documentation.
    fn type_name(&self) -> &'static str;
    /// Returns all values that the field takes, if these are a few words. Empty for every other
    /// type.
    fn words(&self) -> Vec<&'static str>;
    /// Returns true if this value in a file means the default.
    fn unset(&self, value: &Value) -> bool;
    fn read(&self, config: &mut Config, value: &Value) -> ParseResult<()>;
    /// Returns the value as the file would have it.
    fn write(&self, config: &mut Config) -> Value;
}

pub(super) type Locate<T> = fn(&mut Config) -> &mut T;

/// A field of one type, and where its value is stored.
pub(super) struct TypedField<T: 'static> {
    pub(super) locate: Locate<T>,
    pub(super) type_name: &'static str,
    pub(super) allowed: fn() -> String,
    pub(super) words: fn() -> Vec<&'static str>,
    pub(super) unset: fn(&Value) -> bool,
    pub(super) read: fn(&Value) -> ParseResult<T>,
    pub(super) write: fn(&T) -> Value,
}

impl<T> Access for TypedField<T> {
    fn allowed(&self) -> String {
        (self.allowed)()
    }

    fn type_name(&self) -> &'static str {
        self.type_name
    }

    fn words(&self) -> Vec<&'static str> {
        (self.words)()
    }

    fn unset(&self, value: &Value) -> bool {
        (self.unset)(value)
    }

    fn read(&self, config: &mut Config, value: &Value) -> ParseResult<()> {
        *(self.locate)(config) = (self.read)(value)?;
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        (self.write)((self.locate)(config))
    }
}

pub(super) fn typed<'v, T>(value: &'v Value, read: impl FnOnce(&'v Value) -> Option<T>) -> ParseResult<T> {
    read(value).ok_or_else(|| InvalidValue::new(Problem::WrongType, value))
}

pub(super) fn parsed<T>(value: &Value, parse: impl FnOnce(&str) -> Option<T>) -> ParseResult<T> {
    parse(typed(value, Value::as_str)?).ok_or_else(|| InvalidValue::new(Problem::NotAllowed, value))
}

pub(super) fn is_empty_text(value: &Value) -> bool {
    value.is_null() || value.as_str() == Some("")
}

fn is_zero(value: &Value) -> bool {
    value.is_null() || value.as_f64() == Some(0.0)
}

pub(super) const fn switch(locate: Locate<bool>) -> TypedField<bool> {
    TypedField {
        locate,
        type_name: "boolean",
        allowed: || "true or false".to_owned(),
        words: Vec::new,
        unset: Value::is_null,
        read: |value| typed(value, Value::as_bool),
        write: |on| Value::Bool(*on),
    }
}

pub(super) const fn text(locate: Locate<String>) -> TypedField<String> {
    TypedField {
        locate,
        type_name: "text",
        allowed: || "text".to_owned(),
        words: Vec::new,
        unset: is_empty_text,
        read: |value| Ok(typed(value, Value::as_str)?.to_owned()),
        write: |text| Value::String(text.clone()),
    }
}

/// The kernel's schedulers, from net/netfilter/ipvs.
const SCHEDULERS: [&str; 14] =
    ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos"];

pub(super) const fn scheduler(locate: Locate<String>) -> TypedField<String> {
    TypedField {
        type_name: "word",
        allowed: || one_of(SCHEDULERS),
        words: || SCHEDULERS.to_vec(),
        read: |value| parsed(value, |text| SCHEDULERS.contains(&text).then(|| text.to_owned())),
        ..text(locate)
    }
}

pub(super) const fn optional_text(locate: Locate<Option<String>>) -> TypedField<Option<String>> {
    TypedField {
        locate,
        type_name: "text",
        allowed: || "text".to_owned(),
        words: Vec::new,
        unset: is_empty_text,
        read: |value| Ok(Some(typed(value, Value::as_str)?.to_owned()).filter(|text| !text.is_empty())),
        write: |text| Value::String(text.clone().unwrap_or_default()),
    }
}

pub(super) const fn port_range(locate: Locate<Option<PortRange>>) -> TypedField<Option<PortRange>> {
    TypedField {
        locate,
        type_name: "port range",
        allowed: || "ports such as 8000-9000, 8000+1000 or 8000".to_owned(),
        words: Vec::new,
        unset: |value| is_empty_text(value) || value == "0-0" || value == "0",
        read: |value| parsed(value, PortRange::parse).map(Some),
        write: |range| Value::String(range.map(|range| range.to_string()).unwrap_or_default()),
    }
}

pub(super) const fn encoding(locate: Locate<Encoding>) -> TypedField<Encoding> {
    TypedField {
        locate,
        type_name: "media type",
        allowed: || "application/vnd.kubernetes.protobuf or application/json".to_owned(),
        words: Vec::new,
        unset: is_empty_text,
        read: |value| parsed(value, Encoding::of),
        write: |encoding| Value::String(encoding.media_type().to_owned()),
    }
}

/// Returns a field that holds an Accept header.
pub(super) const fn accept_header(locate: Locate<Option<String>>) -> TypedField<Option<String>> {
    TypedField {
        allowed: || {
            "application/vnd.kubernetes.protobuf, application/json or */*, or several separated by commas"
                .to_owned()
        },
        read: |value| parsed(value, |text| media::is_acceptable(text).then(|| Some(text.to_owned()))),
        ..optional_text(locate)
    }
}

pub(super) const fn file(locate: Locate<Option<PathBuf>>) -> TypedField<Option<PathBuf>> {
    TypedField {
        locate,
        type_name: "path",
        allowed: || "the path of a file".to_owned(),
        words: Vec::new,
        unset: is_empty_text,
        read: |value| Ok(Some(PathBuf::from(typed(value, Value::as_str)?))),
        write: |path| {
            Value::String(path.as_ref().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default())
        },
    }
}

fn absolute(value: &Value) -> ParseResult<PathBuf> {
    parsed(value, |text| Some(PathBuf::from(text)).filter(|path| path.is_absolute()))
}

pub(super) const fn optional_folder(locate: Locate<Option<PathBuf>>) -> TypedField<Option<PathBuf>> {
    TypedField {
        allowed: || "an absolute path".to_owned(),
        read: |value| absolute(value).map(Some),
        ..file(locate)
    }
}

pub(super) const fn folder(locate: Locate<PathBuf>) -> TypedField<PathBuf> {
    TypedField {
        locate,
        type_name: "path",
        allowed: || "an absolute path".to_owned(),
        words: Vec::new,
        unset: is_empty_text,
        read: absolute,
        write: |path| Value::String(path.to_string_lossy().into_owned()),
    }
}

pub(super) const fn number(locate: Locate<f64>) -> TypedField<f64> {
    TypedField {
        locate,
        type_name: "number",
        allowed: || "a number".to_owned(),
        words: Vec::new,
        unset: is_zero,
        read: |value| typed(value, Value::as_f64),
        // Go writes 5.0 as 5.
        write: |number| {
            let whole = (number.fract() == 0.0 && number.abs() < 1e9).then_some(*number as i64);
            whole
                .map(Value::from)
                .or_else(|| Number::from_f64(*number).map(Value::Number))
                .unwrap_or_default()
        },
    }
}

/// Returns a field that holds an IP address. IPv4 written as IPv6 (`::ffff:10.0.0.1`) is IPv4.
pub(super) const fn address(locate: Locate<IpAddr>) -> TypedField<IpAddr> {
    TypedField {
        locate,
        type_name: "IP address",
        allowed: || "an IP address".to_owned(),
        words: Vec::new,
        unset: is_empty_text,
        read: |value| parsed(value, |text| Some(text.parse::<IpAddr>().ok()?.to_canonical())),
        write: |address| Value::String(address.to_string()),
    }
}

/// Returns a field that holds `address:port`, `[address]:port`, or an address alone, which gets
/// port `PORT`.
pub(super) const fn listen_address<const PORT: u16>(
    locate: Locate<Option<SocketAddr>>,
) -> TypedField<Option<SocketAddr>> {
    TypedField {
        locate,
        type_name: "address and port",
        allowed: || format!("an IP address and a port from 1 to 65535, such as \"0.0.0.0:{PORT}\""),
        words: Vec::new,
        unset: is_empty_text,
        read: |value| {
            let address = |text: &str| {
                text.parse().or_else(|_| Ok::<_, ()>(SocketAddr::new(text.parse().map_err(drop)?, PORT)))
            };
            parsed(value, |text| address(text).ok().filter(|address| address.port() != 0)).map(Some)
        },
        write: |address| Value::String(address.map(|address| address.to_string()).unwrap_or_default()),
    }
}

/// Returns a field that holds a duration of 0 or more. Zero and an absent value mean the default.
pub(super) const fn period(locate: Locate<Duration>) -> TypedField<Duration> {
    TypedField { unset: |value| value.as_str().and_then(duration::parse) == Some(0), ..timeout(locate) }
}

/// Returns a field that holds a duration of 0 or more. Zero is a value, and null means the default.
pub(super) const fn optional_timeout(locate: Locate<Duration>) -> TypedField<Duration> {
    TypedField { unset: Value::is_null, ..timeout(locate) }
}

/// Returns a field that holds a duration of 0 or more. Zero is its default. As in kube-proxy, null
/// is not a duration.
pub(super) const fn timeout(locate: Locate<Duration>) -> TypedField<Duration> {
    TypedField {
        locate,
        type_name: "duration",
        allowed: || "a duration of 0s or more, such as \"30s\" or \"1h0m0s\"".to_owned(),
        words: Vec::new,
        unset: |_| false,
        read: |value| duration_if(value, |_| true),
        write: |duration| Value::String(duration::format(*duration)),
    }
}

/// Reads a duration of 0 or more that `allowed` accepts.
pub(super) fn duration_if(value: &Value, allowed: impl FnOnce(&Duration) -> bool) -> ParseResult<Duration> {
    let nanoseconds = typed(value, |value| duration::parse(value.as_str()?))?;
    let found = u64::try_from(nanoseconds).ok().map(Duration::from_nanos).filter(allowed);
    found.ok_or_else(|| InvalidValue::new(Problem::NotAllowed, value))
}

/// Returns a field that holds a duration, or a whole number of nanoseconds. Zero means the default.
pub(super) const fn duration_or_nanoseconds(locate: Locate<Duration>) -> TypedField<Duration> {
    TypedField {
        allowed: || "a duration above 0s such as \"5s\", or nanoseconds".to_owned(),
        unset: |value| is_zero(value) || value.as_str().and_then(duration::parse) == Some(0),
        read: |value| {
            let nanoseconds =
                typed(value, |value| as_whole(value).or_else(|| duration::parse(value.as_str()?)))?;
            match u64::try_from(nanoseconds) {
                Ok(0) | Err(_) => Err(InvalidValue::new(Problem::NotAllowed, value)),
                Ok(nanoseconds) => Ok(Duration::from_nanos(nanoseconds)),
            }
        },
        ..timeout(locate)
    }
}

/// Returns a field that holds a Kubernetes quantity. It is kept as it is written, because nothing
/// here depends on its size.
pub(super) const fn quantity(locate: Locate<String>) -> TypedField<String> {
    TypedField {
        type_name: "quantity",
        allowed: || "a quantity such as \"0\" or \"64Ki\"".to_owned(),
        unset: |value| is_zero(value) || matches!(value.as_str(), Some("" | "0")),
        read: |value| {
            let number = || value.is_number().then(|| value.to_string());
            typed(value, |value| value.as_str().map(str::to_owned).or_else(number))
        },
        ..text(locate)
    }
}

pub(super) const MAX_I32: i64 = i32::MAX as i64;

/// Reads a whole number. Helm writes large ones as `1e+06`.
pub(super) fn as_whole(value: &Value) -> Option<i64> {
    let whole_float = |number: f64| (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i64);
    value.as_i64().or_else(|| whole_float(value.as_f64()?))
}

/// Reads an integer in a range. A number that does not fit 32 bits has the wrong type, because
/// kube-proxy reads every integer into 32 bits first.
fn in_range<T: TryFrom<i64>>(value: &Value, min: i64, max: i64) -> ParseResult<T> {
    let number = typed(value, |value| as_whole(value).filter(|number| i32::try_from(*number).is_ok()))?;
    let allowed = Some(number).filter(|number| (min..=max).contains(number));
    let not_allowed = || InvalidValue::new(Problem::NotAllowed, value);
    allowed.and_then(|number| T::try_from(number).ok()).ok_or_else(not_allowed)
}

pub(super) const fn integer<T, const MIN: i64, const MAX: i64>(locate: Locate<T>) -> TypedField<T>
where
    T: Copy + Into<i64> + TryFrom<i64>,
{
    TypedField {
        locate,
        type_name: "integer",
        allowed: || format!("from {MIN} to {MAX}"),
        words: Vec::new,
        unset: Value::is_null,
        read: |value| in_range(value, MIN, MAX),
        write: |number| Value::from((*number).into()),
    }
}

pub(super) const fn integer_not_zero<T, const MIN: i64, const MAX: i64>(locate: Locate<T>) -> TypedField<T>
where
    T: Copy + Into<i64> + TryFrom<i64>,
{
    TypedField { unset: is_zero, ..integer::<T, MIN, MAX>(locate) }
}

/// A value that is one of a few words.
pub trait Keyword: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, meaning)| *meaning == self).map_or("", |(word, _)| *word)
    }

    /// Returns all words as a text for messages.
    fn words() -> String {
        one_of(Self::WORDS.iter().map(|(word, _)| *word))
    }

    fn of(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning)
    }
}

pub(super) const fn keyword<T: Keyword>(locate: Locate<T>) -> TypedField<T> {
    TypedField {
        locate,
        type_name: "word",
        allowed: T::words,
        words: || T::WORDS.iter().map(|(word, _)| *word).filter(|word| !word.is_empty()).collect(),
        unset: is_empty_text,
        read: |value| {
            // YAML 1.1 reads a bare `off` as false.
            let word = if *value == Value::Bool(false) { "off" } else { typed(value, Value::as_str)? };
            T::of(word).ok_or_else(|| InvalidValue::new(Problem::NotAllowed, value))
        },
        write: |keyword| Value::String(keyword.word().to_owned()),
    }
}

/// An item in a list of texts.
pub(super) trait ListItem: ToString + Sized + 'static {
    const LIST: &'static str;
    /// The text that says what each item must be.
    const ALLOWED: &'static str;
    /// The value of an empty list. kube-proxy writes its empty lists as null.
    const EMPTY: Value = Value::Null;

    fn parse(text: &str) -> Option<Self>;
}

pub(super) const fn list<T: ListItem>(locate: Locate<Vec<T>>) -> TypedField<Vec<T>> {
    TypedField {
        locate,
        type_name: T::LIST,
        allowed: || T::ALLOWED.to_owned(),
        words: Vec::new,
        unset: Value::is_null,
        read: |value| {
            let item = |(index, value): (usize, &Value)| {
                parsed(value, T::parse).map_err(|invalid| invalid.at(format!("[{index}]")))
            };
            typed(value, Value::as_array)?.iter().enumerate().map(item).collect()
        },
        write: |list| {
            if list.is_empty() {
                return T::EMPTY;
            }
            list.iter().map(|item| Value::String(item.to_string())).collect()
        },
    }
}

/// Joins words to `a`, `a or b`, or `a, b or c`.
fn one_of<'w>(words: impl IntoIterator<Item = &'w str>) -> String {
    let words: Vec<_> = words.into_iter().collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, first)) => format!("{} or {last}", first.join(", ")),
        None => String::new(),
    }
}
