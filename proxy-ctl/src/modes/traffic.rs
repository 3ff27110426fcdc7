//! Flows that a mode itself keeps, and events about new connections, in the form in which people
//! and programs get them.

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
    HostConnection,
}

/// A flow that the packet programs translate.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FlowSnapshot {
    /// The service port. `None`: the client has dialled the backend itself, or the frontend does
    /// not belong to the service port any more.
    pub service: Option<Arc<ServicePortName>>,
    /// The client. It is `None`, as `frontend` is, if it is not known. Every flow that is kept now
    /// has both.
    pub client: Option<SocketAddr>,
    pub frontend: Option<SocketAddr>,
    pub backend: SocketAddr,
    /// The source that the backend sees instead of the client.
    pub masquerade: Option<SocketAddr>,
    /// True if the backend is on another node and answers the client itself. This node does not see
    /// the answers.
    pub dsr: bool,
    pub protocol: Protocol,
    pub state: FlowState,
    pub age: Duration,
    /// The time since the last packet of the flow. It may be up to a second too long.
    pub idle: Duration,
}

/// Selects flows, and limits their number to the newest ones.
pub struct FlowQuery<'a> {
    pub wanted: &'a dyn Fn(&FlowSnapshot) -> bool,
    pub limit: usize,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EventSnapshot {
    pub time: SystemTime,
    pub kind: EventKind,
    pub reason: Reason,
    /// True if the event is a system call of a socket, false if it is a packet.
    pub of_socket: bool,
    pub service: Option<Arc<ServicePortName>>,
    /// The client. `None` for a socket whose address is not chosen yet.
    pub client: Option<SocketAddr>,
    pub frontend: SocketAddr,
    pub backend: Option<SocketAddr>,
    pub protocol: Protocol,
}

/// Selects the events that the kernel makes.
#[derive(Clone, Debug)]
pub struct EventQuery {
    pub reasons: Vec<Reason>,
    /// Only one of this many events is made, chosen at random.
    pub one_of: u32,
}

/// A stream of events. It must be read at least once a second, because the kernel makes no events
/// from some seconds after the last read.
pub trait EventStream: AsFd {
    /// Returns a limited number of the events that have come. The descriptor is readable while
    /// there are more.
    fn read(&mut self) -> Result<Vec<EventSnapshot>, Error>;

    /// Returns the number of events that were lost for want of room since the beginning.
    fn lost(&self) -> Result<u64, Error>;
}
