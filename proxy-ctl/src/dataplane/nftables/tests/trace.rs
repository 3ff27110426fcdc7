//! An interpreter of rules: what becomes of the first packet of a connection.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::super::{
    frame::{self, Context},
    objects::{ElementId, ElementValue, Objects, Rule, Set},
    render::{Placement, render, room},
    slots::Blocks,
};
use crate::{
    dataplane::Host,
    model::{
        desired::DesiredPort,
        objects::{IpFamily, Protocol},
    },
    sys::nftables::{
        Comparison, Conntrack, ElementData, Expression, Header, Meta, Register, SetOperation, Side, Verdict,
    },
};

/// Everything that one table holds.
pub(super) struct Rules {
    context: Context,
    chains: BTreeMap<String, Vec<Rule>>,
    elements: BTreeMap<ElementId, ElementValue>,
    local: Vec<IpAddr>,
    /// Of the packet that was masqueraded last.
    pub(super) masquerade_ports: Option<[u16; 2]>,
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Fate {
    /// Endpoint, and whether the source address is the node's.
    Answered(SocketAddr, bool),
    Rejected,
    Dropped,
    /// Goes where it was sent to.
    Untouched,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Connection {
    pub(super) from: IpAddr,
    pub(super) to: SocketAddr,
    pub(super) protocol: Protocol,
    pub(super) interface: &'static str,
}

/// A packet on its way.
struct Packet {
    connection: Connection,
    translated: bool,
    masqueraded: bool,
    mark: u32,
    registers: [u8; 64],
    /// Which of the numbers is drawn.
    draw: u32,
}

/// How a chain ends.
enum End {
    Return,
    Accept,
    Drop,
    Reject,
}

impl Rules {
    pub(super) fn new(family: IpFamily, host: &Host, ports: &[&DesiredPort]) -> Self {
        let context = Context::new(family, host);
        let mut rules = Self {
            chains: frame::chains(&context).into_iter().map(|one| (one.name.to_owned(), one.rules)).collect(),
            elements: BTreeMap::new(),
            local: host.node_port_addresses.iter().copied().collect(),
            masquerade_ports: None,
            context,
        };
        let mut blocks = Blocks::default();
        let fixed = frame::elements(&rules.context).into_iter();
        rules.elements.extend(fixed.map(|id| (id, ElementValue::default())));
        for port in ports {
            let wanted = room(port, &rules.context);
            let mut place = |count| (count > 0).then(|| blocks.allocate(count)).flatten();
            let placement = Placement { cluster: place(wanted.cluster), local: place(wanted.local) };
            let Objects { chains, elements, shared, .. } = render(port, &rules.context, placement);
            rules.chains.extend(chains);
            rules.elements.extend(elements);
            rules.elements.extend(shared.into_iter().map(|id| (id, ElementValue::default())));
        }
        rules
    }

    pub(super) fn chain(&self, name: &str) -> Option<&[Rule]> {
        self.chains.get(name).map(Vec::as_slice)
    }

    /// Every fate that the random choice allows.
    pub(super) fn fates(&mut self, connection: Connection) -> BTreeSet<Fate> {
        const DRAWS: u32 = 60;
        (0..DRAWS).map(|draw| self.fate(connection, draw)).collect()
    }

    pub(super) fn fate(&mut self, connection: Connection, draw: u32) -> Fate {
        let from_node = self.local.contains(&connection.from);
        let mut packet =
            Packet { connection, translated: false, masqueraded: false, mark: 0, registers: [0; 64], draw };
        let first = if from_node {
            ["filter-output-pre-dnat", "nat-output", "filter-output"]
        } else {
            ["filter-prerouting-pre-dnat", "nat-prerouting", "filter-forward"]
        };
        for (place, chain) in first.into_iter().enumerate() {
            let to_node = self.local.contains(&packet.connection.to.ip());
            let chain = if place == 2 && !from_node && to_node { "filter-input" } else { chain };
            match self.run(chain, &mut packet) {
                End::Drop => return Fate::Dropped,
                End::Reject => return Fate::Rejected,
                End::Return | End::Accept => {}
            }
        }
        // What the node sends to itself comes in again.
        if from_node && self.local.contains(&packet.connection.to.ip()) {
            match self.run("filter-input", &mut packet) {
                End::Drop => return Fate::Dropped,
                End::Reject => return Fate::Rejected,
                End::Return | End::Accept => {}
            }
        }
        self.run("nat-postrouting", &mut packet);
        if packet.translated {
            Fate::Answered(packet.connection.to, packet.masqueraded)
        } else {
            Fate::Untouched
        }
    }

    fn run(&mut self, chain: &str, packet: &mut Packet) -> End {
        let rules = self.chains.get(chain).unwrap_or_else(|| panic!("no chain {chain}")).clone();
        for rule in rules {
            if let Some(end) = self.rule(&rule, packet) {
                return end;
            }
        }
        End::Return
    }

    fn rule(&mut self, rule: &Rule, packet: &mut Packet) -> Option<End> {
        for expression in &rule.expressions {
            match expression {
                Expression::Immediate { value, to } => packet.load(*to, value),
                Expression::Payload { header, offset, length, to } => {
                    let bytes = packet.bytes(*header, *offset, *length, self.context.language.family);
                    packet.load(*to, &bytes);
                }
                Expression::Meta { key, to } => {
                    let bytes = packet.meta(*key);
                    packet.load(*to, &bytes);
                }
                Expression::SetMark { from } => {
                    packet.mark = u32::from_ne_bytes(packet.read(*from, 4).try_into().unwrap());
                }
                Expression::Conntrack { key, to } => {
                    let value: u32 = match key {
                        Conntrack::State => 8,
                        Conntrack::Status => u32::from(packet.translated) << 5,
                        Conntrack::Direction => 0,
                    };
                    packet.load(*to, &value.to_ne_bytes());
                }
                Expression::AddressType { of, to } => {
                    let address = match of {
                        Side::Source => packet.connection.from,
                        Side::Destination => packet.connection.to.ip(),
                    };
                    let kind: u32 = if self.local.contains(&address) { 2 } else { 1 };
                    packet.load(*to, &kind.to_ne_bytes());
                }
                Expression::Bitwise { register, mask, xor } => {
                    let bytes = packet.read(*register, mask.len());
                    let changed: Vec<u8> = bytes
                        .iter()
                        .zip(mask.iter().zip(xor))
                        .map(|(byte, (mask, xor))| byte & mask ^ xor)
                        .collect();
                    packet.load(*register, &changed);
                }
                Expression::Compare { register, comparison, value } => {
                    let equal = packet.read(*register, value.len()) == *value;
                    if equal != (*comparison == Comparison::Equal) {
                        return None;
                    }
                }
                Expression::Lookup { set, key, to } => {
                    let set = Set::of_name(set);
                    let length = self.elements.keys().find(|id| id.set == set)?.key.len();

                    let id = ElementId { set, key: packet.read(*key, length) };
                    let data = self.elements.get(&id)?.data.clone();
                    match (data, to) {
                        (ElementData::Verdict(verdict), _) => {
                            return self.verdict(&verdict, packet);
                        }
                        (ElementData::Value(value), Some(to)) => packet.load(*to, &value),
                        (_, None) => {}
                        (ElementData::None, Some(_)) => panic!("a set has no values"),
                    }
                }
                Expression::Random { modulus, offset, to } => {
                    let number = offset + packet.draw % modulus;
                    packet.load(*to, &number.to_ne_bytes());
                }
                Expression::ChangeSet { set, operation, key, .. } => {
                    assert_eq!(*operation, SetOperation::Update);
                    let id = ElementId {
                        set: Set::of_name(set),
                        key: packet.read(*key, 2 * packet.address_length() + 4),
                    };
                    self.elements.insert(id, ElementValue::default());
                }
                Expression::DestinationNat { address, port, .. } => {
                    let length = packet.address_length();
                    let bytes = packet.read(*address, length);
                    let ip = match length {
                        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).unwrap()),
                        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).unwrap()),
                    };
                    let port = u16::from_be_bytes(packet.read(*port, 2).try_into().unwrap());
                    packet.connection.to = SocketAddr::new(ip, port);
                    packet.translated = true;
                    return Some(End::Accept);
                }
                Expression::Redirect { .. } => panic!("only mode userspace redirects"),
                Expression::Masquerade { ports } => {
                    packet.masqueraded = true;
                    let read = |port| u16::from_be_bytes(packet.read(port, 2).try_into().unwrap());
                    self.masquerade_ports = ports.map(|[first, last]| [read(first), read(last)]);
                    assert_eq!(packet.mark, 0, "the mark must not leave the node");
                    return Some(End::Accept);
                }
                Expression::Reject { .. } => return Some(End::Reject),
                Expression::Verdict(verdict) => return self.verdict(verdict, packet),
            }
        }
        None
    }

    /// `None`: the next rule is asked.
    fn verdict(&mut self, verdict: &Verdict, packet: &mut Packet) -> Option<End> {
        match verdict {
            Verdict::Accept => Some(End::Accept),
            Verdict::Drop => Some(End::Drop),
            Verdict::Return => Some(End::Return),
            Verdict::Goto(chain) => Some(self.run(chain, packet)),
            Verdict::Jump(chain) => match self.run(chain, packet) {
                End::Return => None,
                end @ (End::Accept | End::Drop | End::Reject) => Some(end),
            },
        }
    }
}

