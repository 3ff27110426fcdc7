//! Runs every suite, quick ones first, and prints one line for each.

use std::{process::ExitCode, time::Instant};

use anyhow::Result;
use clap::Args;

use crate::{
    command::{as_root, built, cargo, find, is_root, run as execute},
    image::{self, ForTests},
    setup,
    suites::{Count, Kind, Report, Suite},
    vm,
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Also run the scenarios against the real kube-proxy
    #[arg(long)]
    kube_proxy: bool,
    /// Also run the core scenarios on kernels 5.10 and 6.12 and on arm64, in virtual machines
    #[arg(long)]
    vm: bool,
    /// Only suites whose name contains this
    #[arg(long, default_value = "")]
    suite: String,
    /// Do not look for missing programs first
    #[arg(long)]
    no_setup: bool,
    /// What is skipped fails the run: for machines that are meant to lack nothing
    #[arg(long)]
    strict: bool,
    /// With --strict: may be skipped all the same, if its suite, name or reason contains this; for several, give it again
    #[arg(long, requires = "strict", value_name = "TEXT")]
    may_skip: Vec<String>,
}

const LAST_LINES: usize = 60;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let start = Instant::now();
    if !arguments.no_setup {
        setup::run_setup()?;
    }
    let mut total = Total::default();
    let (checks, missing) = checks();
    for (name, program) in missing {
        println!("{name:<22} skipped: {program} is not installed");
        total.count.skipped += 1;
        total.skips.push(format!("{name}: skipped: {program} is not installed"));
    }
    for suite in checks.into_iter().chain([unit_suite()]) {
        total.add(suite, arguments)?;
    }
    build()?;
    for suite in root_suites(arguments) {
        total.add(suite, arguments)?;
    }
    if arguments.vm {
        // Others are not downloaded.
        for machine in vm::MACHINES.into_iter().filter(|machine| machine.name().contains(&arguments.suite)) {
            total.add(machine.suite()?, arguments)?;
        }
    }
    println!("in {} s", start.elapsed().as_secs());
    let forbidden: Vec<&String> = total.skips.iter().filter(|skip| arguments.forbids(skip)).collect();
    for skip in &forbidden {
        println!("may not be skipped: {skip}");
    }
    println!("{}", total.count);
    let succeeded = total.count.failed == 0 && forbidden.is_empty();
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Arguments {
    fn forbids(&self, skip: &str) -> bool {
        self.strict && !self.may_skip.iter().any(|text| skip.contains(text))
    }
}

#[derive(Default)]
struct Total {
    count: Count,
    /// What was skipped, with its suite and the reason.
    skips: Vec<String>,
}

impl Total {
    /// Runs the suite, if it is asked for.
    fn add(&mut self, suite: Suite, arguments: &Arguments) -> Result<()> {
        let name = suite.name;
        if name.contains(&arguments.suite) {
            let report = suite.run()?;
            print_report(name, &report);
            self.skips.extend(report.skips().map(|skip| format!("{name}: {skip}")));
            self.count += report.count;
        }
        Ok(())
    }
}

fn print_report(name: &str, report: &Report) {
    for note in &report.notes {
        println!("  {}", note.trim());
    }
    if report.count.failed > 0 {
        for text in [&report.text, &report.errors] {
            let lines: Vec<&str> = text.lines().collect();
            for line in lines.get(lines.len().saturating_sub(LAST_LINES)..).unwrap_or_default() {
                println!("  | {line}");
            }
        }
    }
    println!("{name:<22} {:<42} {:>6.1} s", report.count.to_string(), report.elapsed.as_secs_f32());
}

fn suite(name: &'static str, kind: Kind, command: std::process::Command) -> Suite {
    Suite { name, kind, command }
}

