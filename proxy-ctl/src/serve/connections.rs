//! An HTTP/1 server on hyper with one task for each connection. The number of connections is bounded, and so is the time
//! of every step. When all connections are in use, a new one replaces the oldest without a request in progress, so that
//! idle clients cannot block others.

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
/// Limit for the header of a request, and between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// Age at which a connection is closed, after the answer in progress.
const LONGEST_CONNECTION: Duration = Duration::from_secs(600);
/// Pause after accept failed, nearly always because there are no file descriptors left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// `longest`: limit for one answer; a later one is 503.
pub(super) async fn serve<H, F>(listener: TcpListener, answer: H, longest: Duration, stop: CancellationToken)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Reply> + Send + 'static,
{
    let connections = Connections::default();
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
        let Some(admission) = connections.admit() else {
            tracing::debug!("a connection was closed: every other one is answering a request");
            continue;
        };
        let (answer, stop) = (answer.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = converse(stream, answer, longest, &admission.connection) => {}
                () = admission.connection.evicted.cancelled() => {
                    tracing::debug!("an idle HTTP connection was closed for a new one");
                }
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn converse<H, F>(stream: TcpStream, answer: H, longest: Duration, connection: &Connection)
where
    H: Fn(Request<Incoming>) -> F,
    F: Future<Output = Reply>,
{
    let service = service_fn(|request| {
        connection.answering.store(true, Ordering::Relaxed);
        let response = timeout(longest, answer(request));
        async move {
            let late = |_| plain(StatusCode::SERVICE_UNAVAILABLE, "The answer took too long\n");
            let response = response.await.unwrap_or_else(late);
            connection.answering.store(false, Ordering::Relaxed);
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let mut http = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
    );
    let ended = tokio::select! {
        ended = http.as_mut() => ended,
        () = sleep(LONGEST_CONNECTION) => {
            http.as_mut().graceful_shutdown();
            timeout(longest, http).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "HTTP connection");
    }
}

/// The open connections of one server.
#[derive(Clone, Default)]
struct Connections(Arc<Mutex<Open>>);

#[derive(Default)]
struct Open {
    next_number: u64,
    /// The oldest first.
    by_number: BTreeMap<u64, Arc<Connection>>,
}

#[derive(Default)]
struct Connection {
    /// A request is being answered.
    answering: AtomicBool,
    evicted: CancellationToken,
}

/// Counts a connection as open until it is dropped.
struct Admission {
    connections: Connections,
    number: u64,
    connection: Arc<Connection>,
}

impl Connections {
    /// Evicts the oldest connection that answers nothing if there are too many. `None`: all of them answer a request.
    fn admit(&self) -> Option<Admission> {
        let mut open = self.lock();
        if open.by_number.len() >= MOST_CONNECTIONS {
            let mut all = open.by_number.iter();
            let idle = all.find(|(_, connection)| !connection.answering.load(Ordering::Relaxed));
            let number = idle.map(|(number, _)| *number)?;
            if let Some(connection) = open.by_number.remove(&number) {
                connection.evicted.cancel();
            }
        }
        let (number, connection) = (open.next_number, Arc::<Connection>::default());
        open.next_number += 1;
        open.by_number.insert(number, Arc::clone(&connection));
        Some(Admission { connections: self.clone(), number, connection })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.connections.lock().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(connections: &Connections) -> Vec<Admission> {
        std::iter::from_fn(|| connections.admit()).take(MOST_CONNECTIONS).collect()
    }

    #[test]
    fn the_oldest_idle_connection_is_evicted_for_a_new_one() {
        let connections = Connections::default();
        let mut admitted = fill(&connections);
        admitted[0].connection.answering.store(true, Ordering::Relaxed);
        admitted.push(connections.admit().unwrap());
        let evicted = admitted.iter().filter(|one| one.connection.evicted.is_cancelled());
        assert_eq!(evicted.map(|one| one.number).collect::<Vec<_>>(), [1]);
        // An evicted connection was already removed from the count.
        admitted.remove(1);
        assert_eq!(connections.lock().by_number.len(), MOST_CONNECTIONS);
        admitted.remove(0);
        assert_eq!(connections.lock().by_number.len(), MOST_CONNECTIONS - 1);
    }

    #[test]
    fn a_connection_that_answers_a_request_is_not_evicted() {
        let connections = Connections::default();
        let admitted = fill(&connections);
        for one in &admitted {
            one.connection.answering.store(true, Ordering::Relaxed);
        }
        assert!(connections.admit().is_none());
        assert!(admitted.iter().all(|one| !one.connection.evicted.is_cancelled()));
    }
}
