//! The programs of this workspace.

use std::{env, path::PathBuf};

use anyhow::{Context as _, Result};

/// `proxy-ctl` or `lab-agent`: the file that `PROXY_CTL` or `LAB_AGENT` names, else what cargo has built beside the running
/// program or, for a test, one folder above it.
pub fn program(name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(name.to_uppercase().replace('-', "_")) {
        return Ok(path.into());
    }
    let own = env::current_exe().context("finding the running program")?;
    let found = own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|file| file.exists());
    found.with_context(|| format!("no {name} beside {}: cargo build --bin {name} builds it", own.display()))
}
