//! Connections in the kernel's connection tracking: lists UDP flows and TCP connections, and
//! removes them.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::Path,
};

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::sys::socket::AddressFamily;

use super::netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, ip_address};
use crate::sys::CallError;

/// The [`CallError::call`] of an error in listing.
const LIST: &str = "netlink IPCTNL_MSG_CT_GET";
/// A file that exists if the kernel tracks connections.
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";

const SUBSYSTEM: u16 = 1;
const GET: u16 = SUBSYSTEM << 8 | 1;
const DELETE: u16 = SUBSYSTEM << 8 | 2;
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const PROTOCOL_STATE: u16 = 4;
const TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const STATUS: u16 = 3;
/// `IPS_ASSURED` of linux/netfilter/nf_conntrack_common.h: both sides have shown that they receive.
const ASSURED: u32 = 1 << 2;
/// States of `enum tcp_conntrack` of linux/netfilter/nf_conntrack_tcp.h.
const SYN_SENT: u8 = 1;
const TIME_WAIT: u8 = 7;
const CLOSED: u8 = 8;
/// The states from ESTABLISHED on.
const AFTER_HANDSHAKE: RangeInclusive<u8> = 3..=CLOSED;
const ID: u16 = 12;
const ZONE: u16 = 18;
const TUPLE_ADDRESSES: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
/// A zone that applies to one direction only.
const TUPLE_ZONE: u16 = 3;
const SOURCE_4: u16 = 1;
const DESTINATION_4: u16 = 2;
const SOURCE_6: u16 = 3;
const DESTINATION_6: u16 = 4;
const PROTOCOL_NUMBER: u16 = 1;
const SOURCE_PORT: u16 = 2;
const DESTINATION_PORT: u16 = 3;

/// Returns an `nfgenmsg`: family, version, resource.
const fn header(family: AddressFamily) -> [u8; 4] {
    [family as u8, 0, 0, 0]
}

/// A flow that can be removed. Its destination is translated if `replier` differs from
/// `destination`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TrackedFlow {
    /// The address that the client has sent to.
    pub destination: SocketAddr,
    /// The address that answers come from.
    pub replier: SocketAddr,
    /// The attributes by which the kernel finds the flow again, as it has listed them.
    key: Vec<(u16, Vec<u8>)>,
}

impl TrackedFlow {
    /// Returns a flow without a key, which no kernel lists.
    #[cfg(test)]
    pub(crate) const fn new(destination: SocketAddr, replier: SocketAddr) -> Self {
        Self { destination, replier, key: Vec::new() }
    }
}

/// A TCP connection that may hinder a new one with the same ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum BegunConnection {
    /// A connection whose SYN nobody has answered, and whose destination is not translated.
    Unanswered(TrackedFlow),
    Answered(AnsweredConnection),
}

/// A TCP connection after its handshake. A connection that a RST has ended a short time ago counts
/// too: a new SYN with the same ends may get the same translation.
///
/// A connection in TIME_WAIT does not count, because a SYN begins a new one there. A connection in
/// a zone other than the default one does not count either.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AnsweredConnection {
    pub flow: TrackedFlow,
    /// The address that answers are sent to.
    pub answers_to: SocketAddr,
}

/// A TCP connection whose destination is translated, and whose both sides have shown that they
/// receive. A forged SYN never makes one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TranslatedConnection {
    pub client: SocketAddr,
    pub dialled: SocketAddr,
    /// The address that answers come from.
    pub replier: SocketAddr,
    /// The address that answers are sent to: the client's, or an address of this node that
    /// masquerades it.
    pub answers_to: SocketAddr,
}

/// A connection to the connection tracking of this thread's network namespace. Needs CAP_NET_ADMIN
/// there.
pub struct Conntrack(NetlinkSocket);

impl Conntrack {
    pub fn open() -> Result<Self, CallError> {
        NetlinkSocket::open(NETLINK_NETFILTER).map(Self).map_err(CallError::of("socket(NETLINK_NETFILTER)"))
    }

