//! Documents in the image about what it is made of.

use std::{collections::BTreeSet, fs};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::cluster;

/// Part of the paths of crates' sources. A program names such paths for positions in crates that it
/// was built from.
const SOURCES: &str = "/registry/src/";

/// Expects the documents to name every crate that the binary itself names. Cargo is not asked.
pub(super) fn crates_that_the_binary_names_are_told((): &mut ()) -> Result<()> {
    let root = tempfile::tempdir().context("making a folder")?;
    cluster::image()?.unpack(root.path())?;
    let read = |path: &str| fs::read(root.path().join(path)).with_context(|| format!("reading {path}"));
    let binary = read("usr/local/bin/proxy-ctl")?;
    let text = String::from_utf8_lossy(&binary);
    // A text in debugging information ends with a zero.
    let named = text.split(SOURCES).skip(1).filter_map(|rest| rest.split(['/', '\0']).nth(1));
    let named: BTreeSet<&str> = named.collect();
    ensure!(named.len() > 20, "the binary names only {named:?}");

    let bill: Value = serde_json::from_slice(&read("usr/share/doc/proxy-ctl/sbom.cdx.json")?)?;
    ensure!(bill["bomFormat"] == "CycloneDX" && bill["specVersion"] == "1.5", "{}", bill["metadata"]);
    let notices = String::from_utf8(read("usr/share/doc/proxy-ctl/NOTICES")?)?;
    let mut told = BTreeSet::new();
    for component in bill["components"].as_array().context("components")? {
        let text = |field: &str| component[field].as_str().context(field.to_owned());
        let (name, version) = (text("name")?, text("version")?);
        ensure!(notices.contains(&format!("\n{name} {version} (")), "NOTICES has no {name} {version}");
        told.insert(format!("{name}-{version}"));
    }
    let untold: Vec<_> = named.iter().filter(|name| !told.contains(**name)).collect();
    ensure!(untold.is_empty(), "not in the bill of materials: {untold:?}");
    Ok(())
}
