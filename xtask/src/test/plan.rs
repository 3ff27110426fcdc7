//! The plan of a run: which suites there are, with which programs and flags, and which of them run
//! at the same time.

use std::{collections::BTreeSet, fs, process::Command, sync::OnceLock, time::Duration};

use anyhow::{Context as _, Result};

use super::{
    ADVISORIES, Arguments, DEPENDENCIES, DEPLOY, E2E, KERNEL_OBJECT,
    jobs::{Job, Room},
    programs::{
        Choice::{self, Bin, Libraries, Test},
        TestPrograms,
    },
    suites::{self, Kind, Report, Suite},
};
use crate::{
    command::{cargo, find, target, workspace},
    image::{self, ForTests},
    setup,
    vm::{self, Extent, Machine},
};

/// The suite that builds the real Kubernetes, for which most suites wait on a new machine.
const KUBERNETES: &str = "kubernetes is built";
/// The suite that builds and downloads what else is made of Go modules, for the suite `deploy`.
const TOOLS: &str = "tools are built";
/// The suite that builds kubelets and the tests of Kubernetes, for the suite `e2e`.
const E2E_PROGRAMS: &str = "e2e is built";
const IMAGE: &str = "image";
/// Suites that measure time, which nothing else runs beside.
const MEASURING: &[&str] = &["unit as root", "flood of probes", "behaviour floods"];
/// The scenario that measures, which is a suite of its own.
const FLOOD: &str = "a flood of new connections";
/// The flags that choose the scenario's variants in every run. With `--all` it runs on every path.
const FLOOD_PATHS: [&str; 5] = ["--path", "packets", "--path", "sockets", "--lean"];
const NO_FLOOD: [&str; 2] = ["--skip", FLOOD];
/// A test of proxy-ctl that is a suite of its own.
const PROBE_FLOOD: &str = "probe_flood";

/// The variables by which suites do more of the same if all is asked for.
const MORE: [(&str, &str); 4] = [
    ("CONNECTIONS_DURING_STARTS", "10000"),
    ("FORGED_CLIENTS", "1000000"),
    ("OUTAGE_SECONDS", "60"),
    ("SUSTAINED_SECONDS", "60"),
];

