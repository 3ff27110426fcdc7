//! Messages between a test and an agent.

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
    /// SCTP with one connection a socket, as TCP has.
    Sctp,
}

impl Protocol {
    /// Returns the name as Kubernetes writes it.
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
    /// Answers SCTP requests as [`Request::Serve`] answers those of the other protocols.
    ServeSctp {
        name: String,
        addresses: Vec<SocketAddr>,
    },
    /// Sends back what it gets. It is the other end of [`Request::Bench`].
    ServeBytes {
        addresses: Vec<SocketAddr>,
    },
    /// Answers each mebibyte with one byte. It is the other end of [`Exercise::Bulk`].
    ServeBulk {
        addresses: Vec<SocketAddr>,
    },
    Dial(Dial),
    /// Dials the dials of a group one after another, and the groups at the same time. A dial ends
    /// with the first request that is not answered.
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
        /// Longest wait for the answer.
        timeout_ms: u64,
    },
    /// Opens a connection that stays open.
    Hold(Dial),
    /// Opens `count` connections that stay open, to the targets in turn, which may be of both
    /// families.
    HoldMany {
        targets: Vec<SocketAddr>,
        protocol: Protocol,
        count: usize,
    },
    /// Makes one request over each connection. Returns ends and outcome of those that were not
    /// answered.
    PingMany {
        connections: Vec<usize>,
    },
    /// Makes one request over a held connection.
    Ping {
        connection: usize,
    },
    Release {
        connection: usize,
    },
    /// Dials again and again until it is told to stop.
    StartLoad(Load),
    PeekLoad {
        load: usize,
    },
    /// Begins the end of all loads: their threads make no further requests.
    EndLoads,
    StopLoad {
        load: usize,
    },
    Bench(Bench),
    /// Requests `GET http://address/path`.
    HttpGet {
        address: SocketAddr,
        path: String,
    },
}

/// Answer to a request as JSON, or the reason why it could not be carried out.
pub type Reply = Result<Value, String>;

/// New connections or sockets one after another, each with one request.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Dial {
    pub target: SocketAddr,
    pub protocol: Protocol,
    pub count: u32,
    /// For UDP: uses `sendto` and `recvfrom` instead of `connect`, `send` and `recv`.
    pub unconnected: bool,
    /// Dials the IPv4-mapped address through an IPv6 socket.
    pub mapped: bool,
    /// For TCP: calls `connect` on a non-blocking socket.
    pub non_blocking: bool,
    pub source: Option<IpAddr>,
    pub source_port: Option<u16>,
    /// Number of bytes of each request.
    pub payload: usize,
    pub timeout_ms: u64,
}

impl Dial {
    /// Makes a dial of one request of 16 bytes. Its answer may take 2 s, times `LAB_PATIENCE`.
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
    /// ECONNREFUSED, and the time that it took.
    Refused {
        micros: u64,
    },
    /// No answer came within the dial's limit.
    TimedOut,
    /// EPERM.
    NotPermitted,
    /// EHOSTUNREACH or ENETUNREACH.
    Unreachable,
    /// Any other error, as the system writes it.
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
    /// Name of the server that answered.
    pub by: String,
    /// Peer that getpeername (TCP, connected UDP) or recvfrom (unconnected UDP) returns.
    pub peer: SocketAddr,
    /// Client address that the server saw.
    pub source: SocketAddr,
    /// Own address of the server on this connection.
    pub server: SocketAddr,
    /// Address that SO_ORIGINAL_DST gives the server of a TCP connection.
    pub original: Option<SocketAddr>,
    /// Number of bytes of the request that reached the server.
    pub bytes: usize,
    /// Time from `connect` (or `sendto`) to the whole answer.
    pub micros: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Load {
    pub target: SocketAddr,
    pub protocol: Protocol,
    /// Number of threads.
    pub clients: u32,
    /// Time between two requests of a thread.
    pub pause_micros: u64,
    pub timeout_ms: u64,
    /// True if each thread sends all its requests over one connection or socket, and false if each
    /// request has a new one. A TCP connection that has broken is replaced.
    pub keeps_socket: bool,
    /// The time for which a new TCP connection goes on with requests, 100 ms apart, and up to half
    /// of that longer or shorter. 0: it has one request.
    pub lasts_ms: u64,
}

impl Load {
    /// Makes a load of one thread that opens a new connection every 5 ms. A request may take 2 s,
    /// times `LAB_PATIENCE`.
    pub fn new(protocol: Protocol, target: SocketAddr) -> Self {
        let timeout_ms = 2_000 * u64::from(wait::patience());
        Self {
            target,
            protocol,
            clients: 1,
            pause_micros: 5_000,
            timeout_ms,
            keeps_socket: false,
            lasts_ms: 0,
        }
    }
}

/// Outcomes of a load so far.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Tally {
    pub answered: u64,
    pub failed: u64,
    /// Largest number of failures that a thread has met one after another.
    pub failed_in_a_row: u64,
    /// Longest time from the beginning of a request that failed to the next answer.
    pub longest_outage_micros: u64,
    /// Number of failures of each outcome.
    pub failures: BTreeMap<String, u64>,
    /// Connections that were opened, of a load whose connections last. The failures are those that
    /// were not.
    pub opened: u64,
    /// Descriptions of the connections that broke or stalled, or were reset while they were opened.
    pub lost: Vec<String>,
    pub backends: BTreeMap<String, Share>,
    pub slowest_micros: u64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Share {
    pub answered: u64,
    /// Sum of the times of all answers.
    pub micros: u64,
}

/// Exchange that a [`Bench`] repeats.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Exercise {
    /// Connects, sends a byte, gets a byte, and closes.
    Connect,
    /// Sends a byte and gets one, on a connection that stays open for a turn.
    Request,
    /// Sends a mebibyte and gets a byte, on a connection that stays open for a turn.
    Bulk,
    /// Sends a byte from a new UDP socket and gets one.
    Datagram,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Bench {
    pub exercise: Exercise,
    /// Sides that are compared, in turn. Each request of a side goes to one of its targets.
    pub sides: Vec<Vec<SocketAddr>>,
    /// Number of connections at once.
    pub clients: u32,
    /// Duration for all sides together.
    pub seconds: f64,
    /// Duration of a side's turn.
    pub turn_ms: u64,
    /// Number of requests in a second of all clients together. With `None`, each follows as soon as
    /// the one before is answered.
    pub pace: Option<f64>,
}

/// Results of one side of a [`Bench`].
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Side {
    /// Rate of requests in each turn after the first.
    pub per_second: Vec<f64>,
    pub answered: u64,
    pub failed: u64,
    /// Error of the first failure.
    pub failure: Option<String>,
    pub p50_micros: f64,
    pub p99_micros: f64,
}
