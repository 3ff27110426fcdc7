//! One writer at a time in a network namespace: a name in its table of abstract sockets, which the kernel drops with its
//! holder.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Held until dropped.
#[derive(Debug)]
pub struct NamespaceLock {
    _name: UnixListener,
}

/// The result of an attempt to lock.
#[derive(Debug)]
pub enum NamespaceAttempt {
    Held(NamespaceLock),
    /// The process that holds it, if known: 0 in another PID namespace.
    Taken(Option<u32>),
}

impl NamespaceLock {
    /// Takes `proxy-ctl/<name>` in the network namespace of the calling thread, without waiting.
    pub fn acquire(name: &str) -> io::Result<NamespaceAttempt> {
        match UnixListener::bind_addr(&address(name)?) {
            Ok(name) => Ok(NamespaceAttempt::Held(Self { _name: name })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                Ok(NamespaceAttempt::Taken(Self::holder(name)))
            }
            Err(error) => Err(error),
        }
    }

    /// By this or another process.
    pub fn is_held(name: &str) -> bool {
        address(name).is_ok_and(|address| UnixStream::connect_addr(&address).is_ok())
    }

    /// The process that holds the name; `None`: none, or the kernel does not tell.
    pub fn holder(name: &str) -> Option<u32> {
        let stream = UnixStream::connect_addr(&address(name).ok()?).ok()?;
        let process = getsockopt(&stream, PeerCredentials).ok()?.pid();
        u32::try_from(process).ok().filter(|process| *process != 0)
    }
}

fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("proxy-ctl/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_asks_in_vain_until_the_first_lets_go() {
        let name = format!("test-{}", std::process::id());
        assert!(!NamespaceLock::is_held(&name));
        let NamespaceAttempt::Held(first) = NamespaceLock::acquire(&name).unwrap() else { panic!("free") };
        let NamespaceAttempt::Taken(process) = NamespaceLock::acquire(&name).unwrap() else {
            panic!("taken")
        };
        assert_eq!(process, Some(std::process::id()));
        assert!(NamespaceLock::is_held(&name));
        drop(first);
        assert_eq!(NamespaceLock::holder(&name), None);
        assert!(matches!(NamespaceLock::acquire(&name).unwrap(), NamespaceAttempt::Held(_)));
    }
}
