//! The programs of all test suites, built by one call of cargo.
//!
//! `cargo test --test <name>` and `cargo test --bin <name>` look only at the packages that have
//! such a target. These packages enable other features of what all depend on, so that cargo would
//! build most of it anew for nearly every suite.
//!
//! Clippy is the compiler of this build. By a command of its own it would compile everything a
//! second time.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::suites::{self, Kind, Report, Suite};
use crate::command::{as_root, cargo, describe, find, output};

/// The environment variable by which proptest takes its seed.
const PROPTEST_SEED: &str = "PROPTEST_RNG_SEED";

#[derive(Debug)]
pub(crate) struct TestPrograms(Vec<TestProgram>);

/// Returns clippy, if it is that of the compiler. rustup has a program of this name even if the
/// component is missing.
pub(crate) fn clippy() -> Option<PathBuf> {
    let clippy = find("clippy-driver")?;
    let version = |command: &mut Command| output(command.arg("-vV")).ok();
    let compiler = version(&mut Command::new("rustc"))?;
    (version(Command::new(&clippy).arg("rustc"))? == compiler).then_some(clippy)
}

/// Returns what the compiler says in these messages of cargo's, in JSON, as people read it.
fn complaints(messages: &str) -> String {
    let rendered = |message: &str| {
        let message: Value = serde_json::from_str(message).ok()?;
        Some(message["message"]["rendered"].as_str()?.to_owned())
    };
    messages.lines().filter_map(rendered).collect()
}

#[derive(Debug, Eq, PartialEq)]
struct TestProgram {
    /// The kind that cargo names, such as `lib`, `bin` or `test`.
    kind: String,
    target: String,
    executable: PathBuf,
    package: PathBuf,
}

/// The programs that a suite has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Choice<'a> {
    /// The unit tests of every library.
    Libraries,
    /// The unit tests of one library.
    Library(&'a str),
    Bin(&'a str),
    Test(&'a str),
}

impl TestPrograms {
    /// Builds the programs. If clippy is installed, also reports what the lints say.
    pub(crate) fn build() -> Result<(Self, Option<Report>)> {
        let began = Instant::now();
        let clippy = clippy();
        let mut command =
            cargo(&["test", "-q", "--no-run", "--tests", "--benches", "--message-format", "json"]);
        if let Some(clippy) = &clippy {
            command.env("RUSTC_WORKSPACE_WRAPPER", clippy);
        }
        let name = describe(&command);
        let built = command.stderr(Stdio::inherit()).output().with_context(|| format!("starting {name}"))?;
        let messages = String::from_utf8_lossy(&built.stdout);
        let complaints = complaints(&messages);
        eprint!("{complaints}");
        if !built.status.success() {
            bail!("{name}: {}", built.status);
        }
        let lints = Report::of_check(complaints.is_empty(), began.elapsed());
        let programs = messages.lines().filter_map(TestProgram::in_message).collect();
        Ok((Self(programs), clippy.map(|_| lints)))
    }

    /// Returns a suite of these programs, which get `harness` as arguments.
    pub(crate) fn suite(
        &self,
        name: &'static str,
        choices: &[Choice<'_>],
        harness: &[&str],
    ) -> Result<Suite> {
        self.suite_by(|program| Command::new(program), name, choices, harness)
    }

    /// Returns a suite like [`Self::suite`] that runs as root, in network namespaces and with
    /// programs loaded into the kernel.
    pub(crate) fn suite_as_root(
        &self,
        name: &'static str,
        choices: &[Choice<'_>],
        harness: &[&str],
    ) -> Result<Suite> {
        self.suite_by(|program| as_root(program), name, choices, harness)
    }

    pub(crate) fn executable(&self, choice: Choice<'_>) -> Result<&Path> {
        let program = self.0.iter().find(|program| choice.is(program));
        Ok(&program.with_context(|| format!("cargo has built no program for {choice:?}"))?.executable)
    }

    fn suite_by(
        &self,
        command: impl Fn(&Path) -> Command,
        name: &'static str,
        choices: &[Choice<'_>],
        harness: &[&str],
    ) -> Result<Suite> {
        let mut commands = Vec::new();
        for choice in choices {
            let before = commands.len();
            for program in self.0.iter().filter(|program| choice.is(program)) {
                let mut command = command(&program.executable);
                command.arg("--show-output").args(harness);
                // cargo runs tests in this folder and with this variable.
                command.current_dir(&program.package).env("CARGO_MANIFEST_DIR", &program.package);
                // Each run has the same cases, so that none fails by chance. Another seed has
                // others.
                if env::var_os(PROPTEST_SEED).is_none() {
                    command.env(PROPTEST_SEED, "1");
                }
                commands.push(command);
            }
            if commands.len() == before {
                bail!("suite {name}: cargo has built no program for {choice:?}");
            }
        }
        Ok(Suite { name, kind: Kind::Tests, commands, limit: suites::LIMIT })
    }
}

impl Choice<'_> {
    fn is(&self, program: &TestProgram) -> bool {
        match self {
            Self::Libraries => program.kind == "lib",
            Self::Library(name) => program.kind == "lib" && program.target == *name,
            Self::Bin(name) => program.kind == "bin" && program.target == *name,
            Self::Test(name) => program.kind == "test" && program.target == *name,
        }
    }
}

impl TestProgram {
    /// Reads one of cargo's messages. Returns `None` if it is not about a test program.
    fn in_message(line: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_test = message["profile"]["test"].as_bool()?;
        let package = Path::new(message["manifest_path"].as_str()?).parent()?;
        let target = &message["target"];
        let program = Self {
            kind: target["kind"][0].as_str()?.to_owned(),
            target: target["name"].as_str()?.to_owned(),
            executable: message["executable"].as_str()?.into(),
            package: package.to_owned(),
        };
        is_test.then_some(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_those_that_cargo_has_built_with_a_harness() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/lab/Cargo.toml","target":{{"kind":["test"],"name":"cluster"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let program = TestProgram {
            kind: "test".into(),
            target: "cluster".into(),
            executable: "/w/target/cluster-1".into(),
            package: "/w/lab".into(),
        };
        assert_eq!(TestProgram::in_message(&message(true, r#""/w/target/cluster-1""#)), Some(program));
        assert_eq!(TestProgram::in_message(&message(false, r#""/w/target/cluster-1""#)), None);
        assert_eq!(TestProgram::in_message(&message(true, "null")), None);
        assert_eq!(TestProgram::in_message(r#"{"reason":"build-finished","success":true}"#), None);
    }

    #[test]
    fn messages_of_the_compiler_are_complaints() {
        let messages = r#"{"reason":"compiler-artifact","executable":null}
            {"reason":"compiler-message","message":{"level":"warning","rendered":"warning: useless use of `vec!`"}}"#;
        assert_eq!(complaints(messages), "warning: useless use of `vec!`");
    }

    #[test]
    fn a_suite_without_a_program_is_an_error() {
        let error = TestPrograms(Vec::new()).suite("lab", &[Choice::Test("cluster")], &[]).err().unwrap();
        assert!(
            error.to_string().contains(r#"suite lab: cargo has built no program for Test("cluster")"#),
            "{error}"
        );
    }
}
