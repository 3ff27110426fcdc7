//! Test programs without cargo's harness: scenarios that share one expensive world run one after another, each is
//! judged and named in a line, and the last line counts them.
//!
//! `cargo test -p control-plane --test <name> [-- [--list] [part of a scenario's name]]`

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Result, anyhow};

use crate::binaries::Program;

/// What a scenario that has not failed comes to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outcome {
    Passed,
    /// Or a part of it was. Says what, and why.
    Skipped(String),
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Passed
    }
}

pub struct Scenario<W> {
    pub name: &'static str,
    pub run: fn(&mut W) -> Result<Outcome>,
}

/// A list of [`Scenario`]s from functions of these names that take `&mut` the world and answer `Result<()>` or
/// `Result<Outcome>`; `module: name, name;` for those of a module.
#[macro_export]
macro_rules! scenarios {
    ($($module:ident: $($name:ident),+;)+) => {
        vec![$($($crate::Scenario {
            name: stringify!($name),
            run: |world| $module::$name(world).map(Into::into),
        },)+)+]
    };
    ($($name:ident),+ $(,)?) => {
        vec![$($crate::Scenario { name: stringify!($name), run: |world| $name(world).map(Into::into) },)+]
    };
}

/// What the scenarios of one program share.
pub trait World: Sized {
    /// Why nothing can be tried here, if nothing can.
    fn missing() -> Option<String> {
        missing(&[Program::Etcd, Program::KubeApiServer])
    }

    /// Only called if there is a scenario to run, and nothing missing.
    fn start() -> Result<Self>;

    /// Called before each scenario with its name.
    fn enter(&mut self, _scenario: &str) -> Result<()> {
        Ok(())
    }

    /// Lines for the end.
    fn notes(&self) -> &[String] {
        &[]
    }
}

/// Which of these is not there and cannot be built.
pub fn missing(programs: &[Program]) -> Option<String> {
    programs.iter().find_map(|program| program.absent())
}

/// Does what the command line says. `title` begins the line that counts.
pub fn main<W: World>(title: &str, scenarios: Vec<Scenario<W>>) -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        for scenario in scenarios {
            println!("{}: test", scenario.name);
        }
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-')).map_or("", String::as_str);
    match run(title, scenarios, filter) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{title}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug, Default, Eq, PartialEq)]
struct Count {
    passed: usize,
    failed: usize,
    skipped: usize,
}

fn run<W: World>(title: &str, mut scenarios: Vec<Scenario<W>>, filter: &str) -> Result<bool> {
    let start = Instant::now();
    scenarios.retain(|scenario| scenario.name.contains(filter));
    let count = match W::missing() {
        _ if scenarios.is_empty() => Count::default(),
        Some(reason) => {
            for scenario in &scenarios {
                println!("  skipped {}: {reason}", scenario.name);
            }
            Count { skipped: scenarios.len(), ..Count::default() }
        }
        None => {
            let mut world = W::start()?;
            let count = run_in(&mut world, &scenarios);
            for note in world.notes() {
                println!("  measured {note}");
            }
            count
        }
    };
    let seconds = start.elapsed().as_secs_f32();
    let Count { passed, failed, skipped } = count;
    println!("{title}: {passed} passed, {failed} failed, {skipped} skipped ({seconds:.1} s)");
    Ok(failed == 0)
}

fn run_in<W: World>(world: &mut W, scenarios: &[Scenario<W>]) -> Count {
    let mut count = Count::default();
    for scenario in scenarios {
        let start = Instant::now();
        let name = scenario.name;
        match judge(scenario, world) {
            Ok(Outcome::Passed) => {
                count.passed += 1;
                println!("  passed  {name} ({:.1} s)", start.elapsed().as_secs_f32());
            }
            Ok(Outcome::Skipped(reason)) => {
                count.skipped += 1;
                println!("  skipped {name}: {reason}");
            }
            Err(error) => {
                count.failed += 1;
                println!("  FAILED  {name}: {error:#}");
            }
        }
    }
    count
}

/// A panic is a failure of the scenario, and no reason to leave processes behind.
fn judge<W: World>(scenario: &Scenario<W>, world: &mut W) -> Result<Outcome> {
    world.enter(scenario.name)?;
    catch_unwind(AssertUnwindSafe(|| (scenario.run)(world))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(anyhow!("panicked: {}", text.or_else(|| panic.downcast_ref().copied()).unwrap_or("?")))
    })
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Names of the scenarios that were begun.
    struct Diary(Vec<String>);

    impl World for Diary {
        fn missing() -> Option<String> {
            None
        }

        fn start() -> Result<Self> {
            Ok(Self(Vec::new()))
        }

        fn enter(&mut self, scenario: &str) -> Result<()> {
            self.0.push(scenario.to_owned());
            Ok(())
        }
    }

    fn passes(_: &mut Diary) -> Result<()> {
        Ok(())
    }

    fn skips(_: &mut Diary) -> Result<Outcome> {
        Ok(Outcome::Skipped("the moon is full".into()))
    }

    fn fails(_: &mut Diary) -> Result<()> {
        bail!("no")
    }

    fn panics(diary: &mut Diary) -> Result<()> {
        assert!(diary.0.is_empty(), "it is not");
        Ok(())
    }

    #[test]
    fn each_is_judged_and_none_stops_the_others() {
        let mut diary = Diary::start().unwrap();
        let all = scenarios![panics, fails, skips, passes];
        let count = run_in(&mut diary, &all);
        assert_eq!(count, Count { passed: 1, failed: 2, skipped: 1 });
        assert_eq!(diary.0, ["panics", "fails", "skips", "passes"]);
    }

    #[test]
    fn what_fails_makes_the_program_fail_unless_it_is_filtered_out() {
        assert!(!run("a", scenarios![passes, fails], "").unwrap());
        assert!(run("a", scenarios![passes, fails], "pass").unwrap());
        assert!(run("a", scenarios![passes, fails], "nothing").unwrap());
    }
}
