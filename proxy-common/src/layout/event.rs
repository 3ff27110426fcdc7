//! Messages of the programs to people: the maps `events`, `event_control` and `kernel_log`.

/// Value of the map `event_control` (array with one entry): which events the programs write to
/// `events`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct EventControl {
    /// The time at which the programs stop writing events, in nanoseconds since boot, suspend
    /// included. 0: nobody watches.
    pub until: u64,
    /// A mask with one bit for each reason of which they write events, at its number.
    pub reasons: u64,
    /// The sampling: they write one of so many events, at random. 0 and 1: they write each event.
    pub one_of: u64,
}

/// Value of the map `kernel_log` (array with one entry): whether the programs log, and how much
/// they have logged. Each load of the programs has its own map.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct LogControl {
    /// The second since boot in which `lines` was last counted from 0.
    pub second: u64,
    /// The number of lines in that second, including those that were left out.
    pub lines: u32,
    /// 0: the programs log nothing.
    pub enabled: u32,
}

/// The largest number of lines that the programs log in a second.
pub const LOG_LINES_PER_SECOND: u32 = 20;

/// The size of `events` in bytes, which has room for 11,000 events.
pub const EVENT_BYTES: u32 = 1 << 20;

/// The event concerns a packet.
pub const EVENT_OF_PACKET: u8 = 0;
/// The event concerns a system call.
pub const EVENT_OF_SOCKET: u8 = 1;

/// Value of the map `events` (ring buffer). An IPv4 address is in the first four bytes of its
/// field.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Event {
    /// The time of the event, in nanoseconds since boot, suspend included.
    pub time: u64,
    /// The address of the client. Unspecified, with port 0: it is a socket, whose address no hook
    /// knows.
    pub client: [u8; 16],
    /// The address that the client dialled.
    pub frontend: [u8; 16],
    /// The address of the backend. Unspecified, with port 0: there is no backend, or it is not
    /// known.
    pub backend: [u8; 16],
    /// The port of the client, in host byte order. The next two ports are in the same order.
    pub client_port: u16,
    pub frontend_port: u16,
    pub backend_port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// The IP family, 4 or 6.
    pub family: u8,
    /// The number of a [`Reason`](crate::reason::Reason) that makes events.
    pub reason: u32,
    /// Index into `services`. `NO_SERVICE`: the client dialled the backend itself, or only the
    /// frontend says which service it is.
    pub service: u32,
    /// Key of `backends4/6`; 0: there is no backend.
    pub backend_id: u32,
    /// The kind of hook that the event comes from (`EVENT_OF_*`).
    pub hook: u8,
    pub(crate) _reserved: [u8; 3],
}

const _: () = {
    assert!(size_of::<LogControl>() == 16);
    assert!(size_of::<EventControl>() == 24);
    assert!(size_of::<Event>() == 80);
};
