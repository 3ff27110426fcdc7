//! Sockets that the programs translate: the maps `socket_origin4/6` and `datagrams4/6`.

use crate::port::Port;

/// Value of the map `socket_origin4/6` (socket storage): the frontend that a connected socket
/// dialled, and the backend it was sent to.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct SocketOrigin<A> {
    pub frontend: A,
    pub backend: A,
    frontend_port: u16,
    backend_port: u16,
    /// Key of `backends4/6`.
    pub backend_id: u32,
    /// Index into `services`, and the flag `SOCKET_COUNTED`. They share a field, because the value
    /// had to keep its length when the flag was added.
    service: u32,
}

/// The flag of a socket that counts as a connection of its backend, as long as it is open and has
/// its value in `socket_origin4/6`. No index of a service is that large.
const SOCKET_COUNTED: u32 = 1 << 31;

impl<A> SocketOrigin<A> {
    /// Returns the index into `services`.
    #[inline(always)]
    pub const fn service(&self) -> u32 {
        self.service & !SOCKET_COUNTED
    }

    #[inline(always)]
    pub const fn is_counted(&self) -> bool {
        self.service & SOCKET_COUNTED != 0
    }

    #[inline(always)]
    pub(crate) const fn count(&mut self) {
        self.service |= SOCKET_COUNTED;
    }

    #[inline(always)]
    pub const fn stop_counting(&mut self) {
        self.service &= !SOCKET_COUNTED;
    }

    #[inline(always)]
    pub(crate) fn new(frontend: (A, Port), backend: (A, Port), backend_id: u32, service: u32) -> Self {
        Self {
            frontend: frontend.0,
            backend: backend.0,
            frontend_port: frontend.1.number(),
            backend_port: backend.1.number(),
            backend_id,
            service,
        }
    }
}

/// The number of services that one unconnected UDP socket can talk to at the same time with exact
/// answers.
pub const DATAGRAM_ORIGINS: usize = 4;

/// Value of the map `datagrams4/6` (socket storage): the services to which an unconnected UDP
/// socket has sent. An element with a `frontend_port` of zero is free.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct DatagramOrigins<A> {
    pub origins: [SocketOrigin<A>; DATAGRAM_ORIGINS],
    /// The index of the element that the next new service takes.
    pub next: u32,
}

ports! {
    SocketOrigin: frontend_port set_frontend_port, backend_port set_backend_port;
}

const _: () = {
    assert!(size_of::<SocketOrigin<[u8; 4]>>() == 20 && size_of::<SocketOrigin<[u8; 16]>>() == 44);
    assert!(size_of::<DatagramOrigins<[u8; 4]>>() == 84 && size_of::<DatagramOrigins<[u8; 16]>>() == 180);
};
