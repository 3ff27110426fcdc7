//! Where the value of a field lies in a [`Config`], what may stand there, and how it is read and written. Each kind of
//! value is told once, for the file, the flags, the documentation and what is written back.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use serde_json::{Number, Value};

use super::{Config, Encoding, duration, media, network, quantity};

/// A value that a field does not take.
#[derive(Debug)]
pub(super) struct Wrong {
    /// Which part of the value, such as `[1]`; or nothing.
    pub(super) part: String,
    pub(super) found: String,
    pub(super) why: Why,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Why {
    /// Not of the field's type: no document with it can be read.
    Form,
    /// Of the right type, but not among the allowed values.
    Limit,
    /// A word that will mean something one day.
    NotBuilt,
}

impl Wrong {
    fn new(why: Why, found: &Value) -> Self {
        Self { part: String::new(), found: found.to_string(), why }
    }
}

pub(super) type Read<T> = Result<T, Wrong>;

/// What a field can do. The value of a file is JSON as it stands there; that of a flag is made to be.
pub(super) trait Access: Sync {
    /// What may stand there, to follow "must be".
    fn allowed(&self) -> String;
    /// The word for its type in the documentation.
    fn kind(&self) -> &'static str;
    /// Whether a file that says `value` says nothing.
    fn unset(&self, value: &Value) -> bool;
    fn read(&self, config: &mut Config, value: &Value) -> Read<()>;
    /// Parts of a value that was read which mean nothing here, though they do to kube-proxy.
    fn left_out(&self, _value: &Value) -> Vec<String> {
        Vec::new()
    }
    /// As the file would say it.
    fn write(&self, config: &mut Config) -> Value;
}

/// A place in the configuration.
pub(super) type Place<T> = fn(&mut Config) -> &mut T;

/// A value of which everything is said by four functions.
pub(super) struct At<T: 'static> {
    pub(super) at: Place<T>,
    pub(super) kind: &'static str,
    pub(super) allowed: &'static str,
    pub(super) unset: fn(&Value) -> bool,
    pub(super) read: fn(&Value) -> Read<T>,
    pub(super) write: fn(&T) -> Value,
}

impl<T> Access for At<T> {
    fn allowed(&self) -> String {
        self.allowed.to_owned()
    }

    fn kind(&self) -> &'static str {
        self.kind
    }

    fn unset(&self, value: &Value) -> bool {
        (self.unset)(value)
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        *(self.at)(config) = (self.read)(value)?;
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        (self.write)((self.at)(config))
    }
}

fn typed<'v, T>(value: &'v Value, read: impl FnOnce(&'v Value) -> Option<T>) -> Read<T> {
    read(value).ok_or_else(|| Wrong::new(Why::Form, value))
}

/// Text that means something.
fn parsed<T>(value: &Value, parse: impl FnOnce(&str) -> Option<T>) -> Read<T> {
    parse(typed(value, Value::as_str)?).ok_or_else(|| Wrong::new(Why::Limit, value))
}

fn no_text(value: &Value) -> bool {
    value.is_null() || value.as_str() == Some("")
}

fn is_zero(value: &Value) -> bool {
    value.is_null() || value.as_f64() == Some(0.0)
}

pub(super) const fn switch(at: Place<bool>) -> At<bool> {
    At {
        at,
        kind: "boolean",
        allowed: "true or false",
        unset: Value::is_null,
        read: |value| typed(value, Value::as_bool),
        write: |on| Value::Bool(*on),
    }
}

pub(super) const fn text(at: Place<String>) -> At<String> {
    At {
        at,
        kind: "text",
        allowed: "text",
        unset: no_text,
        read: |value| Ok(typed(value, Value::as_str)?.to_owned()),
        write: |text| Value::String(text.clone()),
    }
}

pub(super) const fn optional_text(at: Place<Option<String>>) -> At<Option<String>> {
    At {
        at,
        kind: "text",
        allowed: "text",
        unset: no_text,
        read: |value| Ok(Some(typed(value, Value::as_str)?.to_owned()).filter(|text| !text.is_empty())),
        write: |text| Value::String(text.clone().unwrap_or_default()),
    }
}

/// Media types, of which it is enough that one can be read.
pub(super) struct MediaTypes<T: 'static> {
    types: At<T>,
    left_out: fn(&str) -> Vec<String>,
}

