//! How many requests over new connections a second, with how much latency.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use super::{
    protocol::{Bench, Protocol, Rate},
    socket::reset_on_close,
};

const LIMIT: Duration = Duration::from_secs(2);

/// Runs for the given time: connect (or a new connected UDP socket), one byte there and back, close.
pub fn run(bench: &Bench) -> Rate {
    let duration = Duration::from_secs_f64(bench.seconds.max(0.0));
    let start = Instant::now();
    let workers: Vec<_> = (0..bench.clients)
        .map(|_| {
            let (target, protocol) = (bench.target, bench.protocol);
            thread::spawn(move || work(target, protocol, start + duration))
        })
        .collect();
    let (mut nanos, mut failed) = (Vec::new(), 0);
    for worker in workers {
        if let Ok((times, failures)) = worker.join() {
            nanos.extend(times);
            failed += failures;
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    nanos.sort_unstable();
    Rate {
        per_second: nanos.len() as f64 / elapsed,
        p50_micros: percentile(&nanos, 0.50),
        p99_micros: percentile(&nanos, 0.99),
        failed,
    }
}

fn percentile(sorted_nanos: &[u64], part: f64) -> f64 {
    let last = sorted_nanos.len().saturating_sub(1);
    let index = (last as f64 * part) as usize;
    sorted_nanos.get(index).map_or(0.0, |nanos| *nanos as f64 / 1_000.0)
}

fn work(target: SocketAddr, protocol: Protocol, end: Instant) -> (Vec<u64>, u64) {
    let (mut nanos, mut failed) = (Vec::new(), 0);
    while Instant::now() < end {
        let start = Instant::now();
        let result = match protocol {
            Protocol::Tcp => tcp(target),
            Protocol::Udp => udp(target),
            Protocol::Sctp => Err(io::ErrorKind::Unsupported.into()),
        };
        match result {
            Ok(()) => nanos.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)),
            Err(_) => failed += 1,
        }
    }
    (nanos, failed)
}

fn tcp(target: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(target)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut byte = [1];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte)?;
    reset_on_close(&stream)
}

fn udp(target: SocketAddr) -> io::Result<()> {
    let any = match target {
        SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(LIMIT))?;
    let mut byte = [1];
    socket.send(&byte)?;
    socket.recv(&mut byte)?;
    Ok(())
}
