//! Rules of nf_tables that lead what is sent to frontends to the listeners, in a table of our own. Which element leads where is
//! pure; [`Redirect`] writes the differences.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
};

use socket2::{Domain, Protocol as IpProtocol, Socket, Type};

use super::{plan::unspecified, stale_flows::StaleFlows};
use crate::{
    dataplane::Host,
    leftovers::names::USERSPACE_TABLE as TABLE,
    model::{
        desired::{Frontend, FrontendKind, ServicePortName},
        objects::{IpFamily, Protocol},
    },
    sys::{
        CallError,
        nftables::{
            BaseChain, Batch, ChainType, Datum, ElementData, Expression, Header, Meta, NetfilterHook,
            NfTables, Register, SetDefinition, TableFamily, Values,
        },
    },
};

const COMMENT: &str = "proxy-ctl in mode userspace";
/// Before routing, and as early as kube-proxy's other modes.
const PRIORITY: i32 = -100;

const FRONTENDS: &str = "frontends";
const NODE_PORTS: &str = "node-ports";
const NODE_ADDRESSES: &str = "node-addresses";

#[derive(Debug, thiserror::Error)]
pub(super) enum RedirectError {
    #[error("{0}")]
    Call(#[from] CallError),
    #[error("the kernel refuses the table {TABLE} of family {family}, in message {message}: {source}")]
    Refused { family: &'static str, message: u32, source: io::Error },
}

/// The map or set of the table that an element is in.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Place {
    /// Address, protocol, port → port.
    Frontends,
    /// Protocol, port → port.
    NodePorts,
    NodeAddresses,
}

impl Place {
    const ALL: [Self; 3] = [Self::Frontends, Self::NodePorts, Self::NodeAddresses];

    const fn name(self) -> &'static str {
        match self {
            Self::Frontends => FRONTENDS,
            Self::NodePorts => NODE_PORTS,
            Self::NodeAddresses => NODE_ADDRESSES,
        }
    }

    fn definition(self, family: IpFamily) -> SetDefinition {
        let port = Values::Of(&[Datum::Port]);
        match (self, family) {
            (Self::Frontends, IpFamily::Ipv4) => {
                SetDefinition::new(&[Datum::Ipv4Address, Datum::Protocol, Datum::Port], port)
            }
            (Self::Frontends, IpFamily::Ipv6) => {
                SetDefinition::new(&[Datum::Ipv6Address, Datum::Protocol, Datum::Port], port)
            }
            (Self::NodePorts, _) => SetDefinition::new(&[Datum::Protocol, Datum::Port], port),
            (Self::NodeAddresses, IpFamily::Ipv4) => SetDefinition::new(&[Datum::Ipv4Address], Values::None),
            (Self::NodeAddresses, IpFamily::Ipv6) => SetDefinition::new(&[Datum::Ipv6Address], Values::None),
        }
    }
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct ElementKey {
    pub(super) family: IpFamily,
    /// `None`: it is an address of the node.
    pub(super) protocol: Option<Protocol>,
    place: Place,
    bytes: Vec<u8>,
}

impl ElementKey {
    pub(super) fn frontend(family: IpFamily, protocol: Protocol, address: IpAddr, port: u16) -> Self {
        let bytes = [address_bytes(address).as_slice(), &protocol_and_port(protocol, port)].concat();
        Self { family, protocol: Some(protocol), place: Place::Frontends, bytes }
    }

    pub(super) fn node_port(family: IpFamily, protocol: Protocol, port: u16) -> Self {
        let bytes = protocol_and_port(protocol, port).to_vec();
        Self { family, protocol: Some(protocol), place: Place::NodePorts, bytes }
    }

    fn node_address(address: IpAddr) -> Self {
        let (family, bytes) = (IpFamily::of(address), address_bytes(address));
        Self { family, protocol: None, place: Place::NodeAddresses, bytes }
    }
}

/// Every element with the port that it leads to; `None`: it is of a set.
pub(super) type Elements = BTreeMap<ElementKey, Option<u16>>;

/// A frontend with the port of its listener.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Lead {
    pub(super) frontend: Frontend,
    pub(super) port: u16,
}

fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn protocol_and_port(protocol: Protocol, port: u16) -> [u8; 8] {
    let [high, low] = port.to_be_bytes();
    [protocol.number(), 0, 0, 0, high, low, 0, 0]
}

fn element(name: &ServicePortName, lead: &Lead) -> (ElementKey, Option<u16>) {
    let Frontend { kind, address, port } = lead.frontend;
    let (family, protocol) = (name.family, name.protocol);
    let key = match kind {
        FrontendKind::NodePort => ElementKey::node_port(family, protocol, port),
        FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
            ElementKey::frontend(family, protocol, address, port)
        }
    };
    (key, Some(lead.port))
}

/// What the kernel should have, by who asks for it.
#[derive(Debug, Default)]
struct Wanted {
    ports: BTreeMap<ServicePortName, Vec<Lead>>,
    /// Where node ports are served.
    addresses: BTreeSet<IpAddr>,
    /// Where clients of other machines and of pods are led, at most one of each family.
    own: Vec<IpAddr>,
}

impl Wanted {
    fn elements(&self) -> Elements {
        let leads = self.ports.iter().flat_map(|(name, leads)| leads.iter().map(|lead| element(name, lead)));
        let addresses = self.addresses.iter().map(|address| (ElementKey::node_address(*address), None));
        leads.chain(addresses).collect()
    }

    /// Takes the change over. Answers with the elements that go and those that come.
    fn change(&mut self, changes: Vec<(ServicePortName, Vec<Lead>)>) -> (Elements, Elements) {
        let (mut go, mut come) = (Elements::new(), Elements::new());
        for (name, leads) in changes {
            come.extend(leads.iter().map(|lead| element(&name, lead)));
            let before = if leads.is_empty() {
                self.ports.remove(&name)
            } else {
                self.ports.insert(name.clone(), leads)
            };
            go.extend(before.iter().flatten().map(|lead| element(&name, lead)));
        }
        let same: Vec<ElementKey> = go
            .iter()
            .filter(|(key, port)| come.get(*key) == Some(*port))
            .map(|(key, _)| key.clone())
            .collect();
        for key in same {
            go.remove(&key);
            come.remove(&key);
        }
        (go, come)
    }
}

fn family_of(family: IpFamily) -> TableFamily {
    match family {
        IpFamily::Ipv4 => TableFamily::Ipv4,
        IpFamily::Ipv6 => TableFamily::Ipv6,
    }
}

fn add(batch: &mut Batch, elements: &Elements) {
    let data = |port: &Option<u16>| match port {
        Some(port) => ElementData::Value(port.to_be_bytes().iter().copied().chain([0, 0]).collect()),
        None => ElementData::None,
    };
    let elements: Vec<_> = elements.iter().map(|(key, port)| (key, data(port))).collect();
    each_place(|family, place| {
        let of_place = elements.iter().filter(|(key, _)| key.family == family && key.place == place);
        let members = of_place.map(|(key, data)| (key.bytes.as_slice(), data, [].as_slice()));
        batch.add_elements(family_of(family), TABLE, place.name(), members);
    });
}

fn delete(batch: &mut Batch, elements: &Elements) {
    each_place(|family, place| {
        let of_place = elements.keys().filter(|key| key.family == family && key.place == place);
        let keys = of_place.map(|key| key.bytes.as_slice());
        batch.delete_elements(family_of(family), TABLE, place.name(), keys);
    });
}

fn each_place(mut act: impl FnMut(IpFamily, Place)) {
    for family in IpFamily::ALL {
        for place in Place::ALL {
            act(family, place);
        }
    }
}

