//! Files of deploy/ as data.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Returns the root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the path `deploy/<name>`.
pub fn path(name: &str) -> PathBuf {
    repository().join("deploy").join(name)
}

pub fn text(name: &str) -> Result<String> {
    let path = path(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Returns the documents of a YAML text without empty ones.
pub fn documents(text: &str) -> Result<Vec<Value>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

/// Returns the documents of `deploy/<name>`, which is a file or a folder of files.
pub fn objects(name: &str) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for (file, text) in texts(name)? {
        objects.extend(documents(&text).with_context(|| file.display().to_string())?);
    }
    Ok(objects)
}

/// Returns the documents of `deploy/<name>/*.yaml` as a shell reads them: one text after the other,
/// with nothing in between.
pub fn joined(name: &str) -> Result<Vec<Value>> {
    documents(&texts(name)?.into_iter().map(|(_, text)| text).collect::<String>())
}

/// Returns the text of `deploy/<name>` or, if it is a folder, of its files that end in .yaml, by
/// their names.
fn texts(name: &str) -> Result<Vec<(PathBuf, String)>> {
    let path = path(name);
    let mut files = Vec::new();
    if path.is_dir() {
        for found in fs::read_dir(&path).with_context(|| format!("reading {}", path.display()))? {
            files.push(found?.path());
        }
        files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
        files.sort();
    } else {
        files.push(path);
    }
    let read = |file: PathBuf| {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        Ok((file, text))
    };
    files.into_iter().map(read).collect()
}

/// Returns kind and name of an object.
pub fn identity(object: &Value) -> (String, String) {
    let text = |pointer| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    (text("/kind"), text("/metadata/name"))
}

/// Returns the first object of a kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Result<&'a Value> {
    objects.iter().find(|object| object["kind"] == kind).with_context(|| format!("there is no {kind}"))
}
