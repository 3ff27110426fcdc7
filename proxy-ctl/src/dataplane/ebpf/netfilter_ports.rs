//! TCP connections that netfilter goes on translating: those that a former proxy's rules, or those
//! of the mode beside, have opened. Each has two pairs of ends, of its client's packets and of its
//! answers, and both are kept from flows. Otherwise the programs would take its answers, or a
//! forged SYN would open a flow that the client's own segments follow.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use proxy_common::{
    flow::NetfilterConnection,
    layout::{FLOW_OF_NETFILTER, Flow, FlowKey, PROGRESS_CONFIRMED},
    port::Port,
};

use super::{Error, family::TableFamily, tables::FamilyTables};
use crate::{
    dataplane::conntrack::address_family,
    sys::conntrack::{Conntrack, TranslatedConnection},
};

/// After which step they are to be kept next: rules go on opening connections until all is taken over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum KeepPorts {
    BeforePackets,
    AfterModeBeside,
    Done,
}

/// The part of the rows of `flows4/6` that connections of netfilter may take. Flows that prove no
/// client may take half of them, so that TCP connections have a quarter at least.
const PARTS_OF_ROWS: u32 = 4;

/// Keeps the ends of one family's connections from flows. Returns how many connections were not
/// kept before.
pub(super) fn keep<F: TableFamily>(
    tables: &FamilyTables<F>,
    conntrack: &Conntrack,
    now: u64,
) -> Result<u64, Error> {
    let connections = list::<F>(conntrack, now)?;
    if connections.is_empty() {
        return Ok(0);
    }
    let most = tables.flows.map().capacity() / PARTS_OF_ROWS;
    let mut rows = kept_rows(tables)?;
    let (mut kept, mut left_out) = (0_u64, 0_u64);
    for flow in &connections {
        let keys = flow.netfilter_keys();
        let has_room = rows + keys.len() as u64 <= u64::from(most);
        let (mut is_new, mut is_left_out) = (false, false);
        for key in keys {
            match keep_key(tables, &key, flow, has_room)? {
                Kept::New => {
                    rows += 1;
                    is_new = true;
                }
                Kept::LeftOut => is_left_out = true,
                Kept::Already => {}
            }
        }
        kept += u64::from(is_new);
        left_out += u64::from(is_left_out);
    }
    if left_out > 0 {
        tracing::warn!(
            left_out,
            "netfilter translates more connections than are kept apart from flows, so that a new flow may take \
             packets of some of them; they may take a quarter of ebpf.limits.flows"
        );
    }
    Ok(kept)
}

/// Counts the rows that are kept, also those of connections that have ended since the last walk.
fn kept_rows<F: TableFamily>(tables: &FamilyTables<F>) -> Result<u64, Error> {
    let mut rows = 0;
    tables.flows.walk(|few| {
        rows += few.iter().filter(|(_, flow)| flow.flags & FLOW_OF_NETFILTER != 0).count() as u64;
        true
    })?;
    Ok(rows)
}

/// What has become of a key that is to be kept.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kept {
    New,
    /// It is netfilter's already, or a confirmed flow's, which goes on.
    Already,
    LeftOut,
}

/// Makes the key netfilter's. A new row is made only if there is room for it.
fn keep_key<F: TableFamily>(
    tables: &FamilyTables<F>,
    key: &FlowKey<F::Address>,
    flow: &Flow<F::Address>,
    has_room: bool,
) -> Result<Kept, Error> {
    // A confirmed flow goes on. Another may be that of a forged SYN, and is not found any more.
    let opening = tables.opening_flows.get(key)?;
    if opening.is_some_and(|flow| flow.state.progress == PROGRESS_CONFIRMED) {
        return Ok(Kept::Already);
    }
    if has_room && tables.flows.insert(key, flow)? {
        return Ok(Kept::New);
    }
    let Some(kept) = tables.flows.get(key)? else { return Ok(Kept::LeftOut) };
    // A former version knew less of it.
    if kept.flags & FLOW_OF_NETFILTER != 0 {
        tables.flows.set(key, flow)?;
    }
    Ok(Kept::Already)
}

fn list<F: TableFamily>(conntrack: &Conntrack, now: u64) -> Result<Vec<Flow<F::Address>>, Error> {
    let connections =
        conntrack.translated_connections(address_family(F::FAMILY)).map_err(Error::Conntrack)?;
    Ok(connections.iter().filter_map(|connection| flow::<F>(connection, now)).collect())
}

fn flow<F: TableFamily>(connection: &TranslatedConnection, now: u64) -> Option<Flow<F::Address>> {
    let end = |end: std::net::SocketAddr| Some((F::address(end.ip())?, Port::new(end.port())));
    let connection = NetfilterConnection {
        client: end(connection.client)?,
        frontend: end(connection.dialled)?,
        backend: end(connection.replier)?,
        answers_to: end(connection.answers_to)?,
    };
    Some(Flow::of_netfilter(&connection, now))
}

/// Finds connections of one family that have ended: their clients may dial again from the same
/// port.
#[derive(Debug)]
pub(super) struct EndedConnections<F: TableFamily> {
    /// Client and frontend of those that have not, as of the walk that goes on.
    up: Option<HashSet<FlowKey<F::Address>>>,
    /// The walk has met one.
    are_kept: bool,
    next_list: Option<Instant>,
}

impl<F: TableFamily> Default for EndedConnections<F> {
    fn default() -> Self {
        Self { up: None, are_kept: false, next_list: None }
    }
}

impl<F: TableFamily> EndedConnections<F> {
    /// A list of all that conntrack knows may take a second: a fiftieth of the time goes into them.
    const REST: u32 = 50;
    const LEAST_REST: Duration = Duration::from_secs(2);

    /// A walk through `flows` begins.
    pub(super) fn begin(&mut self) {
        self.up = None;
        let is_due = self.next_list.is_none_or(|next| next <= Instant::now());
        if !std::mem::take(&mut self.are_kept) || !is_due {
            return;
        }
        let started = Instant::now();
        let listed =
            Conntrack::open().map_err(Error::Conntrack).and_then(|conntrack| list::<F>(&conntrack, 0));
        match listed {
            Ok(flows) => self.up = Some(flows.iter().map(Flow::client_key).collect()),
            Err(error) => tracing::debug!(%error, "connections that netfilter translates are not listed"),
        }
        let rest = (started.elapsed() * Self::REST).max(Self::LEAST_REST);
        self.next_list = Some(Instant::now() + rest);
    }

    /// Others were kept since the list was made.
    pub(super) fn forget(&mut self) {
        self.up = None;
    }

    /// Returns true if the walk meets a connection of netfilter's that has ended.
    pub(super) fn has_ended(&mut self, flow: &Flow<F::Address>) -> bool {
        let is_one = flow.flags & FLOW_OF_NETFILTER != 0;
        self.are_kept |= is_one;
        is_one && self.up.as_ref().is_some_and(|up| !up.contains(&flow.client_key()))
    }
}
