//! Runs a test suite and reads its result, from the words of cargo's own harness, which all suites
//! print.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, IsTerminal as _},
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use crate::progress;

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
    /// Reads a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
    fn in_line(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let count = |what| {
            let mut counts = counts.split("; ").filter_map(|count| count.split_once(' '));
            counts.find_map(|(number, of)| (of == what).then_some(number)?.parse().ok())
        };
        Some(Self { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
    }
}

/// The time limit of one command of a suite.
pub(crate) const LIMIT: Duration = Duration::from_secs(20 * 60);
/// The limit of a suite that leaves the processors to others.
pub(crate) const LONGEST: Duration = Duration::from_secs(60 * 60);

/// The way in which a suite's output becomes counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// One check, whose result is the exit status.
    Check,
    /// One check that needs the network. It is skipped if the network fails.
    Online,
    /// Tests of cargo's harness, or of one that prints the same.
    Tests,
}

pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The commands, which run one after the other.
    pub(crate) commands: Vec<Command>,
    /// The limit of each command. A test that waits for ever fails its suite, and the other suites
    /// run.
    pub(crate) limit: Duration,
}

#[derive(Default)]
pub(crate) struct Report {
    pub(crate) count: Count,
    /// The names of what was skipped, with the reasons.
    pub(crate) skips: Vec<String>,
    /// Rows of a table that the suite prints beside its tests. They are lines that begin with `| `.
    pub(crate) table: Vec<String>,
    /// Names of the tests that failed.
    pub(crate) failures: Vec<String>,
    section: Section,
    /// The number of tests since the last summary that have passed for cargo's harness and say that
    /// they are skipped.
    skipped_of_passed: u64,
    /// The standard output, without what is about tests that passed.
    pub(crate) text: String,
    /// The standard error.
    pub(crate) errors: String,
    pub(crate) elapsed: Duration,
    /// The processor time of the suite's programs, and of those that they have waited for.
    pub(crate) processor: Duration,
}

/// The part of a test program's output that a line is in.
#[derive(Debug, Default, Eq, PartialEq)]
enum Section {
    #[default]
    Tests,
    /// The output of tests that passed. The name is that of the test that printed the line, until
    /// it says that it is skipped.
    Successes(Option<String>),
    Failures,
}

impl Suite {
    /// Returns the same suite, whose programs get what others leave of the processors.
    pub(crate) fn at_lowest_priority(self) -> Self {
        let behind = |command: Command| {
            let mut nice = Command::new("nice");
            nice.args(["-n", "19"]).arg(command.get_program()).args(command.get_args());
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => nice.env(name, value),
                    None => nice.env_remove(name),
                };
            }
            if let Some(folder) = command.get_current_dir() {
                nice.current_dir(folder);
            }
            nice
        };
        Self { commands: self.commands.into_iter().map(behind).collect(), ..self }
    }

    /// Runs the suite. On a terminal, the line below shows what it does.
    pub(crate) fn run(mut self) -> Result<Report> {
        let start = Instant::now();
        let mut report = Report::default();
        for command in std::mem::take(&mut self.commands) {
            self.run_one(command, start, &mut report)?;
        }
        report.elapsed = start.elapsed();
        clear();
        Ok(report)
    }

    fn run_one(&self, mut command: Command, start: Instant, report: &mut Report) -> Result<()> {
        let name = crate::command::describe(&command);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let (sender, lines) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            send_lines(out, sender.clone(), Line::Out);
        }
        if let Some(err) = child.stderr.take() {
            send_lines(err, sender, Line::Error);
        }
        let failed_before = report.count.failed;
        let deadline = Instant::now() + self.limit;
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Line::Out(line)) => {
                    show(self.name, &line, start);
                    match self.kind {
                        // A virtual machine ends its lines as a terminal does.
                        Kind::Tests => report.take(line.trim_end()),
                        Kind::Check | Kind::Online => report.keep(&line),
                    }
                }
                Ok(Line::Error(line)) => report.keep_error(&line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    report.keep_error(&format!("{name}: ended after {} s, the limit", self.limit.as_secs()));
                    if let Err(error) = child.kill() {
                        // The command belongs to another user, and goes on beside the other suites.
                        report.keep_error(&format!("{name}: cannot be ended: {error}"));
                        report.count.failed += 1;
                        return Ok(());
                    }
                    break;
                }
            }
        }
        report.processor += processor_time(child.id());
        let succeeded = child.wait().with_context(|| format!("waiting for {name}"))?.success();
        match self.kind {
            Kind::Check | Kind::Online if succeeded => report.count.passed += 1,
            Kind::Online if !report.errors.contains("error[") && !report.text.contains("error[") => {
                report.count.skipped += 1;
                report.skips.push("the data it needs could not be fetched".to_owned());
            }
            Kind::Check | Kind::Online => report.count.failed += 1,
            // The program died without a failed test.
            Kind::Tests if !succeeded && report.count.failed == failed_before => report.count.failed += 1,
            Kind::Tests => {}
        }
        Ok(())
    }
}

