//! Shows each step that takes a while by one line that moves.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal as _, Read, Write as _},
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::command::describe;

/// The number of lines of a program's output that are shown when it fails.
const LAST_LINES: usize = 40;
/// The width of the line that moves.
const WIDTH: usize = 79;
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// One thing to do, by one program after the other.
pub(crate) struct Step {
    /// The words that name the step, such as `installing make and iproute2`.
    pub(crate) what: String,
    pub(crate) commands: Vec<Command>,
    /// The consequence if it cannot be done. `None` makes that an error.
    pub(crate) without: Option<&'static str>,
}

impl Step {
    pub(crate) fn new(what: impl Into<String>, commands: impl IntoIterator<Item = Command>) -> Self {
        Self { what: what.into(), commands: commands.into_iter().collect(), without: None }
    }

    /// Returns the same step, which may fail.
    pub(crate) fn or_without(self, consequence: &'static str) -> Self {
        Self { without: Some(consequence), ..self }
    }
}

/// Does one step after the other. With `verbose` the programs print what they like.
pub(crate) fn run(steps: Vec<Step>, verbose: bool) -> Result<()> {
    let count = steps.len();
    for (number, step) in (1..).zip(steps) {
        let title = format!("[{number}/{count}] {}", step.what);
        match (run_step(&title, step.commands, verbose), step.without) {
            (Err(error), Some(consequence)) => eprintln!("      not possible ({error:#}); {consequence}"),
            (done, _) => done?,
        }
    }
    Ok(())
}

fn run_step(title: &str, commands: Vec<Command>, verbose: bool) -> Result<()> {
    let start = Instant::now();
    let moves = !verbose && io::stderr().is_terminal();
    if !moves {
        eprintln!("{title}");
    }
    for mut command in commands {
        if verbose {
            crate::command::run(&mut command)?;
        } else {
            watch(&mut command, |seen| {
                if moves {
                    show(&line(title, seen, start.elapsed()));
                }
            })?;
        }
    }
    let took = time(start.elapsed());
    if moves {
        show("");
        eprintln!("{title}: {took}");
    } else {
        eprintln!("      {took}");
    }
    Ok(())
}

/// Runs a program, and calls `look` with the newest count in its output, each second at least. If
/// it fails, the error has its last lines.
fn watch(command: &mut Command, mut look: impl FnMut(Option<Count>)) -> Result<()> {
    let name = describe(command);
    // By default cargo shows its progress only on a terminal. The second variable limits the length
    // of a line.
    command.env("CARGO_TERM_PROGRESS_WHEN", "always").env("CARGO_TERM_PROGRESS_WIDTH", "100");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
    let (sender, lines) = mpsc::channel();
    if let Some(out) = child.stdout.take() {
        send_lines(out, sender.clone());
    }
    if let Some(errors) = child.stderr.take() {
        send_lines(errors, sender);
    }
    let (mut last, mut seen) = (VecDeque::new(), None);
    loop {
        match lines.recv_timeout(BETWEEN_LOOKS) {
            Ok(line) => {
                if let Some(count) = Count::in_line(&line) {
                    seen = Some(count);
                } else if !line.trim().is_empty() {
                    last.push_back(line);
                }
                if last.len() > LAST_LINES {
                    last.pop_front();
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        look(seen);
    }
    let status = child.wait().with_context(|| format!("waiting for {name}"))?;
    if !status.success() {
        bail!("{name}: {status}\n{}", Vec::from(last).join("\n"));
    }
    Ok(())
}

/// Sends what a program prints, until all that have the pipe open have ended. A carriage return
/// ends a line too.
fn send_lines(pipe: impl Read + Send + 'static, to: mpsc::Sender<String>) {
    thread::spawn(move || {
        let mut line = Vec::new();
        for byte in io::BufReader::new(pipe).bytes().map_while(io::Result::ok) {
            if byte != b'\n' && byte != b'\r' {
                line.push(byte);
            } else if to.send(String::from_utf8_lossy(&std::mem::take(&mut line)).into_owned()).is_err() {
                return;
            }
        }
    });
}

/// The number of crates that cargo has built, and of all.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Count {
    done: u32,
    all: u32,
}

impl Count {
    /// Reads a line such as ` Building [====> ] 12/402: serde, tokio`.
    fn in_line(line: &str) -> Option<Self> {
        let (_, rest) = line.trim_start().strip_prefix("Building [")?.split_once("] ")?;
        let (done, rest) = rest.split_once('/')?;
        let all = rest.split(|letter: char| !letter.is_ascii_digit()).next()?;
        Some(Self { done: done.parse().ok()?, all: all.parse().ok()? })
    }
}

fn line(title: &str, count: Option<Count>, elapsed: Duration) -> String {
    let count = count.map_or_else(String::new, |Count { done, all }| format!("  {done} of {all} crates"));
    format!("{title}{count}  {}", time(elapsed))
}

/// Returns minutes and seconds, such as `1:07`.
pub(crate) fn time(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

/// Cuts a text to the width of a terminal. A longer one would wrap, and the line that replaces it
/// would begin below it.
fn fit(text: &str) -> String {
    text.trim_end().chars().take(WIDTH).collect()
}

/// Shows a text instead of the line that shows progress.
pub(crate) fn show(text: &str) {
    eprint!("\r\x1b[K{}", fit(text));
    // A line that does not appear is no failure.
    let _shown = io::stderr().flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn how_far_cargo_is_stands_in_its_progress_bar() {
        let line = "    Building [=====>       ] 187/402: serde, tokio(build)";
        assert_eq!(Count::in_line(line), Some(Count { done: 187, all: 402 }));
        assert_eq!(Count::in_line("   Compiling serde v1.0.228"), None);
        assert_eq!(Count::in_line("    Building [=> ] many"), None);
    }

    #[test]
    fn the_line_that_moves_has_step_count_and_time_and_fits_a_terminal() {
        let count = Some(Count { done: 187, all: 402 });
        let told = line("[2/3] building", count, Duration::from_secs(72));
        assert_eq!(told, "[2/3] building  187 of 402 crates  1:12");
        assert_eq!(fit(&"long ".repeat(30)).chars().count(), WIDTH);
        assert_eq!(fit("padded by a harness          "), "padded by a harness");
    }

    #[test]
    fn counts_are_seen_while_a_program_runs() {
        let mut seen = Vec::new();
        let script = "printf 'Building [> ] 1/2: a\\rBuilding [=] 2/2: b\\r\\n' >&2";
        watch(&mut shell(script), |count| seen.extend(count)).unwrap();
        assert_eq!(seen.last(), Some(&Count { done: 2, all: 2 }));
    }

    #[test]
    fn a_program_that_fails_says_why_with_its_last_lines() {
        let error = watch(&mut shell("echo fine; echo broken >&2; exit 3"), |_| ()).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("exit status: 3") && text.contains("broken"), "{text}");
    }

    #[test]
    fn a_step_that_fails_is_an_error_unless_there_is_a_way_without() {
        let failing = || Step::new("failing", [shell("exit 1")]);
        assert!(run(vec![failing()], false).is_err());
        assert!(run(vec![failing().or_without("a check will be skipped")], false).is_ok());
    }
}
