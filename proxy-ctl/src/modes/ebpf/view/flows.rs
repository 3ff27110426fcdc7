//! Lists flows, as read from the pinned maps. Each is listed once, though it has an entry for each
//! pair of its ends, and is in two maps for a while.

use std::{cmp::Reverse, net::SocketAddr, time::Duration};

use proxy_common::{
    family::Destination,
    layout::{
        FIN_ACKNOWLEDGED, FLOW_DSR, FLOW_HOST_CONNECTION, FLOW_OF_NETFILTER, Flow, FlowKey,
        PROGRESS_ANSWERED, PROGRESS_CONFIRMED,
    },
    port::Port,
};

use super::frontend_names::FrontendNames;
use crate::{
    modes::{
        FlowQuery, FlowSnapshot, FlowState,
        ebpf::{
            Error,
            maps::{
                family::MapFamily,
                handles::{CommonMaps, FamilyMaps, NamedMap},
            },
            services::entries,
        },
    },
    sys::bpf::map::Cursor,
};

/// Number of entries that are read at once.
const SLICE: usize = 4_096;

/// Collects the newest flows only, so that memory is bounded by their number and not by the number
/// of all flows.
pub(crate) struct Newest<'a> {
    query: &'a FlowQuery<'a>,
    now: u64,
    flows: Vec<(Reverse<u64>, FlowSnapshot)>,
}

impl<'a> Newest<'a> {
    /// Begins with no flows. `now` is in nanoseconds since boot.
    pub(crate) fn new(query: &'a FlowQuery<'a>, now: u64) -> Self {
        Self { query, now, flows: Vec::new() }
    }

    /// Adds the flows of one family.
    pub(crate) fn add<F: MapFamily>(
        &mut self,
        common: &CommonMaps,
        maps: &FamilyMaps<F>,
    ) -> Result<(), Error> {
        let mut names = FrontendNames::new(common, maps);
        self.add_map(&mut names, &maps.flows, |_, _| Ok(true))?;
        // `opening_flows` keeps a copy of an established flow for a while, and nothing updates it.
        // So the copy is left out.
        self.add_map(&mut names, &maps.opening_flows, |key, flow| {
            Ok(!maps.flows.get(key)?.is_some_and(|established| established.is_same(flow)))
        })
    }