impl<T> Access for MediaTypes<T> {
    fn allowed(&self) -> String {
        self.types.allowed()
    }

    fn kind(&self) -> &'static str {
        self.types.kind()
    }

    fn unset(&self, value: &Value) -> bool {
        self.types.unset(value)
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        self.types.read(config, value)
    }

    fn left_out(&self, value: &Value) -> Vec<String> {
        value.as_str().map(self.left_out).unwrap_or_default()
    }

    fn write(&self, config: &mut Config) -> Value {
        self.types.write(config)
    }
}

fn no_types(value: &Value) -> bool {
    value.is_null() || value.as_str().is_some_and(media::is_blank)
}

pub(super) const fn encoding(at: Place<Encoding>) -> MediaTypes<Encoding> {
    MediaTypes {
        types: At {
            at,
            kind: "media type",
            allowed: "application/vnd.kubernetes.protobuf or application/json",
            unset: no_types,
            // A flag that is blank is a value of its own.
            read: |value| {
                if no_types(value) { Ok(Encoding::default()) } else { parsed(value, Encoding::configured) }
            },
            write: |encoding| Value::String(encoding.media_type().to_owned()),
        },
        left_out: media::not_sent,
    }
}

/// Media types of an Accept header.
pub(super) const fn accepted(at: Place<Option<String>>) -> MediaTypes<Option<String>> {
    MediaTypes {
        types: At {
            allowed: "application/vnd.kubernetes.protobuf, application/json or */*, or several with commas in between, each \
                      with ;q=0.5 or the like if need be",
            unset: no_types,
            read: |value| parsed(value, media::accept).map(Some),
            ..optional_text(at)
        },
        left_out: media::not_accepted,
    }
}

pub(super) const fn file(at: Place<Option<PathBuf>>) -> At<Option<PathBuf>> {
    At {
        at,
        kind: "path",
        allowed: "the path of a file",
        unset: no_text,
        read: |value| Ok(Some(PathBuf::from(typed(value, Value::as_str)?))),
        write: write_path,
    }
}

fn write_path(path: &Option<PathBuf>) -> Value {
    Value::String(path.as_ref().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default())
}

const FOLDER: &str = "an absolute path";

fn absolute(value: &Value) -> Read<PathBuf> {
    parsed(value, |text| Some(PathBuf::from(text)).filter(|path| path.is_absolute()))
}

pub(super) const fn optional_folder(at: Place<Option<PathBuf>>) -> At<Option<PathBuf>> {
    At {
        at,
        kind: "path",
        allowed: FOLDER,
        unset: no_text,
        read: |value| absolute(value).map(Some),
        write: write_path,
    }
}

pub(super) const fn folder(at: Place<PathBuf>) -> At<PathBuf> {
    At {
        at,
        kind: "path",
        allowed: FOLDER,
        unset: no_text,
        read: absolute,
        write: |path| Value::String(path.to_string_lossy().into_owned()),
    }
}

/// As Go's float32: what is too small for it is zero.
pub(super) const fn number(at: Place<f32>) -> At<f32> {
    At {
        at,
        kind: "number",
        allowed: "a number that fits into a float of 32 bits",
        unset: |value| value.is_null() || as_float(value) == Some(0.0),
        read: |value| typed(value, as_float),
        // Go writes 5.0 as 5, and of a fraction what a float of 32 bits needs.
        write: |number| {
            let whole = (number.fract() == 0.0 && number.abs() < 1e9).then_some(*number as i64);
            let fraction = || number.to_string().parse().ok().and_then(Number::from_f64);
            whole.map(Value::from).or_else(|| fraction().map(Value::Number)).unwrap_or_default()
        },
    }
}

fn as_float(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
}

pub(super) const fn address(at: Place<std::net::IpAddr>) -> At<std::net::IpAddr> {
    At {
        at,
        kind: "IP address",
        allowed: "an IP address",
        unset: no_text,
        read: |value| parsed(value, |text| Some(network::address(text)?.to_canonical())),
        write: |address| Value::String(address.to_string()),
    }
}

/// 0 or more; zero and absent mean the default.
pub(super) const fn period(at: Place<Duration>) -> At<Duration> {
    At { unset: |value| value.as_str().and_then(duration::parse) == Some(0), ..timeout(at) }
}

