//! What a test and an agent say to each other.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::wait;

#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Protocol {
    Tcp,
    Udp,
    /// One connection a socket, as TCP.
    Sctp,
}

impl Protocol {
    /// As Kubernetes writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.name())
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Request {
    /// Answers TCP and UDP requests with `name` and the addresses that the server sees.
    Serve {
        name: String,
        addresses: Vec<SocketAddr>,
    },
    /// Answers SCTP requests as [`Request::Serve`] those of the other protocols.
    ServeSctp {
        name: String,
        addresses: Vec<SocketAddr>,
    },
    /// Returns what it gets: the other end of [`Request::Bench`].
    ServeBytes {
        addresses: Vec<SocketAddr>,
    },
    /// Answers a mebibyte with one byte: the other end of [`Exercise::Bulk`].
    ServeBulk {
        addresses: Vec<SocketAddr>,
    },
    Dial(Dial),
    /// The dials of a group one after another, the groups at the same time. A dial ends with what is not answered.
    DialGroups(Vec<Vec<Dial>>),
    /// Sends to every target in turn, `rounds` times, from one unconnected UDP socket.
    DialShared {
        targets: Vec<SocketAddr>,
        rounds: u32,
        mapped: bool,
    },
    /// Sends one datagram from this address, its fragments of 1,400 bytes in this order.
    DialInFragments {
        source: IpAddr,
        target: SocketAddr,
        payload: usize,
        order: Vec<usize>,
        /// The longest wait for the answer.
        timeout_ms: u64,
    },
    /// Opens a connection that stays open.
    Hold(Dial),
    /// Opens as many connections that stay open, to each target in turn, of both families.
    HoldMany {
        targets: Vec<SocketAddr>,
        protocol: Protocol,
        count: usize,
    },
    /// One request over each of them: the ends of those that were not answered, and what became of them.
    PingMany {
        connections: Vec<usize>,
    },
    /// One request over a held connection.
    Ping {
        connection: usize,
    },
    Release {
        connection: usize,
    },
    /// Dials again and again until told to stop.
    StartLoad(Load),
    PeekLoad {
        load: usize,
    },
    StopLoad {
        load: usize,
    },
    Bench(Bench),
    /// `GET http://address/path`.
    HttpGet {
        address: SocketAddr,
        path: String,
    },
}

/// What the request asks for as JSON, or why it could not be carried out.
pub type Reply = Result<Value, String>;

/// New connections (or sockets) one after another, each with one request.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Dial {
    pub target: SocketAddr,
    pub protocol: Protocol,
    pub count: u32,
    /// UDP: `sendto` and `recvfrom` instead of `connect`, `send` and `recv`.
    pub unconnected: bool,
    /// Through an IPv6 socket to the IPv4-mapped address.
    pub mapped: bool,
    /// TCP: `connect` on a non-blocking socket.
    pub non_blocking: bool,
    pub source: Option<IpAddr>,
    pub source_port: Option<u16>,
    /// Bytes of each request.
    pub payload: usize,
    pub timeout_ms: u64,
}

impl Dial {
    /// Once, of 16 bytes; an answer may take 2 s, times `LAB_PATIENCE`.
    pub fn new(protocol: Protocol, target: SocketAddr) -> Self {
        Self {
            target,
            protocol,
            count: 1,
            unconnected: false,
            mapped: false,
            non_blocking: false,
            source: None,
            source_port: None,
            payload: 16,
            timeout_ms: 2_000 * u64::from(wait::patience()),
        }
    }

    pub fn times(mut self, count: u32) -> Self {
        self.count = count;
        self
    }

    pub fn unconnected(mut self) -> Self {
        self.unconnected = true;
        self
    }

    pub fn mapped(mut self) -> Self {
        self.mapped = true;
        self
    }

    pub fn non_blocking(mut self) -> Self {
        self.non_blocking = true;
        self
    }

    pub fn payload(mut self, bytes: usize) -> Self {
        self.payload = bytes;
        self
    }

