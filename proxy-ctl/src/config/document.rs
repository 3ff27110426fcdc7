//! The configuration file as a document, and the way back from a configuration to a document.

use std::path::Path;

use serde_json::{Map, Value};
use serde_saphyr::{DuplicateKeyPolicy, UserMessageFormatter};

use super::{
    Config, Error, duration,
    fields::{API_VERSION, FIELDS, KIND},
};

/// A file of our kind, whose fields are not checked yet.
pub(super) struct Document {
    pub(super) root: Value,
    pub(super) warnings: Vec<String>,
}

/// Returns the options of the YAML parser. Integers with a leading zero are octal, as in YAML 1.1
/// and in kube-proxy.
fn options(duplicates: DuplicateKeyPolicy) -> serde_saphyr::Options {
    serde_saphyr::options! { duplicate_keys: duplicates, with_snippet: false, legacy_octal_numbers: true }
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Document, Error> {
    let at = path.display();
    let (root, duplicates) =
        read(text).map_err(|error| Error::Syntax { path: path.to_owned(), problem: problem(&error) })?;
    let problems = kind_problems(&root);
    if !problems.is_empty() {
        return Err(Error::Values(problems.iter().map(|problem| format!("{at}: {problem}")).collect()));
    }
    let warning = |error| format!("{at}: {}", duplicate(&error));
    Ok(Document { root, warnings: duplicates.map(warning).into_iter().collect() })
}

/// Reads a text. If it has duplicate fields, the last of each counts, and the error about them is
/// returned with the value.
fn read(text: &str) -> Result<(Value, Option<serde_saphyr::Error>), serde_saphyr::Error> {
    match read_with(text, DuplicateKeyPolicy::Error) {
        Ok(root) => Ok((root, None)),
        Err(strict) => Ok((read_with(text, DuplicateKeyPolicy::LastWins)?, Some(strict))),
    }
}

/// Reads a text that may consist of several documents. All but one must be empty, as the one after
/// a `---` at the end.
fn read_with(text: &str, duplicates: DuplicateKeyPolicy) -> Result<Value, serde_saphyr::Error> {
    let single = serde_saphyr::from_str_with_options(text, options(duplicates));
    let Err(error) = single else { return single };
    if !matches!(error.without_snippet(), serde_saphyr::Error::MultipleDocuments { .. }) {
        return Err(error);
    }
    match serde_saphyr::from_multiple_with_options::<Value>(text, options(duplicates)).as_deref_mut() {
        Ok([only]) => Ok(only.take()),
        Ok(_) | Err(_) => Err(error),
    }
}

/// Returns a message about a field that is given twice. It uses the words of the file and not those
/// of the library.
fn duplicate(error: &serde_saphyr::Error) -> String {
    let line = error.location().map(|again| format!(" in line {}", again.line())).unwrap_or_default();
    let duplicate = error.without_snippet();
    let field = if let serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } = duplicate {
        key.as_str()
    } else {
        "a field"
    };
    format!("{field} is given again{line}; the last value counts")
}

