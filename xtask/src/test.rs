//! Runs every suite, quick ones first, and prints one line for each.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, ExitCode},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use crate::{
    command::{cargo, find, workspace},
    fresh,
    image::{self, ForTests},
    setup::{self, Purpose},
    suites::{self, Count, Kind, Report, Suite},
    test_programs::{
        Choice::{Bin, Libraries, Test},
        TestPrograms, clippy,
    },
    vm::{self, Extent, Machine},
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Also run the scenarios against the real kube-proxy
    #[arg(long)]
    kube_proxy: bool,
    /// Whole sets of scenarios in the modes nftables, iptables and userspace and on all paths of mode ebpf, and all switches, in place of
    /// small sets; those of mode ipvs are part of --all-kernels
    #[arg(long)]
    all_modes: bool,
    /// Also run all scenarios of mode ipvs, and the core ones of mode ebpf on kernels 5.10, 6.1, 6.12, the newest and arm64, in virtual machines
    #[arg(long)]
    all_kernels: bool,
    /// Of the suite `random`: how many clusters each proxy meets
    #[arg(long, default_value_t = 20)]
    clusters: u32,
    /// The number of the first of them
    #[arg(long, default_value_t = 0)]
    first: u32,
    /// What they come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only suites whose name contains this
    #[arg(long, default_value = "")]
    suite: String,
    /// Do not look for missing programs first
    #[arg(long)]
    no_setup: bool,
    /// Show all that the programs print which install what is missing
    #[arg(long)]
    verbose: bool,
    /// As on a fresh machine: HEAD in a clean clone, with nothing in any cache; all of it is removed at the end
    #[arg(long)]
    fresh: bool,
    /// What is skipped fails the run: for machines that are meant to lack nothing
    #[arg(long)]
    strict: bool,
    /// With --strict: may be skipped all the same, if its suite, name or reason contains this; for several, give it again
    #[arg(long, requires = "strict", value_name = "TEXT")]
    may_skip: Vec<String>,
}

const LAST_LINES: usize = 60;

/// Names of suites that are made in one place and asked for in another.
const KERNEL_OBJECT: &str = "kernel object";
const DEPENDENCIES: &str = "licences and sources";
const ADVISORIES: &str = "advisories";
const DEPLOY: &str = "deploy";

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.fresh {
        return fresh::run();
    }
    let start = Instant::now();
    if !arguments.no_setup {
        setup::install(&arguments.purposes(), arguments.verbose)?;
    }
    let mut total = Total::default();
    let (checks, missing) = checks();
    for (name, program) in missing {
        if total.is_asked_for(name, arguments) {
            total.skip(name, &format!("{program} is not installed"));
        }
    }
    for suite in checks {
        total.add(suite, arguments)?;
    }
    let (programs, lints) = TestPrograms::build()?;
    if let Some(lints) = lints
        && total.is_asked_for("clippy", arguments)
    {
        total.record("clippy", lints);
    }
    for suite in user_suites(&programs)? {
        total.add(suite, arguments)?;
    }
    let RootSuites { beside_each_other, alone } = root_suites(&programs, arguments)?;
    total.add_beside_each_other(beside_each_other, arguments)?;
    for suite in alone {
        total.add(suite, arguments)?;
    }
    // Every run has the machine of mode ipvs: it is lean, unless all kernels are asked for.
    let (extent, others): (_, &[Machine]) =
        if arguments.all_kernels { (Extent::Core, &vm::OTHERS) } else { (Extent::Lean, &[]) };
    for machine in std::iter::once(&vm::IPVS).chain(others) {
        total.add_machine(*machine, extent, &programs, arguments)?;
    }
    ensure!(
        total.names.iter().any(|name| name.contains(&arguments.suite)),
        "no suite has {:?} in its name; there are: {}",
        arguments.suite,
        Vec::from_iter(total.names).join(", ")
    );
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
    /// What must be installed for the suites that are asked for.
    fn purposes(&self) -> Vec<Purpose> {
        let further = [
            (Purpose::Lab, ""),
            (Purpose::Tests, ""),
            (Purpose::KernelPrograms, KERNEL_OBJECT),
            (Purpose::Dependencies, DEPENDENCIES),
            (Purpose::Dependencies, ADVISORIES),
            (Purpose::Containers, DEPLOY),
            (Purpose::Machines, vm::IPVS.name()),
        ];
        let asked_for = further.into_iter().filter(|(_, suite)| self.asks_for(suite) || suite.is_empty());
        [Purpose::Building].into_iter().chain(asked_for.map(|(purpose, _)| purpose)).collect()
    }

    fn asks_for(&self, suite: &str) -> bool {
        suite.contains(&self.suite)
    }

    fn forbids(&self, skip: &str) -> bool {
        self.strict && !self.may_skip.iter().any(|text| skip.contains(text))
    }
}