    /// Returns the UDP flows of `family`, which is Inet or Inet6. The list is empty if the kernel
    /// has no connection tracking or lacks the module nf_conntrack_netlink.
    pub fn udp_flows(&self, family: AddressFamily) -> Result<Vec<TrackedFlow>, CallError> {
        self.list(family, |flow| udp_flow(family, flow))
    }

    /// Returns the unanswered TCP connections, and the answered ones whose replier satisfies
    /// `is_replier`. The list is empty in the same cases as for [`Self::udp_flows`].
    pub fn begun_connections(
        &self,
        family: AddressFamily,
        is_replier: impl Fn(IpAddr) -> bool,
    ) -> Result<Vec<BegunConnection>, CallError> {
        self.list(family, |flow| {
            let unanswered = unanswered_connection(family, flow).map(BegunConnection::Unanswered);
            unanswered
                .or_else(|| answered_connection(family, flow, &is_replier).map(BegunConnection::Answered))
        })
    }

    /// Returns the translated TCP connections that are up. The list is empty if the kernel has no
    /// connection tracking. It is an error if the kernel has it and does not list connections.
    pub fn translated_connections(
        &self,
        family: AddressFamily,
    ) -> Result<Vec<TranslatedConnection>, CallError> {
        let listed = self.listed(family, |flow| translated_connection(family, flow))?;
        match listed {
            None if Path::new(COUNT).exists() => {
                Err(CallError::new(LIST, std::io::Error::from_raw_os_error(libc::EOPNOTSUPP)))
            }
            listed => Ok(listed.unwrap_or_default()),
        }
    }

    /// Returns true if there is a connection of any protocol whose dialled address satisfies
    /// `is_asked_for`, and that another address answers. Returns false if the kernel has no
    /// connection tracking, as for [`Self::udp_flows`].
    pub fn has_translated(
        &self,
        family: AddressFamily,
        is_asked_for: impl Fn(SocketAddr) -> bool,
    ) -> Result<bool, CallError> {
        let translated = self.list(family, |flow| {
            let (sources, destinations) = address_kinds(family);
            let dialled = endpoint(family, flow.nested(ORIGINAL)?, destinations, DESTINATION_PORT)?;
            let replier = endpoint(family, flow.nested(REPLY)?, sources, SOURCE_PORT)?;
            (replier != dialled && is_asked_for(dialled)).then_some(())
        })?;
        Ok(!translated.is_empty())
    }

    fn list<T>(
        &self,
        family: AddressFamily,
        parse: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> Result<Vec<T>, CallError> {
        self.listed(family, parse).map(Option::unwrap_or_default)
    }

    /// Returns the connections, or `None` if the kernel cannot list them.
    fn listed<T>(
        &self,
        family: AddressFamily,
        parse: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, CallError> {
        let mut request = Messages::default();
        request.begin(GET, NLM_F_DUMP, &header(family));
        let parse = |_, body: &[u8]| parse(Attributes(body.get(4..)?));
        match self.0.dump(&request, parse) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(None),
            flows => flows.map(Some).map_err(CallError::of(LIST)),
        }
    }

    /// Removes a flow. Returns false if it has ended meanwhile.
    pub fn remove(&self, family: AddressFamily, flow: &TrackedFlow) -> Result<bool, CallError> {
        let mut request = Messages::default();
        request.begin(DELETE, NLM_F_ACK, &header(family));
        for (kind, value) in &flow.key {
            match *kind {
                ORIGINAL => request.nested(ORIGINAL, |tuple| tuple.raw(value)),
                kind => request.attribute(kind, value),
            };
        }
        match self.0.request(&request, |_, _| ()) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(CallError::new("netlink IPCTNL_MSG_CT_DELETE", error)),
        }
    }
}

/// Returns the types of the attributes for a source and a destination address.
const fn address_kinds(family: AddressFamily) -> (u16, u16) {
    if matches!(family, AddressFamily::Inet) { (SOURCE_4, DESTINATION_4) } else { (SOURCE_6, DESTINATION_6) }
}

