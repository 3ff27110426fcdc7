//! Reserves the ends of TCP connections that netfilter translates, so that no flow takes them.
//! Rules of a former proxy, or of the secondary mode, have opened these connections.
//!
//! Each connection has two pairs of ends, that of its client's packets and that of its answers, and
//! both are reserved in `flows4/6`. Otherwise the programs would take its answers, or a forged SYN
//! would open a flow that the client's own segments follow.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use proxy_common::{
    flow::NetfilterConnection,
    layout::{FLOW_OF_NETFILTER, Flow, FlowKey, PROGRESS_CONFIRMED},
    port::Port,
};

use crate::{
    modes::{
        conntrack::address_family,
        ebpf::{
            Error,
            maps::{family::MapFamily, handles::FamilyMaps},
        },
    },
    sys::net::conntrack::{Conntrack, TranslatedConnection},
};

/// The step after which the connections of netfilter are to be listed next. Rules go on opening
/// connections until everything is taken over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum KeepPorts {
    BeforePackets,
    AfterSecondaryMode,
    Done,
}

/// The part of the entries of `flows4/6`, one in this number, that connections of netfilter may
/// take. Flows that prove no client may take half of them, so at least a quarter is left for TCP
/// connections.
const PARTS_OF_ENTRIES: u32 = 4;

/// The outcome of reserving the ends of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    /// The number of connections whose ends were not reserved before.
    pub(crate) new: u64,
    /// True if there was room for all connections.
    pub(crate) are_all: bool,
}

/// Reserves the ends of one family's connections, so that no flow takes them.
pub(crate) fn keep<F: MapFamily>(
    maps: &FamilyMaps<F>,
    conntrack: &Conntrack,
    now: u64,
) -> Result<Kept, Error> {
    let connections = list::<F>(conntrack, now)?;
    if connections.is_empty() {
        return Ok(Kept { new: 0, are_all: true });
    }
    let most = maps.flows.map().capacity() / PARTS_OF_ENTRIES;
    let mut entries = kept_entries(maps)?;
    let (mut new, mut left_out) = (0_u64, 0_u64);
    for flow in &connections {
        let keys = flow.netfilter_keys();
        let has_room = entries + keys.len() as u64 <= u64::from(most);
        let (mut is_new, mut is_left_out) = (false, false);
        for key in keys {
            match keep_key(maps, &key, flow, has_room)? {
                KeptKey::New => {
                    entries += 1;
                    is_new = true;
                }
                KeptKey::LeftOut => is_left_out = true,
                KeptKey::Already => {}
            }
        }
        new += u64::from(is_new);
        left_out += u64::from(is_left_out);
    }
    if left_out > 0 {
        tracing::warn!(
            left_out,
            "netfilter translates more connections than can be kept apart from flows, so a new flow may take \
             packets of some of them; such connections get a quarter of ebpf.limits.flows, which may be raised"
        );
    }
    Ok(Kept { new, are_all: left_out == 0 })
}

/// Counts the reserved entries, also those of connections that have ended since the last walk.
fn kept_entries<F: MapFamily>(maps: &FamilyMaps<F>) -> Result<u64, Error> {
    let mut entries = 0;
    maps.flows.walk(|few| {
        entries += few.iter().filter(|(_, flow)| flow.flags & FLOW_OF_NETFILTER != 0).count() as u64;
        true
    })?;
    Ok(entries)
}

/// The outcome for a key that is to be kept.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum KeptKey {
    New,
    /// The key is netfilter's already, or that of a confirmed flow, which goes on.
    Already,
    LeftOut,
}

/// Makes the key netfilter's. A new entry is made only if there is room for it.
fn keep_key<F: MapFamily>(
    maps: &FamilyMaps<F>,
    key: &FlowKey<F::Address>,
    flow: &Flow<F::Address>,
    has_room: bool,
) -> Result<KeptKey, Error> {
    // A confirmed flow goes on. Any other flow may come from a forged SYN, and is not found any
    // more.
    let opening = maps.opening_flows.get(key)?;
    if opening.is_some_and(|flow| flow.state.progress == PROGRESS_CONFIRMED) {
        return Ok(KeptKey::Already);
    }
    if has_room {
        match maps.flows.insert(key, flow) {
            Ok(true) => return Ok(KeptKey::New),
            Ok(false) => {}
            // Flows have taken the room. The next connection may still find some.
            Err(Error::Full(_)) => return Ok(KeptKey::LeftOut),
            Err(error) => return Err(error),
        }
    }
    let Some(kept) = maps.flows.get(key)? else { return Ok(KeptKey::LeftOut) };
    // The entry may be of a former version, which knew less of the connection.
    if kept.flags & FLOW_OF_NETFILTER != 0 {
        maps.flows.set(key, flow)?;
    }
    Ok(KeptKey::Already)
}