/// 0 or more; zero is a value, null means the default.
pub(super) const fn optional_timeout(at: Place<Duration>) -> At<Duration> {
    At { unset: Value::is_null, ..timeout(at) }
}

/// 0 or more; zero is the default. As with kube-proxy, null is not a duration.
pub(super) const fn timeout(at: Place<Duration>) -> At<Duration> {
    At {
        at,
        kind: "duration",
        allowed: "a duration of 0s or more, such as \"30s\" or \"1h0m0s\"",
        unset: |_| false,
        read: |value| {
            let nanoseconds = typed(value, |value| duration::parse(value.as_str()?))?;
            let unsigned = u64::try_from(nanoseconds).map_err(|_| Wrong::new(Why::Limit, value))?;
            Ok(Duration::from_nanos(unsigned))
        },
        write: write_duration,
    }
}

fn write_duration(duration: &Duration) -> Value {
    Value::String(duration::format(*duration))
}

/// A duration, or a whole number of nanoseconds; zero means the default.
pub(super) const fn duration_or_nanoseconds(at: Place<Duration>) -> At<Duration> {
    At {
        at,
        kind: "duration",
        allowed: "a duration above 0s such as \"5s\", or nanoseconds",
        unset: |value| is_zero(value) || value.as_str().and_then(duration::parse) == Some(0),
        read: |value| {
            let nanoseconds =
                typed(value, |value| as_whole(value).or_else(|| duration::parse(value.as_str()?)))?;
            match u64::try_from(nanoseconds) {
                Ok(0) | Err(_) => Err(Wrong::new(Why::Limit, value)),
                Ok(nanoseconds) => Ok(Duration::from_nanos(nanoseconds)),
            }
        },
        write: write_duration,
    }
}

/// A Kubernetes quantity.
pub(super) const fn bytes(at: Place<String>) -> At<String> {
    At {
        at,
        kind: "quantity",
        allowed: "a quantity such as \"0\" or \"64Ki\"",
        unset: |value| is_zero(value) || value.as_str() == Some("0"),
        read: |value| {
            let number = || value.is_number().then(|| value.to_string());
            typed(value, |value| quantity::canonical(&value.as_str().map(str::to_owned).or_else(number)?))
        },
        write: |text| Value::String(text.clone()),
    }
}

/// An address on which something is served.
pub(super) struct Listen {
    pub(super) at: Place<Option<SocketAddr>>,
    /// For an address alone.
    pub(super) port: u16,
}

impl Access for Listen {
    fn allowed(&self) -> String {
        format!("an IP address and a port from 1 to 65535, such as \"0.0.0.0:{}\"", self.port)
    }

    fn kind(&self) -> &'static str {
        "address and port"
    }

    fn unset(&self, value: &Value) -> bool {
        no_text(value)
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        *(self.at)(config) = Some(parsed(value, |text| network::listen_address(text, self.port))?);
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        Value::String((self.at)(config).map(|address| address.to_string()).unwrap_or_default())
    }
}

/// A whole number, in a field that Go holds in 32 bits.
pub(super) struct Whole<T: 'static> {
    pub(super) at: Place<T>,
    pub(super) range: RangeInclusive<i64>,
    /// A file's 0 means the default.
    pub(super) zero_is_unset: bool,
}

pub(super) const fn whole<T>(at: Place<T>, range: RangeInclusive<i64>) -> Whole<T> {
    Whole { at, range, zero_is_unset: false }
}

pub(super) const fn whole_not_zero<T>(at: Place<T>, range: RangeInclusive<i64>) -> Whole<T> {
    Whole { at, range, zero_is_unset: true }
}

pub(super) const HIGHEST_I32: i64 = i32::MAX as i64;

/// 5.0 is the whole number 5.
pub(super) fn as_whole(value: &Value) -> Option<i64> {
    let whole_float = |number: f64| (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i64);
    value.as_i64().or_else(|| whole_float(value.as_f64()?))
}

fn in_range(value: &Value, range: &RangeInclusive<i64>) -> Read<i64> {
    let fits = |number: &i64| i32::try_from(*number).is_ok();
    let number = typed(value, |value| as_whole(value).filter(fits))?;
    if range.contains(&number) { Ok(number) } else { Err(Wrong::new(Why::Limit, value)) }
}

