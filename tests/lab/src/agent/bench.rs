//! Measures the rate and latency of requests to several targets in turn, in one process.
//!
//! Figures of rounds that last seconds drift with the machine, by more than a proxy costs. So a
//! turn takes only some milliseconds: whatever disturbs the machine then meets all sides of a
//! comparison alike.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use super::{
    protocol::{Bench, Exercise, Side},
    serve::BULK,
    socket::reset_on_close,
};

const LIMIT: Duration = Duration::from_secs(2);
/// Number of first turns of each side that are not counted, because some things are slow only the
/// first time.
const WARM_UP: usize = 1;

/// Alternates between the sides until the time is over.
pub fn run(bench: &Bench) -> Vec<Side> {
    let plan = Plan::new(bench);
    let workers: Vec<_> = (0..plan.bench.clients as usize)
        .map(|_| {
            let plan = plan.clone();
            thread::spawn(move || Worker::new(&plan).work())
        })
        .collect();
    let done: Vec<Vec<Turn>> = workers.into_iter().filter_map(|worker| worker.join().ok()).collect();
    (0..plan.bench.sides.len()).map(|side| plan.summary(side, &done)).collect()
}

#[derive(Clone)]
struct Plan {
    bench: Bench,
    start: Instant,
    turn: Duration,
    turns: usize,
}

/// Results of one worker in one turn.
#[derive(Clone, Default)]
struct Turn {
    /// Duration of each request that was answered.
    nanos: Vec<u64>,
    failed: u64,
    failure: Option<String>,
}

impl Plan {
    fn new(bench: &Bench) -> Self {
        let turn = Duration::from_millis(bench.turn_ms.max(1));
        let turns = (bench.seconds.max(0.0) / turn.as_secs_f64()).ceil() as usize;
        let least = bench.sides.len() * (WARM_UP + 1);
        Self { bench: bench.clone(), start: Instant::now(), turn, turns: turns.max(least) }
    }

    /// Returns the current turn, or `None` if the time is over.
    fn now(&self) -> Option<usize> {
        let turn = (self.start.elapsed().as_nanos() / self.turn.as_nanos()) as usize;
        (turn < self.turns).then_some(turn)
    }

    fn side_of(&self, turn: usize) -> usize {
        turn % self.bench.sides.len().max(1)
    }

    fn summary(&self, side: usize, workers: &[Vec<Turn>]) -> Side {
        let first = WARM_UP * self.bench.sides.len();
        let of_side = |turn: &usize| self.side_of(*turn) == side;
        let rates = (first..self.turns)
            .filter(of_side)
            .map(|turn| workers.iter().filter_map(|turns| turns.get(turn)).map(Turn::per_second).sum());
        let all = || {
            let turns = workers.iter().flat_map(|turns| turns.iter().enumerate());
            turns.filter(|(turn, _)| of_side(turn)).map(|(_, done)| done)
        };
        let mut nanos: Vec<u64> = all().flat_map(|done| done.nanos.iter().copied()).collect();
        nanos.sort_unstable();
        Side {
            per_second: rates.collect(),
            answered: nanos.len() as u64,
            failed: all().map(|done| done.failed).sum(),
            failure: all().find_map(|done| done.failure.clone()),
            p50_micros: percentile(&nanos, 0.50),
            p99_micros: percentile(&nanos, 0.99),
        }
    }
}

impl Turn {
    /// Returns the rate over the time of the requests alone. A request that lasts into another
    /// side's turn does not lower it.
    fn per_second(&self) -> f64 {
        let nanos: u64 = self.nanos.iter().sum();
        if nanos == 0 { 0.0 } else { self.nanos.len() as f64 / (nanos as f64 / 1e9) }
    }
}

fn percentile(sorted_nanos: &[u64], part: f64) -> f64 {
    let last = sorted_nanos.len().saturating_sub(1);
    let index = (last as f64 * part) as usize;
    sorted_nanos.get(index).map_or(0.0, |nanos| *nanos as f64 / 1_000.0)
}

struct Worker<'a> {
    plan: &'a Plan,
    /// Connection of this turn, for exercises that keep one.
    open: Option<(usize, TcpStream)>,
    buffer: Vec<u8>,
}

impl<'a> Worker<'a> {
    fn new(plan: &'a Plan) -> Self {
        let buffer = if plan.bench.exercise == Exercise::Bulk { vec![0; BULK] } else { Vec::new() };
        Self { plan, open: None, buffer }
    }