/// The table with its chains, sets and rules, and no elements. `own`: an address of this node.
fn make_table(batch: &mut Batch, family: IpFamily, own: Option<IpAddr>) {
    let table_family = family_of(family);
    batch.add_table(table_family, TABLE, COMMENT);
    for place in Place::ALL {
        batch.add_set(table_family, TABLE, place.name(), &place.definition(family));
    }
    let (address_offset, address_length) = match family {
        IpFamily::Ipv4 => (16, 4),
        IpFamily::Ipv6 => (24, 16),
    };
    let address = Expression::Payload {
        header: Header::Network,
        offset: address_offset,
        length: address_length,
        to: Register::new(0),
    };
    // The protocol's register follows that of the address, and the port's follows the protocol's.
    let load_protocol_and_port = |place: u32| {
        let port = Register::new(place + 1);
        [
            Expression::Meta { key: Meta::Protocol, to: Register::new(place) },
            Expression::Payload { header: Header::Transport, offset: 2, length: 2, to: port },
        ]
    };
    let port = Register::new(8);
    let find = |place: Place| Expression::Lookup {
        set: place.name().to_owned(),
        key: Register::new(0),
        to: Some(port),
    };
    let is_node =
        Expression::Lookup { set: Place::NodeAddresses.name().to_owned(), key: Register::new(0), to: None };
    let redirect = vec![Expression::Redirect { port }];
    // A redirection goes to an address of the interface, and an interface that leads to a pod may have none.
    let translate = own.map(|own| {
        let address = Register::new(12);
        let own = Expression::Immediate { value: address_bytes(own), to: address };
        vec![own, Expression::DestinationNat { family: table_family, address, port }]
    });
    let arriving = translate.unwrap_or_else(|| redirect.clone());
    for (chain, hook, lead) in
        [("prerouting", NetfilterHook::Prerouting, &arriving), ("output", NetfilterHook::Output, &redirect)]
    {
        let base = BaseChain { kind: ChainType::Nat, hook, priority: PRIORITY };
        batch.add_chain(table_family, TABLE, chain, Some(base));
        let mut frontends = vec![address.clone()];
        frontends.extend(load_protocol_and_port(address_length / 4));
        frontends.push(find(Place::Frontends));
        let mut node_ports = vec![address.clone(), is_node.clone()];
        node_ports.extend(load_protocol_and_port(0));
        node_ports.push(find(Place::NodePorts));
        for keys in [frontends, node_ports] {
            batch.add_rule(table_family, TABLE, chain, &[keys.as_slice(), lead].concat(), &[]);
        }
    }
}

/// Ports at which everybody is refused: they are held, and nothing listens there.
#[derive(Debug)]
struct RefusingPorts {
    ports: BTreeMap<(IpFamily, Protocol), u16>,
    _sockets: Vec<Socket>,
}

impl RefusingPorts {
    fn hold(families: &[IpFamily]) -> io::Result<Self> {
        let (mut ports, mut sockets) = (BTreeMap::new(), Vec::new());
        for family in families {
            let any = SocketAddr::new(unspecified(*family), 0);
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let (kind, number) = match protocol {
                    Protocol::Udp => (Type::DGRAM, IpProtocol::UDP),
                    Protocol::Tcp | Protocol::Sctp => (Type::STREAM, IpProtocol::TCP),
                };
                let socket = Socket::new(Domain::for_address(any), kind, Some(number))?;
                if *family == IpFamily::Ipv6 {
                    socket.set_only_v6(true)?;
                }
                socket.bind(&any.into())?;
                let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
                if protocol == Protocol::Udp {
                    // It gets what one peer sends, which is itself and never does: the kernel refuses all others.
                    let loopback: IpAddr = match family {
                        IpFamily::Ipv4 => std::net::Ipv4Addr::LOCALHOST.into(),
                        IpFamily::Ipv6 => std::net::Ipv6Addr::LOCALHOST.into(),
                    };
                    socket.connect(&SocketAddr::new(loopback, port).into())?;
                }
                ports.insert((*family, protocol), port);
                sockets.push(socket);
            }
        }
        Ok(Self { ports, _sockets: sockets })
    }
}

