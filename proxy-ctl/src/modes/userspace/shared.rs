//! The state that all listeners of this process share.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc};

use super::{
    balancer::{Refusal, SharedBalancer},
    plan::Entrance,
};

/// Descriptors that are kept free for the rest of the process: logs, watches, HTTP.
const KEPT_FREE: u64 = 256;
/// The descriptors of a connection: those of the client's and of the endpoint's socket.
const OF_CONNECTION: u32 = 2;

/// Locks a mutex, also after a panic. Nothing under these locks can leave a half-made state behind.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// File descriptors for listeners, connections and sessions.
#[derive(Debug)]
pub(super) struct Descriptors {
    free: Arc<Semaphore>,
    total: usize,
    limit: u64,
    /// True if the log says that no descriptor is left, and none has been free since.
    told: AtomicBool,
}

pub(super) type Permit = OwnedSemaphorePermit;

impl Descriptors {
    /// Returns the descriptors of a process. `limit` is its RLIMIT_NOFILE.
    pub(super) fn new(limit: u64) -> Self {
        let free = usize::try_from(limit.saturating_sub(KEPT_FREE)).unwrap_or(usize::MAX);
        let total = free.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(total)), total, limit, told: AtomicBool::new(false) }
    }

    /// Reserves descriptors for a listener that accepts one connection at a time. `None`: there is
    /// no room.
    pub(super) fn for_listener(&self) -> Option<Permit> {
        self.try_acquire(OF_CONNECTION)
    }

    /// Reserves descriptors for a connection. It waits until others have ended, and the kernel's
    /// queue fills meanwhile.
    pub(super) async fn for_connection(&self) -> Option<Permit> {
        match self.try_acquire(OF_CONNECTION) {
            Some(permit) => Some(permit),
            // The semaphore is never closed.
            None => Arc::clone(&self.free).acquire_many_owned(OF_CONNECTION).await.ok(),
        }
    }

    pub(super) fn for_session(&self) -> Option<Permit> {
        self.try_acquire(1)
    }

    fn try_acquire(&self, count: u32) -> Option<Permit> {
        match Arc::clone(&self.free).try_acquire_many_owned(count) {
            Ok(permit) => {
                self.told.store(false, Ordering::Relaxed);
                Some(permit)
            }
            Err(TryAcquireError::NoPermits | TryAcquireError::Closed) => {
                if !self.told.swap(true, Ordering::Relaxed) {
                    tracing::warn!("{}; new clients wait for others to end", self.exhausted());
                }
                None
            }
        }
    }

    /// Returns true if nothing is open.
    pub(super) fn is_idle(&self) -> bool {
        self.free.available_permits() == self.total
    }

    /// Returns the number of descriptors that may still be opened.
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.free.available_permits()
    }

    pub(super) fn exhausted(&self) -> String {
        format!("all of the {} open files that RLIMIT_NOFILE allows are in use: raise it", self.limit)
    }
}

/// Counters since the start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections: AtomicU64,
    pub(super) sessions: AtomicU64,
    pub(super) failed_dials: AtomicU64,
    pub(super) refused_clients: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) descriptors: Descriptors,
    pub(super) counters: Counters,
    pub(super) udp_idle_timeout: Duration,
    /// Room for one datagram. All tasks share it, because they run on one thread.
    pub(super) datagram: Mutex<Vec<u8>>,
}

/// The length of the longest datagram of UDP.
const LONGEST_DATAGRAM: usize = 65_535;

impl Shared {
    pub(super) fn new(limit: u64, udp_idle_timeout: Duration) -> Self {
        Self {
            descriptors: Descriptors::new(limit),
            counters: Counters::default(),
            udp_idle_timeout,
            datagram: Mutex::new(vec![0; LONGEST_DATAGRAM]),
        }
    }
}

/// A handle for everything that must end before the runtime does.
pub(super) type Alive = mpsc::Sender<Infallible>;

/// The state by which one listener connects its clients to endpoints.
#[derive(Clone, Debug)]
pub(super) struct Portal {
    pub(super) balancer: SharedBalancer,
    pub(super) entrance: Entrance,
    pub(super) shared: Arc<Shared>,
    pub(super) _alive: Alive,
}

impl Portal {
    pub(super) fn choose(&self, client: IpAddr, tried: &[SocketAddr]) -> Result<SocketAddr, Refusal> {
        let chosen = lock(&self.balancer).choose(self.entrance, client, tried, Instant::now());
        if let Err(refusal) = chosen {
            count(&self.shared.counters.refused_clients);
            tracing::debug!(%client, ?refusal, "a client is refused");
        }
        chosen
    }

    pub(super) fn failed(&self, endpoint: SocketAddr, error: &io::Error) {
        count(&self.shared.counters.failed_dials);
        tracing::debug!(%endpoint, %error, "an endpoint did not answer");
    }
}
