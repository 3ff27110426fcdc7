//! Decides which suites run at the same time.

use std::{collections::BTreeSet, sync::mpsc, thread, time::Instant};

use anyhow::{Result, bail};

use crate::test::suites::Report;

/// The room that a job leaves for others.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Room {
    /// The job needs all processors, or measures time.
    Alone,
    /// The job waits for most of its time, and three such jobs run at once.
    Shared,
    /// The job computes, and others wait for it. One such job runs beside all others.
    Beside,
    /// The job takes what others leave of the processors, at the lowest priority. One such job runs
    /// at a time.
    Behind,
}

/// A suite, and when it may run.
pub(crate) struct Job<'a> {
    pub(crate) name: &'static str,
    pub(crate) room: Room,
    /// Jobs that must have ended before. Names that no job has do not count.
    pub(crate) after: &'static [&'static str],
    pub(crate) run: Box<dyn FnOnce() -> Result<Report> + Send + 'a>,
}

/// The number of [`Room::Shared`] jobs that run at once.
const AT_ONCE: usize = 3;

/// Runs all jobs, in their order as far as room and needs allow it, and calls `record` with each
/// report when it is there.
pub(crate) fn run(mut waiting: Vec<Job<'_>>, mut record: impl FnMut(&'static str, Report)) -> Result<()> {
    let (ended, reports) = mpsc::channel();
    thread::scope(|scope| {
        let mut running: Vec<(&'static str, Room)> = Vec::new();
        loop {
            while let Some(next) = next(&waiting, &running) {
                let Job { name, room, run, .. } = waiting.remove(next);
                running.push((name, room));
                let ended = ended.clone();
                // The report of a job is lost if another job has failed to run.
                scope.spawn(move || {
                    let start = Instant::now();
                    let report = run().map(|report| report.after(start.elapsed()));
                    ended.send((name, report)).is_ok()
                });
            }
            if running.is_empty() && waiting.is_empty() {
                return Ok(());
            }
            if running.is_empty() {
                bail!("these suites wait for each other: {}", names(&waiting).join(", "));
            }
            let Ok((name, report)) = reports.recv() else { bail!("no suite tells its end any more") };
            running.retain(|(other, _)| *other != name);
            record(name, report?);
        }
    })
}

fn names(jobs: &[Job<'_>]) -> Vec<&'static str> {
    jobs.iter().map(|job| job.name).collect()
}

/// Returns the job that may begin now, beside those that run.
fn next(waiting: &[Job<'_>], running: &[(&'static str, Room)]) -> Option<usize> {
    let unfinished: BTreeSet<_> =
        names(waiting).into_iter().chain(running.iter().map(|(name, _)| *name)).collect();
    let count = |room: Room| running.iter().filter(|(_, other)| *other == room).count();
    // A job that needs more room than there is keeps those after it from taking that room.
    let mut is_kept = false;
    for (at, job) in waiting.iter().enumerate() {
        if job.after.iter().any(|other| unfinished.contains(other)) {
            continue;
        }
        let has_room = match job.room {
            Room::Beside | Room::Behind => count(job.room) == 0,
            Room::Shared => !is_kept && count(Room::Alone) == 0 && count(Room::Shared) < AT_ONCE,
            Room::Alone => !is_kept && count(Room::Alone) + count(Room::Shared) == 0,
        };
        if has_room {
            return Some(at);
        }
        is_kept |= matches!(job.room, Room::Shared | Room::Alone);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, time::Duration};

    use super::*;

    fn job(name: &'static str, room: Room, after: &'static [&'static str]) -> Job<'static> {
        Job { name, room, after, run: Box::new(|| Ok(Report::of_check(true, Duration::ZERO))) }
    }

    fn may_begin(waiting: &[Job<'_>], running: &[(&'static str, Room)]) -> Option<&'static str> {
        next(waiting, running).map(|at| waiting[at].name)
    }

    #[test]
    fn three_share_and_one_runs_behind_them() {
        let waiting = [job("d", Room::Shared, &[]), job("go", Room::Behind, &[])];
        let mut running = vec![("a", Room::Shared), ("b", Room::Shared)];
        assert_eq!(may_begin(&waiting, &running), Some("d"));
        running.push(("c", Room::Shared));
        assert_eq!(may_begin(&waiting, &running), Some("go"));
        assert_eq!(may_begin(&waiting[1..], &[("image", Room::Behind)]), None);
        assert_eq!(may_begin(&waiting[1..], &[("tools", Room::Beside)]), Some("go"));
    }

    #[test]
    fn who_needs_all_room_gets_it_before_those_behind_it() {
        let waiting = [job("alone", Room::Alone, &[]), job("b", Room::Shared, &[])];
        assert_eq!(may_begin(&waiting, &[("a", Room::Shared)]), None);
        assert_eq!(may_begin(&waiting, &[("go", Room::Behind)]), Some("alone"));
        assert_eq!(may_begin(&waiting[1..], &[("alone", Room::Alone)]), None);
    }

    #[test]
    fn who_needs_another_lets_others_pass() {
        let waiting = [job("oracle", Room::Shared, &["go"]), job("b", Room::Shared, &[])];
        assert_eq!(may_begin(&waiting, &[("go", Room::Behind)]), Some("b"));
        assert_eq!(may_begin(&waiting, &[]), Some("oracle"), "no job of that name is to run");
    }

    #[test]
    fn all_run_and_each_is_told_once() {
        let told = Mutex::new(Vec::new());
        let jobs = vec![
            job("last", Room::Alone, &["first"]),
            job("first", Room::Behind, &[]),
            job("other", Room::Shared, &[]),
        ];
        run(jobs, |name, _| told.lock().unwrap().push(name)).unwrap();
        let mut told = told.into_inner().unwrap();
        assert!(told.iter().position(|name| *name == "first") < told.iter().position(|name| *name == "last"));
        told.sort_unstable();
        assert_eq!(told, ["first", "last", "other"]);
    }

    #[test]
    fn suites_that_wait_for_each_other_are_an_error() {
        let jobs = vec![job("a", Room::Shared, &["b"]), job("b", Room::Shared, &["a"])];
        assert!(run(jobs, |_, _| ()).unwrap_err().to_string().contains("wait for each other: a, b"));
    }
}
