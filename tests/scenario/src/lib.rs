//! Test programs whose scenarios share one expensive world (a lab, an API server). They take the
//! command line of cargo's own harness, and print what it prints:
//! `cargo test --test NAME -- [--list] [--exact] [--skip TEXT] [TEXT]`.
//!
//! Scenarios run one after another in the main thread, in their order, because a world may move the
//! process to another network namespace. Standard output belongs to the harness. A scenario writes
//! its messages to standard error.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Result, anyhow};
pub use libtest_mimic::{Arguments, Trial};
use libtest_mimic::{Completion, Failed};

/// Outcome of a scenario that does not fail.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outcome {
    Passed,
    /// The scenario, or a part of it, was skipped. The text says which, and why.
    Skipped(String),
}

/// Error that ends a scenario as skipped. It says why.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Skip(pub String);

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Passed
    }
}

impl From<Outcome> for Completion {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Passed => Self::Completed,
            Outcome::Skipped(reason) => Self::ignored_with(reason),
        }
    }
}

type Run<W> = Box<dyn FnOnce(&mut W) -> Result<Outcome> + Send>;

pub struct Scenario<W> {
    pub name: String,
    run: Run<W>,
}

impl<W: 'static> Scenario<W> {
    pub fn new<O: Into<Outcome>>(
        name: impl Into<String>,
        run: impl FnOnce(&mut W) -> Result<O> + Send + 'static,
    ) -> Self {
        let skipped = |error: anyhow::Error| error.downcast().map(|Skip(reason)| Outcome::Skipped(reason));
        Self { name: name.into(), run: Box::new(move |world| run(world).map(Into::into).or_else(skipped)) }
    }

    /// Returns the same scenario, which first calls `prepare` with its name.
    pub fn after(self, prepare: fn(&mut W, &str) -> Result<()>) -> Self {
        let Self { name, run } = self;
        let own = name.clone();
        Self::new(name, move |world| {
            prepare(world, &own)?;
            run(world)
        })
    }
}

/// Makes a list of [`Scenario`]s from functions that take `&mut` the world and return `Result<()>`
/// or `Result<Outcome>`. The form is `name, name`, or `module: name, name;` for those of a module.
#[macro_export]
macro_rules! scenarios {
    ($($module:ident: $($name:ident),+;)+) => {
        vec![$($($crate::Scenario::new(stringify!($name), $module::$name),)+)+]
    };
    ($($name:ident),+ $(,)?) => {
        vec![$($crate::Scenario::new(stringify!($name), $name),)+]
    };
}

/// World that scenarios share. It is started for the first scenario that needs it, and dropped with
/// the last one.
pub struct Shared<W>(Arc<Mutex<State<W>>>);

/// A world, or the reason why this machine cannot have it.
pub type Started<W> = Result<W, String>;

type Start<W> = Box<dyn FnOnce() -> Result<Started<W>> + Send>;

enum State<W> {
    New(Start<W>),
    Here(W),
    Missing(String),
    Failed(String),
}

impl<W> Clone for Shared<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<W> Shared<W> {
    pub fn new(start: impl FnOnce() -> Result<Started<W>> + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(State::New(Box::new(start)))))
    }

    /// Does `work` in the world. Returns the reason if this machine cannot have the world.
    pub fn with<T>(&self, work: impl FnOnce(&mut W) -> Result<T>) -> Result<Started<T>> {
        // A scenario that panics counts as failed, and the next one may go on in its world.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::New(start) = &mut *state {
            let start = std::mem::replace(start, Box::new(|| Err(anyhow!("starting the world panicked"))));
            *state = match start() {
                Ok(Ok(world)) => State::Here(world),
                Ok(Err(reason)) => State::Missing(reason),
                Err(error) => State::Failed(format!("the world of the scenarios does not start: {error:#}")),
            };
        }
        match &mut *state {
            State::Here(world) => work(world).map(Ok),
            State::Missing(reason) => Ok(Err(reason.clone())),
            State::Failed(error) => Err(anyhow!(error.clone())),
            State::New(_) => Err(anyhow!("the world is never started")),
        }
    }
}

