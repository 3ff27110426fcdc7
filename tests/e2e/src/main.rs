//! Runs Kubernetes's tests of sig-network with each proxy: `ebpf: [sig-network] Services should …`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Parser;
use e2e::{
    addresses::NodeNumber,
    cluster::Cluster,
    ginkgo::{self, Limits, Verdict, Verdicts},
    home, image, node, programs,
    proxy::Setting,
    selection,
    table::{self, Record},
};
use scenario::{Outcome, Scenario, Shared, Started, Trial};

// clap names a group of arguments after its struct, and the harness has `Arguments`.
#[derive(Parser)]
struct Selection {
    #[command(flatten)]
    harness: scenario::Arguments,
    /// Build the programs that are missing, and run no test
    #[arg(long)]
    build: bool,
    /// Write docs/conformance.md from the results that runs with --all have kept, and run no test
    #[arg(long)]
    table: bool,
    /// Run all tests that need no cloud instead of the conformance tests, with each proxy unless
    /// --proxy names some
    #[arg(long)]
    all: bool,
    /// Proxies to test [default: ebpf]
    #[arg(long, value_enum)]
    proxy: Vec<Setting>,
    /// Nodes of the cluster; they are in three zones [default: 3, with --all 6]
    #[arg(long)]
    nodes: Option<NodeNumber>,
    /// Be the first process of the node that this file describes, in namespaces that are made
    /// already
    #[arg(long, value_name = "FILE", hide = true)]
    node: Option<PathBuf>,
    /// The number of tests that run at once
    #[arg(long, default_value_t = 6)]
    procs: u8,
}

const CONFORMANCE_LIMIT: Duration = Duration::from_mins(15);
const ALL_LIMIT: Duration = Duration::from_hours(2);

