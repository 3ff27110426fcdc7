//! Ports for what tests start.

use std::{
    net::{Ipv4Addr, TcpListener, UdpSocket},
    process,
    sync::atomic::{AtomicU16, Ordering},
};

/// A port of TCP and UDP that nobody has. It is none that the kernel chooses for connections: those of another test could take it before
/// who is to listen on it does, and a connection to it could be given this very port and meet itself.
pub(crate) fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const OF_A_PROCESS: u16 = 1_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = FIRST + OF_A_PROCESS * (process::id() % 10) as u16;
    loop {
        let address = (Ipv4Addr::UNSPECIFIED, first + NEXT.fetch_add(1, Ordering::Relaxed) % OF_A_PROCESS);
        if TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok() {
            return address.1;
        }
    }
}
