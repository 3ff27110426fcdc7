//! Decisions about packets: which flow one belongs to, what opens a flow, and how it is translated.
//!
//! A flow has an entry for each pair of ends that its packets have at the hooks of this node:
//! client and frontend, client and backend, and, where its source is translated too, masquerade
//! and backend. Each entry serves both directions, so that a packet of a flow costs one lookup.
//!
//! A flow opens in the map of opening flows, which evicts. Its entries are copied to the
//! established ones when the client has acknowledged the backend's SYN, whose number a client with
//! a forged address does not know. Datagrams prove nothing of their client: flows of datagrams that
//! go on for seconds may take a part of the established ones. So no flood can fill the map that
//! does not evict. The copies in the opening map stay until they age: a reader between two
//! lookups would otherwise find neither.
//!
//! The state of a flow is the union of what its entries know: no CPU overwrites what another
//! learned.
//!
//! # Three ways through the same rules
//!
//! | way | where | which packets it decides about |
//! |---|---|---|
//! | slow path | `arriving.rs`, `leaving.rs` | all |
//! | fast path | `fast_path.rs` | most: of established flows, and of no flow if they open none |
//! | XDP | `forward/` | from outside, of flows that the stack has let out before |
//!
//! All ways have one contract. The slow path is the rule. Another way either decides what the slow
//! path decides, or leaves the packet to it untouched. XDP stands for two decisions: where the
//! packet arrives, and where it leaves. So whoever changes a rule of the slow path looks whether
//! the other ways apply it themselves. What several of them need is written once, in `find.rs`,
//! `translate.rs`, `keep.rs` and `tcp.rs`. Tests take the fast path first, as programs do, and
//! `both_ways_are_one` compares XDP with the two decisions that it stands for.
//!
//! In all ways a packet is worked on in a [`Scratch`]: its flow is found (`find.rs`) or opened
//! (`open/`), what becomes of it is decided (`translate.rs`), and its flow is kept (`keep.rs`).

mod arriving;
mod describe;
mod direct;
mod entries;
mod fast_path;
mod find;
mod forward;
mod fragments;
mod keep;
mod leaving;
mod open;
mod ports;
mod routine;
mod scratch;
mod tcp;
#[cfg(test)]
mod tests;
mod traits;
mod translate;
mod tuples;

pub use arriving::{arriving, may_carry_another};
pub use entries::{collect, copy, lifetimes::FlowLifetimes};
pub use fast_path::{arriving_fast, leaving_fast};
pub use forward::{
    forward,
    next_hop::{Forwarder, NextHop},
};
pub use leaving::{cannot_skip_stack, encapsulating, leaving};
pub use open::{
    flood_limit::{OPENING_SERVICES, ServiceOpenings, openings_per_window},
    unknown::frontend_address_bit,
};
pub use ports::host_connection::is_remapped;
pub use routine::{Routine, run};
pub use scratch::{Clock, Scratch};
pub use tcp::Side;
pub use traits::{Change, FlowEntry, FlowMaps, InsertError, PodSockets, Stage, UnknownSockets};
pub use tuples::NetfilterConnection;
