//! A lock that admits one writer at a time in a network namespace. It is a name in the namespace's
//! table of abstract sockets, which the kernel releases when its holder ends. Containers that share
//! the namespace see it, which would not be true of a file below /run.
//!
//! Any local user can bind such a name. Only sockets of the process's own user or of root count as
//! the lock, so that nobody else can keep a mode from opening. If another user holds the name, the
//! lock is a longer name that cannot be guessed.

use std::{
    fs,
    hash::{BuildHasher as _, RandomState},
    io::{self, Read as _},
    os::{
        fd::{AsFd, AsRawFd as _},
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    process::id,
    thread,
    time::{Duration, Instant},
};

use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use nix::{
    sys::socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
    },
    unistd::Uid,
};

use super::netlink::{Attributes, Messages, NLM_F_DUMP, NetlinkSocket, word};
use crate::sys::proc::lock::Holder;

/// The longest time from fork to exec on a busy node.
const LONGEST_START: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);
/// The longest wait for each part of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer that is read, in bytes.
const LONGEST_ANSWER: u64 = 1 << 30;

/// `SOCK_DIAG_BY_FAMILY`.
const LIST: u16 = 20;
/// The state in `unix_diag_req` that selects sockets that listen.
const LISTENING: u32 = 1 << 10;
/// `UDIAG_SHOW_NAME`: asks for the name of each socket.
const WITH_NAME: u32 = 1;
/// Adds `UDIAG_SHOW_UID`, to which kernels before 5.3 do not respond.
const WITH_NAME_AND_OWNER: u32 = WITH_NAME | 1 << 6;
/// Attributes of an answer, which follow `unix_diag_msg`.
const NAME: u16 = 0;
const OWNER: u16 = 7;
const ANSWER_HEADER: usize = 16;

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub struct NamespaceLock {
    name: UnixListener,
}

/// The result of an attempt to lock.
#[derive(Debug)]
pub enum NamespaceAttempt {
    Held(NamespaceLock),
    Taken(Holder),
}