/// Returns the processor time of a process that has ended, or is about to, and of the children that
/// it has waited for.
fn processor_time(process: u32) -> Duration {
    // An unknown time counts as zero. The figure is for people who look for where time goes.
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    processor_time_in(&stat).unwrap_or_default()
}

/// Reads fields 14 to 17 of `/proc/<pid>/stat`, in hundredths of a second. They are in units of
/// USER_HZ, which is 100 for user space on every architecture that Rust knows.
fn processor_time_in(stat: &str) -> Option<Duration> {
    // The second field is the program's name in brackets, which may have spaces.
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks = fields.split(' ').skip(11).take(4).map(str::parse::<u64>);
    Some(Duration::from_millis(ticks.sum::<Result<u64, _>>().ok()? * 10))
}

enum Line {
    Out(String),
    Error(String),
}

/// Sends the lines of a pipe, until all that have it open have ended.
fn send_lines(pipe: impl io::Read + Send + 'static, to: mpsc::Sender<Line>, as_line: fn(String) -> Line) {
    thread::spawn(move || {
        let lines = BufReader::new(pipe).split(b'\n').map_while(Result::ok);
        for line in lines {
            if to.send(as_line(String::from_utf8_lossy(&line).into_owned())).is_err() {
                return;
            }
        }
    });
}

impl Report {
    /// Returns the report with `elapsed` as its time, which includes everything that was done for
    /// the suite before.
    pub(crate) fn after(self, elapsed: Duration) -> Self {
        Self { elapsed, ..self }
    }

    /// Returns the report of one thing that this machine cannot do.
    pub(crate) fn skipped(reason: &str) -> Self {
        let count = Count { skipped: 1, ..Count::default() };
        Self { count, skips: vec![reason.to_owned()], ..Self::default() }
    }

    pub(crate) fn of_check(passed: bool, elapsed: Duration) -> Self {
        let count = Count { passed: u64::from(passed), failed: u64::from(!passed), skipped: 0 };
        Self { count, elapsed, ..Self::default() }
    }

    /// Takes a line of a test program.
    fn take(&mut self, line: &str) {
        let summary = Count::in_line(line);
        self.section = match (line, std::mem::take(&mut self.section)) {
            _ if summary.is_some() => Section::Tests,
            ("successes:", _) => Section::Successes(None),
            ("failures:", _) => Section::Failures,
            (_, Section::Successes(test)) => Section::Successes(self.take_printed(line, test)),
            (_, section) => section,
        };
        if let Some(mut count) = summary {
            let skipped = std::mem::take(&mut self.skipped_of_passed);
            count.passed = count.passed.saturating_sub(skipped);
            count.skipped += skipped;
            self.count += count;
        }
        match &self.section {
            Section::Successes(_) => {}
            Section::Failures => self.keep(line),
            Section::Tests if line.starts_with('|') => self.table.push(line.to_owned()),
            Section::Tests => match line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) {
                Some((_, "ok")) => {}
                Some((name, outcome)) => self.take_outcome(name.trim(), outcome),
                None => self.keep(line),
            },
        }
    }

    fn take_outcome(&mut self, name: &str, outcome: &str) {
        if let Some(reason) = outcome.strip_prefix("ignored") {
            // cargo's own harness puts a comma before the reason, libtest-mimic brackets around it.
            let bracketed = reason.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
            let reason = bracketed.or_else(|| reason.strip_prefix(", ")).unwrap_or("no reason is given");
            self.skips.push(format!("{name}: {reason}"));
        } else if outcome == "FAILED" {
            self.failures.push(name.to_owned());
        }
    }

    /// Takes a line that a test printed that passed for cargo. The line is `skipped: <reason>` if
    /// the test did not do what it should.
    fn take_printed(&mut self, line: &str, test: Option<String>) -> Option<String> {
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            return Some(name.to_owned());
        }
        let (Some(reason), Some(name)) = (line.strip_prefix("skipped: "), &test) else { return test };
        self.skips.push(format!("{name}: {reason}"));
        self.skipped_of_passed += 1;
        None
    }

    fn keep(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn keep_error(&mut self, line: &str) {
        self.errors.push_str(line);
        self.errors.push('\n');
    }
}

