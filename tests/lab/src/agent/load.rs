//! Dials without end and counts what comes back.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{
    dial,
    protocol::{Dial, Load, Outcome, Tally},
};

/// A load that is running.
pub struct Running {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    pub fn start(load: &Load) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let pause = Duration::from_micros(load.pause_micros);
        let dial = Dial::new(load.protocol, load.target).timeout_ms(load.timeout_ms);
        let threads = (0..load.clients)
            .map(|_| {
                let (stop, tally, dial) = (Arc::clone(&stop), Arc::clone(&tally), dial.clone());
                thread::spawn(move || {
                    let mut in_a_row = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let outcome = dial::once(&dial);
                        in_a_row = if matches!(outcome, Outcome::Answered(_)) { 0 } else { in_a_row + 1 };
                        let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                        tally.failed_in_a_row = tally.failed_in_a_row.max(in_a_row);
                        count(&mut tally, &outcome);
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

    /// Waits for the requests under way and returns the final count.
    pub fn stop(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A thread that panicked has counted what it did before.
            let _ended = thread.join();
        }
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