/// The variable of the environment by which the suite `deploy` learns what has become of the image,
/// with its value.
pub(crate) type ImageVariable = OnceLock<(&'static str, std::ffi::OsString)>;

pub(crate) struct Plan<'a> {
    arguments: &'a Arguments,
    /// Names of all suites, asked for or not.
    pub(crate) names: BTreeSet<&'static str>,
    pub(crate) jobs: Vec<Job<'a>>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(arguments: &'a Arguments) -> Self {
        Self { arguments, names: BTreeSet::new(), jobs: Vec::new() }
    }

    /// Returns true if the suite is asked for. Its name is known from now on.
    pub(crate) fn asks_for(&mut self, name: &'static str) -> bool {
        self.names.insert(name);
        self.arguments.asks_for(name)
    }

    fn add(
        &mut self,
        name: &'static str,
        room: Room,
        after: &'static [&'static str],
        run: impl FnOnce() -> Result<Report> + Send + 'a,
    ) {
        self.jobs.push(Job { name, room, after, run: Box::new(run) });
    }

    /// Adds a suite if it is asked for.
    fn suite(
        &mut self,
        name: &'static str,
        room: Room,
        after: &'static [&'static str],
        make: impl FnOnce() -> Result<Suite>,
    ) -> Result<()> {
        if self.asks_for(name) {
            let suite = make()?;
            let mut suite = if room == Room::Behind { suite.at_lowest_priority() } else { suite };
            if matches!(room, Room::Beside | Room::Behind) {
                // The suite gets only what the other suites leave of the processors.
                suite.limit = suite.limit.max(suites::LONGEST);
            }
            self.add(name, room, after, || suite.run());
        }
        Ok(())
    }

    /// Adds the suites that check the sources only.
    pub(crate) fn add_checks(&mut self) -> Result<()> {
        let check = |name, kind, command| Suite { name, kind, commands: vec![command], limit: suites::LIMIT };
        if find("cargo-fmt").is_some() {
            let format = || Ok(check("format", Kind::Check, cargo(&["fmt", "--all", "--check"])));
            self.suite("format", Room::Shared, &[], format)?;
        } else if self.asks_for("format") {
            self.add("format", Room::Shared, &[], || Ok(Report::skipped("cargo-fmt is not installed")));
        }
        // These suites run one after the other. The first installs cargo-deny, and two at once
        // would spoil its folder.
        for (name, after, kind, what) in [
            (DEPENDENCIES, &[][..], Kind::Check, &["bans", "licenses", "sources"][..]),
            (ADVISORIES, &[DEPENDENCIES], Kind::Online, &["advisories"]),
        ] {
            if !self.asks_for(name) {
                continue;
            }
            self.add(name, Room::Shared, after, move || match setup::cargo_deny() {
                Ok(program) => {
                    let mut command = Command::new(program);
                    command.args(["--log-level", "error", "check"]).args(what).current_dir(workspace());
                    check(name, kind, command).run()
                }
                Err(error) => Ok(Report::skipped(&format!("cargo-deny cannot be had here: {error:#}"))),
            });
        }
        Ok(())
    }

    /// Adds the suites that need no root. They run first, as the user who has started them, and
    /// build other projects' programs. Later suites enter network namespaces, where nothing can be
    /// downloaded. Files in the caches thus belong to that user.
    pub(crate) fn add_user_suites(&mut self, programs: &TestPrograms) -> Result<()> {
        let test = self.arguments.test.as_str();
        self.suite(KUBERNETES, Room::Beside, MEASURING, || {
            programs.suite(KUBERNETES, &[Test("programs")], &["kubernetes_is_built"])
        })?;
        let unit = [Libraries, Bin("xtask"), Bin("image")];
        self.suite("unit", Room::Shared, &[], || {
            programs.suite("unit", &unit, &["--skip", "as_root", test])
        })?;
        self.suite("rules", Room::Shared, &[], || programs.suite("rules", &[Test("rules")], &[test]))?;
        if self.asks_for(TOOLS) {
            let mut suite = programs.suite(TOOLS, &[Test("programs")], &["--skip", "kubernetes_is_built"])?;
            let all = self.arguments.all;
            suite.limit = suites::LONGEST;
            self.add(TOOLS, Room::Beside, MEASURING, move || with_tools(suite, all).run());
        }
        if self.arguments.builds_kubelets() {
            self.suite(E2E_PROGRAMS, Room::Beside, MEASURING, || {
                programs.suite(E2E_PROGRAMS, &[Bin("e2e")], &["--build"])
            })?;
        }
        self.suite(KERNEL_OBJECT, Room::Behind, MEASURING, || {
            programs.suite(KERNEL_OBJECT, &[Test("committed")], &[test])
        })
    }

    /// Adds a suite that runs in network namespaces, with programs loaded into the kernel.
    fn root_suite(
        &mut self,
        programs: &TestPrograms,
        name: &'static str,
        (room, after): (Room, &'static [&'static str]),
        choices: &[Choice<'_>],
        flags: &[&str],
    ) -> Result<()> {
        let test = self.arguments.test.as_str();
        let given = flags.iter().copied().chain([test]).filter(|word| !word.is_empty()).collect::<Vec<_>>();
        let all = self.arguments.all;
        self.suite(name, room, after, || {
            let mut suite = programs.suite_as_root(name, choices, &given)?;
            if all {
                for command in &mut suite.commands {
                    command.envs(MORE);
                }
            }
            Ok(suite)
        })
    }

    pub(crate) fn add_root_suites(
        &mut self,
        programs: &'a TestPrograms,
        image: &'a ImageVariable,
    ) -> Result<()> {
        const ALONE: (Room, &[&str]) = (Room::Alone, &[]);
        const SHARED: (Room, &[&str]) = (Room::Shared, &[]);
        const WITH_ORACLE: (Room, &[&str]) = (Room::Shared, &[KUBERNETES]);
        let arguments = self.arguments;
        let own = tests_of_proxy_ctl()?;
        let own: Vec<_> = own.iter().filter(|name| *name != PROBE_FLOOD).map(|name| Test(name)).collect();
        let as_root: &[&str] = if arguments.test.is_empty() { &["as_root"] } else { &[] };

        // Suites that need all room come first, because later the others would have to end before
        // them. Tables of legacy iptables are locked for the whole machine.
        let flags = [&["--ignored"], as_root].concat();
        self.root_suite(programs, "unit as root", ALONE, &[Libraries], &flags)?;
        // This suite gets priority over all others, and measures how soon answers come.
        self.root_suite(programs, "flood of probes", ALONE, &[Test(PROBE_FLOOD)], &[])?;
        // This suite measures how soon others are served beside a flood.
        let mut flags = if arguments.all { Vec::new() } else { FLOOD_PATHS.to_vec() };
        flags.extend(arguments.test.is_empty().then_some(FLOOD));
        self.root_suite(programs, "behaviour floods", ALONE, &[Bin("behaviour")], &flags)?;
        // The longest suite begins early.
        self.root_suite(programs, "life cycle", WITH_ORACLE, &[Test("life_cycle")], &[])?;
        let room = if arguments.all { Room::Alone } else { Room::Shared };
        self.root_suite(programs, "packets", (room, &[]), &[Test("packets")], &[])?;
        self.add_soak(programs)?;
        for (name, path) in [("behaviour unseen", "unseen"), ("behaviour off", "off")] {
            let flags = [on_path(arguments, path, &["--core", "--lean"]), NO_FLOOD.to_vec()].concat();
            self.root_suite(programs, name, SHARED, &[Bin("behaviour")], &flags)?;
        }
        for (name, mode) in [
            ("behaviour iptables", "iptables"),
            ("behaviour nftables", "nftables"),
            ("behaviour userspace", "userspace"),
        ] {
            self.root_suite(programs, name, SHARED, &[Bin("behaviour")], &in_mode(arguments, mode))?;
        }
        self.root_suite(programs, "proxy-ctl", SHARED, &own, &[])?;
        self.root_suite(programs, "lab", SHARED, &[Test("cluster")], &[])?;
        self.add_random(programs)?;
        self.add_machine(vm::IPVS, programs)?;
        // The way back to the real kube-proxy is part of these two suites.
        for (name, path) in [("behaviour packets", "packets"), ("behaviour sockets", "sockets")] {
            let flags = [on_path(arguments, path, &["--lean"]), NO_FLOOD.to_vec()].concat();
            self.root_suite(programs, name, WITH_ORACLE, &[Bin("behaviour")], &flags)?;
        }
        let flags = differential(arguments);
        self.root_suite(programs, "differential", WITH_ORACLE, &[Bin("differential")], &flags)?;
        let flags = differential_ebpf(arguments);
        self.root_suite(programs, "differential ebpf", SHARED, &[Bin("differential")], &flags)?;
        let flags = switching(arguments);
        self.root_suite(programs, "switching", WITH_ORACLE, &[Bin("switching")], &flags)?;
        self.root_suite(programs, "sources", WITH_ORACLE, &[Test("sources")], &[])?;
        self.root_suite(programs, "surface", WITH_ORACLE, &[Test("surface")], &[])?;
        self.root_suite(programs, "topology", WITH_ORACLE, &[Test("topology")], &[])?;
        self.add_deploy(programs, image)?;
        if arguments.all {
            for (name, proxy) in [
                ("kube-proxy iptables", "kube-proxy-iptables"),
                ("kube-proxy nftables", "kube-proxy-nftables"),
            ] {
                self.root_suite(programs, name, WITH_ORACLE, &[Bin("behaviour")], &["--proxy", proxy])?;
            }
        }
        if arguments.all_kernels {
            for machine in vm::OTHERS {
                self.add_machine(machine, programs)?;
            }
        }
        Ok(())
    }

    /// Adds the suite that measures, which takes all room when the others have ended. It must be
    /// added last.
    pub(crate) fn add_bench(&mut self, programs: &TestPrograms) -> Result<()> {
        self.root_suite(programs, "bench", (Room::Alone, &[KUBERNETES]), &[Test("bench")], &[])
    }

    /// Adds Kubernetes's own tests. They run alone, because they measure how soon endpoints are
    /// served.
    pub(crate) fn add_e2e(&mut self, programs: &TestPrograms) -> Result<()> {
        let Arguments { all, test, .. } = self.arguments;
        self.suite(E2E, Room::Alone, &[KUBERNETES, E2E_PROGRAMS], || {
            let flags: Vec<&str> = all.then_some("--all").into_iter().chain([test.as_str()]).collect();
            let mut suite = programs.suite_as_root(E2E, &[Bin("e2e")], &flags)?;
            if *all {
                suite.limit = suites::LONGEST * 4;
            }
            Ok(suite)
        })
    }

    /// Adds the suite of flows that end in all ways, and of floods beside connections that go on.
    /// With `--all` it takes about 40 minutes of a machine that does nothing else.
    fn add_soak(&mut self, programs: &TestPrograms) -> Result<()> {
        let Arguments { all, test, .. } = self.arguments;
        let room = if *all { Room::Alone } else { Room::Shared };
        self.suite("soak and floods", room, &[], || {
            let flags = all.then_some("--full").into_iter().chain([test.as_str()]);
            let flags: Vec<&str> = flags.filter(|word| !word.is_empty()).collect();
            let mut suite = programs.suite_as_root("soak and floods", &[Bin("floods")], &flags)?;
            if *all {
                suite.limit = suites::LONGEST;
            }
            Ok(suite)
        })
    }

    /// Adds the suite of random clusters. If all is asked for, every mode and path and the real
    /// kube-proxy serve its clusters.
    fn add_random(&mut self, programs: &TestPrograms) -> Result<()> {
        let Arguments { all, clusters, first, seed, test, .. } = self.arguments;
        let numbers = [
            ("--clusters", clusters.to_string()),
            ("--first", first.to_string()),
            ("--seed", seed.to_string()),
        ];
        let mut flags: Vec<&str> =
            numbers.iter().flat_map(|(flag, number)| [*flag, number.as_str()]).collect();
        if *all {
            flags.extend(["--path", "sockets", "--path", "packets", "--path", "unseen", "--kube-proxy"]);
        } else {
            flags.extend(["--proxy", "ebpf", "--proxy", "nftables", "--proxy", "iptables"]);
        }
        flags.push(test);
        let after: &[_] = if *all { &[KUBERNETES] } else { &[] };
        self.suite("random", Room::Shared, after, || {
            let mut suite = programs.suite_as_root("random", &[Bin("random")], &flags)?;
            // Many clusters take longer than one suite may.
            suite.limit = suite.limit.max(Duration::from_mins(1) * *clusters);
            Ok(suite)
        })
    }

    fn add_deploy(&mut self, programs: &'a TestPrograms, image: &'a ImageVariable) -> Result<()> {
        if !self.asks_for(DEPLOY) {
            return Ok(());
        }
        // The program that the tests have built is enough, unless all is asked for, because users
        // get the static one.
        let linked = (!self.arguments.all).then(|| target().join("debug/proxy-ctl"));
        self.add(IMAGE, Room::Behind, MEASURING, move || {
            let variable = match image::for_tests(linked.as_deref()) {
                Ok(ForTests::Built(file)) => ("PROXY_IMAGE", file.into_os_string()),
                // The test of the image is skipped for this reason.
                Ok(ForTests::Impossible(reason)) => ("PROXY_NO_IMAGE", reason.into()),
                // The test of the image fails with this error.
                Err(error) => ("PROXY_BROKEN_IMAGE", format!("{error:#}").into()),
            };
            image.get_or_init(|| variable);
            Ok(Report::default())
        });
        let mut suite = programs.suite_as_root(DEPLOY, &[Test("deploy")], &[&self.arguments.test])?;
        let all = self.arguments.all;
        self.add(DEPLOY, Room::Shared, &[KUBERNETES, TOOLS, IMAGE], move || {
            let (variable, value) = image.get().context("the image was not built before the suite deploy")?;
            for command in &mut suite.commands {
                command.env(variable, value);
            }
            with_tools(suite, all).run()
        });
        Ok(())
    }

    /// Adds a machine. Every run has the machine of mode ipvs, which is lean unless all kernels are
    /// asked for.
    fn add_machine(&mut self, machine: Machine, programs: &'a TestPrograms) -> Result<()> {
        let name = machine.name();
        if !self.asks_for(name) {
            return Ok(());
        }
        let arguments = self.arguments;
        let extent = if arguments.all_kernels { Extent::Core } else { Extent::Lean };
        self.add(name, Room::Behind, MEASURING, move || {
            if arguments.all_kernels && machine.has_passed()? {
                return Ok(Report::skipped(
                    "it has passed with this commit; rm -r target/vm/passed runs it again",
                ));
            }
            if let Err(error) = machine.provide() {
                return Ok(Report::skipped(&format!("the machine cannot be had here: {error:#}")));
            }
            let report = machine.suite(extent, programs, &arguments.test)?.run()?;
            if arguments.all_kernels && arguments.test.is_empty() && report.count.failed == 0 {
                machine.note_that_it_has_passed()?;
            }
            Ok(report)
        });
        Ok(())
    }
}

