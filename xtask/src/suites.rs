//! What a test suite is, and how its result is read from what it prints.

use std::{
    io::{BufRead as _, BufReader, IsTerminal as _, Write as _},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl std::ops::AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Count {
    /// From `test result: ok. 3 passed; 0 failed; 1 ignored; …` and from `name: 3 passed, 0 failed, 1 skipped`.
    fn in_line(line: &str) -> Option<Self> {
        if !line.starts_with("test result:") && !line.contains(" passed, ") {
            return None;
        }
        let mut count = Self::default();
        let mut known = false;
        let words: Vec<&str> = line.split([' ', ',', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let [number, what] = pair else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match *what {
                "passed" => count.passed = number,
                "failed" => count.failed = number,
                "skipped" | "ignored" => count.skipped = number,
                _ => continue,
            }
            known = true;
        }
        known.then_some(count)
    }
}

/// How a suite's output becomes counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// One check: its exit status.
    Check,
    /// One check that needs the network: skipped where that fails.
    Online,
    /// Summaries of cargo's test harness or of ours.
    Tests,
}

pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) command: Command,
}

#[derive(Default)]
pub(crate) struct Report {
    pub(crate) count: Count,
    /// Lines that say what was skipped and why, or what failed.
    pub(crate) notes: Vec<String>,
    /// The test of cargo's harness whose output comes, until it says that it is skipped.
    test: Option<String>,
    /// What comes was printed by tests that passed, or names them.
    of_successes: bool,
    /// Tests that say that they are skipped, and have passed for cargo's harness.
    passed_for_cargo: u64,
    /// Standard output, but for what is about tests that passed.
    pub(crate) text: String,
    /// Standard error.
    pub(crate) errors: String,
    pub(crate) elapsed: Duration,
}

impl Suite {
    /// Runs it; on a terminal the line below shows what it is at.
    pub(crate) fn run(mut self) -> Result<Report> {
        let start = Instant::now();
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", crate::command::describe(&self.command)))?;
        let errors = child.stderr.take().map(|stderr| {
            thread::spawn(move || {
                BufReader::new(stderr).lines().map_while(Result::ok).collect::<Vec<_>>().join("\n")
            })
        });
        let mut report = Report::default();
        for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let line = line.with_context(|| format!("reading what {} prints", self.name))?;
            show(self.name, &line, start);
            report.take(&line, self.kind);
        }
        if let Some(Ok(text)) = errors.map(thread::JoinHandle::join) {
            report.notes.extend(text.lines().filter(|line| is_note(line)).map(str::trim).map(str::to_owned));
            report.errors = text;
        }
        report.count.passed = report.count.passed.saturating_sub(report.passed_for_cargo);
        report.count.skipped += report.passed_for_cargo;
        let succeeded = child.wait().with_context(|| format!("waiting for {}", self.name))?.success();
        match self.kind {
            Kind::Check | Kind::Online if succeeded => report.count.passed += 1,
            Kind::Online if !report.errors.contains("error[") && !report.text.contains("error[") => {
                report.count.skipped += 1;
                report.notes.push("skipped: the data it needs could not be fetched".into());
            }
            Kind::Check | Kind::Online => report.count.failed += 1,
            Kind::Tests if !succeeded && report.count.failed == 0 => report.count.failed += 1,
            Kind::Tests => {}
        }
        report.elapsed = start.elapsed();
        clear();
        Ok(report)
    }
}

impl Report {
    /// What was skipped, and why.
    pub(crate) fn skips(&self) -> impl Iterator<Item = &str> {
        self.notes.iter().map(String::as_str).filter(|note| note.starts_with(SKIPPED))
    }

    /// A line of standard output.
    fn take(&mut self, line: &str, kind: Kind) {
        self.of_successes = match line {
            "successes:" => true,
            "failures:" => false,
            _ => self.of_successes && !line.starts_with("test result:"),
        };
        if kind == Kind::Tests && !self.of_successes {
            self.count += Count::in_line(line).unwrap_or_default();
        }
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.test = Some(name.to_owned());
        } else if let Some(reason) = line.strip_prefix("skipped: ") {
            if let Some(name) = self.test.take() {
                self.passed_for_cargo += 1;
                self.notes.push(format!("{SKIPPED} {name}: {reason}"));
            }
        } else if is_note(line) && !self.of_successes {
            self.notes.push(line.trim().to_owned());
        }
        if !self.of_successes {
            self.text.push_str(line);
            self.text.push('\n');
        }
    }
}

const SKIPPED: &str = "skipped";

fn is_note(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with(SKIPPED) || line.starts_with("FAILED")
}

/// The line that shows what is going on, cut to the width of a terminal.
fn show(suite: &str, line: &str, start: Instant) {
    if std::io::stderr().is_terminal() {
        let text: String =
            format!("{suite} ({} s) {}", start.elapsed().as_secs(), line.trim()).chars().take(98).collect();
        eprint!("\r\x1b[K{text}");
        // A line that does not appear is no failure of a test.
        let _shown = std::io::stderr().flush();
    }
}

fn clear() {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
}

#[cfg(test)]
mod tests {
    use super::{Count, Kind, Report};

    #[test]
    fn counts_are_read_from_both_forms_and_from_nothing_else() {
        let cargo =
            "test result: ok. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(Count::in_line(cargo), Some(Count { passed: 12, failed: 3, skipped: 1 }));
        let ours = "behaviour[ebpf sockets]: 10 passed, 0 failed, 2 skipped (3.0 s)";
        assert_eq!(Count::in_line(ours), Some(Count { passed: 10, failed: 0, skipped: 2 }));
        assert_eq!(Count::in_line("  passed  [ebpf] a pod reaches 3 endpoints"), None);
    }

    #[test]
    fn a_skip_is_told_by_name_also_where_the_harness_counts_it_as_passed() {
        let mut report = Report::default();
        for line in [
            "  skipped [ebpf] a case: no such kernel",
            "successes:",
            "---- links::survive stdout ----",
            "some words",
            "skipped: needs root",
            "skipped: needs root",
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ] {
            report.take(line, Kind::Tests);
        }
        let skips: Vec<&str> = report.skips().collect();
        assert_eq!(skips, ["skipped [ebpf] a case: no such kernel", "skipped links::survive: needs root"]);
        assert_eq!((report.count.passed, report.passed_for_cargo), (3, 1));
    }

    #[test]
    fn what_tests_that_passed_print_is_no_result() {
        let mut report = Report::default();
        for line in [
            "successes:",
            "---- a::runner::counts stdout ----",
            "  FAILED  a case of its own: no",
            "its scenarios: 1 passed, 1 failed, 0 skipped (0.0 s)",
            "successes:",
            "    a::runner::counts",
            "failures:",
            "---- b stdout ----",
            "panicked at b.rs",
            "failures:",
            "    b",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ] {
            report.take(line, Kind::Tests);
        }
        assert_eq!(report.notes, [""; 0]);
        assert_eq!(report.count, Count { passed: 1, failed: 1, skipped: 0 });
        let told: Vec<&str> = report.text.lines().take(3).collect();
        assert_eq!(told, ["failures:", "---- b stdout ----", "panicked at b.rs"]);
        assert!(report.text.contains("test result: FAILED"));
    }
}