/// Shows what a suite does, if somebody looks.
fn show(suite: &str, line: &str, start: Instant) {
    if io::stderr().is_terminal() {
        progress::show(&format!("{suite} ({} s) {}", start.elapsed().as_secs(), line.trim()));
    }
}

fn clear() {
    if io::stderr().is_terminal() {
        progress::show("");
    }
}

#[cfg(test)]
mod tests {
    use std::{process::Command, time::Duration};

    use super::{Count, Kind, Report, Suite, processor_time_in};

    fn read(lines: &str) -> Report {
        let mut report = Report::default();
        lines.lines().for_each(|line| report.take(line.trim_start()));
        report
    }

    #[test]
    fn counts_are_those_of_the_summaries() {
        let report = read(
            "test a ... ok
             test result: ok. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

             running 1 test
             test b ... ok
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        );
        assert_eq!(report.count, Count { passed: 13, failed: 3, skipped: 1 });
        assert_eq!(Count::in_line("test ebpf: 3 passed, by hand ... ok"), None);
    }

    #[test]
    fn a_skipped_test_is_told_by_name_and_reason_in_each_form() {
        let report = read(
            "test own ... ignored, needs ip_vs (CONFIG_IP_VS)
             test ebpf/off: a case (TCP IPv4)      ... ignored (packets stay on lo (as always))
             test without_reason ... ignored
             test links::survive ... ok

             successes:

             ---- links::survive stdout ----
             some words
             skipped: needs root
             skipped: needs root

             successes:
                 links::survive

             test result: ok. 1 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        );
        let told = [
            "own: needs ip_vs (CONFIG_IP_VS)",
            "ebpf/off: a case (TCP IPv4): packets stay on lo (as always)",
            "without_reason: no reason is given",
            "links::survive: needs root",
        ];
        assert_eq!(report.skips, told);
        assert_eq!(report.count, Count { passed: 0, failed: 0, skipped: 4 });
    }

    #[test]
    fn processor_time_is_that_of_a_process_and_its_children() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 1000 300 20 0 1 0 99";
        assert_eq!(processor_time_in(stat), Some(Duration::from_secs(15)));
        assert_eq!(processor_time_in(""), None);
        let mut command = Command::new("sh");
        command.args(["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"]);
        let limit = Duration::from_secs(60);
        let report = Suite { name: "busy", kind: Kind::Check, commands: vec![command], limit }.run().unwrap();
        assert!(
            report.processor > Duration::ZERO && report.processor <= report.elapsed * 2,
            "{:?}",
            report.processor
        );
    }

    #[test]
    fn a_suite_that_does_not_end_fails_with_what_it_has_printed() {
        let ended_after = |limit| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo 'test a has been running for over 60 seconds'; exec sleep 600"]);
            let suite = Suite { name: "endless", kind: Kind::Tests, commands: vec![command], limit };
            let report = suite.run().unwrap();
            assert_eq!(report.count, Count { passed: 0, failed: 1, skipped: 0 });
            let seconds = limit.as_secs();
            let told = format!("ended after {seconds} s, the limit");
            assert!(report.errors.contains(&told), "{}", report.errors);
            report.text
        };
        // The first limit is long enough for the shell to print, unless the machine is busy.
        let mut texts = [300, 3_000, 30_000].into_iter().map(Duration::from_millis).map(ended_after);
        assert!(
            texts.any(|text| text.contains("test a has been running")),
            "nothing that it has printed is kept"
        );
    }

    #[test]
    fn rows_of_a_table_are_kept() {
        let report = read(
            "test a ... ok
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
             | mode | failed |
             |---|---|
             | ebpf | 0 |",
        );
        assert_eq!(report.table, ["| mode | failed |", "|---|---|", "| ebpf | 0 |"]);
    }

    #[test]
    fn what_is_shown_of_a_failure_is_about_what_failed() {
        let report = read(
            "test a ... ok
             test b ... FAILED
             test c ... FAILED

             successes:

             ---- a stdout ----
             test result of its own, 1 failed

             successes:
                 a

             failures:

             ---- b stdout ----
             skipped: the rest, as this is wrong
             panicked at b.rs

             ---- c ----
             the answer is 41

             failures:
                 b
                 c
             test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        );
        assert_eq!(report.failures, ["b", "c"]);
        assert_eq!(report.skips, [""; 0]);
        assert_eq!(report.count, Count { passed: 1, failed: 2, skipped: 0 });
        assert!(report.text.contains("panicked at b.rs") && report.text.contains("the answer is 41"));
        assert!(!report.text.contains("---- a"), "{}", report.text);
    }
}