/// Passes the paths of helm and promtool to a suite. The suite builds a tool whose path it does not
/// get. With `all` it builds helm too, in its newest version, which no package has.
fn with_tools(mut suite: Suite, all: bool) -> Suite {
    let helm = (!all).then(|| ("HELM", setup::helm()));
    for (variable, program) in helm.into_iter().chain([("PROMTOOL", setup::promtool())]) {
        match program {
            Ok(program) => {
                for command in &mut suite.commands {
                    command.env(variable, &program);
                }
            }
            Err(error) => eprintln!("{variable} is built, as it cannot be had here: {error:#}"),
        }
    }
    suite
}

/// Returns proxy-ctl's own tests, by the names of their files and folders.
fn tests_of_proxy_ctl() -> Result<Vec<String>> {
    let folder = workspace().join("proxy-ctl/tests");
    let found = fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?;
    let names = found.map(|test| Ok(test?.path().file_stem().unwrap_or_default().display().to_string()));
    names.collect::<Result<_>>().with_context(|| format!("reading {}", folder.display()))
}

/// Returns the flags for tests on `path`. `in_every_run` are further flags, which choose some of
/// the scenarios. They are left out with `--all`.
fn on_path<'a>(arguments: &Arguments, path: &'a str, in_every_run: &[&'a str]) -> Vec<&'a str> {
    let chosen = if arguments.all { &[] } else { in_every_run };
    [&["--path", path], chosen].concat()
}

fn in_mode(arguments: &Arguments, mode: &'static str) -> Vec<&'static str> {
    let core = (!arguments.all).then_some("--core");
    ["--proxy", mode].into_iter().chain(core).collect()
}

/// Returns the flags for a comparison with the real kube-proxy. Unless all is asked for, mode
/// userspace is left out, and each family has one protocol.
fn differential(arguments: &Arguments) -> Vec<&'static str> {
    let further: &[_] = if arguments.all { &["--proxy", "userspace"] } else { &["--lean"] };
    [&["--proxy", "iptables", "--proxy", "nftables", "--kube-proxy"], further].concat()
}

/// Returns the flags for both source addresses. To masquerade, packets of pods are translated even
/// on the path of sockets.
fn differential_ebpf(arguments: &Arguments) -> Vec<&'static str> {
    let further: &[_] = if arguments.all { &["--path", "packets"] } else { &["--lean"] };
    let both = ["--proxy", "ebpf", "--source", "preserve", "--source", "masquerade", "--path", "sockets"];
    [&both, further].concat()
}

/// Returns the flags for switches, from and to the real kube-proxy too. Unless all is asked for,
/// each mode is left once and entered once, over fewer connections.
fn switching(arguments: &Arguments) -> Vec<&'static str> {
    let lean: &[_] = if arguments.all { &[] } else { &["--lean", "--connections", "200"] };
    [&["--kube-proxy"], lean].concat()
}