/// The table of this mode in nf_tables.
pub(super) struct Redirect {
    kernel: NfTables,
    families: Vec<IpFamily>,
    refusing: RefusingPorts,
    wanted: Wanted,
    stale_flows: StaleFlows,
}

impl std::fmt::Debug for Redirect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redirect").field("families", &self.families).finish_non_exhaustive()
    }
}

impl Redirect {
    /// Makes the table anew, without elements. Needs CAP_NET_ADMIN. `None`: the kernel cannot do it, or this process may not.
    pub(super) fn open() -> Option<Self> {
        let kernel = match NfTables::load() {
            Ok(kernel) => kernel?,
            Err(error) => {
                tracing::debug!(%error, "no rules of nf_tables");
                return None;
            }
        };
        let mut families = Vec::new();
        for family in IpFamily::ALL {
            match rebuild(&kernel, family, &Wanted::default()) {
                Ok(()) => families.push(family),
                Err(error) => tracing::debug!(%error, family = family.name(), "no rules of nf_tables"),
            }
        }
        if families.is_empty() {
            return None;
        }
        let refusing = RefusingPorts::hold(&families);
        let refusing = refusing.inspect_err(|error| tracing::warn!(%error, "no rules of nf_tables")).ok()?;
        let (wanted, stale_flows) = Default::default();
        Some(Self { kernel, families, refusing, wanted, stale_flows })
    }

    /// Whether clients of this family are led anywhere.
    pub(super) fn has(&self, family: IpFamily) -> bool {
        self.families.contains(&family)
    }

    /// Where clients that nobody serves are led.
    pub(super) fn refusing_port(&self, name: &ServicePortName) -> Option<u16> {
        self.refusing.ports.get(&(name.family, name.protocol)).copied()
    }

    /// Leads the frontends of these service ports there, and nowhere else. Answers with the number of elements that come and go.
    pub(super) fn lead(
        &mut self,
        changes: Vec<(ServicePortName, Vec<Lead>)>,
    ) -> Result<(u64, u64), RedirectError> {
        let (go, come) = self.wanted.change(changes);
        let mut batch = Batch::default();
        delete(&mut batch, &go);
        add(&mut batch, &come);
        if !batch.is_empty() && commit(&self.kernel, batch, "ip, ip6").is_err() {
            // Somebody may have changed the table: it is made anew, in one step.
            self.restore()?;
        }
        self.stale_flows.note(&go, &come);
        self.stale_flows.end(&self.wanted.addresses);
        Ok((come.len() as u64, go.len() as u64))
    }

    pub(super) fn set_host(&mut self, host: &Host) -> Result<(), RedirectError> {
        self.wanted.addresses = host.node_port_addresses.clone();
        self.wanted.own = host.masquerade_addresses.clone();
        self.restore()
    }

