//! Runs every suite and prints one line for each.

mod fresh;
mod jobs;
mod plan;
pub(crate) mod programs;
pub(crate) mod suites;

use std::{
    collections::BTreeMap,
    fs,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use clap::Args;

use self::{
    plan::{ImageVariable, Plan},
    programs::TestPrograms,
    suites::{Count, Report},
};
use crate::{
    cache, progress,
    setup::{self, Purpose},
    vm,
};

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask test                                  what .ci/run runs
  cargo xtask test --suite 'behaviour packets'      one suite
  cargo xtask test --suite packets --test fragment  its tests of that name
  cargo xtask test --all                            all but virtual machines")]
pub(crate) struct Arguments {
    /// Run everything but virtual machines: all scenarios in every mode and on all paths of mode
    /// ebpf, all switches, and the scenarios with the real kube-proxy
    #[arg(long)]
    pub(crate) all: bool,
    /// Also run all scenarios of mode ipvs, and the core ones of mode ebpf on kernels 5.10, 6.1,
    /// 6.12, the newest and arm64, in virtual machines; what has passed with this commit is skipped
    #[arg(long)]
    pub(crate) all_kernels: bool,
    /// The number of clusters that each proxy meets in the suite `random`
    #[arg(long, default_value_t = 20)]
    pub(crate) clusters: u32,
    /// The number of the first cluster of the suite `random`
    #[arg(long, default_value_t = 0)]
    pub(crate) first: u32,
    /// The seed of the clusters of the suite `random`
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Run only suites whose name contains this
    #[arg(long, default_value = "")]
    pub(crate) suite: String,
    /// Run only tests whose name contains this
    #[arg(long, default_value = "", value_name = "TEXT")]
    pub(crate) test: String,
    /// Do not install missing programs first
    #[arg(long)]
    no_setup: bool,
    /// Show everything that the programs print that install what is missing
    #[arg(long)]
    verbose: bool,
    /// Test HEAD in a clean clone with empty caches, as on a fresh machine, and remove all of it at
    /// the end
    #[arg(long)]
    fresh: bool,
    /// Let a skipped test fail the run, for machines that should lack nothing
    #[arg(long)]
    strict: bool,
    /// With --strict, allow skips whose suite, name or reason contains this; may be given several
    /// times
    #[arg(long, requires = "strict", value_name = "TEXT")]
    may_skip: Vec<String>,
}

/// The number of lines of a suite's output that are shown when it has failed.
const LAST_LINES: usize = 60;
/// The number of failed tests that are named at the end of a run.
const LAST_FAILURES: usize = 8;

/// The names of suites that are made in one place and asked for in another.
pub(crate) const KERNEL_OBJECT: &str = "kernel object";
pub(crate) const DEPENDENCIES: &str = "licences and sources";
pub(crate) const ADVISORIES: &str = "advisories";
pub(crate) const DEPLOY: &str = "deploy";
pub(crate) const E2E: &str = "e2e";
const CLIPPY: &str = "clippy";

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.fresh {
        return fresh::run();
    }
    let start = Instant::now();
    if !arguments.no_setup {
        let mut purposes = arguments.purposes();
        if arguments.asks_for(E2E) && kubelets_are_built() {
            purposes.push(Purpose::Nodes);
        }
        setup::install(&purposes, arguments.verbose)?;
    }
    println!("installed what was missing in {}", progress::time(start.elapsed()));
    let mut total = Total::default();
    let (programs, lints) = TestPrograms::build()?;
    let image = ImageVariable::new();
    let mut plan = Plan::new(arguments);
    if plan.asks_for(CLIPPY) {
        total.record(
            CLIPPY,
            lints.unwrap_or_else(|| Report::skipped("the compiler's clippy is not installed")),
        );
    }
    plan.add_root_suites(&programs, &image)?;
    plan.add_user_suites(&programs)?;
    plan.add_checks()?;
    plan.add_e2e(&programs)?;
    plan.add_bench(&programs)?;
    let Plan { names, jobs, .. } = plan;
    ensure!(
        names.iter().any(|name| arguments.asks_for(name)),
        "no suite has {:?} in its name; there are: {}",
        arguments.suite,
        Vec::from_iter(names).join(", ")
    );
    jobs::run(jobs, |name, report| total.record(name, report))?;
    println!("in {} ({} s)", progress::time(start.elapsed()), start.elapsed().as_secs());
    let forbidden: Vec<&String> = total.skips.iter().filter(|skip| arguments.forbids(skip)).collect();
    for skip in &forbidden {
        println!("may not be skipped: {skip}");
    }
    for line in summary(&total.failures) {
        println!("{line}");
    }
    println!("{}", total.count);
    let succeeded = total.count.failed == 0 && forbidden.is_empty();
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Arguments {
    /// Returns what must be installed for the suites that are asked for.
    fn purposes(&self) -> Vec<Purpose> {
        let further = [
            (Purpose::KernelPrograms, KERNEL_OBJECT),
            (Purpose::Dependencies, DEPENDENCIES),
            (Purpose::Dependencies, ADVISORIES),
            (Purpose::Containers, DEPLOY),
            (Purpose::Machines, vm::IPVS.name()),
        ];
        let nodes = self.builds_kubelets().then_some((Purpose::Nodes, E2E));
        let asked_for = further.into_iter().filter(|(_, suite)| self.asks_for(suite)).chain(nodes);
        let always = [Purpose::Building, Purpose::Lab, Purpose::Tests];
        always.into_iter().chain(asked_for.map(|(purpose, _)| purpose)).collect()
    }

    pub(crate) fn asks_for(&self, suite: &str) -> bool {
        suite.contains(&self.suite)
    }

    /// Returns true if this run builds the programs of the suite e2e, which takes nine minutes.
    /// Other runs have that suite if an earlier run has built them.
    pub(crate) fn builds_kubelets(&self) -> bool {
        self.asks_for(E2E) && (self.all || !self.suite.is_empty())
    }

    fn forbids(&self, skip: &str) -> bool {
        self.strict && !self.may_skip.iter().any(|text| skip.contains(text))
    }
}

/// Returns true if an earlier run has built programs of the suite e2e. Its crate names the folder.
fn kubelets_are_built() -> bool {
    let Ok(folders) = cache::folder("").and_then(|cache| Ok(fs::read_dir(cache)?)) else { return false };
    folders.flatten().any(|folder| folder.file_name().to_string_lossy().starts_with("e2e-own-"))
}

#[derive(Default)]
struct Total {
    count: Count,
    /// The tests that were skipped, each with its suite and the reason.
    skips: Vec<String>,
    /// The failed tests of each suite that has failed. The list is empty if the suite failed
    /// without naming one.
    failures: BTreeMap<&'static str, Vec<String>>,
}

impl Total {
    fn record(&mut self, name: &'static str, report: Report) {
        print_report(name, &report);
        self.skips.extend(report.skips.iter().map(|skip| format!("{name}: {skip}")));
        self.count += report.count;
        if report.count.failed > 0 {
            self.failures.insert(name, report.failures);
        }
    }
}

fn print_report(name: &str, report: &Report) {
    for skip in &report.skips {
        println!("  skipped {skip}");
    }
    for failure in &report.failures {
        println!("  FAILED  {failure}");
    }
    for row in &report.table {
        println!("{row}");
    }
    if report.count.failed > 0 {
        for text in [&report.text, &report.errors] {
            let lines: Vec<&str> = text.lines().collect();
            for line in lines.get(lines.len().saturating_sub(LAST_LINES)..).unwrap_or_default() {
                println!("  | {line}");
            }
        }
    }
    let seconds = |time: Duration| time.as_secs_f32();
    println!(
        "{name:<20} {:<36} {:>6.1} s  {:>6.1} s cpu",
        report.count.to_string(),
        seconds(report.elapsed),
        seconds(report.processor)
    );
}

/// Says what has failed, and how to run it alone, in at most ten lines.
fn summary(failures: &BTreeMap<&'static str, Vec<String>>) -> Vec<String> {
    let command = |suite: &str, test: Option<&String>| {
        let test = test.map_or_else(String::new, |test| format!(" --test '{test}'"));
        format!("  cargo xtask test --suite '{suite}'{test}")
    };
    let mut lines: Vec<String> = failures
        .iter()
        .flat_map(|(suite, tests)| match &tests[..] {
            [] => vec![command(suite, None)],
            tests => tests.iter().map(|test| command(suite, Some(test))).collect(),
        })
        .collect();
    if lines.is_empty() {
        return lines;
    }
    let further = lines.len().saturating_sub(LAST_FAILURES);
    lines.truncate(LAST_FAILURES);
    if further > 0 {
        lines.push(format!("  and {further} more, named above"));
    }
    lines.insert(0, "failed; each of these runs one alone:".to_owned());
    lines
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn arguments(flags: &[&str]) -> Arguments {
        let words = [&["test"], flags].concat();
        Command::try_parse_from(words).unwrap().arguments
    }

    #[test]
    fn what_is_skipped_is_an_error_if_nobody_has_named_it() {
        let skip = "advisories: the data it needs could not be fetched";
        assert!(!arguments(&[]).forbids(skip));
        assert!(arguments(&["--strict"]).forbids(skip));
        assert!(!arguments(&["--strict", "--may-skip", "advisories"]).forbids(skip));
        assert!(arguments(&["--strict", "--may-skip", "packets"]).forbids(skip));
        assert!(!arguments(&["--strict", "--may-skip", "packets", "--may-skip", "fetched"]).forbids(skip));
        assert!(Command::try_parse_from(["test", "--may-skip", "all"]).is_err());
    }

    #[test]
    fn a_suite_installs_what_it_needs() {
        let needs = |suite: &str, purpose| arguments(&["--suite", suite]).purposes().contains(&purpose);
        assert!(!needs("unit", Purpose::KernelPrograms) && !needs("unit", Purpose::Dependencies));
        assert!(needs("kernel object", Purpose::KernelPrograms));
        assert!(needs("deploy", Purpose::Containers) && !needs("deploy", Purpose::Machines));
        assert!(needs("", Purpose::Machines) && needs("", Purpose::Dependencies));
        assert!(needs("e2e", Purpose::Nodes) && !needs("", Purpose::Nodes) && !needs("unit", Purpose::Nodes));
        assert!(arguments(&["--all"]).purposes().contains(&Purpose::Nodes));
    }

    #[test]
    fn a_failed_run_ends_with_ten_lines_at_most_that_say_how_to_go_on() {
        assert_eq!(summary(&BTreeMap::new()), [""; 0]);
        let failures = BTreeMap::from([("life cycle", vec!["restart".to_owned()]), ("lab", Vec::new())]);
        let told = [
            "failed; each of these runs one alone:",
            "  cargo xtask test --suite 'lab'",
            "  cargo xtask test --suite 'life cycle' --test 'restart'",
        ];
        assert_eq!(summary(&failures), told);
        let many = BTreeMap::from([("packets", (0..30).map(|number| format!("case {number}")).collect())]);
        let lines = summary(&many);
        assert_eq!(lines.len(), 10);
        assert_eq!(lines.last().map(String::as_str), Some("  and 22 more, named above"));
    }
}