    fn work(mut self) -> Vec<Turn> {
        let mut turns = vec![Turn::default(); self.plan.turns];
        let pause = self.plan.bench.pace.map(|pace| {
            Duration::from_secs_f64(f64::from(self.plan.bench.clients) / pace.max(f64::MIN_POSITIVE))
        });
        let mut due = Instant::now();
        while let Some(turn) = self.plan.now() {
            let Some(done) = turns.get_mut(turn) else { break };
            match self.request(turn) {
                Ok(took) => done.nanos.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)),
                Err(error) => {
                    self.open = None;
                    done.failed += 1;
                    done.failure.get_or_insert_with(|| error.to_string());
                }
            }
            if let Some(pause) = pause {
                due += pause;
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
        turns
    }

    /// Draws one of the targets, as a Service does. If two clients took two servers in turn, they
    /// would never dial both at once.
    fn target(&self, turn: usize) -> io::Result<SocketAddr> {
        let targets = self.plan.bench.sides.get(self.plan.side_of(turn));
        let targets = targets.filter(|targets| !targets.is_empty());
        let targets = targets.ok_or_else(|| io::Error::other("a side without targets"))?;
        Ok(targets[fastrand::usize(..targets.len())])
    }

    /// Makes a request, and returns how long it took.
    fn request(&mut self, turn: usize) -> io::Result<Duration> {
        let exercise = self.plan.bench.exercise;
        match exercise {
            Exercise::Connect => {
                let target = self.target(turn)?;
                timed(|| connect(target))
            }
            Exercise::Datagram => {
                let target = self.target(turn)?;
                timed(|| datagram(target))
            }
            Exercise::Request | Exercise::Bulk => {
                if self.open.as_ref().is_none_or(|(opened, _)| *opened != turn) {
                    self.open = Some((turn, open(self.target(turn)?)?));
                }
                let Some((_, stream)) = &mut self.open else {
                    return Err(io::ErrorKind::NotConnected.into());
                };
                let bytes: &[u8] = if exercise == Exercise::Bulk { &self.buffer } else { &[1] };
                timed(|| stream.write_all(bytes).and_then(|()| stream.read_exact(&mut [0])))
            }
        }
    }
}

fn timed(work: impl FnOnce() -> io::Result<()>) -> io::Result<Duration> {
    let start = Instant::now();
    work().map(|()| start.elapsed())
}

fn open(target: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&target, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    stream.set_nodelay(true)?;
    reset_on_close(&stream)?;
    Ok(stream)
}

fn connect(target: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(target)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(&[1])?;
    stream.read_exact(&mut [0])?;
    reset_on_close(&stream)
}

fn datagram(target: SocketAddr) -> io::Result<()> {
    let any = match target {
        SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(LIMIT))?;
    socket.send(&[1])?;
    socket.recv(&mut [0])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(sides: usize) -> Plan {
        let sides = vec![Vec::new(); sides];
        let exercise = Exercise::Connect;
        Plan::new(&Bench { exercise, sides, clients: 2, seconds: 0.06, turn_ms: 10, pace: None })
    }

    fn turn(nanos: &[u64]) -> Turn {
        Turn { nanos: nanos.to_vec(), ..Turn::default() }
    }

    #[test]
    fn a_side_has_every_other_turn_and_the_first_of_each_is_no_rate() {
        let worker: Vec<Turn> = (1..=6).map(|turn_of| turn(&[turn_of * 1_000_000])).collect();
        let sides = [0, 1].map(|side| plan(2).summary(side, &[worker.clone(), worker.clone()]));
        // Each turn has two workers with one request each: of 3 ms and 5 ms, then of 4 ms and 6 ms.
        let rounded = |side: &Side| side.per_second.iter().map(|rate| rate.round()).collect::<Vec<_>>();
        assert_eq!(sides.each_ref().map(rounded), [vec![667.0, 400.0], vec![500.0, 333.0]]);
        assert_eq!(sides.each_ref().map(|side| side.p50_micros), [3_000.0, 4_000.0]);
        assert_eq!(sides.map(|side| side.answered), [6, 6]);
    }

    #[test]
    fn failures_are_counted_and_the_first_is_told() {
        let failing = Turn { failed: 2, failure: Some("refused".into()), ..Turn::default() };
        let side = plan(1).summary(0, &[vec![turn(&[10]), failing]]);
        assert_eq!((side.answered, side.failed, side.failure.as_deref()), (1, 2, Some("refused")));
    }

    #[test]
    fn every_side_has_a_turn_that_counts_however_short_the_time() {
        let bench = Bench { seconds: 0.0, ..plan(3).bench };
        assert_eq!(Plan::new(&bench).turns, 6);
    }
}
