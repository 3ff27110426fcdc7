//! Free ports for the servers of tests.

use std::{
    fs,
    os::{linux::net::SocketAddrExt as _, unix::net},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
};

/// Returns a port of TCP and UDP that nobody has, and that no other test gets while this process
/// lives.
///
/// The port lies below the range from which the kernel chooses ports for connections. A connection
/// of another test could take a port of that range before the server of this test listens on it.
/// And a connection to the server could be given this very port as its own, and connect to itself.
pub(crate) fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 10_000;
    /// The abstract socket names of the ports that were given out. Tests of another process in this
    /// network namespace find them taken.
    static NAMES: Mutex<Vec<net::UnixListener>> = Mutex::new(Vec::new());
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let port = FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
        let name = net::SocketAddr::from_abstract_name(format!("proxy-ctl/test-port-{port}"));
        let Ok(name) = name.and_then(|name| net::UnixListener::bind_addr(&name)) else { continue };
        if !is_in_use(port) {
            NAMES.lock().unwrap_or_else(PoisonError::into_inner).push(name);
            return port;
        }
    }
}

/// Returns true if a socket of this network namespace has the port. The kernel's tables are read,
/// and no socket is bound to try. A child that another test starts at that moment would inherit the
/// socket, and hold the port until it runs its program.
fn is_in_use(port: u16) -> bool {
    ["tcp", "tcp6", "udp", "udp6"].into_iter().any(|table| {
        // A kernel without IPv6 has no such table.
        let sockets = fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
        let mut local = sockets.lines().filter_map(|socket| socket.split_whitespace().nth(1));
        local.any(|address| address.rsplit_once(':').is_some_and(|(_, hex)| hex == format!("{port:04X}")))
    })
}
