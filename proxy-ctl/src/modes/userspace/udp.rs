//! Serves UDP. Each client has a session with an endpoint, which ends when neither has sent
//! anything for a while.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket as StdUdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use socket2::SockRef;
use tokio::{
    net::UdpSocket,
    task::JoinSet,
    time::{self, Instant},
};
use tokio_util::sync::CancellationToken;

use super::{
    datagrams::{Datagram, Datagrams},
    plan::unspecified,
    shared::{Permit, Portal, count, lock},
    tcp::DIAL_TIMEOUTS,
};
use crate::model::objects::IpFamily;

/// The client, and the address of the node to which it sends. Answers come from that address.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Path {
    client: SocketAddr,
    node: IpAddr,
}

struct Session {
    path: Path,
    endpoint: SocketAddr,
    /// The socket of the session, which is connected to the endpoint.
    socket: UdpSocket,
    used: Mutex<Instant>,
    ended: AtomicBool,
    _permit: Permit,
}

/// Serves until it is stopped. Its sessions end with it, because its socket answers their clients.
pub(super) async fn serve(listener: Datagrams, portal: Portal, stop: CancellationToken) {
    let listener = Arc::new(listener);
    let mut sessions: HashMap<Path, Arc<Session>> = HashMap::new();
    let mut tasks: JoinSet<Arc<Session>> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(Ok(ended)) = tasks.join_next() => {
                if sessions.get(&ended.path).is_some_and(|session| Arc::ptr_eq(session, &ended)) {
                    sessions.remove(&ended.path);
                }
            }
            readable = listener.readable() => {
                let received = readable.and_then(|()| receive(&listener, &portal, &mut sessions, &mut tasks));
                if let Err(error) = received {
                    tracing::debug!(%error, "receiving a datagram failed");
                }
            }
        }
    }
}

/// Passes one datagram on. A datagram that cannot be sent is lost, as datagrams are.
fn receive(
    listener: &Arc<Datagrams>,
    portal: &Portal,
    sessions: &mut HashMap<Path, Arc<Session>>,
    tasks: &mut JoinSet<Arc<Session>>,
) -> io::Result<()> {
    let mut buffer = lock(&portal.shared.datagram);
    let Some(Datagram { length, client, node }) = listener.try_receive(&mut buffer)? else { return Ok(()) };
    let path = Path { client, node };
    let goes_on = |session: &&Arc<Session>| {
        !session.ended.load(Ordering::Relaxed) && lock(&portal.balancer).has(session.endpoint)
    };
    let session = match sessions.get(&path).filter(goes_on) {
        Some(session) => session,
        None => {
            let Some(session) = open(path, portal) else { return Ok(()) };
            let session = Arc::new(session);
            let (of_task, listener) = (Arc::clone(&session), Arc::clone(listener));
            tasks.spawn(answer(of_task, listener, portal.clone()));
            sessions.entry(path).insert_entry(session).into_mut()
        }
    };
    *lock(&session.used) = Instant::now();
    // The runtime does not know yet that a new socket is writable, so it does not send this.
    if let Err(error) = SockRef::from(&session.socket).send(&buffer[..length]) {
        portal.failed(session.endpoint, &error);
    }
    Ok(())
}

/// Opens a session. `None`: no endpoint is for this client, none can be reached, or there is no
/// room.
fn open(path: Path, portal: &Portal) -> Option<Session> {
    let permit = portal.shared.descriptors.for_session()?;
    let mut tried = Vec::new();
    for _ in DIAL_TIMEOUTS {
        let endpoint = portal.choose(path.client.ip(), &tried).ok()?;
        match connect(endpoint) {
            Ok(socket) => {
                count(&portal.shared.counters.sessions);
                let (used, ended) = (Mutex::new(Instant::now()), AtomicBool::new(false));
                return Some(Session { path, endpoint, socket, used, ended, _permit: permit });
            }
            Err(error) => portal.failed(endpoint, &error),
        }
        tried.push(endpoint);
    }
    None
}

fn connect(endpoint: SocketAddr) -> io::Result<UdpSocket> {
    let socket = StdUdpSocket::bind((unspecified(IpFamily::of(endpoint.ip())), 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(endpoint)?;
    UdpSocket::from_std(socket)
}

/// Passes answers on until the session ends.
async fn answer(session: Arc<Session>, listener: Arc<Datagrams>, portal: Portal) -> Arc<Session> {
    let idle_timeout = portal.shared.udp_idle_timeout;
    loop {
        let ends = *lock(&session.used) + idle_timeout;
        match time::timeout_at(ends, session.socket.readable()).await {
            Ok(Ok(())) => {
                let mut buffer = lock(&portal.shared.datagram);
                match session.socket.try_recv(&mut buffer) {
                    Ok(length) => {
                        *lock(&session.used) = Instant::now();
                        let Path { client, node } = session.path;
                        if let Err(error) = listener.try_send(&buffer[..length], client, node) {
                            tracing::debug!(%client, %error, "an answer is lost");
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // The endpoint's host says that nobody listens, so the next datagram chooses
                    // anew.
                    Err(error) => {
                        portal.failed(session.endpoint, &error);
                        break;
                    }
                }
            }
            Ok(Err(_)) => break,
            Err(_) if lock(&session.used).elapsed() >= idle_timeout => break,
            Err(_) => {}
        }
    }
    session.ended.store(true, Ordering::Relaxed);
    session
}
