//! An HTTP/1 server on hyper with one task for each connection. The number of connections is
//! bounded, and so is the time of every step.
//!
//! No source has more than its share of the connections. A new connection replaces an idle one of
//! its own source, or, when all slots are taken, one of the source that has most. Silent clients
//! thus keep nobody from an answer, and a flood keeps no other source from one. The node itself has
//! slots of its own, for the kubelet's probes.
//!
//! A connection of a source that opens them too fast is reset at once. That costs least, and it
//! keeps the accept queue short: while that queue is full, the kernel drops everybody's
//! connections.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    future::Future,
    net::{IpAddr, Ipv6Addr},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ::http::{Extensions, Request, StatusCode};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::reply::{Reply, plain};

/// The most open connections of the node itself. All other sources together may have as many.
const MOST_CONNECTIONS: usize = 128;
const MOST_OF_SOURCE: usize = 32;
/// The number of connections that one source may open in [`RATE_PERIOD`]. The node itself may open
/// any number.
const MOST_NEW_OF_SOURCE: u32 = 200;
const RATE_PERIOD: Duration = Duration::from_secs(1);
/// The time limit for the header of a request, and for the pause between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// The age at which a connection is closed, after the answer in progress.
const LONGEST_CONNECTION: Duration = Duration::from_secs(600);
/// The pause after accept has failed, which nearly always means that no file descriptors are left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Accepts connections and answers their requests until `stop` is cancelled. `longest` is the time
/// limit for one answer. A later one is replaced by status 503.
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
        let (peer, stream) = match accepted {
            Ok((stream, peer)) => (Peer::of(&stream, peer.ip()), stream),
            Err(error) => {
                tracing::debug!(%error, "accept");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let admission = match connections.admit(peer, Instant::now()) {
            Ok(admission) => admission,
            Err(refusal) => {
                tracing::debug!("a connection was closed: {refusal}");
                // With a linger time of zero the connection is reset, and the kernel keeps no state
                // of it. If that cannot be set, the connection ends all the same.
                let _ends_anyway = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
                continue;
            }
        };
        let (answer, stop) = (answer.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = converse(stream, peer, answer, longest, &admission.connection) => {}
                () = admission.connection.evicted.cancelled() => {
                    tracing::debug!("an idle HTTP connection was closed for a new one");
                }
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn converse<H, F>(
    stream: TcpStream,
    peer: Peer,
    answer: H,
    longest: Duration,
    connection: &HttpConnection,
) where
    H: Fn(Request<Incoming>) -> F,
    F: Future<Output = Reply>,
{
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
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

/// The client of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    address: IpAddr,
    /// True if the client is on this node. The kubelet probes an address of the node from that same
    /// address.
    is_own_node: bool,
}

impl Peer {
    fn of(stream: &TcpStream, peer: IpAddr) -> Self {
        let address = peer.to_canonical();
        let ours = stream.local_addr().is_ok_and(|local| local.ip().to_canonical() == address);
        Self { address, is_own_node: ours || address.is_loopback() }
    }

    /// Returns true if the request with these extensions came from loopback.
    pub(super) fn is_loopback(request: &Extensions) -> bool {
        request.get::<Self>().is_some_and(|peer| peer.address.is_loopback())
    }

    /// Returns the source that the client counts as. An IPv6 client may have a whole /64, so all of
    /// its addresses count as one.
    fn source(self) -> IpAddr {
        match self.address {
            IpAddr::V4(_) => self.address,
            IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) >> 64 << 64).into(),
        }
    }
}

/// The open connections of one server.
#[derive(Clone, Default)]
struct Connections {
    own_node: Arc<Mutex<Open>>,
    others: Arc<Mutex<Open>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
enum Refusal {
    #[error("its source opens too many in a second")]
    TooFast,
    #[error("every other one is answering a request")]
    AllAnswering,
}

#[derive(Default)]
struct Open {
    next_number: u64,
    rates: Rates,
    /// The connections of each source, the oldest first. Every source in the map has at least one.
    by_source: BTreeMap<IpAddr, BTreeMap<u64, Arc<HttpConnection>>>,
}

#[derive(Default)]
struct HttpConnection {
    /// True while a request is being answered.
    answering: AtomicBool,
    evicted: CancellationToken,
}

/// The number of connections that each source has opened in the current period.
#[derive(Default)]
struct Rates {
    began: Option<Instant>,
    opened: BTreeMap<IpAddr, u32>,
}

impl Rates {
    fn allow(&mut self, source: IpAddr, now: Instant) -> bool {
        if self.began.is_none_or(|began| now.duration_since(began) >= RATE_PERIOD) {
            self.began = Some(now);
            self.opened.clear();
        }
        let opened = self.opened.entry(source).or_default();
        *opened += 1;
        *opened <= MOST_NEW_OF_SOURCE
    }
}

/// An admitted connection, which counts as open until this is dropped.
struct Admission {
    among: Arc<Mutex<Open>>,
    source: IpAddr,
    number: u64,
    connection: Arc<HttpConnection>,
}

impl Connections {
    fn admit(&self, peer: Peer, now: Instant) -> Result<Admission, Refusal> {
        let among = if peer.is_own_node { &self.own_node } else { &self.others };
        let source = peer.source();
        let mut open = lock(among);
        if !peer.is_own_node && !open.rates.allow(source, now) {
            return Err(Refusal::TooFast);
        }
        let (number, connection) = open.admit(source).ok_or(Refusal::AllAnswering)?;
        drop(open);
        Ok(Admission { among: Arc::clone(among), source, number, connection })
    }
}

impl Open {
    /// Admits a connection and makes room for it. Returns `None` if all connections that it could
    /// replace are answering requests.
    fn admit(&mut self, source: IpAddr) -> Option<(u64, Arc<HttpConnection>)> {
        if self.by_source.get(&source).is_some_and(|own| own.len() >= MOST_OF_SOURCE) {
            self.evict_oldest_idle(source).then_some(())?;
        } else if self.count() >= MOST_CONNECTIONS {
            let mut crowds: Vec<_> =
                self.by_source.iter().map(|(source, all)| (all.len(), *source)).collect();
            crowds.sort_by_key(|(length, source)| {
                let oldest = self.by_source[source].first_key_value().map(|(number, _)| *number);
                (Reverse(*length), oldest)
            });
            crowds.into_iter().find(|(_, source)| self.evict_oldest_idle(*source))?;
        }
        let (number, connection) = (self.next_number, Arc::<HttpConnection>::default());
        self.next_number += 1;
        self.by_source.entry(source).or_default().insert(number, Arc::clone(&connection));
        Some((number, connection))
    }

    fn count(&self) -> usize {
        self.by_source.values().map(BTreeMap::len).sum()
    }

    fn evict_oldest_idle(&mut self, source: IpAddr) -> bool {
        let mut all = self.by_source.get(&source).into_iter().flatten();
        let idle = all.find(|(_, connection)| !connection.answering.load(Ordering::Relaxed));
        let Some(number) = idle.map(|(number, _)| *number) else { return false };
        if let Some(connection) = self.remove(source, number) {
            connection.evicted.cancel();
        }
        true
    }

    fn remove(&mut self, source: IpAddr, number: u64) -> Option<Arc<HttpConnection>> {
        let all = self.by_source.get_mut(&source)?;
        let removed = all.remove(&number);
        if all.is_empty() {
            self.by_source.remove(&source);
        }
        removed
    }
}

fn lock(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Admission {
    fn drop(&mut self) {
        lock(&self.among).remove(self.source, self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use rstest::rstest;

    use super::*;

    fn from(source: u32) -> Peer {
        Peer { address: Ipv4Addr::from_bits(0xc000_0200 + source).into(), is_own_node: false }
    }

    fn admit(connections: &Connections, source: u32, count: usize) -> Vec<Admission> {
        let now = Instant::now();
        std::iter::from_fn(|| connections.admit(from(source), now).ok()).take(count).collect()
    }

    fn evicted(admitted: &[Admission]) -> Vec<u64> {
        let evicted = admitted.iter().filter(|one| one.connection.evicted.is_cancelled());
        evicted.map(|one| one.number).collect()
    }

    fn answers(admission: &Admission) {
        admission.connection.answering.store(true, Ordering::Relaxed);
    }

    #[test]
    fn a_source_that_has_its_share_gives_up_its_own_oldest_idle_connection() {
        let connections = Connections::default();
        let other = admit(&connections, 2, 1);
        let mut admitted = admit(&connections, 1, MOST_OF_SOURCE);
        answers(&admitted[0]);
        admitted.extend(admit(&connections, 1, 1));
        assert_eq!((evicted(&admitted), evicted(&other)), (vec![2], vec![]));
        // The end of an evicted connection makes no room, because its slot is taken already.
        admitted.remove(1);
        assert_eq!(lock(&connections.others).count(), MOST_OF_SOURCE + 1);
        drop(admitted);
        drop(other);
        assert!(lock(&connections.others).by_source.is_empty());
    }

    #[test]
    fn when_all_slots_are_taken_the_source_with_most_of_them_gives_one_up() {
        let connections = Connections::default();
        let few = admit(&connections, 0, 2);
        let mut crowds = Vec::new();
        for source in 1.. {
            let room = MOST_CONNECTIONS - lock(&connections.others).count();
            if room == 0 {
                break;
            }
            crowds.push(admit(&connections, source, MOST_OF_SOURCE.min(room)));
        }
        let new = admit(&connections, 99, 1);
        assert_eq!(evicted(&few), [0; 0]);
        assert_eq!(crowds.iter().flat_map(|crowd| evicted(crowd)).collect::<Vec<_>>(), [2]);
        assert_eq!((new.len(), evicted(&new)), (1, vec![]));
    }

    #[test]
    fn a_connection_that_answers_a_request_is_not_evicted() {
        let connections = Connections::default();
        let admitted: Vec<_> =
            (0..4).flat_map(|source| admit(&connections, source, MOST_CONNECTIONS / 4)).collect();
        admitted.iter().for_each(answers);
        for source in [0, 9] {
            let refused = connections.admit(from(source), Instant::now()).err();
            assert_eq!(refused, Some(Refusal::AllAnswering));
        }
        assert_eq!(evicted(&admitted), [0; 0]);
        // The slots for the node itself are counted apart from those for other sources.
        let own = Peer { is_own_node: true, ..from(10) };
        assert!(connections.admit(own, Instant::now()).is_ok());
    }

    #[test]
    fn what_a_source_opens_too_fast_is_refused_until_the_next_second() {
        let (connections, start) = (Connections::default(), Instant::now());
        let own = Peer { is_own_node: true, ..from(3) };
        for _ in 0..MOST_NEW_OF_SOURCE {
            assert!(connections.admit(from(1), start).is_ok() && connections.admit(own, start).is_ok());
        }
        let refused = |peer, now| connections.admit(peer, now).err();
        assert_eq!(refused(from(1), start + RATE_PERIOD / 2), Some(Refusal::TooFast));
        assert_eq!((refused(from(2), start), refused(own, start)), (None, None));
        assert_eq!(refused(from(1), start + RATE_PERIOD), None);
    }

    #[rstest]
    #[case("192.0.2.1", "192.0.2.1")]
    #[case("2001:db8:1:2:3::4", "2001:db8:1:2::")]
    fn who_counts_as_one_source(#[case] address: IpAddr, #[case] source: IpAddr) {
        assert_eq!(Peer { address, is_own_node: false }.source(), source);
    }
}