fn is_of_protocol(tuple: Attributes<'_>, protocol: i32) -> Option<()> {
    let number = tuple.nested(TUPLE_PROTOCOL)?.get(PROTOCOL_NUMBER)?;
    (i32::from(*number.first()?) == protocol).then_some(())
}

fn translated_connection(family: AddressFamily, flow: Attributes<'_>) -> Option<TranslatedConnection> {
    let (original, reply) = (flow.nested(ORIGINAL)?, flow.nested(REPLY)?);
    is_of_protocol(original, libc::IPPROTO_TCP)?;
    let status = u32::from_be_bytes(*flow.get(STATUS)?.first_chunk()?);
    let has_ended = tcp_state(flow).is_some_and(|state| [TIME_WAIT, CLOSED].contains(&state));
    let is_up = status & ASSURED != 0 && !has_ended;
    let (sources, destinations) = address_kinds(family);
    let client = endpoint(family, original, sources, SOURCE_PORT)?;
    let dialled = endpoint(family, original, destinations, DESTINATION_PORT)?;
    let replier = endpoint(family, reply, sources, SOURCE_PORT)?;
    let answers_to = endpoint(family, reply, destinations, DESTINATION_PORT)?;
    let connection = TranslatedConnection { client, dialled, replier, answers_to };
    (replier != dialled && is_up).then_some(connection)
}

fn tcp_state(flow: Attributes<'_>) -> Option<u8> {
    flow.nested(PROTOCOL_STATE)?.nested(TCP)?.get(TCP_STATE)?.first().copied()
}

fn answered_connection(
    family: AddressFamily,
    flow: Attributes<'_>,
    is_replier: impl Fn(IpAddr) -> bool,
) -> Option<AnsweredConnection> {
    let reply = flow.nested(REPLY)?;
    let (sources, destinations) = address_kinds(family);
    // These checks come before anything is copied, because there may be a million entries.
    let has_zone = flow.get(ZONE).is_some()
        || [flow.nested(ORIGINAL)?, reply].into_iter().any(|tuple| tuple.get(TUPLE_ZONE).is_some());
    let is_one = is_replier(endpoint(family, reply, sources, SOURCE_PORT)?.ip())
        && !has_zone
        && tcp_state(flow).is_some_and(|state| AFTER_HANDSHAKE.contains(&state) && state != TIME_WAIT);
    let answers_to = endpoint(family, reply, destinations, DESTINATION_PORT)?;
    let flow = tracked_flow(family, is_one.then_some(flow)?, libc::IPPROTO_TCP)?;
    Some(AnsweredConnection { flow, answers_to })
}

fn unanswered_connection(family: AddressFamily, flow: Attributes<'_>) -> Option<TrackedFlow> {
    let is_syn_sent = tcp_state(flow) == Some(SYN_SENT);
    let tracked = tracked_flow(family, is_syn_sent.then_some(flow)?, libc::IPPROTO_TCP)?;
    (tracked.replier == tracked.destination).then_some(tracked)
}

fn udp_flow(family: AddressFamily, flow: Attributes<'_>) -> Option<TrackedFlow> {
    tracked_flow(family, flow, libc::IPPROTO_UDP)
}

fn tracked_flow(family: AddressFamily, flow: Attributes<'_>, protocol: i32) -> Option<TrackedFlow> {
    let original = flow.nested(ORIGINAL)?;
    is_of_protocol(original, protocol)?;
    let (sources, destinations) = address_kinds(family);
    let key = flow.filter(|(kind, _)| matches!(*kind, ORIGINAL | ID | ZONE));
    Some(TrackedFlow {
        destination: endpoint(family, original, destinations, DESTINATION_PORT)?,
        replier: endpoint(family, flow.nested(REPLY)?, sources, SOURCE_PORT)?,
        key: key.map(|(kind, value)| (kind, value.to_vec())).collect(),
    })
}

