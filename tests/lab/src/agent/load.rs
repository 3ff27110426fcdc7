//! Dials until it is stopped, and counts the outcomes.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    dial::{self, Held},
    protocol::{Dial, Load, Outcome, Protocol, Tally},
    socket::{micros_since, outcome_of},
};

/// The time between two requests over a connection that lasts.
const BETWEEN_REQUESTS: Duration = Duration::from_millis(100);

/// Load that is running.
pub struct Running {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    pub fn start(load: &Load) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let (pause, keeps_socket) = (Duration::from_micros(load.pause_micros), load.keeps_socket);
        let lasts_ms = load.lasts_ms;
        let dial = Dial::new(load.protocol, load.target).timeout_ms(load.timeout_ms);
        let threads = (0..load.clients)
            .map(|_| {
                let (stop, tally, dial) = (Arc::clone(&stop), Arc::clone(&tally), dial.clone());
                thread::spawn(move || {
                    let (mut socket, mut outage) = (None, Outage::default());
                    while !stop.load(Ordering::Relaxed) {
                        if lasts_ms > 0 {
                            last(&tally, &dial, Duration::from_millis(lasts_ms));
                            thread::sleep(pause);
                            continue;
                        }
                        let start = Instant::now();
                        let outcome = if keeps_socket { over(&mut socket, &dial) } else { dial::once(&dial) };
                        let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                        count(&mut tally, &outcome);
                        outage.follow(&mut tally, &outcome, start);
                        drop(tally);
                        thread::sleep(pause);
                    }
                })
            })
            .collect();
        Self { stop, tally, threads }
    }

    pub fn tally(&self) -> Tally {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes its threads begin no further requests, without waiting for those under way.
    pub fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for the requests under way and returns the final count.
    pub fn stop(self) -> Tally {
        self.end();
        for thread in self.threads {
            // A thread that panicked has already counted its results.
            let _ended = thread.join();
        }
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Opens a connection, goes on with requests over it for about this time, and counts it. One that
/// nobody accepts is a failure. One that later has no answer is lost, and so is one whose SYN was
/// answered and that was reset before `connect` has returned.
fn last(tally: &Mutex<Tally>, dial: &Dial, lasts: Duration) {
    let start = Instant::now();
    let tally = || tally.lock().unwrap_or_else(PoisonError::into_inner);
    let mut held = match Held::open(dial) {
        Ok(held) => held,
        Err(error) => {
            let outcome = outcome_of(&error, start);
            let Outcome::Failed(what) = outcome else { return count(&mut tally(), &outcome) };
            let age = start.elapsed();
            return tally().lost.push(format!("reset while it was opened, after {age:?}: {what}"));
        }
    };
    tally().opened += 1;
    let (opened, lasts) = (Instant::now(), lasts.mul_f64(0.5 + fastrand::f64()));
    loop {
        let outcome = held.ping();
        if !matches!(outcome, Outcome::Answered(_)) {
            let (ends, age) = (held.ends(), opened.elapsed());
            let opening = opened.duration_since(start);
            let at = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            return tally()
                .lost
                .push(format!("{ends}, opened in {opening:?}, after {age:?}: {outcome} (at {at:?})"));
        }
        if opened.elapsed() >= lasts {
            return count(&mut tally(), &outcome);
        }
        thread::sleep(BETWEEN_REQUESTS);
    }
}

/// Makes a request over one socket. It is opened for the first request. A TCP connection that has
/// broken is opened anew for the next one.
fn over(socket: &mut Option<Held>, dial: &Dial) -> Outcome {
    let start = Instant::now();
    let outcome = match socket {
        Some(socket) => socket.ping(),
        None => match Held::open(dial) {
            Ok(opened) => socket.insert(opened).ping(),
            Err(error) => outcome_of(&error, start),
        },
    };
    if dial.protocol == Protocol::Tcp && !matches!(outcome, Outcome::Answered(_)) {
        *socket = None;
    }
    outcome
}

/// Requests of one thread that have failed one after another.
#[derive(Default)]
struct Outage {
    failed: u64,
    since: Option<Instant>,
}

impl Outage {
    /// Counts an outcome. `start` is the time when the request began.
    fn follow(&mut self, tally: &mut Tally, outcome: &Outcome, start: Instant) {
        let is_over = matches!(outcome, Outcome::Answered(_));
        if !is_over {
            self.failed += 1;
            self.since.get_or_insert(start);
        }
        let Some(since) = self.since else { return };
        tally.failed_in_a_row = tally.failed_in_a_row.max(self.failed);
        tally.longest_outage_micros = tally.longest_outage_micros.max(micros_since(since));
        if is_over {
            *self = Self::default();
        }
    }
}

fn count(tally: &mut Tally, outcome: &Outcome) {
    match outcome {
        Outcome::Answered(answer) => {
            tally.answered += 1;
            tally.slowest_micros = tally.slowest_micros.max(answer.micros);
            let share = tally.backends.entry(answer.by.clone()).or_default();
            share.answered += 1;
            share.micros += answer.micros;
        }
        Outcome::Refused { .. } => fail(tally, "refused".into()),
        Outcome::TimedOut | Outcome::NotPermitted | Outcome::Unreachable | Outcome::Failed(_) => {
            fail(tally, outcome.to_string())
        }
    }
}

fn fail(tally: &mut Tally, kind: String) {
    tally.failed += 1;
    *tally.failures.entry(kind).or_default() += 1;
}
