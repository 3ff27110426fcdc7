//! What the controller's /metrics and /proc say of it.

use std::fs;

use anyhow::{Context as _, Result};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Metrics {
    pub(crate) first_sync_seconds: f64,
    pub(crate) written: f64,
    pub(crate) removed: f64,
    pub(crate) resident_bytes: f64,
    pub(crate) peak_resident_bytes: f64,
    pub(crate) table_bytes: f64,
}

impl Metrics {
    /// `text`: a scrape after the first sync.
    pub(crate) fn new(text: &str, process: u32) -> Result<Self> {
        Ok(Self {
            first_sync_seconds: sum(text, "proxy_first_sync_duration_seconds")
                .filter(|seconds| *seconds > 0.0)
                .context("no first sync yet")?,
            written: sum(text, "proxy_writes_total").unwrap_or(0.0),
            removed: sum(text, "proxy_removals_total").unwrap_or(0.0),
            resident_bytes: sum(text, "process_resident_memory_bytes").context("no resident memory")?,
            peak_resident_bytes: peak(process)?,
            table_bytes: sum(text, "proxy_table_bytes").unwrap_or(0.0),
        })
    }
}

/// Sum over all label sets of one metric.
fn sum(text: &str, name: &str) -> Option<f64> {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        (rest.starts_with('{') || rest.starts_with(' ')).then(|| rest.rsplit(' ').next()?.parse().ok())?
    });
    values.reduce(|a: f64, b| a + b)
}

/// VmHWM, in bytes.
pub(crate) fn peak(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse().with_context(|| format!("VmHWM: {line}"))?;
    Ok(kib * 1024.0)
}