/// Returns one end of a tuple.
fn endpoint(family: AddressFamily, tuple: Attributes<'_>, address: u16, port: u16) -> Option<SocketAddr> {
    let address: IpAddr = ip_address(family as i32, tuple.nested(TUPLE_ADDRESSES)?.get(address)?)?;
    let port = u16::from_be_bytes(*tuple.nested(TUPLE_PROTOCOL)?.get(port)?.first_chunk()?);
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const TCP_NUMBER: u8 = 6;
    const ENDPOINT: ([u8; 4], u16) = ([10, 1, 0, 9], 5353);
    const NODE: ([u8; 4], u16) = ([192, 0, 2, 1], 41_000);

    /// Returns the kernel's listing of a flow 10.1.0.5:4000 → 10.96.0.10:53 that 10.1.0.9:5353
    /// answers.
    fn listed(protocol: u8) -> Messages {
        listed_with(protocol, ([10, 1, 0, 9], 5353), ([10, 1, 0, 5], 4000))
    }

    fn listed_with(protocol: u8, replier: ([u8; 4], u16), source: ([u8; 4], u16)) -> Messages {
        listed_with_status(protocol, replier, source, ASSURED as u8)
    }

    fn listed_with_status(
        protocol: u8,
        replier: ([u8; 4], u16),
        source: ([u8; 4], u16),
        status: u8,
    ) -> Messages {
        let tuple =
            |message: &mut Messages, kind, source: [u8; 4], from: u16, destination: [u8; 4], to: u16| {
                message.nested(kind, |tuple| {
                    tuple
                        .nested(TUPLE_ADDRESSES, |addresses| {
                            addresses.attribute(SOURCE_4, &source).attribute(DESTINATION_4, &destination);
                        })
                        .nested(TUPLE_PROTOCOL, |ports| {
                            ports
                                .attribute(PROTOCOL_NUMBER, &[protocol])
                                .attribute(SOURCE_PORT, &from.to_be_bytes())
                                .attribute(DESTINATION_PORT, &to.to_be_bytes());
                        });
                });
            };
        let mut message = Messages::default();
        message.begin(GET, 0, &header(AddressFamily::Inet));
        tuple(&mut message, ORIGINAL, [10, 1, 0, 5], 4000, [10, 96, 0, 10], 53);
        tuple(&mut message, REPLY, replier.0, replier.1, source.0, source.1);
        message.attribute(STATUS, &[0, 0, 0, status]).attribute(ID, &[1, 2, 3, 4]);
        message
    }

    fn in_state(state: u8, mut message: Messages) -> Messages {
        message.nested(PROTOCOL_STATE, |of| {
            of.nested(TCP, |of| {
                of.attribute(TCP_STATE, &[state]);
            });
        });
        message
    }

    #[rstest]
    #[case::syn_sent(TCP_NUMBER, ([10, 96, 0, 10], 53), 1, true)]
    #[case::answered(TCP_NUMBER, ([10, 96, 0, 10], 53), 2, false)]
    #[case::established(TCP_NUMBER, ([10, 96, 0, 10], 53), 3, false)]
    #[case::translated(TCP_NUMBER, ENDPOINT, 1, false)]
    #[case::udp(17, ([10, 96, 0, 10], 53), 1, false)]
    fn connections_that_nobody_answers(
        #[case] protocol: u8,
        #[case] replier: ([u8; 4], u16),
        #[case] state: u8,
        #[case] is_one: bool,
    ) {
        let message = in_state(state, listed_with(protocol, replier, ([10, 1, 0, 5], 4000)));
        let found = unanswered_connection(AddressFamily::Inet, Attributes(&message.bytes()[20..]));
        assert_eq!(found.is_some(), is_one);
    }

    #[rstest]
    #[case::syn_sent(TCP_NUMBER, NODE, SYN_SENT, false)]
    #[case::syn_received(TCP_NUMBER, NODE, 2, false)]
    #[case::established(TCP_NUMBER, NODE, 3, true)]
    #[case::half_closed(TCP_NUMBER, NODE, 5, true)]
    #[case::time_wait(TCP_NUMBER, NODE, TIME_WAIT, false)]
    #[case::reset(TCP_NUMBER, NODE, CLOSED, true)]
    #[case::syn_of_both(TCP_NUMBER, NODE, 9, false)]
    #[case::another_replier(TCP_NUMBER, ENDPOINT, 3, false)]
    #[case::udp(17, NODE, 3, false)]
    fn connections_that_the_node_answers(
        #[case] protocol: u8,
        #[case] replier: ([u8; 4], u16),
        #[case] state: u8,
        #[case] is_one: bool,
    ) {
        let message = in_state(state, listed_with(protocol, replier, ([10, 1, 0, 5], 4000)));
        let flow = Attributes(&message.bytes()[20..]);
        let found = answered_connection(AddressFamily::Inet, flow, |address| address == IpAddr::from(NODE.0));
        let ends = found.map(|found| (found.flow.replier, found.answers_to));
        assert_eq!(ends, is_one.then_some((NODE.into(), ([10, 1, 0, 5], 4000).into())));
    }

    #[test]
    fn a_connection_of_another_zone_is_another_trackers() {
        let mut message = in_state(3, listed_with(TCP_NUMBER, NODE, ([10, 1, 0, 5], 4000)));
        message.attribute(ZONE, &[0, 7]);
        let flow = Attributes(&message.bytes()[20..]);
        assert_eq!(answered_connection(AddressFamily::Inet, flow, |_| true), None);
    }

    #[test]
    fn a_flow_tells_what_was_dialled_and_who_answers() {
        let message = listed(17);
        let flow = udp_flow(AddressFamily::Inet, Attributes(&message.bytes()[20..])).unwrap();
        assert_eq!(flow.destination.to_string(), "10.96.0.10:53");
        assert_eq!(flow.replier.to_string(), "10.1.0.9:5353");
        let kinds: Vec<u16> = flow.key.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [ORIGINAL, ID]);
    }

    #[rstest]
    #[case::masqueraded(TCP_NUMBER, ENDPOINT, NODE, 3, true)]
    #[case::the_port_stays(TCP_NUMBER, ENDPOINT, (NODE.0, 4000), 3, true)]
    #[case::of_the_node_itself(TCP_NUMBER, ENDPOINT, ([10, 1, 0, 5], 41_000), 3, true)]
    #[case::half_closed(TCP_NUMBER, ENDPOINT, NODE, 5, true)]
    #[case::ended(TCP_NUMBER, ENDPOINT, NODE, 7, false)]
    #[case::destination_alone(TCP_NUMBER, ENDPOINT, ([10, 1, 0, 5], 4000), 3, true)]
    #[case::source_alone(TCP_NUMBER, ([10, 96, 0, 10], 53), NODE, 3, false)]
    #[case::udp(17, ENDPOINT, NODE, 3, false)]
    fn translated_connections_that_go_on(
        #[case] protocol: u8,
        #[case] replier: ([u8; 4], u16),
        #[case] source: ([u8; 4], u16),
        #[case] state: u8,
        #[case] is_one: bool,
    ) {
        let message = in_state(state, listed_with(protocol, replier, source));
        let found = translated_connection(AddressFamily::Inet, Attributes(&message.bytes()[20..]));
        let expected = TranslatedConnection {
            client: ([10, 1, 0, 5], 4000).into(),
            dialled: ([10, 96, 0, 10], 53).into(),
            replier: replier.into(),
            answers_to: source.into(),
        };
        assert_eq!(found, is_one.then_some(expected));
    }

    /// A SYN flood leaves connections in this state: their SYN was answered, and nothing followed.
    #[rstest]
    #[case::seen_reply(0b10, false)]
    #[case::assured(0b110, true)]
    fn connections_whose_client_has_not_shown_itself_are_left_out(#[case] status: u8, #[case] is_one: bool) {
        let mut message = in_state(3, listed_with_status(TCP_NUMBER, ENDPOINT, NODE, status));
        message.attribute(ID, &[1, 2, 3, 4]);
        let found = translated_connection(AddressFamily::Inet, Attributes(&message.bytes()[20..]));
        assert_eq!(found.is_some(), is_one);
    }

    #[test]
    fn flows_of_other_protocols_are_left_out() {
        assert_eq!(udp_flow(AddressFamily::Inet, Attributes(&listed(6).bytes()[20..])), None);
    }
}
