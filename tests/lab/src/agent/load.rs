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
        let dial = Dial::new(load.protocol, load.target).timeout_ms(load.timeout_ms);
        let threads = (0..load.clients)
            .map(|_| {
                let (stop, tally, dial) = (Arc::clone(&stop), Arc::clone(&tally), dial.clone());
                thread::spawn(move || {
                    let (mut socket, mut outage) = (None, Outage::default());
                    while !stop.load(Ordering::Relaxed) {
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

    /// Waits for the requests under way, and returns the final count.
    pub fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A thread that panicked has already counted its results.
            let _ended = thread.join();
        }
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
