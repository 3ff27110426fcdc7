//! Connections that a mode itself keeps, and what becomes of new ones, as people and programs are shown them.

use std::{
    net::SocketAddr,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, SystemTime},
};

use proxy_common::{event::EventKind, reason::Reason};

use super::Error;
use crate::model::{desired::ServicePortName, objects::Protocol};

/// How far a flow has come, or whose it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub enum FlowState {
    /// The backend has not answered.
    Opening,
    /// The client has not shown that it receives the answers.
    Answered,
    Established,
    /// One side has closed.
    Closing,
    /// Both sides have closed, or one has reset it
    Ended,
    /// Netfilter translates it: rules of a former proxy have opened it.
    Netfilter,
    /// A connection of the node's own, or of a network plugin, that had the same ends as a flow
    Foreign,
}

/// One that the packet programs translate.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FlowSnapshot {
    /// `None`: the client has dialled the backend itself, or the frontend is not the service port's any more.
    pub service: Option<Arc<ServicePortName>>,
    /// `None`: it is not known, nor is the next. Every flow that is kept now has both.
    pub client: Option<SocketAddr>,
    pub frontend: Option<SocketAddr>,
    pub backend: SocketAddr,
    /// The source that the backend sees in the client's place.
    pub masquerade: Option<SocketAddr>,
    /// The backend is another node's, which answers the client itself: answers are not seen here.
    pub direct: bool,
    pub protocol: Protocol,
    pub state: FlowState,
    pub age: Duration,
    /// For how long nothing was heard of it; up to a second more.
    pub idle: Duration,
}

/// Which flows, and how many at most: the newest ones.
pub struct FlowQuery<'a> {
    pub wanted: &'a dyn Fn(&FlowSnapshot) -> bool,
    pub limit: usize,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EventSnapshot {
    pub time: SystemTime,
    pub kind: EventKind,
    pub reason: Reason,
    /// A system call of a socket, not a packet.
    pub of_socket: bool,
    pub service: Option<Arc<ServicePortName>>,
    /// `None`: a socket, whose address is not chosen yet.
    pub client: Option<SocketAddr>,
    pub frontend: SocketAddr,
    pub backend: Option<SocketAddr>,
    pub protocol: Protocol,
}

/// Which events the kernel makes.
#[derive(Clone, Debug)]
pub struct EventQuery {
    pub reasons: Vec<Reason>,
    /// One of so many, at random.
    pub one_of: u32,
}

/// Events as they come, to be read at least once a second: the kernel makes none some seconds after the last time.
pub trait EventStream: AsFd {
    /// Those that have come, not too many at once; the descriptor is readable when there are more.
    fn read(&mut self) -> Result<Vec<EventSnapshot>, Error>;

    /// How many there was no room for since the beginning.
    fn lost(&self) -> Result<u64, Error>;
}
