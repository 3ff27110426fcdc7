//! The file as a document, and a configuration as a document again.

use std::path::Path;

use serde_json::{Map, Value};
use serde_saphyr::DuplicateKeyPolicy;

use super::{
    Config, Error,
    fields::{API_VERSION, FIELDS, KIND},
};

/// A file that has been read: nothing of it is checked but that it is one document of our kind.
pub(super) struct Document {
    pub(super) root: Value,
    pub(super) warnings: Vec<String>,
}

fn options(duplicates: DuplicateKeyPolicy) -> serde_saphyr::Options {
    serde_saphyr::options! {
        duplicate_keys: duplicates,
        with_snippet: false,
        // As in YAML 1.1, which kube-proxy reads: 010 is eight.
        legacy_octal_numbers: true,
        // One anchor may be used often; how much comes of it stays bounded.
        budget: serde_saphyr::budget! { enforce_alias_anchor_ratio: false },
    }
}

/// Strict first; what fails only because a field is there twice is read again with its last value.
pub(super) fn parse(path: &Path, text: &str) -> Result<Document, Error> {
    let read = |duplicates| {
        let single = serde_saphyr::from_str_with_options(text, options(duplicates));
        let Err(error) = single else { return single };
        if !matches!(error.without_snippet(), serde_saphyr::Error::MultipleDocuments { .. }) {
            return Err(error);
        }
        // Empty ones, as after a `---` at the end, are left out.
        match serde_saphyr::from_multiple_with_options::<Value>(text, options(duplicates)).as_deref_mut() {
            Ok([only]) => Ok(only.take()),
            Ok(_) | Err(_) => Err(error),
        }
    };
    let (root, duplicates) = match read(DuplicateKeyPolicy::Error) {
        Ok(root) => (root, None),
        Err(strict) => match read(DuplicateKeyPolicy::LastWins) {
            Ok(root) => (root, Some(strict.to_string())),
            Err(error) => return Err(Error::Syntax { path: path.to_owned(), problem: problem(&error) }),
        },
    };
    let at = path.display();
    let problems = kind_problems(&root);
    if !problems.is_empty() {
        return Err(Error::Values(problems.iter().map(|problem| format!("{at}: {problem}")).collect()));
    }
    let duplicates =
        duplicates.map(|problem| format!("{at}: the last of two equal fields counts: {problem}"));
    Ok(Document { root, warnings: duplicates.into_iter().collect() })
}

fn problem(error: &serde_saphyr::Error) -> String {
    match (error.without_snippet(), error.location()) {
        (serde_saphyr::Error::MultipleDocuments { .. }, Some(second)) => {
            format!("must be one document, found a second at line {}", second.line())
        }
        _ => format!("is neither YAML nor JSON: {error}"),
    }
}

fn kind_problems(root: &Value) -> Vec<String> {
    if !root.is_object() && !root.is_null() {
        return vec![format!("the document must be an object with fields, found {root}")];
    }
    let problem = |(name, right): (&str, &str)| {
        let found = match root.get(name) {
            Some(Value::String(text)) if text == right => return None,
            Some(Value::String(text)) if !text.is_empty() => text.clone(),
            Some(Value::Null | Value::String(_)) | None => "nothing".to_owned(),
            Some(other) => other.to_string(),
        };
        Some(format!("{name} must be {right}, found {found}"))
    };
    [("apiVersion", API_VERSION), ("kind", KIND)].into_iter().filter_map(problem).collect()
}

impl Document {
    /// `None`: absent, or something above it is.
    pub(super) fn value(&self, path: &str) -> Option<&Value> {
        path.split('.').try_fold(&self.root, |value, name| value.get(name))
    }

    /// Sections that are no objects, as problems; fields that nobody knows.
    pub(super) fn shape(&self) -> Shape {
        let mut shape = Shape::default();
        shape.walk("", &self.root);
        shape
    }
}

#[derive(Default)]
pub(super) struct Shape {
    pub(super) problems: Vec<String>,
    pub(super) unknown: Vec<String>,
}

impl Shape {
    fn walk(&mut self, section: &str, value: &Value) {
        let Some(object) = value.as_object() else {
            if !value.is_null() {
                self.problems.push(format!("{section} must be an object with fields, found {value}"));
            }
            return;
        };
        for (name, value) in object {
            let path = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
            let below = |field: &str| field.strip_prefix(&path).is_some_and(|rest| rest.starts_with('.'));
            if name.contains('.') {
                self.unknown.push(path);
            } else if FIELDS.iter().any(|field| below(field.path)) {
                self.walk(&path, value);
            } else if !FIELDS.iter().any(|field| field.path == path) && !is_type(&path) {
                self.unknown.push(path);
            }
        }
    }
}

fn is_type(path: &str) -> bool {
    path == "apiVersion" || path == "kind"
}

/// Left out where they say nothing, as kube-proxy does.
const LEFT_OUT_IF_EMPTY: [&str; 5] = [
    "featureGates",
    "logging.vmodule",
    "logging.options.text.splitStream",
    "logging.options.json.splitStream",
    "windowsRunAsService",
];

pub(super) fn of(config: &Config) -> Value {
    let mut root = Map::new();
    root.insert("apiVersion".to_owned(), API_VERSION.into());
    root.insert("kind".to_owned(), KIND.into());
    let mut config = config.clone();
    for field in FIELDS {
        let value = field.access.write(&mut config);
        let value = if field.counts_in(config.mode) { value } else { zero(&value) };
        let nothing_of_ours = field.path.starts_with("ebpf.") && (value.is_null() || value == "");
        let nothing = LEFT_OUT_IF_EMPTY.contains(&field.path) && is_empty(&value);
        if !nothing_of_ours && !nothing {
            insert(&mut root, field.path, value);
        }
    }
    Value::Object(root)
}

/// What a section that does not count says.
fn zero(value: &Value) -> Value {
    if value.is_boolean() { Value::Bool(false) } else { Value::from("0s") }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(object) => object.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Bool(on) => !on,
        Value::Null | Value::Number(_) | Value::String(_) => false,
    }
}

fn insert(object: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            object.insert(path.to_owned(), value);
        }
        Some((section, rest)) => {
            let section = object.entry(section).or_insert_with(|| Map::new().into());
            if let Some(section) = section.as_object_mut() {
                insert(section, rest, value);
            }
        }
    }
}