fn main() -> ExitCode {
    match run(Selection::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Selection) -> Result<ExitCode> {
    if let Some(plan) = &arguments.node {
        return node::run(plan).map(|()| ExitCode::SUCCESS);
    }
    if arguments.table {
        return write_table();
    }
    if arguments.build {
        let build = Scenario::new("programs_are_built", |(): &mut ()| build());
        return Ok(scenario::run(arguments.harness, Shared::new(|| Ok(Ok(()))).trials([build])));
    }
    home::remove_on_signals()?;
    let settings = match (&arguments.proxy[..], arguments.all) {
        ([], false) => vec![Setting::Ebpf],
        ([], true) => Setting::TABLE.to_vec(),
        (named, _) => named.to_vec(),
    };
    // Only the test binary knows the names of the other tests.
    let (names, not_here) = match arguments.all && missing().is_none() {
        true => selection::all(&ginkgo::names()?),
        false => (selection::conformance(), BTreeMap::new()),
    };
    let mut trials = vec![list_is_that_of_the_binary()];
    for setting in settings {
        trials.extend(trials_of(setting, &arguments, &names, &not_here));
    }
    Ok(scenario::run(arguments.harness, trials))
}

/// Builds all programs, and downloads what images take from the sources of Kubernetes.
fn build() -> Result<Outcome> {
    if let Some(reason) = programs::provide_reference()? {
        return Ok(Outcome::Skipped(reason));
    }
    programs::build()?;
    programs::kubernetes_sources()?;
    Ok(Outcome::Passed)
}

/// Writes the page. The results of proxies that were not tested here are those of an earlier page,
/// which are in the repository.
fn write_table() -> Result<ExitCode> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let published = docs.join("conformance");
    for (setting, record) in table::kept(&results()?)? {
        record.keep(&published, setting)?;
    }
    let page = table::page(&table::kept(&published)?)?;
    let file = docs.join("conformance.md");
    fs::write(&file, page).with_context(|| format!("writing {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the folder with results, and with logs of tests that failed.
fn results() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding the running program")?;
    let target = own.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
    Ok(target.context("the running program is in no target folder of cargo")?.join("e2e"))
}

fn list_is_that_of_the_binary() -> Trial {
    let world = Shared::new(|| Ok(missing().map_or(Ok(()), Err)));
    let scenario =
        Scenario::new("the list of conformance tests is that of the test binary", |(): &mut ()| {
            selection::check(&ginkgo::names()?)
        });
    let mut trials = world.trials([scenario]);
    trials.remove(0)
}

/// Returns the reason why no cluster can be made here, if there is one.
fn missing() -> Option<String> {
    if let Some(program) = programs::missing() {
        return Some(format!("{program} and others are built by cargo xtask test --suite e2e"));
    }
    if !programs::reference_is_built() {
        return Some(
            "the real Kubernetes is not built: it is built by cargo xtask test --suite e2e".to_owned(),
        );
    }
    for program in ["containerd", "ctr", "runc"] {
        if control_plane::go::on_path(program).is_none() {
            return Some(format!("{program} is not installed: cargo xtask setup installs it"));
        }
    }
    if !Path::new(node::NETWORK_PLUGINS).join("ptp").exists() {
        return Some(format!("there are no network plugins in {}", node::NETWORK_PLUGINS));
    }
    if let Some(tool) = image::missing_tool() {
        return Some(format!("{tool} is not installed: cargo xtask setup installs it"));
    }
    (!nix::unistd::geteuid().is_root()).then(|| "namespaces need root".to_owned())
}

/// Makes the tests with one proxy. One run of ginkgo has all of them, and the first test that asks
/// starts it.
fn trials_of(
    setting: Setting,
    arguments: &Selection,
    names: &BTreeSet<String>,
    not_here: &BTreeMap<String, &'static str>,
) -> Vec<Trial> {
    let title = move |name: &str| format!("{setting}: {name}");
    let chosen: BTreeSet<String> =
        names.iter().filter(|name| is_asked_for(&arguments.harness, &title(name))).cloned().collect();
    let plan = Plan {
        setting,
        nodes: arguments.nodes.unwrap_or(if arguments.all { 6 } else { 3 }),
        limits: Limits {
            at_once: arguments.procs,
            time: if arguments.all { ALL_LIMIT } else { CONFORMANCE_LIMIT },
        },
        is_whole: arguments.all && chosen.len() == names.len(),
        names: chosen,
        not_here: not_here.iter().map(|(name, why)| (name.clone(), (*why).to_owned())).collect(),
    };
    let verdicts = Shared::new(move || plan.run());
    verdicts.trials(names.iter().map(|name| {
        let name = name.clone();
        Scenario::new(title(&name), move |verdicts: &mut Verdicts| judge(verdicts.get(&name)))
    }))
}

/// Returns true if the harness is going to run the test of this title.
fn is_asked_for(harness: &scenario::Arguments, title: &str) -> bool {
    let meets = |text: &String| if harness.exact { title == text } else { title.contains(text.as_str()) };
    harness.filter.as_ref().is_none_or(meets) && !harness.skip.iter().any(meets)
}

fn judge(verdict: Option<&Verdict>) -> Result<Outcome> {
    match verdict {
        Some(Verdict::Passed { .. }) => Ok(Outcome::Passed),
        Some(Verdict::Skipped { reason }) => {
            Ok(Outcome::Skipped(reason.lines().collect::<Vec<_>>().join(" ")))
        }
        Some(Verdict::Failed { message }) => Err(anyhow!(message.clone())),
        None => bail!("ginkgo has not run it"),
    }
}

/// Tests that are run with one proxy.
struct Plan {
    setting: Setting,
    nodes: NodeNumber,
    limits: Limits,
    names: BTreeSet<String>,
    /// True if these are all tests that can be run here. Their results are then kept.
    is_whole: bool,
    not_here: BTreeMap<String, String>,
}

impl Plan {
    fn run(self) -> Result<Started<Verdicts>> {
        if let Some(reason) = missing() {
            return Ok(Err(reason));
        }
        let logs = results()?.join(self.setting.name());
        let mut cluster = Cluster::start(self.setting, self.nodes)?;
        eprintln!("{}: {} tests on {} nodes", self.setting, self.names.len(), self.nodes);
        let verdicts = ginkgo::run(&cluster, &self.names, self.limits);
        let failed = |verdicts: &Verdicts| self.names.iter().any(|name| judge(verdicts.get(name)).is_err());
        if verdicts.as_ref().map_or(true, failed) {
            cluster.keep_logs(&logs)?;
        }
        cluster.alive()?;
        let verdicts = verdicts?;
        if self.is_whole {
            self.record(verdicts.clone())?.keep(&results()?, self.setting)?;
        }
        Ok(Ok(verdicts))
    }

    fn record(&self, verdicts: Verdicts) -> Result<Record> {
        let kernel =
            fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's version")?;
        Ok(Record {
            kubernetes: programs::kubernetes_version()?,
            proxy: version(&self.setting.program()?)?,
            // The rest of the version names who has built the kernel.
            kernel: kernel.trim().split('-').next().unwrap_or_default().to_owned(),
            nodes: self.nodes,
            verdicts,
            not_here: self.not_here.clone(),
        })
    }
}

/// Returns the first line that a proxy prints about its version.
fn version(program: &Path) -> Result<String> {
    let output = Command::new(program).arg("--version").output().context("asking a proxy for its version")?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
}