fn list<F: MapFamily>(conntrack: &Conntrack, now: u64) -> Result<Vec<Flow<F::Address>>, Error> {
    let connections =
        conntrack.translated_connections(address_family(F::FAMILY)).map_err(Error::Conntrack)?;
    Ok(connections.iter().filter_map(|connection| flow::<F>(connection, now)).collect())
}

fn flow<F: MapFamily>(connection: &TranslatedConnection, now: u64) -> Option<Flow<F::Address>> {
    let end = |end: std::net::SocketAddr| Some((F::address(end.ip())?, Port::new(end.port())));
    let connection = NetfilterConnection {
        client: end(connection.client)?,
        frontend: end(connection.dialled)?,
        backend: end(connection.replier)?,
        answers_to: end(connection.answers_to)?,
    };
    Some(Flow::of_netfilter(&connection, now))
}

/// The verdict on an entry that a walk meets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Judged {
    /// Nothing: the entry is a flow's, or the connection goes on.
    Other,
    /// The connection goes on, although its client, or somebody with a forged address, has dialled
    /// again. The program's note of that is to be removed.
    Dialled,
    /// The connection has ended, so the entry is to be removed.
    Ended,
}

/// Returns the entry without the note that a program has made when it met a SYN.
pub(super) fn not_dialled<A: Copy>(flow: &Flow<A>) -> Flow<A> {
    let mut flow = *flow;
    flow.state.reset = 0;
    flow
}

/// The pause after listing all connections that conntrack knows. A list may take a second, so at
/// most a fiftieth of the time goes into lists.
#[derive(Debug, Default)]
pub(crate) struct ListRest {
    last: Option<LastList>,
}

/// The time at which a list was complete, and how long it took.
#[derive(Clone, Copy, Debug)]
struct LastList {
    at: Instant,
    took: Duration,
}

impl ListRest {
    const SHARE: u32 = 50;
    const LEAST: Duration = Duration::from_secs(2);
    /// The share while clients dial again: a tenth of the time goes into lists. Forged SYNs cannot
    /// cause more lists than that.
    const SHARE_IF_DIALLED: u32 = 10;

    /// Returns true if another list may be made.
    pub(crate) fn is_over(&self) -> bool {
        self.has_lasted(|took| (took * Self::SHARE).max(Self::LEAST))
    }

    /// Returns true if another list may be made because clients have dialled again.
    fn is_over_for_dialled(&self) -> bool {
        self.has_lasted(|took| took * Self::SHARE_IF_DIALLED)
    }

    fn has_lasted(&self, rest: impl Fn(Duration) -> Duration) -> bool {
        self.last.is_none_or(|last| last.at.elapsed() >= rest(last.took))
    }

    /// Begins the pause after a list that was begun at this time.
    pub(crate) fn begin_after(&mut self, list: Instant) {
        self.last = Some(LastList { at: Instant::now(), took: list.elapsed() });
    }
}

/// Finds the connections of one family that have ended, because their clients may dial again from
/// the same port. The entry that a SYN meets notes it, and then the next list comes sooner.
#[derive(Debug)]
pub(crate) struct EndedConnections<F: MapFamily> {
    /// Client and frontend of each connection that goes on, if a list was made for the current
    /// walk.
    up: Option<HashSet<FlowKey<F::Address>>>,
    /// True if the walk has met a kept connection.
    are_kept: bool,
    /// True if the walk has met a connection that was dialled again.
    are_dialled: bool,
    rest: ListRest,
    /// True if the walk has begun after connections were kept last.
    is_current: bool,
    /// True if the walk has met a connection to an address that has a frontend.
    concern_frontends: bool,
    /// True if a current walk has met no connection to an address that has a frontend.
    are_gone: bool,
}

impl<F: MapFamily> Default for EndedConnections<F> {
    fn default() -> Self {
        Self {
            up: None,
            are_kept: false,
            are_dialled: false,
            rest: ListRest::default(),
            is_current: false,
            concern_frontends: false,
            are_gone: false,
        }
    }
}

impl<F: MapFamily> EndedConnections<F> {
    /// Begins a walk through `flows`, and lists the connections if that is due.
    pub(crate) fn begin(&mut self) {
        self.up = None;
        self.is_current = true;
        self.concern_frontends = false;
        let (are_kept, are_dialled) =
            (std::mem::take(&mut self.are_kept), std::mem::take(&mut self.are_dialled));
        let is_due = if are_dialled { self.rest.is_over_for_dialled() } else { self.rest.is_over() };
        if !are_kept || !is_due {
            return;
        }
        let started = Instant::now();
        let listed =
            Conntrack::open().map_err(Error::Conntrack).and_then(|conntrack| list::<F>(&conntrack, 0));
        match listed {
            Ok(flows) => self.up = Some(flows.iter().map(Flow::client_key).collect()),
            Err(error) => tracing::debug!(%error, "connections that netfilter translates are not listed"),
        }
        self.rest.begin_after(started);
    }