/// What looks at the sources only; and which of it cannot be done here, for want of which program.
fn checks() -> (Vec<Suite>, Vec<(&'static str, &'static str)>) {
    let deny = |what: &[&str]| {
        let mut command = cargo(&["deny", "--log-level", "error", "check"]);
        command.args(what);
        command
    };
    let lints = ["clippy", "-q", "--all-targets", "--", "-D", "warnings"];
    let all = [
        ("cargo-fmt", suite("format", Kind::Check, cargo(&["fmt", "--all", "--check"]))),
        ("cargo-deny", suite("licences and sources", Kind::Check, deny(&["bans", "licenses", "sources"]))),
        ("cargo-deny", suite("advisories", Kind::Online, deny(&["advisories"]))),
        ("cargo-clippy", suite("clippy", Kind::Check, cargo(&lints))),
    ];
    let (mut suites, mut missing) = (Vec::new(), Vec::new());
    for (program, suite) in all {
        if find(program).is_some() {
            suites.push(suite);
        } else {
            missing.push((suite.name, program));
        }
    }
    (suites, missing)
}

fn unit_suite() -> Suite {
    let tests =
        ["test", "-q", "--no-fail-fast", "--lib", "--bins", "--", "--show-output", "--skip", "as_root"];
    suite("unit", Kind::Tests, cargo(&tests))
}

fn build() -> Result<()> {
    execute(&mut cargo(&["build", "-q", "-p", "proxy-ctl", "-p", "lab", "-p", "behaviour", "--bins"]))
}

/// Tests in network namespaces, with programs loaded into the kernel.
fn root_suites(arguments: &Arguments) -> Vec<Suite> {
    let tests = |name: &'static str, selection: &[&str]| {
        let mut command = cargo(&["test", "-q", "--no-fail-fast"]);
        command.args(selection);
        if !is_root() {
            command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", "sudo --preserve-env");
            command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", "sudo --preserve-env");
        }
        suite(name, Kind::Tests, command)
    };
    let behaviour = |name: &'static str, flags: &[&str]| {
        let mut command = as_root(built("behaviour"));
        command.args(flags);
        suite(name, Kind::Tests, command)
    };
    let mut suites = vec![
        tests("unit as root", &["-p", "proxy-ctl", "--lib", "--", "--show-output", "--ignored", "as_root"]),
        tests("proxy-ctl", &["-p", "proxy-ctl", "-p", "proxy-common", "--test", "*", "--", "--show-output"]),
        tests("packets", &["-p", "packets"]),
        tests("lab", &["-p", "lab", "--test", "cluster", "--", "--show-output"]),
        behaviour("behaviour sockets", &["--proxy", "ebpf", "--path", "sockets"]),
        behaviour("behaviour packets", &["--proxy", "ebpf", "--path", "packets"]),
        behaviour("behaviour unseen", &["--proxy", "ebpf", "--path", "unseen"]),
        behaviour("behaviour off", &["--proxy", "ebpf", "--path", "off"]),
        tests("control plane", &["-p", "control-plane", "--tests"]),
    ];
    let mut deploy = tests("deploy", &["-p", "deploy", "--test", "deploy"]);
    if deploy.name.contains(&arguments.suite) {
        println!("building an image, not optimised");
        match image::for_tests() {
            Ok(ForTests::Built(file)) => deploy.command.env("PROXY_IMAGE", file),
            // That check is skipped,
            Ok(ForTests::Impossible(error)) => deploy.command.env("PROXY_NO_IMAGE", format!("{error:#}")),
            // and fails here.
            Err(error) => deploy.command.env("PROXY_BROKEN_IMAGE", format!("{error:#}")),
        };
    }
    suites.push(deploy);
    if arguments.kube_proxy {
        suites.push(behaviour("kube-proxy iptables", &["--proxy", "kube-proxy-iptables"]));
        suites.push(behaviour("kube-proxy nftables", &["--proxy", "kube-proxy-nftables"]));
    }
    suites
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::Arguments;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn forbids(flags: &[&str], skip: &str) -> bool {
        let words = [&["test"], flags].concat();
        Command::try_parse_from(words).unwrap().arguments.forbids(skip)
    }

    #[test]
    fn what_is_skipped_is_an_error_if_nobody_has_named_it() {
        let skip = "advisories: skipped: the data it needs could not be fetched";
        assert!(!forbids(&[], skip));
        assert!(forbids(&["--strict"], skip));
        assert!(!forbids(&["--strict", "--may-skip", "advisories"], skip));
        assert!(forbids(&["--strict", "--may-skip", "packets"], skip));
        assert!(!forbids(&["--strict", "--may-skip", "packets", "--may-skip", "fetched"], skip));
        assert!(Command::try_parse_from(["test", "--may-skip", "all"]).is_err());
    }
}