    fn add_map<F: MapFamily>(
        &mut self,
        names: &mut FrontendNames<'_, F>,
        map: &NamedMap<FlowKey<F::Address>, Flow<F::Address>>,
        is_wanted: impl Fn(&FlowKey<F::Address>, &Flow<F::Address>) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let (mut cursor, mut slice) = (Some(Cursor::Start), Vec::new());
        while let Some(at) = cursor {
            slice.clear();
            cursor = map
                .map()
                .read(at, SLICE, &mut slice)
                .map_err(|source| Error::Map { name: map.name, source })?;
            for (key, flow) in slice.iter().filter(|(key, flow)| is_listed(key, flow)) {
                if is_wanted(key, flow)? {
                    let frontend = Destination {
                        address: flow.frontend,
                        port: flow.frontend_port(),
                        protocol: flow.protocol,
                    };
                    let service = names.of_flow(frontend, flow.service)?;
                    let Some(shown) = snapshot::<F>(flow, self.now) else { continue };
                    self.push(flow.opened, FlowSnapshot { service, ..shown });
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, opened: u64, flow: FlowSnapshot) {
        if !(self.query.wanted)(&flow) {
            return;
        }
        self.flows.push((Reverse(opened), flow));
        if self.flows.len() >= self.query.limit.saturating_mul(2).max(SLICE) {
            self.shrink();
        }
    }

    fn shrink(&mut self) {
        let ends = |flow: &FlowSnapshot| (flow.client, flow.frontend, flow.backend, flow.protocol);
        self.flows
            .sort_unstable_by(|(at, one), (other_at, other)| (at, ends(one)).cmp(&(other_at, ends(other))));
        // A walk may meet an entry twice.
        self.flows.dedup_by(|(at, one), (other_at, other)| at == other_at && ends(one) == ends(other));
        self.flows.truncate(self.query.limit);
    }

    /// Returns the flows, the newest first.
    pub(crate) fn finish(mut self) -> Vec<FlowSnapshot> {
        self.shrink();
        self.flows.into_iter().map(|(_, flow)| flow).collect()
    }
}

/// Returns true for the entry by which a flow is listed: that of client and frontend, which is the
/// last to go.
fn is_listed<A: proxy_common::layout::Address>(key: &FlowKey<A>, flow: &Flow<A>) -> bool {
    *key == flow.client_key()
}

/// Returns the flow without its service port, or `None` if its protocol is unknown.
fn snapshot<F: MapFamily>(flow: &Flow<F::Address>, now: u64) -> Option<FlowSnapshot> {
    let end = |address, port: Port| SocketAddr::new(F::ip(address), port.number());
    let masquerade = flow.is_masqueraded().then(|| end(flow.masquerade, flow.masquerade_port()));
    let since = |then: u64| Duration::from_nanos(now.saturating_sub(then));
    Some(FlowSnapshot {
        service: None,
        client: Some(end(flow.client, flow.client_port())),
        frontend: Some(end(flow.frontend, flow.frontend_port())),
        backend: end(flow.backend, flow.backend_port()),
        masquerade,
        dsr: flow.flags & FLOW_DSR != 0,
        protocol: entries::protocol(flow.protocol)?,
        state: state(flow),
        age: since(flow.opened),
        idle: since(flow.last_seen),
    })
}

fn state<A>(flow: &Flow<A>) -> FlowState {
    let state = flow.state;
    if flow.flags & FLOW_OF_NETFILTER != 0 {
        FlowState::Netfilter
    } else if state.has_ended() {
        FlowState::Ended
    } else if flow.flags & FLOW_HOST_CONNECTION != 0 {
        FlowState::HostConnection
    } else if state.client_fin.max(state.backend_fin) == FIN_ACKNOWLEDGED {
        FlowState::Closing
    } else if state.progress >= PROGRESS_CONFIRMED {
        FlowState::Established
    } else if state.progress >= PROGRESS_ANSWERED {
        FlowState::Answered
    } else {
        FlowState::Opening
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        family::V4,
        flow::NetfilterConnection,
        layout::{self, PROGRESS_SUSTAINED, PROTOCOL_TCP, RESET_CONFIRMED},
    };
    use rstest::rstest;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const OPEN: layout::FlowState =
        layout::FlowState { progress: PROGRESS_CONFIRMED, client_fin: 0, backend_fin: 0, reset: 0 };
    const OPENING: layout::FlowState = layout::FlowState { progress: 0, ..OPEN };
    const SUSTAINED: layout::FlowState = layout::FlowState { progress: PROGRESS_SUSTAINED, ..OPEN };
    const HALF: layout::FlowState = layout::FlowState { client_fin: FIN_ACKNOWLEDGED, ..OPEN };
    const RESET: layout::FlowState = layout::FlowState { reset: RESET_CONFIRMED, ..OPEN };

    fn flow(opened: u64, client_port: u16) -> Flow<[u8; 4]> {
        let mut flow = Flow::default();
        (flow.client, flow.frontend, flow.backend) = ([10, 1, 0, 1], [10, 96, 0, 1], [10, 1, 0, 2]);
        flow.set_client_port(Port::new(client_port));
        flow.set_alias_port(Port::new(client_port));
        flow.set_frontend_port(Port::new(80));
        flow.set_backend_port(Port::new(8080));
        (flow.protocol, flow.opened, flow.last_seen) = (PROTOCOL_TCP, opened * SECOND, 90 * SECOND);
        flow
    }

    #[rstest]
    #[case::opening(OPENING, 0, FlowState::Opening)]
    #[case::udp_that_goes_on(SUSTAINED, 0, FlowState::Answered)]
    #[case::established(OPEN, 0, FlowState::Established)]
    #[case::one_side_has_closed(HALF, 0, FlowState::Closing)]
    #[case::reset(RESET, 0, FlowState::Ended)]
    #[case::netfilters(OPEN, FLOW_OF_NETFILTER, FlowState::Netfilter)]
    #[case::host_connection(OPEN, FLOW_HOST_CONNECTION, FlowState::HostConnection)]
    #[case::host_connection_that_has_ended(RESET, FLOW_HOST_CONNECTION, FlowState::Ended)]
    fn states(#[case] state: layout::FlowState, #[case] flags: u32, #[case] expected: FlowState) {
        let mut flow = flow(1, 1);
        (flow.state, flow.flags) = (state, flags);
        assert_eq!(super::state(&flow), expected);
    }

    #[test]
    fn a_flow_is_listed_for_one_of_its_entries() {
        let mut flow = flow(1, 40_000);
        flow.masquerade = [192, 0, 2, 1];
        flow.set_masquerade_port(Port::new(1024));
        let keys = [flow.client_key(), flow.backend_key(), flow.masquerade_key()];
        assert_eq!(keys.map(|key| is_listed(&key, &flow)), [true, false, false]);
    }

    #[test]
    fn what_is_shown_of_a_flow() {
        let shown = snapshot::<V4>(&flow(40, 40_000), 100 * SECOND).unwrap();
        assert_eq!(shown.client.map(|end| end.to_string()).as_deref(), Some("10.1.0.1:40000"));
        assert_eq!(shown.frontend.map(|end| end.to_string()).as_deref(), Some("10.96.0.1:80"));
        assert_eq!((shown.backend.to_string().as_str(), shown.masquerade), ("10.1.0.2:8080", None));
        assert_eq!((shown.age, shown.idle), (Duration::from_secs(60), Duration::from_secs(10)));
    }

    #[rstest]
    #[case::masqueraded(([192, 0, 2, 1], 1024), Some("192.0.2.1:1024"))]
    #[case::not_masqueraded(([10, 1, 0, 5], 4000), None)]
    fn netfilters_connection_is_listed_once(
        #[case] answers_to: ([u8; 4], u16),
        #[case] masquerade: Option<&str>,
    ) {
        let end = |(address, port)| (address, Port::new(port));
        let connection = NetfilterConnection::<[u8; 4]> {
            client: end(([10, 1, 0, 5], 4000)),
            frontend: end(([10, 96, 0, 1], 80)),
            backend: end(([10, 1, 0, 2], 8080)),
            answers_to: end(answers_to),
        };
        let flow = Flow::of_netfilter(&connection, SECOND);
        assert_eq!(flow.netfilter_keys().map(|key| is_listed(&key, &flow)), [true, false]);
        let shown = snapshot::<V4>(&flow, SECOND).unwrap();
        assert_eq!(shown.masquerade.map(|end| end.to_string()).as_deref(), masquerade);
        let ends = [shown.client.unwrap(), shown.frontend.unwrap(), shown.backend];
        assert_eq!(ends.map(|end| end.to_string()), ["10.1.0.5:4000", "10.96.0.1:80", "10.1.0.2:8080"]);
    }

    fn listed(limit: usize, wanted: &dyn Fn(&FlowSnapshot) -> bool, opened: &[u64]) -> Vec<u64> {
        let query = FlowQuery { wanted, limit };
        let mut newest = Newest::new(&query, 10_000 * SECOND);
        for (port, opened) in (1..).zip(opened) {
            newest.push(*opened, snapshot::<V4>(&flow(*opened, port), 10_000 * SECOND).unwrap());
        }
        newest.finish().into_iter().map(|flow| 10_000 - flow.age.as_secs()).collect()
    }

    #[test]
    fn the_newest_come_first() {
        assert_eq!(listed(2, &|_| true, &[3, 9, 5]), [9, 5]);
        assert_eq!(listed(usize::MAX, &|_| true, &[3, 9, 5]), [9, 5, 3]);
        let many: Vec<u64> = (1..=9_000).map(|n| n * 7 % 9_001).collect();
        assert_eq!(listed(3, &|_| true, &many), [9_000, 8_999, 8_998]);
    }

    #[test]
    fn what_is_not_asked_for_takes_no_space() {
        let old = |flow: &FlowSnapshot| flow.age > Duration::from_secs(9_992);
        assert_eq!(listed(2, &old, &[3, 9, 5, 7]), [7, 5]);
    }

    #[test]
    fn a_flow_that_a_walk_meets_twice_is_listed_once() {
        let query = FlowQuery { wanted: &|_| true, limit: 10 };
        let mut newest = Newest::new(&query, 100 * SECOND);
        for port in [1, 2, 1] {
            newest.push(5, snapshot::<V4>(&flow(5, port), 100 * SECOND).unwrap());
        }
        assert_eq!(newest.finish().len(), 2);
    }
}