#[derive(Default)]
struct Total {
    /// Of all suites, asked for or not.
    names: BTreeSet<String>,
    count: Count,
    /// What was skipped, with its suite and the reason.
    skips: Vec<String>,
}

impl Total {
    fn is_asked_for(&mut self, name: &str, arguments: &Arguments) -> bool {
        self.names.insert(name.to_owned());
        name.contains(&arguments.suite)
    }

    /// Runs the suite, if it is asked for.
    fn add(&mut self, suite: Suite, arguments: &Arguments) -> Result<()> {
        let name = suite.name;
        if self.is_asked_for(name, arguments) {
            self.record(name, suite.run()?);
        }
        Ok(())
    }

    /// All at once, told in the order in which they end.
    fn add_beside_each_other(&mut self, suites: [Suite; 2], arguments: &Arguments) -> Result<()> {
        let (ended, reports) = mpsc::channel();
        thread::scope(|scope| {
            for suite in suites {
                if self.is_asked_for(suite.name, arguments) {
                    let ended = ended.clone();
                    // Whoever waits for the reports has failed if nobody takes this one.
                    scope.spawn(move || ended.send((suite.name, suite.run())).is_ok());
                }
            }
            drop(ended);
            reports.into_iter().try_for_each(|(name, report)| {
                self.record(name, report?);
                Ok(())
            })
        })
    }

    fn record(&mut self, name: &str, report: Report) {
        print_report(name, &report);
        self.skips.extend(report.skips.iter().map(|skip| format!("{name}: {skip}")));
        self.count += report.count;
    }

    fn skip(&mut self, name: &str, reason: &str) {
        println!("{name:<22} skipped: {reason}");
        self.count.skipped += 1;
        self.skips.push(format!("{name}: {reason}"));
    }