fn range_in_words(range: &RangeInclusive<i64>) -> String {
    format!("from {} to {}", range.start(), range.end())
}

impl<T: Copy + Into<i64> + TryFrom<i64>> Access for Whole<T> {
    fn allowed(&self) -> String {
        range_in_words(&self.range)
    }

    fn kind(&self) -> &'static str {
        "integer"
    }

    fn unset(&self, value: &Value) -> bool {
        value.is_null() || (self.zero_is_unset && is_zero(value))
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        let number = in_range(value, &self.range)?;
        *(self.at)(config) = T::try_from(number).map_err(|_| Wrong::new(Why::Limit, value))?;
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        Value::from((*(self.at)(config)).into())
    }
}

/// A number of table rows; `None`: the default of the dataplane.
pub(super) struct Count {
    pub(super) at: Place<Option<u32>>,
    pub(super) most: u32,
}

impl Access for Count {
    fn allowed(&self) -> String {
        range_in_words(&(1..=i64::from(self.most)))
    }

    fn kind(&self) -> &'static str {
        "integer"
    }

    fn unset(&self, value: &Value) -> bool {
        value.is_null()
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        *(self.at)(config) = u32::try_from(in_range(value, &(1..=i64::from(self.most)))?).ok();
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        (*(self.at)(config)).map(Value::from).unwrap_or_default()
    }
}

/// One of a few words.
pub trait Word: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];
    /// Right, but what they ask for is not built yet.
    const PLANNED: &'static [&'static str] = &[];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, meaning)| *meaning == self).map_or("", |(word, _)| *word)
    }

    fn of(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, meaning)| *meaning)
    }
}

pub(super) struct Words<T: 'static>(pub(super) Place<T>);

impl<T: Word> Access for Words<T> {
    fn allowed(&self) -> String {
        one_of(T::WORDS.iter().map(|(word, _)| *word))
    }

    fn kind(&self) -> &'static str {
        "word"
    }

    fn unset(&self, value: &Value) -> bool {
        no_text(value)
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        // YAML 1.1 reads a bare `off` as false.
        let word = if *value == Value::Bool(false) { "off" } else { typed(value, Value::as_str)? };
        let why = if T::PLANNED.contains(&word) { Why::NotBuilt } else { Why::Limit };
        *(self.0)(config) = T::of(word).ok_or_else(|| Wrong::new(why, value))?;
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        Value::String((self.0)(config).word().to_owned())
    }
}

/// A list of texts, each of which means something.
pub(super) struct List<T: 'static> {
    pub(super) at: Place<Vec<T>>,
    pub(super) kind: &'static str,
    /// What each of them must be.
    pub(super) allowed: &'static str,
    pub(super) parse: fn(&str) -> Option<T>,
    pub(super) write: fn(&T) -> String,
    /// An empty list is written as null, as kube-proxy does.
    pub(super) null_if_empty: bool,
}

impl<T> Access for List<T> {
    fn allowed(&self) -> String {
        self.allowed.to_owned()
    }

    fn kind(&self) -> &'static str {
        self.kind
    }

    fn unset(&self, value: &Value) -> bool {
        value.is_null()
    }

    fn read(&self, config: &mut Config, value: &Value) -> Read<()> {
        let one = |(index, value): (usize, &Value)| {
            let at_index = |wrong: Wrong| Wrong { part: format!("[{index}]"), ..wrong };
            parsed(value, self.parse).map_err(at_index)
        };
        let values = typed(value, Value::as_array)?;
        *(self.at)(config) = values.iter().enumerate().map(one).collect::<Read<_>>()?;
        Ok(())
    }

    fn write(&self, config: &mut Config) -> Value {
        let list = (self.at)(config);
        if list.is_empty() && self.null_if_empty {
            return Value::Null;
        }
        Value::Array(list.iter().map(|one| Value::String((self.write)(one))).collect())
    }
}

/// Wrong at a part of the value.
pub(super) fn wrong_at(part: String, why: Why, found: &Value) -> Wrong {
    Wrong { part, ..Wrong::new(why, found) }
}

/// `a`, `a or b`, `a, b or c`.
pub(super) fn one_of<'w>(words: impl IntoIterator<Item = &'w str>) -> String {
    let words: Vec<_> = words.into_iter().collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, first)) => format!("{} or {last}", first.join(", ")),
        None => String::new(),
    }
}