    pub fn timeout_ms(mut self, milliseconds: u64) -> Self {
        self.timeout_ms = milliseconds;
        self
    }

    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = Some(port);
        self
    }
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Outcome {
    Answered(Answer),
    /// ECONNREFUSED, with the time it took.
    Refused {
        micros: u64,
    },
    /// No answer within the dial's limit.
    TimedOut,
    /// EPERM.
    NotPermitted,
    /// EHOSTUNREACH or ENETUNREACH.
    Unreachable,
    /// Anything else, as the system writes it.
    Failed(String),
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Answered(answer) => write!(
                formatter,
                "answered by {} (peer {}, server saw {})",
                answer.by, answer.peer, answer.source
            ),
            Self::Refused { micros } => write!(formatter, "refused after {micros} us"),
            Self::TimedOut => formatter.write_str("timed out"),
            Self::NotPermitted => formatter.write_str("EPERM"),
            Self::Unreachable => formatter.write_str("unreachable"),
            Self::Failed(text) => formatter.write_str(text),
        }
    }
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Answer {
    /// Name of who answered.
    pub by: String,
    /// What getpeername (TCP, connected UDP) or recvfrom (unconnected UDP) says, exactly.
    pub peer: SocketAddr,
    /// Client address as the server saw it.
    pub source: SocketAddr,
    /// The server's own address of this connection.
    pub server: SocketAddr,
    /// What SO_ORIGINAL_DST tells the server of a TCP connection.
    pub original: Option<SocketAddr>,
    /// Bytes of the request that reached the server.
    pub bytes: usize,
    /// From `connect` (or `sendto`) to the whole answer.
    pub micros: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Load {
    pub target: SocketAddr,
    pub protocol: Protocol,
    /// Threads.
    pub clients: u32,
    /// Between two requests of a thread.
    pub pause_micros: u64,
    pub timeout_ms: u64,
    /// Each thread sends all of its requests over one connection or socket, not each over a new one. A TCP connection that has broken is
    /// replaced.
    pub keeps_socket: bool,
}

impl Load {
    /// Of one thread, 5 ms between two requests, a new connection for each, which may take 2 s, times `LAB_PATIENCE`.
    pub fn new(protocol: Protocol, target: SocketAddr) -> Self {
        let timeout_ms = 2_000 * u64::from(wait::patience());
        Self { target, protocol, clients: 1, pause_micros: 5_000, timeout_ms, keeps_socket: false }
    }
}

/// What a load has met so far.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Tally {
    pub answered: u64,
    pub failed: u64,
    /// Most failures that a thread has met one after another.
    pub failed_in_a_row: u64,
    /// From the begin of a request that failed to the next answer.
    pub longest_outage_micros: u64,
    /// Failures by outcome.
    pub failures: BTreeMap<String, u64>,
    pub backends: BTreeMap<String, Share>,
    pub slowest_micros: u64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Share {
    pub answered: u64,
    /// Sum over all answers.
    pub micros: u64,
}

/// What a [`Bench`] does again and again.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Exercise {
    /// Connects, sends a byte, gets one, closes.
    Connect,
    /// A byte there and back on a connection that stays open for a turn.
    Request,
    /// A mebibyte there, a byte back, on a connection that stays open for a turn.
    Bulk,
    /// A byte there and back from a new UDP socket.
    Datagram,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Bench {
    pub exercise: Exercise,
    /// What is compared, by turns: the targets of a side are dialled one after another.
    pub sides: Vec<Vec<SocketAddr>>,
    /// Connections at once.
    pub clients: u32,
    /// For all sides together.
    pub seconds: f64,
    /// How long a side has its turn.
    pub turn_ms: u64,
    /// Requests a second of all clients together; none: each as soon as the one before is answered.
    pub pace: Option<f64>,
}

/// What one side of a [`Bench`] has met.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Side {
    /// Requests a second in each turn after the first.
    pub per_second: Vec<f64>,
    pub answered: u64,
    pub failed: u64,
    /// The first of them.
    pub failure: Option<String>,
    pub p50_micros: f64,
    pub p99_micros: f64,
}
