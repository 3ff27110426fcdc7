//! A small HTTP/1 server: one task a connection, bounded in number and in the time that everything may take. Whoever is
//! silent, or slow to take an answer, loses the place to the next who comes: nobody can keep others from an answer.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ::http::{Request, StatusCode};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::reply::{Reply, plain};

const MOST_CONNECTIONS: usize = 128;
/// For the header of a request, and between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// Then a connection ends after the answer that it is at.
const LONGEST_CONNECTION: Duration = Duration::from_secs(600);
/// Pause after accept failed, which is nearly always for want of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// `longest`: for one answer; then it is 503.
pub(super) async fn serve<H, F>(listener: TcpListener, answer: H, longest: Duration, stop: CancellationToken)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Reply> + Send + 'static,
{
    let places = Places::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accept");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(place) = places.take() else {
            tracing::debug!("every HTTP connection is being answered: one more is turned away");
            continue;
        };
        let (answer, stop) = (answer.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = converse(stream, answer, longest, &place.seat) => {}
                () = place.seat.lost.cancelled() => tracing::debug!("an idle HTTP connection made room for another"),
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn converse<H, F>(stream: TcpStream, answer: H, longest: Duration, seat: &Seat)
where
    H: Fn(Request<Incoming>) -> F,
    F: Future<Output = Reply>,
{
    let service = service_fn(|request| {
        seat.answering.store(true, Ordering::Relaxed);
        let response = timeout(longest, answer(request));
        async move {
            let late = |_| plain(StatusCode::SERVICE_UNAVAILABLE, "The answer took too long\n");
            let response = response.await.unwrap_or_else(late);
            seat.answering.store(false, Ordering::Relaxed);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = sleep(LONGEST_CONNECTION) => {
            connection.as_mut().graceful_shutdown();
            timeout(longest, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "HTTP connection");
    }
}

/// What there is of connections, oldest first.
#[derive(Clone, Default)]
struct Places(Arc<Mutex<Seats>>);

#[derive(Default)]
struct Seats {
    next: u64,
    taken: BTreeMap<u64, Arc<Seat>>,
}

#[derive(Default)]
struct Seat {
    /// A request is being answered.
    answering: AtomicBool,
    lost: CancellationToken,
}

/// Free again when dropped.
struct Place {
    places: Places,
    number: u64,
    seat: Arc<Seat>,
}

impl Places {
    /// The oldest connection on which nothing is being answered makes room; `None`: there is no such one.
    fn take(&self) -> Option<Place> {
        let mut seats = self.lock();
        if seats.taken.len() >= MOST_CONNECTIONS {
            let idle = seats.taken.iter().find(|(_, seat)| !seat.answering.load(Ordering::Relaxed));
            let number = idle.map(|(number, _)| *number)?;
            if let Some(seat) = seats.taken.remove(&number) {
                seat.lost.cancel();
            }
        }
        let (number, seat) = (seats.next, Arc::<Seat>::default());
        seats.next += 1;
        seats.taken.insert(number, Arc::clone(&seat));
        Some(Place { places: self.clone(), number, seat })
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().taken.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_is_idle_makes_room() {
        let places = Places::default();
        let mut taken: Vec<Place> = std::iter::from_fn(|| places.take()).take(MOST_CONNECTIONS).collect();
        taken[0].seat.answering.store(true, Ordering::Relaxed);
        taken.push(places.take().unwrap());
        let lost: Vec<u64> =
            taken.iter().filter(|place| place.seat.lost.is_cancelled()).map(|place| place.number).collect();
        assert_eq!(lost, [1]);
        // One that has lost its place does not free another's.
        taken.remove(1);
        assert_eq!(places.lock().taken.len(), MOST_CONNECTIONS);
        taken.remove(0);
        assert_eq!(places.lock().taken.len(), MOST_CONNECTIONS - 1);
    }

    #[test]
    fn what_is_being_answered_is_not_given_up() {
        let places = Places::default();
        let taken: Vec<Place> = std::iter::from_fn(|| places.take()).take(MOST_CONNECTIONS).collect();
        for place in &taken {
            place.seat.answering.store(true, Ordering::Relaxed);
        }
        assert!(places.take().is_none());
        assert!(taken.iter().all(|place| !place.seat.lost.is_cancelled()));
    }
}