impl NamespaceLock {
    /// Takes `proxy-ctl/<name>` in the network namespace of the calling thread. If this process
    /// itself seems to hold the name, waits for a short time: a child that it is starting inherits
    /// the socket and has it until exec.
    pub fn acquire(name: &str) -> io::Result<NamespaceAttempt> {
        let end = Instant::now() + LONGEST_START;
        loop {
            let attempt = Self::try_acquire(name)?;
            let is_own = matches!(attempt, NamespaceAttempt::Taken(Holder(Some(process))) if process == id());
            if !is_own || Instant::now() >= end {
                return Ok(attempt);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Tries to take the lock `proxy-ctl/<name>` of the network namespace in which the calling
    /// thread is. Does not wait while another process holds it.
    pub fn try_acquire(name: &str) -> io::Result<NamespaceAttempt> {
        let mut own = path(name);
        let bound = match UnixListener::bind_addr(&address(&own)?) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && counted(name).is_empty() => {
                own = format!("{own}/{:016x}", RandomState::new().hash_one(id()));
                UnixListener::bind_addr(&address(&own)?)
            }
            bound => bound,
        };
        let taken = || Ok(NamespaceAttempt::Taken(Holder(Self::holder(name))));
        match bound {
            // If two processes have taken different names at the same moment, both give up.
            Ok(_) if counted(name).iter().any(|other| *other != own) => taken(),
            Ok(name) => Ok(NamespaceAttempt::Held(Self { name })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => taken(),
            Err(error) => Err(error),
        }
    }

    /// Returns true if this or another process holds the lock.
    pub fn is_held(name: &str) -> bool {
        !counted(name).is_empty()
    }

    /// Returns the process that holds the lock. Returns `None` if nobody does or the kernel does
    /// not report it.
    pub fn holder(name: &str) -> Option<u32> {
        // The connection is made without waiting, because the queue of a holder that accepts nobody
        // may be full.
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).ok()?;
        let path = counted(name).into_iter().next()?;
        connect(socket.as_raw_fd(), &UnixAddr::new_abstract(path.as_bytes()).ok()?).ok()?;
        let process = getsockopt(&socket, PeerCredentials).ok()?.pid();
        u32::try_from(process).ok().filter(|process| *process != 0)
    }

    /// Returns the socket that [`NamespaceLock::ask`] and [`NamespaceLock::holder`] connect to. The
    /// name stays taken until this is closed too.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.name.try_clone()
    }

    /// Connects to the holder of the lock and returns what it writes. Fails if the holder is
    /// neither of the process's own user nor of root. Returns `None` if nobody holds the lock.
    pub fn ask(name: &str) -> io::Result<Option<Vec<u8>>> {
        let held = counted(name).into_iter().next().unwrap_or_else(|| path(name));
        let stream = match UnixStream::connect_addr(&address(&held)?) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return Ok(None),
            stream => stream?,
        };
        if !is_trusted(&stream) {
            let text = format!("the process that holds {name} is another user's");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut answer = Vec::new();
        stream.take(LONGEST_ANSWER).read_to_end(&mut answer)?;
        Ok(Some(answer))
    }
}

/// Returns true if the peer is of the process's own user or of root. Root trusts every peer.
pub fn is_trusted(stream: &impl AsFd) -> bool {
    let own = Uid::effective();
    let peer = getsockopt(stream, PeerCredentials).map(|peer| Uid::from_raw(peer.uid()));
    own.is_root() || peer.is_ok_and(|peer| peer == own || peer.is_root())
}

/// Returns the names of sockets that count as the lock, without the leading zero byte. If the
/// kernel does not report the owners (no CONFIG_UNIX_DIAG, or before 5.3), a socket of the exact
/// name counts, whoever owns it.
fn counted(name: &str) -> Vec<String> {
    counted_of(name, listening(WITH_NAME_AND_OWNER))
}

fn counted_of(name: &str, listening: io::Result<Vec<(String, Uid)>>) -> Vec<String> {
    let path = path(name);
    let is_one =
        |of: &&str| of.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let own = Uid::effective();
    match listening {
        Ok(sockets) => {
            let trusted = sockets.iter().filter(|(_, owner)| *owner == own || owner.is_root());
            trusted.map(|(name, _)| name.as_str()).filter(is_one).map(str::to_owned).collect()
        }
        Err(_) => {
            let sockets = fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
            let mut names =
                sockets.lines().filter_map(|socket| socket.split_whitespace().nth(7)?.strip_prefix('@'));
            names.find(|name| *name == path).map(str::to_owned).into_iter().collect()
        }
    }
}

/// Returns the abstract sockets of the network namespace that listen, with their owners. `shown`
/// says what the kernel is asked for. Fails if the kernel does not report the owners.
fn listening(shown: u32) -> io::Result<Vec<(String, Uid)>> {
    let mut header = [0; 24];
    header[0] = AddressFamily::Unix as u8;
    header[4..8].copy_from_slice(&LISTENING.to_ne_bytes());
    header[12..16].copy_from_slice(&shown.to_ne_bytes());
    let mut request = Messages::default();
    request.begin(LIST, NLM_F_DUMP, &header);
    let sockets = NetlinkSocket::open(NETLINK_SOCK_DIAG)?.dump(&request, |_, answer| {
        let attributes = Attributes(answer.get(ANSWER_HEADER..)?);
        let name = attributes.get(NAME)?.strip_prefix(&[0])?;
        let owner = attributes.get(OWNER).and_then(|owner| word(owner, 0)).map(Uid::from_raw);
        Some((str::from_utf8(name).ok()?.to_owned(), owner))
    })?;
    let with_owner = |(name, owner): (String, Option<Uid>)| Some((name, owner?));
    let owned: Option<Vec<_>> = sockets.into_iter().map(with_owner).collect();
    owned.ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "the kernel tells no owners of sockets"))
}

fn path(name: &str) -> String {
    format!("proxy-ctl/{name}")
}

