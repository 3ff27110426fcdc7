//! Keeps the results of whole runs, and writes them as one table: `docs/conformance.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use crate::{
    addresses::NodeNumber,
    ginkgo::{Verdict, Verdicts},
    proxy::Setting,
};

const SIG: &str = "[sig-network] ";

/// Results of all tests with one proxy.
#[derive(Debug, Deserialize, Serialize)]
pub struct Record {
    /// Version of Kubernetes of which the cluster and the tests are.
    pub kubernetes: String,
    /// Version that the proxy reports.
    pub proxy: String,
    pub kernel: String,
    pub nodes: NodeNumber,
    pub verdicts: Verdicts,
    /// Tests that cannot be run here, each with the reason.
    pub not_here: BTreeMap<String, String>,
}

impl Record {
    /// Writes the record to a folder, under the name of its setting.
    pub fn keep(&self, folder: &Path, setting: Setting) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let file = folder.join(format!("{setting}.json"));
        fs::write(&file, serde_json::to_vec(self)?).with_context(|| format!("writing {}", file.display()))
    }
}

/// Reads the records that were kept, in the order of the table's columns.
pub fn kept(folder: &Path) -> Result<Vec<(Setting, Record)>> {
    let mut records = Vec::new();
    for setting in Setting::value_variants() {
        let file = folder.join(format!("{setting}.json"));
        if !file.exists() {
            continue;
        }
        let text = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let record = serde_json::from_slice(&text).with_context(|| format!("reading {}", file.display()))?;
        records.push((*setting, record));
    }
    let position = |setting: &Setting| Setting::TABLE.iter().position(|column| column == setting);
    records.sort_by_key(|(setting, _)| position(setting).unwrap_or(usize::MAX));
    Ok(records)
}

/// Returns the page with the table.
pub fn page(records: &[(Setting, Record)]) -> Result<String> {
    ensure!(!records.is_empty(), "no results are kept: cargo xtask test --suite e2e --all makes them");
    let mut page = String::from(
        "# Kubernetes's own tests of sig-network\n\n\
         The table has every test of `[sig-network]` that a machine without a cloud can run, with each proxy on the same\n\
         cluster: real kubelets and containerd on nodes that are network namespaces of one machine. The first columns are\n\
         the real kube-proxy, for reference.\n\n    \
         cargo xtask test --suite e2e --all     # runs the tests, with each proxy\n    \
         cargo run -p e2e --bin e2e -- --table  # writes this page\n\n",
    );
    page.push_str("| proxy | version | Kubernetes | Linux | nodes | passed | failed | skipped |\n");
    page.push_str("|---|---|---|---|---|---|---|---|\n");
    for (setting, record) in records {
        let count = |is: fn(&Verdict) -> bool| record.verdicts.values().filter(|verdict| is(verdict)).count();
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(
            page,
            "| {setting} | {} | {} | {} | {} | {} | {} | {} |",
            record.proxy,
            record.kubernetes,
            record.kernel,
            record.nodes,
            count(|verdict| matches!(verdict, Verdict::Passed { .. })),
            count(|verdict| matches!(verdict, Verdict::Failed { .. })),
            count(|verdict| matches!(verdict, Verdict::Skipped { .. })),
        );
    }
    page.push_str("\n## Test and proxy\n\n");
    let _ = writeln!(page, "| test | {} |", columns(records, |setting, _| setting.to_string()));
    let _ = writeln!(page, "|---|{}", "---|".repeat(records.len()));
    for name in names(records) {
        let _ = writeln!(page, "| {} | {} |", plain(name), columns(records, |_, record| cell(record, name)));
    }
    page.push_str("\n## What could not be run\n\n");
    page.push_str(&not_run(records));
    Ok(page)
}

fn columns(records: &[(Setting, Record)], cell: impl Fn(Setting, &Record) -> String) -> String {
    records.iter().map(|(setting, record)| cell(*setting, record)).collect::<Vec<_>>().join(" | ")
}

