//! The command `config` and the flag `--write-config-to`, which show the configuration that
//! applies. `config` also shows the origin of each value.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::{
    add_global_bpffs,
    table::{print, print_json, table},
    tree,
};
use crate::config::{CommandLine, Config, Effective};

/// Writes the configuration as a file that gives the same configuration.
pub(super) fn write(line: &CommandLine, path: &Path) -> anyhow::Result<()> {
    let effective = load(line)?;
    fs::write(path, as_file(&effective)?)
        .with_context(|| format!("--write-config-to {}: the file cannot be written", path.display()))?;
    eprintln!("the configuration is in {}", path.display());
    Ok(())
}

fn load(line: &CommandLine) -> anyhow::Result<Effective> {
    Ok(Effective::load(line.text("config").map(Path::new), line)?)
}

fn warn(warnings: &[String]) {
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
}

fn not_for_a_file(config: &Config) -> Vec<String> {
    let message = |(field, meant): (&crate::config::Field, Value)| {
        let value = text(&field.value(config));
        format!("{} {value} cannot be expressed in a file, where it means {}", field.path, text(&meant))
    };
    config.not_for_a_file().into_iter().map(message).collect()
}

/// Returns the configuration as YAML, and prints warnings about what YAML cannot express.
fn as_file(effective: &Effective) -> anyhow::Result<String> {
    warn(&effective.warnings);
    warn(&not_for_a_file(&effective.config));
    Ok(serde_saphyr::to_string(&effective.config.to_document())?)
}

pub(super) fn show(flags: Vec<OsString>, bpffs: Option<PathBuf>) -> anyhow::Result<()> {
    let mut line = CommandLine::parse_with(&tree::OUTPUT, flags)?;
    add_global_bpffs(&mut line, bpffs);
    if line.is_on("help") {
        return tree::help(tree::subcommand("config"));
    }
    let effective = load(&line)?;
    match line.text("output") {
        None | Some("table") => {
            warn(&effective.warnings);
            let row = |(field, value, origin): (&crate::config::Field, Value, crate::config::Origin)| {
                [field.path.to_owned(), text(&value), origin.to_string()]
            };
            let rows = effective.values().into_iter().map(row);
            Ok(print(&table(["FIELD", "VALUE", "ORIGIN"], rows))?)
        }
        Some("yaml") => Ok(print(&as_file(&effective)?)?),
        Some("json") => {
            let values: Vec<_> = effective
                .values()
                .into_iter()
                .map(|(field, value, origin)| {
                    json!({"field": field.path, "value": value, "origin": origin.to_string()})
                })
                .collect();
            print_json(&json!({
                "config": effective.config.to_document(),
                "values": values,
                "warnings": effective.warnings,
            }))
        }
        Some(other) => bail!("--output must be table, json or yaml, found {other:?}"),
    }
}

/// Returns a value as text, without the quotes of JSON.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}
