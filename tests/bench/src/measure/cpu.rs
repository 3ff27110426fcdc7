//! Measures processor time.
//!
//! The kernel charges the work of a software interrupt to the process that happens to run, or to
//! none, and to no cgroup. So this asks how long the whole machine was not idle, which the kernel
//! counts exactly. What the machine does without the load is subtracted.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

/// Rate of the clock ticks that the kernel shows to programs, on every architecture that proxy-ctl
/// is built for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Measures how busy the machine is from one moment to another.
pub(crate) struct Watch {
    begun: Instant,
    counted: Counted,
}

/// Seconds that all cores together have spent in a state.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counted {
    idle: f64,
    /// Time that other virtual machines have taken.
    stolen: f64,
    cores: usize,
}

impl Counted {
    fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        Self::parse(&text).context("no cpu in /proc/stat")
    }

    fn parse(stat: &str) -> Option<Self> {
        let ticks: Vec<f64> = stat
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_whitespace()
            .map_while(|n| n.parse().ok())
            .collect();
        let of_core = |line: &&str| {
            line.strip_prefix("cpu")
                .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        };
        Some(Self {
            idle: (ticks.get(3)? + ticks.get(4)?) / TICKS_PER_SECOND,
            stolen: ticks.get(7).copied().unwrap_or(0.0) / TICKS_PER_SECOND,
            cores: stat.lines().filter(of_core).count(),
        })
    }
}

impl Watch {
    pub(crate) fn begin() -> Result<Self> {
        Ok(Self { counted: Counted::now()?, begun: Instant::now() })
    }

    /// Returns seconds of processor time, and seconds of the clock.
    fn end(self) -> Result<(f64, f64)> {
        let (elapsed, now) = (self.begun.elapsed().as_secs_f64(), Counted::now()?);
        Ok((busy(self.counted, now, elapsed), elapsed))
    }
}

fn busy(before: Counted, after: Counted, elapsed: f64) -> f64 {
    let all = after.cores as f64 * elapsed;
    (all - (after.idle - before.idle) - (after.stolen - before.stolen)).max(0.0)
}

pub(crate) struct Load<T> {
    /// Seconds of processor time beyond what the machine takes in the same time without the load.
    pub(crate) seconds: f64,
    /// Share of all cores, from 0 to 1, that was busy without the load.
    pub(crate) busy_at_rest: f64,
    pub(crate) done: T,
}

pub(crate) fn of_load<T>(rest: Duration, load: impl FnOnce() -> Result<T>) -> Result<Load<T>> {
    let watch = Watch::begin()?;
    let cores = watch.counted.cores as f64;
    thread::sleep(rest);
    let (busy_at_rest, at_rest) = watch.end()?;
    let watch = Watch::begin()?;
    let done = load()?;
    let (busy, elapsed) = watch.end()?;
    let rest = busy_at_rest / at_rest;
    Ok(Load { seconds: busy - rest * elapsed, busy_at_rest: rest / cores, done })
}

/// Returns the processor time that a process and its ended children have taken since it began.
pub(crate) fn of_process(process: u32) -> Result<f64> {
    let path = format!("/proc/{process}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    process_seconds(&stat).with_context(|| format!("no times in {path}"))
}

fn process_seconds(stat: &str) -> Option<f64> {
    // The name of the process may contain anything, brackets too.
    let (_, fields) = stat.rsplit_once(')')?;
    let times: Vec<f64> = fields.split_whitespace().skip(11).take(4).map_while(|n| n.parse().ok()).collect();
    (times.len() == 4).then(|| times.iter().sum::<f64>() / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_what_is_neither_idle_nor_stolen() {
        let stat = |idle: u32, steal: u32| {
            let text =
                format!("cpu  10 0 20 {idle} 5 0 7 {steal} 0 0\ncpu0 1 0 1\ncpu1 1 0 1\nintr 5\ncpufreq 1\n");
            Counted::parse(&text).unwrap()
        };
        let (before, after) = (stat(1_000, 0), stat(1_100, 20));
        assert_eq!(before, Counted { idle: 10.05, stolen: 0.0, cores: 2 });
        assert!((busy(before, after, 1.0) - 0.8).abs() < 1e-9);
    }

    #[test]
    fn a_process_has_its_own_time_and_that_of_its_children() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 99 0 0 0 150 50 25 75 20 0 1 0 3 4 5";
        assert_eq!(process_seconds(stat), Some(3.0));
        assert_eq!(process_seconds("7 (a) S 1"), None);
    }
}