impl Packet {
    fn address_length(&self) -> usize {
        if self.connection.from.is_ipv4() { 4 } else { 16 }
    }

    fn load(&mut self, to: Register, bytes: &[u8]) {
        let start = to.place() * 4;
        let end = (start + bytes.len()).next_multiple_of(4);
        self.registers[start..end].fill(0);
        self.registers[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, from: Register, length: usize) -> Vec<u8> {
        let start = from.place() * 4;
        self.registers[start..start + length].to_vec()
    }

    fn bytes(&self, header: Header, offset: u32, length: u32, family: IpFamily) -> Vec<u8> {
        let address = |address: IpAddr| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let (mut network, mut transport) = (vec![0; 40], vec![0; 4]);
        let (source, destination) = match family {
            IpFamily::Ipv4 => (12, 16),
            IpFamily::Ipv6 => (8, 24),
        };
        for (at, ip) in [(source, self.connection.from), (destination, self.connection.to.ip())] {
            let bytes = address(ip);
            network[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        transport[2..].copy_from_slice(&self.connection.to.port().to_be_bytes());
        let whole = match header {
            Header::Network => network,
            Header::Transport => transport,
        };
        whole[offset as usize..(offset + length) as usize].to_vec()
    }

    fn meta(&self, key: Meta) -> Vec<u8> {
        match key {
            Meta::Mark => self.mark.to_ne_bytes().to_vec(),
            Meta::Protocol => vec![self.connection.protocol.number()],
            Meta::InputInterface => {
                let mut name = self.connection.interface.as_bytes().to_vec();
                name.resize(16, 0);
                name
            }
        }
    }
}
