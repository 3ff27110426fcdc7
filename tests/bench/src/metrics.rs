//! Figures of a proxy from its /metrics and from /proc.

use std::fs;

use anyhow::{Context as _, Result};

/// Returns the sum of a metric over all its label sets.
pub(crate) fn sum(text: &str, name: &str) -> Option<f64> {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        (rest.starts_with('{') || rest.starts_with(' ')).then(|| rest.rsplit(' ').next()?.parse().ok())?
    });
    values.reduce(|a: f64, b| a + b)
}

/// Returns the highest resident memory of a process (VmHWM), in bytes.
pub(crate) fn peak(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse().with_context(|| format!("VmHWM: {line}"))?;
    Ok(kib * 1024.0)
}
