//! One writer at a time in a network namespace: a name in its table of abstract sockets, which the kernel drops with its
//! holder.

use std::{
    fs,
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

use nix::{
    sys::socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
    },
    unistd::Uid,
};

use super::lock::Holder;

/// Longest time from fork to exec, on a busy node.
const LONGEST_START: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);
/// Longest wait for each part of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer that is read, in bytes.
const LONGEST_ANSWER: u64 = 1 << 30;

/// Held until dropped.
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
    /// Takes `proxy-ctl/<name>` in the network namespace of the calling thread. What this process has let go of is waited for: a
    /// child that it is just starting has it until it becomes another program.
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

    /// Takes `proxy-ctl/<name>` in the network namespace of the calling thread, without waiting.
    pub fn try_acquire(name: &str) -> io::Result<NamespaceAttempt> {
        match UnixListener::bind_addr(&address(name)?) {
            Ok(name) => Ok(NamespaceAttempt::Held(Self { name })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                Ok(NamespaceAttempt::Taken(Holder(Self::holder(name))))
            }
            Err(error) => Err(error),
        }
    }

    /// By this or another process.
    pub fn is_held(name: &str) -> bool {
        let sockets = fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
        let path = format!("@proxy-ctl/{name}");
        sockets.lines().any(|socket| socket.split_whitespace().nth(7) == Some(&path))
    }

    /// The process that holds the name; `None`: none, or the kernel does not tell.
    pub fn holder(name: &str) -> Option<u32> {
        // A holder that accepts nobody is asked without waiting: its queue may be full.
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).ok()?;
        let path = format!("proxy-ctl/{name}");
        connect(socket.as_raw_fd(), &UnixAddr::new_abstract(path.as_bytes()).ok()?).ok()?;
        let process = getsockopt(&socket, PeerCredentials).ok()?.pid();
        u32::try_from(process).ok().filter(|process| *process != 0)
    }

    /// Where [`NamespaceLock::ask`] and [`NamespaceLock::holder`] connect. The name is taken until this is closed too.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.name.try_clone()
    }

    /// What the holder of the name writes to whoever connects; only of a process of the own user or of root. `None`: nobody
    /// holds it.
    pub fn ask(name: &str) -> io::Result<Option<Vec<u8>>> {
        let stream = match UnixStream::connect_addr(&address(name)?) {
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

/// The other side is of the own user or of root; for root, everybody is.
pub fn is_trusted(stream: &impl AsFd) -> bool {
    let own = Uid::effective();
    let peer = getsockopt(stream, PeerCredentials).map(|peer| Uid::from_raw(peer.uid()));
    own.is_root() || peer.is_ok_and(|peer| peer == own || peer.is_root())
}

fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("proxy-ctl/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // A child that another test starts at this moment holds the name until it runs its program.
        let end = Instant::now() + Duration::from_secs(60);
        while NamespaceLock::holder(&name).is_some() {
            assert!(Instant::now() < end, "the name is still held");
            thread::yield_now();
        }
        assert!(matches!(NamespaceLock::acquire(&name).unwrap(), NamespaceAttempt::Held(_)));
    }
}