fn address(path: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(path)
}

#[cfg(test)]
mod tests {
    use nix::unistd::fchown;

    use super::*;

    /// Returns a socket that an ordinary user owns.
    fn of_a_user(path: &str) -> UnixListener {
        let listener = UnixListener::bind_addr(&address(path).unwrap()).unwrap();
        fchown(&listener, Some(Uid::from_raw(65_534)), None).unwrap();
        listener
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_name_that_an_ordinary_user_has_bound_is_no_lock() {
        let name = format!("test-user-{}", id());
        let users = [of_a_user(&path(&name)), of_a_user(&format!("{}/0", path(&name)))];
        assert!(!NamespaceLock::is_held(&name));
        assert_eq!(NamespaceLock::holder(&name), None);
        let NamespaceAttempt::Held(first) = NamespaceLock::acquire(&name).unwrap() else { panic!("free") };
        assert!(NamespaceLock::is_held(&name));
        let taken = NamespaceLock::try_acquire(&name).unwrap();
        assert!(
            matches!(taken, NamespaceAttempt::Taken(Holder(Some(process))) if process == id()),
            "{taken:?}"
        );

        // The name becomes free, and the lock is still held.
        drop(users);
        let taken = NamespaceLock::try_acquire(&name).unwrap();
        assert!(matches!(taken, NamespaceAttempt::Taken(_)), "{taken:?}");
        drop(first);
    }

    #[test]
    fn a_kernel_that_tells_names_without_owners_leaves_the_lock_held() {
        let name = format!("test-owners-{}", id());
        let NamespaceAttempt::Held(_lock) = NamespaceLock::acquire(&name).unwrap() else { panic!("free") };
        // Kernels before 5.3 send this answer to any request.
        let old_kernel = listening(WITH_NAME);
        assert_eq!(counted_of(&name, old_kernel), [path(&name)]);
    }

    #[test]
    fn a_name_that_only_begins_alike_is_another_lock() {
        let name = format!("test-alike-{}", id());
        let longer = format!("{name}er");
        let NamespaceAttempt::Held(_other) = NamespaceLock::acquire(&longer).unwrap() else { panic!("free") };
        assert!(!NamespaceLock::is_held(&name));
        assert!(matches!(NamespaceLock::acquire(&name).unwrap(), NamespaceAttempt::Held(_)));
    }

    #[test]
    fn the_holder_answers_who_asks() {
        let name = format!("test-answer-{}", id());
        assert_eq!(NamespaceLock::ask(&name).unwrap(), None);
        let NamespaceAttempt::Held(lock) = NamespaceLock::acquire(&name).unwrap() else { panic!("free") };
        let listener = lock.listener().unwrap();
        let answering = thread::spawn(move || {
            let (mut asker, _) = listener.accept().unwrap();
            assert!(is_trusted(&asker));
            io::Write::write_all(&mut asker, b"all is well").unwrap();
        });
        assert_eq!(NamespaceLock::ask(&name).unwrap().as_deref(), Some(b"all is well".as_slice()));
        answering.join().unwrap();
    }

    #[test]
    fn the_second_asks_in_vain_until_the_first_lets_go() {
        let name = format!("test-{}", id());
        assert!(!NamespaceLock::is_held(&name));
        let NamespaceAttempt::Held(first) = NamespaceLock::acquire(&name).unwrap() else { panic!("free") };
        let NamespaceAttempt::Taken(holder) = NamespaceLock::acquire(&name).unwrap() else { panic!("taken") };
        assert_eq!(holder, Holder(Some(id())));
        assert!(NamespaceLock::is_held(&name));
        drop(first);
        // A child that another test is starting holds the name until exec.
        let end = Instant::now() + Duration::from_secs(60);
        while NamespaceLock::holder(&name).is_some() {
            assert!(Instant::now() < end, "the name is still held");
            thread::yield_now();
        }
        assert!(matches!(NamespaceLock::acquire(&name).unwrap(), NamespaceAttempt::Held(_)));
    }
}