fn problem(error: &serde_saphyr::Error) -> String {
    match (error.without_snippet(), error.location()) {
        (serde_saphyr::Error::MultipleDocuments { .. }, Some(second)) => {
            format!("must be one document, found a second at line {}", second.line())
        }
        _ => format!("is neither YAML nor JSON: {}", error.render_with_formatter(&UserMessageFormatter)),
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

/// Returns the value at a path. `None` if the field or a section above it is absent.
fn value<'a>(root: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(root, |value, name| value.get(name))
}

impl Document {
    pub(super) fn value(&self, path: &str) -> Option<&Value> {
        value(&self.root, path)
    }

    pub(super) fn structure(&self) -> Structure {
        let mut structure = Structure::default();
        structure.walk("", &self.root);
        structure
    }
}

#[derive(Default)]
pub(super) struct Structure {
    /// Messages about sections that are not objects.
    pub(super) problems: Vec<String>,
    /// The paths of fields that are in no table.
    pub(super) unknown: Vec<String>,
}

impl Structure {
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

/// Returns the field that was probably meant: one of this name in another section, or one of this
/// section with a similar name.
fn similar(path: &str) -> Option<String> {
    let (section, name) = path.rsplit_once('.').map_or(("", path), |(section, name)| (section, name));
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_lowercase();
    let mut elsewhere = FIELDS.iter().filter(|field| last(field.path) == name.to_lowercase());
    if let (Some(only), None) = (elsewhere.next(), elsewhere.next()) {
        return Some(only.path.to_owned());
    }
    let prefix = if section.is_empty() { String::new() } else { format!("{section}.") };
    let siblings = FIELDS.iter().filter_map(|field| field.path.strip_prefix(&prefix)?.split('.').next());
    let alike = |sibling: &str| strsim::jaro(&sibling.to_lowercase(), &name.to_lowercase());
    let best = siblings.map(|sibling| (alike(sibling), sibling)).max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    // clap uses the same threshold for flags.
    (best.0 > 0.7).then(|| format!("{prefix}{}", best.1))
}

/// Returns a message about a field that is in no table.
pub(super) fn unknown(path: &str) -> String {
    let meant = similar(path).map(|field| format!(": did you mean {field}?")).unwrap_or_default();
    format!("{path} is not a known field, ignored{meant}")
}

fn is_type(path: &str) -> bool {
    path == "apiVersion" || path == "kind"
}

/// The fields that are left out if they are empty, as kube-proxy does.
const LEFT_OUT_IF_EMPTY: [&str; 5] = [
    "featureGates",
    "logging.vmodule",
    "logging.options.text.splitStream",
    "logging.options.json.splitStream",
    "windowsRunAsService",
];

/// The fields that are left out in modes other than their own. Current versions of kube-proxy do
/// not have them any more.
pub const LEFT_OUT_ELSEWHERE: [&str; 1] = ["udpIdleTimeout"];

pub(super) fn of(config: &Config) -> Value {
    let mut root = Map::new();
    root.insert("apiVersion".to_owned(), API_VERSION.into());
    root.insert("kind".to_owned(), KIND.into());
    let mut config = config.clone();
    for field in FIELDS {
        let value = field.access.write(&mut config);
        let value = if field.applies_in(config.mode) { value } else { zero(&value) };
        let unset_of_ours = field.path.starts_with("ebpf.") && (value.is_null() || value == "");
        let left_out = LEFT_OUT_IF_EMPTY.contains(&field.path) && is_empty(&value)
            || LEFT_OUT_ELSEWHERE.contains(&field.path) && !field.applies_in(config.mode);
        if !unset_of_ours && !left_out {
            insert(&mut root, field.path, value);
        }
    }
    Value::Object(root)
}

/// Returns the value that a field has in a section that does not apply.
fn zero(value: &Value) -> Value {
    match value {
        Value::Bool(_) => Value::Bool(false),
        Value::String(text) if duration::parse(text).is_none() => Value::from(""),
        Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            Value::from("0s")
        }
    }
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::misspelt("conntrack.maxPerCor", Some("conntrack.maxPerCore"))]
    #[case::misspelt_at_the_top("clusterCidr", Some("clusterCIDR"))]
    #[case::another_case("hostnameoverride", Some("hostnameOverride"))]
    #[case::misspelt_section("contrack", Some("conntrack"))]
    #[case::another_section("excludeCIDRs", Some("ipvs.excludeCIDRs"))]
    #[case::of_several_sections("syncPeriod", Some("configSyncPeriod"))]
    #[case::nothing_alike("colour", None)]
    fn an_unknown_field_is_likened_to(#[case] path: &str, #[case] meant: Option<&str>) {
        assert_eq!(similar(path).as_deref(), meant);
    }

    #[rstest]
    #[case::at_the_top("mode: ebpf\nmode: ipvs", "mode is given again in line 4; the last value counts")]
    #[case::in_a_section(
        "conntrack: {min: 1, min: 2}",
        "min is given again in line 3; the last value counts"
    )]
    fn a_field_that_is_given_twice(#[case] body: &str, #[case] expected: &str) {
        let text = format!("apiVersion: {API_VERSION}\nkind: {KIND}\n{body}\n");
        let document = parse(Path::new("c.yaml"), &text).map_err(|error| error.to_string());
        assert_eq!(document.map(|document| document.warnings), Ok(vec![format!("c.yaml: {expected}")]));
    }
}
