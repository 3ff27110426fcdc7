//! The command line, and the settings of a run.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Parser;

use crate::{
    contender::{CONTENDERS, Contender},
    results::Settings,
};

#[derive(Clone, Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    about = "Measures proxy-ctl, the real kube-proxy and no proxy on one machine, with a real API server, in network namespaces"
)]
pub struct Arguments {
    /// Make a short run to try it out: 1 and 100 Services, few contenders, programs that are not
    /// optimised
    #[arg(long)]
    pub lean: bool,
    /// Measure only cells whose names contain this, as --list shows them, such as `connect/`; if it
    /// is given several times, they must contain all of the texts
    #[arg(long, value_name = "TEXT")]
    pub filter: Vec<String>,
    /// Measure only this contender, such as ebpf-sockets; may be given several times
    #[arg(long, value_name = "NAME", value_parser = contender)]
    pub contender: Vec<Contender>,
    /// Services in the cluster; may be given several times for several sizes [default: 1, 1000,
    /// 10000]
    #[arg(long, value_name = "COUNT")]
    pub services: Vec<usize>,
    /// Endpoints of each Service
    #[arg(long, default_value_t = 10)]
    pub endpoints: usize,
    /// Seconds of each cell of traffic [default: 5]
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Endpoint changes whose processor time is measured [default: 1000]
    #[arg(long)]
    pub changes: Option<NonZeroUsize>,
    /// Folder for results.json and plots [default: docs/benchmarks, with --lean target/benchmarks]
    #[arg(long, value_name = "FOLDER")]
    pub output: Option<PathBuf>,
    /// Continue a run that was ended, on the same machine with the same flags: measure only cells
    /// that results.json in the folder lacks
    #[arg(long, conflicts_with_all = ["render", "list"])]
    pub resume: bool,
    /// Measure nothing: show the results that are in the folder, and draw the plots anew
    #[arg(long, conflicts_with = "list")]
    pub render: bool,
    /// Measure nothing: list the cells
    #[arg(long)]
    pub list: bool,
}

fn contender(name: &str) -> Result<Contender, String> {
    Contender::by_name(name).ok_or_else(|| format!("one of {}", CONTENDERS.map(|one| one.name).join(", ")))
}

impl Arguments {
    pub fn settings(&self) -> Settings {
        let of = |lean, full| if self.lean { lean } else { full };
        let sizes = if self.lean { vec![1, 100] } else { vec![1, 1_000, 10_000] };
        let mut sizes = if self.services.is_empty() { sizes } else { self.services.clone() };
        // A cluster only grows, so the sizes are measured in ascending order.
        sizes.sort_unstable();
        sizes.dedup();
        Settings {
            build: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
            sizes,
            endpoints: self.endpoints,
            seconds: self.seconds.unwrap_or(if self.lean { 1.0 } else { 5.0 }),
            turn_ms: 25,
            clients: 4,
            pace: if self.lean { 1_000.0 } else { 4_000.0 },
            rounds: of(2, 7),
            changes: self.changes.map_or(of(20, 1_000), NonZeroUsize::get),
            flows: 1_024,
            syns_per_second: 50_000,
        }
    }

    pub fn contenders(&self) -> Vec<Contender> {
        let of_names = !self.contender.is_empty();
        let is_asked_for = |contender: &Contender| match of_names {
            true => self.contender.iter().any(|asked| asked.name == contender.name),
            false => contender.is_lean || !self.lean,
        };
        CONTENDERS.into_iter().filter(is_asked_for).collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn settings(words: &[&str]) -> Settings {
        Arguments::try_parse_from([&["bench"], words].concat()).unwrap().settings()
    }

    #[rstest]
    #[case::all(&[], CONTENDERS.len())]
    #[case::one(&["--contender", "ipvs"], 1)]
    #[case::two_though_lean(&["--lean", "--contender", "ipvs", "--contender", "ebpf-sockets"], 2)]
    fn contenders_that_are_asked_for(#[case] words: &[&str], #[case] expected: usize) {
        let arguments = Arguments::try_parse_from([&["bench"], words].concat()).unwrap();
        assert_eq!(arguments.contenders().len(), expected);
    }

    #[test]
    fn an_unknown_contender_is_told_those_there_are() {
        let error = Arguments::try_parse_from(["bench", "--contender", "ebpf"]).unwrap_err().to_string();
        assert!(error.contains("one of dropped, ") && error.contains("kube-proxy-ipvs"), "{error}");
    }

    #[test]
    fn sizes_grow_and_what_is_given_wins() {
        assert_eq!(settings(&[]).sizes, [1, 1_000, 10_000]);
        assert_eq!(settings(&["--services", "50", "--services", "5", "--services", "50"]).sizes, [5, 50]);
        let lean = settings(&["--lean", "--seconds", "0.2", "--changes", "4"]);
        assert_eq!((lean.seconds, lean.changes, lean.sizes), (0.2, 4, vec![1, 100]));
    }
}
