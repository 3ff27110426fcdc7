//! Reads a document field by field and keeps account: what is wrong, with the path of the field, what was
//! found and what is allowed; and which fields nobody asked for.

use std::{
    cell::RefCell, collections::BTreeSet, fmt::Display, net::IpAddr, ops::RangeInclusive, time::Duration,
};

use serde_json::{Map, Value};

use super::duration;

/// What reading a document has brought to light.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Each `<path> must be <allowed>, found <found>`.
    pub(super) problems: Vec<String>,
    pub(super) unknown: Vec<String>,
}

/// One object of the document. Null and absent are the same; a field is unknown unless it was asked for.
pub(super) struct Fields<'a> {
    path: String,
    object: Option<&'a Map<String, Value>>,
    asked: RefCell<BTreeSet<&'static str>>,
    findings: &'a RefCell<Findings>,
}

impl<'a> Fields<'a> {
    pub(super) fn root(document: &'a Value, findings: &'a RefCell<Findings>) -> Self {
        Self::of(String::new(), Some(document), findings)
    }

    fn of(path: String, value: Option<&'a Value>, findings: &'a RefCell<Findings>) -> Self {
        let object = match value {
            Some(Value::Object(object)) => Some(object),
            None | Some(Value::Null) => None,
            Some(other) => {
                let name = if path.is_empty() { "the document" } else { &path };
                let problem = format!("{name} must be an object with fields, found {other}");
                findings.borrow_mut().problems.push(problem);
                None
            }
        };
        Self { path, object, asked: RefCell::default(), findings }
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    fn value(&self, name: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(name);
        self.object.and_then(|object| object.get(name)).filter(|value| !value.is_null())
    }

    pub(super) fn section(&self, name: &'static str) -> Self {
        Self::of(self.path_of(name), self.value(name), self.findings)
    }

    pub(super) fn problem(&self, name: &str, allowed: impl Display, found: impl Display) {
        let problem = format!("{} must be {allowed}, found {found}", self.path_of(name));
        self.findings.borrow_mut().problems.push(problem);
    }

    fn typed<T>(
        &self,
        name: &'static str,
        allowed: impl Display,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.value(name)?;
        let typed = read(value);
        if typed.is_none() {
            self.problem(name, allowed, value);
        }
        typed
    }

    /// `None` also where the text is empty: the zero value means the default.
    pub(super) fn text(&self, name: &'static str) -> Option<&'a str> {
        self.typed(name, "text", Value::as_str).filter(|text| !text.is_empty())
    }

    pub(super) fn flag(&self, name: &'static str) -> Option<bool> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(super) fn integer(&self, name: &'static str, range: RangeInclusive<i64>) -> Option<i64> {
        let allowed = match (*range.start(), *range.end()) {
            (start, i64::MAX) => format!("{start} or more"),
            (start, end) => format!("from {start} to {end}"),
        };
        self.typed(name, allowed, |value| value.as_i64().filter(|number| range.contains(number)))
    }

    pub(super) fn count(&self, name: &'static str, most: u32) -> Option<u32> {
        self.integer(name, 1..=i64::from(most)).and_then(|number| u32::try_from(number).ok())
    }

    pub(super) fn number(&self, name: &'static str) -> Option<f64> {
        self.typed(name, "a number", Value::as_f64)
    }

    /// 0 or more.
    pub(super) fn duration(&self, name: &'static str) -> Option<Duration> {
        self.typed(name, "a duration of 0s or more, such as \"30s\" or \"1h0m0s\"", |value| {
            duration::parse(value.as_str()?)
        })
    }

    /// `None` also where it is zero: the zero value means the default.
    pub(super) fn period(&self, name: &'static str) -> Option<Duration> {
        self.duration(name).filter(|duration| !duration.is_zero())
    }

    /// A duration, or a whole number of nanoseconds.
    pub(super) fn duration_or_nanoseconds(&self, name: &'static str) -> Option<Duration> {
        self.typed(name, "a duration such as \"5s\", or nanoseconds", |value| {
            value.as_u64().map(Duration::from_nanos).or_else(|| duration::parse(value.as_str()?))
        })
        .filter(|duration| !duration.is_zero())
    }

    /// A Kubernetes quantity, such as `64Ki`, of which nothing is used.
    pub(super) fn quantity(&self, name: &'static str) {
        let starts_with_digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        self.typed(name, "a quantity such as \"0\" or \"64Ki\"", |value| {
            (value.is_u64() || value.as_str().is_some_and(starts_with_digit)).then_some(())
        });
    }

    pub(super) fn address(&self, name: &'static str) -> Option<IpAddr> {
        self.parsed(name, "an IP address", |text| text.parse().ok())
    }

    /// Text that means something; empty means the default.
    pub(super) fn parsed<T>(
        &self,
        name: &'static str,
        allowed: impl Display,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(name)?;
        let parsed = parse(text);
        if parsed.is_none() {
            self.problem(name, allowed, format_args!("{text:?}"));
        }
        parsed
    }

    /// One of a few words. `None` in a choice: a word that is right, but what it asks for is not built yet.
    pub(super) fn choice<T: Copy>(
        &self,
        name: &'static str,
        choices: &[(&'static str, Option<T>)],
    ) -> Option<T> {
        let text = self.text(name)?;
        let allowed =
            || one_of(choices.iter().filter(|(_, meaning)| meaning.is_some()).map(|(word, _)| *word));
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, Some(meaning))) => return Some(*meaning),
            Some((_, None)) => {
                self.problem(name, allowed(), format_args!("{text:?}, which is not built yet"))
            }
            None => self.problem(name, allowed(), format_args!("{text:?}")),
        }
        None
    }

    /// A list of texts, each of which means something.
    pub(super) fn list<T>(
        &self,
        name: &'static str,
        allowed: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Vec<T> {
        let Some(values) = self.typed(name, "a list", Value::as_array) else { return Vec::new() };
        let parse_one = |(index, value): (usize, &Value)| {
            let parsed = value.as_str().and_then(&parse);
            if parsed.is_none() {
                self.problem(&format!("{name}[{index}]"), allowed, value);
            }
            parsed
        };
        values.iter().enumerate().filter_map(parse_one).collect()
    }

    /// The objects of a list.
    pub(super) fn sections(&self, name: &'static str) -> Vec<Self> {
        let values = self.typed(name, "a list", Value::as_array).map_or(&[][..], Vec::as_slice);
        let section =
            |(index, value)| Self::of(format!("{}[{index}]", self.path_of(name)), Some(value), self.findings);
        values.iter().enumerate().map(section).collect()
    }

    /// An object whose field names are free and whose values are true or false.
    pub(super) fn switches(&self, name: &'static str) -> Vec<(String, bool)> {
        let Some(object) = self.typed(name, "an object", Value::as_object) else { return Vec::new() };
        let switch = |(key, value): (&String, &Value)| {
            if value.as_bool().is_none() {
                self.problem(&format!("{name}.{key}"), "true or false", value);
            }
            Some((key.clone(), value.as_bool()?))
        };
        object.iter().filter_map(switch).collect()
    }
}

impl Drop for Fields<'_> {
    fn drop(&mut self) {
        let asked = self.asked.borrow();
        let unknown =
            self.object.into_iter().flat_map(Map::keys).filter(|name| !asked.contains(name.as_str()));
        self.findings.borrow_mut().unknown.extend(unknown.map(|name| self.path_of(name)));
    }
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