    /// Answers whether the table was not there any more.
    pub(super) fn restore_if_gone(&mut self) -> Result<bool, RedirectError> {
        for family in &self.families {
            if !self.kernel.tables(family_of(*family))?.iter().any(|table| table == TABLE) {
                self.restore()?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn restore(&self) -> Result<(), RedirectError> {
        self.families.iter().try_for_each(|family| rebuild(&self.kernel, *family, &self.wanted))
    }

    /// Nobody is led anywhere any more, and what is translated stays so: the kernel goes on while there is the table.
    pub(super) fn lead_nobody(&mut self) -> Result<(), RedirectError> {
        self.wanted = Wanted::default();
        self.restore()
    }
}

/// Replaces the table in one step.
fn rebuild(kernel: &NfTables, family: IpFamily, wanted: &Wanted) -> Result<(), RedirectError> {
    let table_family = family_of(family);
    let mut batch = Batch::default();
    // One that is not there could not be deleted.
    batch.add_table(table_family, TABLE, COMMENT);
    batch.delete_table(table_family, TABLE);
    make_table(&mut batch, family, wanted.own.iter().copied().find(|own| IpFamily::of(*own) == family));
    let mut elements = wanted.elements();
    elements.retain(|key, _| key.family == family);
    add(&mut batch, &elements);
    commit(kernel, batch, table_family.name())
}

fn commit(kernel: &NfTables, batch: Batch, family: &'static str) -> Result<(), RedirectError> {
    match kernel.commit(batch)?.first() {
        None => Ok(()),
        Some(refused) => {
            let source = io::Error::from_raw_os_error(refused.errno);
            Err(RedirectError::Refused { family, message: refused.message, source })
        }
    }
}

/// The table of a family, for people.
pub(super) fn place(family: &str) -> String {
    format!("nftables {family} {TABLE}")
}

/// Answers with the families whose table was there.
pub(super) fn remove() -> Result<Vec<&'static str>, RedirectError> {
    let Some(kernel) = NfTables::open()? else { return Ok(Vec::new()) };
    let mut removed = Vec::new();
    for family in TableFamily::ALL {
        if kernel.tables(family)?.iter().any(|table| table == TABLE) {
            let mut batch = Batch::default();
            batch.delete_table(family, TABLE);
            commit(&kernel, batch, family.name())?;
            removed.push(family.name());
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dataplane::userspace::test_support::web, model::objects::TrafficPolicy};

    fn shown(elements: &Elements) -> Vec<String> {
        let one = |(key, port): (&ElementKey, &Option<u16>)| {
            let ElementKey { place, bytes, .. } = key;
            format!("{} {bytes:?} {port:?}", place.name())
        };
        elements.iter().map(one).collect()
    }

    #[test]
    fn frontends_lead_to_listeners_and_only_differences_are_written() {
        let port = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
        let leads = |number: u16| -> Vec<Lead> {
            port.frontends.iter().map(|frontend| Lead { frontend: *frontend, port: number }).collect()
        };
        let mut wanted = Wanted::default();
        let (go, come) = wanted.change(vec![(port.name.clone(), leads(40_000))]);
        assert_eq!((go.len(), come.len()), (0, 4));
        let cluster_ip = "frontends [10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0] Some(40000)";
        let node_port = "node-ports [6, 0, 0, 0, 117, 128, 0, 0] Some(40000)";
        for expected in [cluster_ip, node_port] {
            assert!(shown(&come).iter().any(|one| one == expected), "{:?}", shown(&come));
        }
        let mut later = leads(40_000);
        later[0].port = 40_001;
        let (go, come) = wanted.change(vec![(port.name.clone(), later)]);
        assert_eq!(shown(&go), [cluster_ip]);
        assert_eq!(shown(&come), [cluster_ip.replace("40000", "40001")]);
        let (go, come) = wanted.change(vec![(port.name.clone(), Vec::new())]);
        assert_eq!((go.len(), come.len()), (4, 0));
        assert!(wanted.elements().is_empty());
    }

    #[test]
    fn a_frontend_passes_to_another_service_port_in_one_step() {
        let port = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
        let mut heir = port.name.clone();
        heir.port = "heir".into();
        let lead = |number| vec![Lead { frontend: port.frontends[0], port: number }];
        let mut wanted = Wanted::default();
        wanted.change(vec![(port.name.clone(), lead(40_000))]);
        let (go, come) = wanted.change(vec![(port.name.clone(), Vec::new()), (heir, lead(40_001))]);
        assert_eq!((go.len(), come.len()), (1, 1));
        assert_eq!(go.keys().next(), come.keys().next());
    }

    #[test]
    fn ports_that_refuse_are_held_and_refuse() {
        let refusing = RefusingPorts::hold(&[IpFamily::Ipv4]).unwrap();
        let port = |protocol| refusing.ports[&(IpFamily::Ipv4, protocol)];
        let error = std::net::TcpStream::connect(("127.0.0.1", port(Protocol::Tcp))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(std::net::TcpListener::bind(("127.0.0.1", port(Protocol::Tcp))).is_err());
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(("127.0.0.1", port(Protocol::Udp))).unwrap();
        client.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        client.send(b"?").unwrap();
        assert_eq!(client.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