/// Returns the tests that at least one proxy has passed or failed.
fn names(records: &[(Setting, Record)]) -> BTreeSet<&str> {
    let all = records.iter().flat_map(|(_, record)| &record.verdicts);
    all.filter(|(_, verdict)| !matches!(verdict, Verdict::Skipped { .. }))
        .map(|(name, _)| name.as_str())
        .collect()
}

fn cell(record: &Record, name: &str) -> String {
    match record.verdicts.get(name) {
        Some(Verdict::Passed { .. }) => "pass",
        Some(Verdict::Failed { .. }) => "**FAIL**",
        Some(Verdict::Skipped { .. }) => "skip",
        None => "",
    }
    .to_owned()
}

/// Returns the tests by the reason why they were not run. This suite or the tests give the reason.
fn not_run(records: &[(Setting, Record)]) -> String {
    let mut reasons: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (setting, record) in records {
        for (name, reason) in &record.not_here {
            reasons.entry(format!("It {reason}.")).or_default().insert(plain(name));
        }
        for (name, verdict) in &record.verdicts {
            let Verdict::Skipped { reason } = verdict else { continue };
            let told = format!("The test says: {}", reason.lines().next().unwrap_or_default());
            // If another proxy was tested, the table says which one was not.
            let by =
                if names(records).contains(name.as_str()) { format!(" ({setting})") } else { String::new() };
            reasons.entry(told).or_default().insert(format!("{}{by}", plain(name)));
        }
    }
    let mut text = String::new();
    for (reason, tests) in reasons {
        let _ = writeln!(text, "{reason}\n");
        for test in tests {
            let _ = writeln!(text, "- {test}");
        }
        text.push('\n');
    }
    text.trim_end().to_owned() + "\n"
}

/// Returns a test's name as Markdown shows it, without the part that all have.
fn plain(name: &str) -> String {
    name.strip_prefix(SIG).unwrap_or(name).replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(verdicts: &[(&str, Verdict)]) -> Record {
        Record {
            kubernetes: "v1.36.1".into(),
            proxy: "x 1".into(),
            kernel: "6.18".into(),
            nodes: 3,
            verdicts: verdicts
                .iter()
                .map(|(name, verdict)| (format!("{SIG}{name}"), verdict.clone()))
                .collect(),
            not_here: BTreeMap::from([(format!("{SIG}c"), "needs the internet".to_owned())]),
        }
    }

    #[test]
    fn a_row_is_a_test_and_a_column_a_proxy() {
        let skipped = Verdict::Skipped { reason: "needs 6 nodes\nmore".into() };
        let failed = Verdict::Failed { message: "late".into() };
        let passed = Verdict::Passed { seconds: 1 };
        let records = [
            (Setting::Ebpf, record(&[("a", passed.clone()), ("b", failed), ("d", skipped.clone())])),
            (Setting::Nftables, record(&[("a", skipped), ("b", passed)])),
        ];
        let page = page(&records).unwrap();
        assert!(
            page.contains(
                "| test | ebpf | nftables |\n|---|---|---|\n| a | pass | skip |\n| b | **FAIL** | pass |\n\n"
            ),
            "{page}"
        );
        assert!(page.contains("| ebpf | x 1 | v1.36.1 | 6.18 | 3 | 1 | 1 | 1 |"), "{page}");
        let end = "It needs the internet.\n\n- c\n\nThe test says: needs 6 nodes\n\n- a (nftables)\n- d\n";
        assert!(page.ends_with(end), "{page}");
    }

    #[test]
    fn what_is_kept_is_found_in_the_order_of_the_columns() {
        let folder = tempfile::tempdir().unwrap();
        assert!(page(&kept(folder.path()).unwrap()).is_err());
        for setting in [Setting::Ebpf, Setting::EbpfHost, Setting::KubeProxyNftables] {
            record(&[]).keep(folder.path(), setting).unwrap();
        }
        let settings: Vec<_> = kept(folder.path()).unwrap().into_iter().map(|(setting, _)| setting).collect();
        assert_eq!(settings, [Setting::KubeProxyNftables, Setting::Ebpf, Setting::EbpfHost]);
    }
}