    /// Downloads the machine and runs its suite, if that is asked for.
    fn add_machine(
        &mut self,
        machine: Machine,
        extent: Extent,
        programs: &TestPrograms,
        arguments: &Arguments,
    ) -> Result<()> {
        let name = machine.name();
        if !self.is_asked_for(name, arguments) {
            return Ok(());
        }
        match machine.provide() {
            Ok(()) => self.add(machine.suite(extent, programs)?, arguments),
            Err(error) => {
                self.skip(name, &format!("the machine cannot be had here: {error:#}"));
                Ok(())
            }
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
    println!("{name:<22} {:<42} {:>6.1} s", report.count.to_string(), report.elapsed.as_secs_f32());
}

fn suite(name: &'static str, kind: Kind, command: Command) -> Suite {
    Suite { name, kind, commands: vec![command], limit: suites::LIMIT }
}

/// What looks at the sources only; and which checks cannot be done here, for want of which program.
fn checks() -> (Vec<Suite>, Vec<(&'static str, &'static str)>) {
    let deny = |what: &[&str]| {
        let mut command = cargo(&["deny", "--log-level", "error", "check"]);
        command.args(what);
        command
    };
    let all = [
        ("cargo-fmt", suite("format", Kind::Check, cargo(&["fmt", "--all", "--check"]))),
        ("cargo-deny", suite("licences and sources", Kind::Check, deny(&["bans", "licenses", "sources"]))),
        ("cargo-deny", suite("advisories", Kind::Online, deny(&["advisories"]))),
    ];
    let (mut suites, mut missing) = (Vec::new(), Vec::new());
    if clippy().is_none() {
        missing.push(("clippy", "the compiler's clippy-driver"));
    }
    for (program, suite) in all {
        if find(program).is_some() {
            suites.push(suite);
        } else {
            missing.push((suite.name, program));
        }
    }
    (suites, missing)
}

/// What needs no root. Programs of others are built here: later suites enter network namespaces, where nothing can be
/// downloaded, and caches belong to whom they are for.
fn user_suites(programs: &TestPrograms) -> Result<[Suite; 2]> {
    Ok([
        programs.suite("unit", &[Libraries, Bin("xtask")], &["--skip", "as_root"])?,
        programs.suite("programs of others", &[Test("programs")], &[])?,
    ])
}

/// proxy-ctl's own, by the names of their files and folders.
fn tests_of_proxy_ctl() -> Result<Vec<String>> {
    let folder = workspace().join("proxy-ctl/tests");
    let found = fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
    let names = found.map(|test| Ok(test?.path().file_stem().unwrap_or_default().display().to_string()));
    names.collect::<Result<_>>().with_context(|| format!("reading {}", folder.display()))
}

struct RootSuites {
    /// One waits nearly all the time, and one has one CPU only.
    beside_each_other: [Suite; 2],
    alone: Vec<Suite>,
}

fn root_suites(programs: &TestPrograms, arguments: &Arguments) -> Result<RootSuites> {
    let own = tests_of_proxy_ctl()?;
    let own: Vec<_> = own.iter().map(|name| Test(name)).collect();
    let behaviour =
        |name: &'static str, flags: &[&str]| programs.suite_as_root(name, &[Bin("behaviour")], flags);
    let mut packets = programs.suite_as_root("packets", &[Test("packets")], &[])?;
    if arguments.all_modes {
        for command in &mut packets.commands {
            command.env("FORGED_CLIENTS", "1000000").env("SUSTAINED_SECONDS", "60");
        }
    }
    let life_cycle = programs.suite_as_root("life cycle", &[Test("life_cycle")], &[])?;
    let mut suites = vec![
        programs.suite_as_root("unit as root", &[Libraries], &["--ignored", "as_root"])?,
        programs.suite_as_root("proxy-ctl", &own, &[])?,
        programs.suite_as_root("lab", &[Test("cluster")], &[])?,
        behaviour("behaviour sockets", &on_path(arguments, "sockets", &["--lean"]))?,
        behaviour("behaviour packets", &on_path(arguments, "packets", &["--lean"]))?,
        behaviour("behaviour unseen", &on_path(arguments, "unseen", &["--core", "--lean"]))?,
        behaviour("behaviour off", &on_path(arguments, "off", &["--core", "--lean"]))?,
        behaviour("behaviour iptables", &in_mode(arguments, "iptables"))?,
        behaviour("behaviour nftables", &in_mode(arguments, "nftables"))?,
        behaviour("behaviour userspace", &in_mode(arguments, "userspace"))?,
        programs.suite_as_root("differential", &[Bin("differential")], &differential(arguments))?,
        programs.suite_as_root("differential ebpf", &[Bin("differential")], &differential_ebpf(arguments))?,
        random(programs, arguments)?,
        programs.suite_as_root("switching", &[Bin("switching")], &switching(arguments))?,
        programs.suite_as_root("sources", &[Test("sources")], &[])?,
        programs.suite_as_root("surface", &[Test("surface")], &[])?,
        programs.suite_as_root("bench", &[Test("bench")], &[])?,
    ];
    let mut deploy = programs.suite_as_root("deploy", &[Test("deploy")], &[])?;
    if deploy.name.contains(&arguments.suite) {
        println!("building an image, not optimised");
        let (variable, value) = match image::for_tests() {
            Ok(ForTests::Built(file)) => ("PROXY_IMAGE", file.into_os_string()),
            // The test of the image is skipped for this reason.
            Ok(ForTests::Impossible(error)) => ("PROXY_NO_IMAGE", format!("{error:#}").into()),
            // The test of the image fails with this error.
            Err(error) => ("PROXY_BROKEN_IMAGE", format!("{error:#}").into()),
        };
        for command in &mut deploy.commands {
            command.env(variable, &value);
        }
    }
    suites.push(deploy);
    if arguments.kube_proxy {
        suites.push(behaviour("kube-proxy iptables", &["--proxy", "kube-proxy-iptables"])?);
        suites.push(behaviour("kube-proxy nftables", &["--proxy", "kube-proxy-nftables"])?);
    }
    Ok(RootSuites { beside_each_other: [life_cycle, packets], alone: suites })
}

/// `in_every_run`: flags that choose some of the scenarios, unless all are asked for.
fn on_path<'a>(arguments: &Arguments, path: &'a str, in_every_run: &[&'a str]) -> Vec<&'a str> {
    let chosen = if arguments.all_modes { &[] } else { in_every_run };
    [&["--path", path], chosen].concat()
}

fn in_mode(arguments: &Arguments, mode: &'static str) -> Vec<&'static str> {
    let core = (!arguments.all_modes).then_some("--core");
    ["--proxy", mode].into_iter().chain(core).collect()
}

/// Beside the real one; unless all is asked for, without mode userspace, and with one protocol of each family.
fn differential(arguments: &Arguments) -> Vec<&'static str> {
    let further: &[_] = if arguments.all_modes { &["--proxy", "userspace"] } else { &["--lean"] };
    [&["--proxy", "iptables", "--proxy", "nftables", "--kube-proxy"], further].concat()
}

/// With both source addresses: to masquerade, packets of pods are translated though the path is that of sockets.
fn differential_ebpf(arguments: &Arguments) -> Vec<&'static str> {
    let further: &[_] = if arguments.all_modes { &["--path", "packets"] } else { &["--lean"] };
    let both = ["--proxy", "ebpf", "--source", "preserve", "--source", "masquerade", "--path", "sockets"];
    [&both, further].concat()
}

/// On its clusters also every mode and path and the real kube-proxy, if asked for.
fn random(programs: &TestPrograms, arguments: &Arguments) -> Result<Suite> {
    let numbers = [
        ("--clusters", arguments.clusters.to_string()),
        ("--first", arguments.first.to_string()),
        ("--seed", arguments.seed.to_string()),
    ];
    let mut flags: Vec<&str> = numbers.iter().flat_map(|(flag, number)| [*flag, number.as_str()]).collect();
    match arguments.all_modes {
        true => flags.extend(["--path", "sockets", "--path", "packets", "--path", "unseen"]),
        false => flags.extend(["--proxy", "ebpf", "--proxy", "nftables", "--proxy", "iptables"]),
    }
    flags.extend(arguments.kube_proxy.then_some("--kube-proxy"));
    let mut suite = programs.suite_as_root("random", &[Bin("random")], &flags)?;
    // Many clusters take longer than one suite may.
    suite.limit = suite.limit.max(Duration::from_secs(60) * arguments.clusters);
    Ok(suite)
}

/// From and to the real one too; unless all is asked for, each mode once from and once to, over fewer connections.
fn switching(arguments: &Arguments) -> Vec<&'static str> {
    let lean: &[_] = if arguments.all_modes { &[] } else { &["--lean", "--connections", "200"] };
    [&["--kube-proxy"], lean].concat()
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
        let skip = "advisories: the data it needs could not be fetched";
        assert!(!forbids(&[], skip));
        assert!(forbids(&["--strict"], skip));
        assert!(!forbids(&["--strict", "--may-skip", "advisories"], skip));
        assert!(forbids(&["--strict", "--may-skip", "packets"], skip));
        assert!(!forbids(&["--strict", "--may-skip", "packets", "--may-skip", "fetched"], skip));
        assert!(Command::try_parse_from(["test", "--may-skip", "all"]).is_err());
    }
}
