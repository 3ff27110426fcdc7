//! Differences between datapaths that docs/differences.md explains.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context as _, Result, ensure};

use crate::setting::{ProxyKind, Setting};

/// Heading of the table of explanations. Its rows are `| mode | `what differs` | why |`, and `*`
/// stands for any text.
const HEADING: &str = "# What differs for connections";

/// Heading further down. Only random clusters meet the rows below it.
const RANDOM_HEADING: &str = "## Met by random clusters only";

/// Difference that a mode of proxy-ctl has. The page also says why.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Explanation {
    mode: String,
    pattern: String,
}

/// Explanations, and those that were needed.
#[derive(Debug, Default)]
pub struct Differences {
    explanations: Vec<Explanation>,
    met: BTreeSet<Explanation>,
}

impl Differences {
    /// Reads the explanations of the project's documentation.
    pub fn read() -> Result<Self> {
        Self::parse(&page()?)
    }

    /// Reads the explanations without those that only random clusters meet.
    pub fn read_of_table() -> Result<Self> {
        Self::parse_of_table(&page()?)
    }

    fn parse_of_table(text: &str) -> Result<Self> {
        let (table, _) = text.split_once(RANDOM_HEADING).with_context(|| format!("no {RANDOM_HEADING:?}"))?;
        Self::parse(table)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut explanations = Vec::new();
        let lines = text.lines().skip_while(|line| *line != HEADING).skip(1);
        for line in lines.take_while(|line| !line.starts_with("# ")) {
            let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            let [mode, patterns, reason] = cells.as_slice() else { continue };
            if !patterns.starts_with('`') {
                continue;
            }
            ensure!(reason.len() > 10, "{patterns} has no reason");
            for pattern in patterns.split("<br>") {
                let pattern = pattern.trim().trim_matches('`').to_owned();
                explanations.push(Explanation { mode: (*mode).to_owned(), pattern });
            }
        }
        ensure!(!explanations.is_empty(), "no explanation below {HEADING:?}");
        Ok(Self { explanations, met: BTreeSet::new() })
    }

    /// Returns true if the difference is explained.
    pub fn explain(&mut self, setting: Setting, difference: &str) -> bool {
        let concerns = |explanation: &&Explanation| {
            is_of(&explanation.mode, setting) && matches(&explanation.pattern, difference)
        };
        let found: Vec<Explanation> = self.explanations.iter().filter(concerns).cloned().collect();
        let is_explained = !found.is_empty();
        self.met.extend(found);
        is_explained
    }

    /// Returns the explanations for these settings that were not needed. All scenarios of the table
    /// must have run.
    pub fn stale(&self, settings: &[Setting]) -> Vec<String> {
        let concerns =
            |explanation: &&Explanation| settings.iter().any(|setting| is_of(&explanation.mode, *setting));
        let unmet = |explanation: &&Explanation| !self.met.contains(*explanation);
        let stale = self.explanations.iter().filter(concerns).filter(unmet);
        stale.map(|Explanation { mode, pattern }| format!("{mode}: {pattern}")).collect()
    }
}

fn page() -> Result<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/differences.md");
    fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))
}

/// Returns true if `mode` names the setting. `ebpf` names each setting of that mode, and
/// `ebpf/preserve` those with that `sourceAddress`.
fn is_of(mode: &str, setting: Setting) -> bool {
    let is_ebpfs = || mode == "ebpf" || mode == format!("ebpf/{}", setting.source);
    mode == setting.to_string() || (setting.proxy == ProxyKind::Ebpf && is_ebpfs())
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((first, rest)) => text.strip_prefix(first).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && matches(rest, &text[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::{PathKind, SourceKind};

    const SOCKETS: Setting = Setting::new(ProxyKind::Ebpf, PathKind::Sockets);
    const REAL: Setting = Setting::new(ProxyKind::KubeProxyNftables, PathKind::Packets);
    const OURS: Setting = Setting::new(ProxyKind::Nftables, PathKind::Packets);

    const PAGE: &str = "\
| ebpf | `of another table` | before the heading |
# What differs for connections
| mode | what differs | why |
|---|---|---|
| ebpf/preserve | `a: *, found as itself` | it keeps addresses |
| ebpf | `b: x` | it differs always |
| ebpf/sockets | `c: y` | a hook says so at once |
| nftables | `c: y` | no reason is known |
## Met by random clusters only
| nftables | `e: z` | nothing else meets it |
# Another heading
| ebpf | `d: z` | after it |
";

    #[test]
    fn what_is_explained_is_so_for_its_mode_only() {
        let mut differences = Differences::parse(PAGE).unwrap();
        assert!(differences.explain(SOCKETS, "a: client, found as itself"));
        assert!(!differences.explain(OURS, "a: client, found as itself"));
        let masquerades = Setting { source: SourceKind::Masquerade, ..SOCKETS };
        assert!(!differences.explain(masquerades, "a: client, found as itself"));
        assert!(differences.explain(masquerades, "b: x"));
        assert!(differences.explain(SOCKETS, "c: y") && !differences.explain(REAL, "c: y"));
        assert!(differences.explain(OURS, "e: z") && !differences.explain(SOCKETS, "e: z"));
        assert!(!differences.explain(SOCKETS, "d: z") && !differences.explain(SOCKETS, "of another table"));
        assert_eq!(differences.stale(&[SOCKETS]), [""; 0]);
        assert_eq!(differences.stale(&[SOCKETS, OURS]), ["nftables: c: y"]);
    }

    #[test]
    fn what_only_random_clusters_meet_excuses_nothing_in_the_table() {
        let mut differences = Differences::parse_of_table(PAGE).unwrap();
        assert!(differences.explain(OURS, "c: y") && !differences.explain(OURS, "e: z"));
        assert_eq!(differences.stale(&[OURS]), [""; 0]);
    }

    #[test]
    fn a_row_needs_a_reason() {
        let page = PAGE.replace("it keeps addresses", "so");
        assert!(Differences::parse(&page).unwrap_err().to_string().contains("has no reason"));
    }
}