impl<W: Send + 'static> Shared<W> {
    /// Returns the scenarios as tests. They are skipped if there is no world.
    pub fn trials(self, scenarios: impl IntoIterator<Item = Scenario<W>>) -> Vec<Trial> {
        let trial = |Scenario { name, run }| {
            let world = self.clone();
            Trial::ignorable_test(name, move || {
                world.with(run).map(|outcome| outcome.unwrap_or_else(Outcome::Skipped).into()).map_err(failed)
            })
        };
        scenarios.into_iter().map(trial).collect()
    }
}

fn failed(error: anyhow::Error) -> Failed {
    format!("{error:#}").into()
}

/// Runs the tests that the command line chooses.
pub fn run(mut arguments: Arguments, trials: Vec<Trial>) -> ExitCode {
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Calls [`run`] for a program whose scenarios all share one world.
pub fn main<W: Send + 'static>(
    start: impl FnOnce() -> Result<Started<W>> + Send + 'static,
    scenarios: impl IntoIterator<Item = Scenario<W>>,
) -> ExitCode {
    run(Arguments::from_args(), Shared::new(start).trials(scenarios))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::bail;

    use super::*;

    /// Names of the scenarios that have begun.
    #[derive(Default)]
    struct Diary(Vec<String>);

    fn passes(_: &mut Diary) -> Result<()> {
        Ok(())
    }

    fn skips(_: &mut Diary) -> Result<Outcome> {
        Ok(Outcome::Skipped("the kernel has no ip_vs".into()))
    }

    fn skips_early(_: &mut Diary) -> Result<()> {
        Err(Skip("the kernel has no ip_vs".into()).into())
    }

    fn fails(_: &mut Diary) -> Result<()> {
        bail!("no")
    }

    fn panics(_: &mut Diary) -> Result<()> {
        panic!("on purpose")
    }

    fn knows_all_before_it(diary: &mut Diary) -> Result<()> {
        assert_eq!(diary.0, ["panics", "fails", "skips", "skips_early", "passes", "knows_all_before_it"]);
        Ok(())
    }

    fn remember(diary: &mut Diary, name: &str) -> Result<()> {
        diary.0.push(name.to_owned());
        Ok(())
    }

    fn counts(arguments: &[&str], trials: Vec<Trial>) -> (u64, u64, u64) {
        let words = ["test", "--test-threads=1", "--logfile=/dev/null"].iter().chain(arguments);
        let told = libtest_mimic::run(&Arguments::from_iter(words), trials);
        (told.num_passed, told.num_failed, told.num_ignored)
    }

    fn all() -> Vec<Scenario<Diary>> {
        scenarios![panics, fails, skips, skips_early, passes, knows_all_before_it]
    }

    #[test]
    fn each_scenario_is_judged_and_none_stops_the_others() {
        let shared = Shared::new(|| Ok(Ok(Diary::default())));
        let trials = shared.trials(all().into_iter().map(|scenario| scenario.after(remember)));
        assert_eq!(counts(&[], trials), (2, 2, 2));
    }

    #[test]
    fn without_a_world_all_are_skipped_and_a_world_that_fails_fails_all() {
        let missing = Shared::new(|| Ok(Err("needs root".into())));
        assert_eq!(counts(&[], missing.trials(all())), (0, 0, 6));
        let broken = Shared::new(|| bail!("no space left"));
        assert_eq!(counts(&[], broken.trials(all())), (0, 6, 0));
    }

    #[test]
    fn a_world_is_started_once_and_only_for_a_scenario_that_runs() {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let shared = || {
            Shared::new(|| {
                STARTED.fetch_add(1, Ordering::Relaxed);
                Ok(Ok(Diary::default()))
            })
        };
        assert_eq!(counts(&["nothing of this name"], shared().trials(all())), (0, 0, 0));
        assert_eq!(STARTED.load(Ordering::Relaxed), 0);
        assert_eq!(counts(&["--exact", "--skip=fails", "passes"], shared().trials(all())), (1, 0, 0));
        assert_eq!(STARTED.load(Ordering::Relaxed), 1);
    }
}
