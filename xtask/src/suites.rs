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

pub(crate) struct Report {
    pub(crate) count: Count,
    /// Lines that say what was skipped and why, or what failed.
    pub(crate) notes: Vec<String>,
    /// Everything that was printed.
    pub(crate) text: String,
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
        let mut report = Report {
            count: Count::default(),
            notes: Vec::new(),
            text: String::new(),
            elapsed: Duration::ZERO,
        };
        for line in child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines()) {
            let line = line.with_context(|| format!("reading what {} prints", self.name))?;
            show(self.name, &line, start);
            report.count += Count::in_line(&line).filter(|_| self.kind == Kind::Tests).unwrap_or_default();
            if is_note(&line) {
                report.notes.push(line.clone());
            }
            report.text.push_str(&line);
            report.text.push('\n');
        }
        if let Some(Ok(text)) = errors.map(thread::JoinHandle::join) {
            report.notes.extend(text.lines().filter(|line| is_note(line)).map(str::to_owned));
            report.text.push_str(&text);
        }
        let succeeded = child.wait().with_context(|| format!("waiting for {}", self.name))?.success();
        match self.kind {
            Kind::Check | Kind::Online if succeeded => report.count.passed += 1,
            Kind::Online if !report.text.contains("error[") => {
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

fn is_note(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("skipped") || line.starts_with("FAILED")
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
    use super::Count;

    #[test]
    fn counts_are_read_from_both_forms_and_from_nothing_else() {
        let cargo =
            "test result: ok. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(Count::in_line(cargo), Some(Count { passed: 12, failed: 3, skipped: 1 }));
        let ours = "behaviour[ebpf sockets]: 10 passed, 0 failed, 2 skipped (3.0 s)";
        assert_eq!(Count::in_line(ours), Some(Count { passed: 10, failed: 0, skipped: 2 }));
        assert_eq!(Count::in_line("  passed  [ebpf] a pod reaches 3 endpoints"), None);
    }
}