    /// Ends a walk that has come to the end of the map.
    pub(crate) fn end(&mut self) {
        self.are_gone = self.is_current && !self.concern_frontends;
    }

    /// Returns true if no kept connection is left, except those to addresses that have no frontend.
    pub(crate) fn are_gone(&self) -> bool {
        self.are_gone
    }

    /// Forgets the list and the walk, because other connections are kept now.
    pub(crate) fn forget(&mut self) {
        self.up = None;
        self.forget_walk();
    }

    /// Forgets the walk, because entries may lie where it has been before.
    pub(super) fn forget_walk(&mut self) {
        (self.is_current, self.are_gone) = (false, false);
    }

    /// Returns what is to be done with an entry that the walk meets. `has_frontend` is true if the
    /// dialled address may have a frontend.
    pub(super) fn judge(&mut self, flow: &Flow<F::Address>, has_frontend: bool) -> Judged {
        if flow.flags & FLOW_OF_NETFILTER == 0 {
            return Judged::Other;
        }
        self.are_kept = true;
        self.concern_frontends |= has_frontend;
        let is_dialled = flow.state.reset != 0;
        match &self.up {
            Some(up) if !up.contains(&flow.client_key()) => Judged::Ended,
            Some(_) if is_dialled => Judged::Dialled,
            Some(_) => Judged::Other,
            None => {
                self.are_dialled |= is_dialled;
                Judged::Other
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{family::V4, layout::RESET_PLAUSIBLE};
    use rstest::rstest;

    use super::*;

    fn entry(client_port: u16, is_dialled: bool) -> Flow<[u8; 4]> {
        let end = |address, port| (address, Port::new(port));
        let client = end([10, 1, 0, 5], client_port);
        let connection = NetfilterConnection {
            client,
            frontend: end([10, 96, 0, 1], 80),
            backend: end([10, 1, 0, 2], 8080),
            answers_to: client,
        };
        let mut flow = Flow::of_netfilter(&connection, 0);
        flow.state.reset = if is_dialled { RESET_PLAUSIBLE } else { 0 };
        flow
    }

    #[rstest]
    #[case::goes_on(1, false, Judged::Other)]
    #[case::goes_on_and_was_dialled(1, true, Judged::Dialled)]
    #[case::has_ended(2, false, Judged::Ended)]
    #[case::has_ended_and_was_dialled(2, true, Judged::Ended)]
    fn entries_beside_a_list(#[case] port: u16, #[case] is_dialled: bool, #[case] expected: Judged) {
        let up = Some([entry(1, false).client_key()].into());
        let mut ended = EndedConnections::<V4> { up, ..EndedConnections::default() };
        assert_eq!(ended.judge(&entry(port, is_dialled), true), expected);
        assert_eq!(not_dialled(&entry(port, is_dialled)), entry(port, false));
    }

    #[test]
    fn an_entry_that_was_dialled_has_the_next_list_made_sooner() {
        let at = Instant::now().checked_sub(Duration::from_secs(3)).unwrap();
        let rest = ListRest { last: Some(LastList { at, took: Duration::from_millis(100) }) };
        assert_eq!((rest.is_over(), rest.is_over_for_dialled()), (false, true));
        let mut ended = EndedConnections::<V4>::default();
        for is_dialled in [false, true, false] {
            assert_eq!(ended.judge(&entry(1, is_dialled), true), Judged::Other);
        }
        assert!(ended.are_dialled);
    }

    fn walk(ended: &mut EndedConnections<V4>, entries: &[u32]) -> bool {
        walk_with(ended, entries, true)
    }

    fn walk_with(ended: &mut EndedConnections<V4>, entries: &[u32], has_frontend: bool) -> bool {
        ended.begin();
        for flags in entries {
            let mut flow = Flow::default();
            flow.flags = *flags;
            ended.judge(&flow, has_frontend);
        }
        ended.end();
        ended.are_gone()
    }

    #[test]
    fn connections_are_gone_when_a_whole_walk_meets_none() {
        let mut ended = EndedConnections::<V4>::default();
        assert!(!ended.are_gone(), "nobody has looked");
        assert!(!walk(&mut ended, &[0, FLOW_OF_NETFILTER, 0]));
        assert!(walk_with(&mut ended, &[FLOW_OF_NETFILTER], false), "it is to no Service");
        assert!(!walk(&mut ended, &[FLOW_OF_NETFILTER]));
        assert!(walk(&mut ended, &[0]));
        assert!(walk(&mut ended, &[]));
    }

    /// The entries may lie where the walk has been before.
    #[test]
    fn a_walk_that_began_before_connections_were_kept_tells_nothing() {
        let mut ended = EndedConnections::<V4>::default();
        assert!(walk(&mut ended, &[]));
        ended.begin();
        ended.forget();
        assert!(!ended.are_gone());
        ended.end();
        assert!(!ended.are_gone());
        assert!(walk(&mut ended, &[]));
    }
}
