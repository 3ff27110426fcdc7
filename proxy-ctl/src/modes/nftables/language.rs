//! Expressions that rules of one IP family are made of: they load fields of packets into registers,
//! and make keys and verdicts.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{
    model::objects::{IpFamily, Protocol},
    sys::nftables::{
        Comparison, Conntrack, DESTINATION_TRANSLATED, Datum, Expression, Header, LOCAL_ADDRESS, Meta,
        Register, Side, TableFamily, Verdict,
    },
};

/// The bit of `ct state` for new connections.
const NEW: u32 = 1 << 3;
const INTERFACE_NAME: usize = 16;

/// The layout of an IP family's packets, as rules see it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Language {
    pub(super) family: IpFamily,
}

/// The register for the endpoint that a rule chooses: an address, and a port behind it.
pub(super) const CHOSEN: Register = Register::new(4);
pub(super) const FIRST: Register = Register::new(0);
pub(super) const SECOND: Register = Register::new(1);

impl Language {
    pub(super) fn table_family(self) -> TableFamily {
        self.family.into()
    }

    /// Returns the length of an address in bytes.
    const fn length(self) -> u32 {
        match self.family {
            IpFamily::Ipv4 => 4,
            IpFamily::Ipv6 => 16,
        }
    }

    /// Returns the length of an address in registers of 4 bytes.
    const fn words(self) -> u32 {
        self.length() / 4
    }

    pub(super) const fn address(self) -> &'static [Datum] {
        match self.family {
            IpFamily::Ipv4 => &[Datum::Ipv4Address],
            IpFamily::Ipv6 => &[Datum::Ipv6Address],
        }
    }

    pub(super) const fn endpoint(self) -> &'static [Datum] {
        match self.family {
            IpFamily::Ipv4 => &[Datum::Ipv4Address, Datum::Port],
            IpFamily::Ipv6 => &[Datum::Ipv6Address, Datum::Port],
        }
    }

    pub(super) const fn frontend(self) -> &'static [Datum] {
        match self.family {
            IpFamily::Ipv4 => &[Datum::Ipv4Address, Datum::Protocol, Datum::Port],
            IpFamily::Ipv6 => &[Datum::Ipv6Address, Datum::Protocol, Datum::Port],
        }
    }

    pub(super) const fn hairpin(self) -> &'static [Datum] {
        match self.family {
            IpFamily::Ipv4 => &[Datum::Ipv4Address, Datum::Ipv4Address, Datum::Protocol, Datum::Port],
            IpFamily::Ipv6 => &[Datum::Ipv6Address, Datum::Ipv6Address, Datum::Protocol, Datum::Port],
        }
    }

    pub(super) fn load_address(self, side: Side, to: Register) -> Expression {
        let offset = match (self.family, side) {
            (IpFamily::Ipv4, Side::Source) => 12,
            (IpFamily::Ipv4, Side::Destination) => 16,
            (IpFamily::Ipv6, Side::Source) => 8,
            (IpFamily::Ipv6, Side::Destination) => 24,
        };
        Expression::Payload { header: Header::Network, offset, length: self.length(), to }
    }

    /// Loads `proto . port` of the destination into consecutive registers, beginning with the one
    /// numbered `first`.
    pub(super) fn load_destination_port(first: u32) -> [Expression; 2] {
        [
            Expression::Meta { key: Meta::Protocol, to: Register::new(first) },
            Expression::Payload {
                header: Header::Transport,
                offset: 2,
                length: 2,
                to: Register::new(first + 1),
            },
        ]
    }

    /// Loads `address . proto . port` of the destination into the first registers.
    pub(super) fn load_frontend(self) -> Vec<Expression> {
        let mut load = vec![self.load_address(Side::Destination, FIRST)];
        load.extend(Self::load_destination_port(self.words()));
        load
    }

    /// Loads `source address . destination address . proto . port` into the first registers.
    pub(super) fn load_hairpin(self) -> Vec<Expression> {
        let mut load = vec![
            self.load_address(Side::Source, FIRST),
            self.load_address(Side::Destination, Register::new(self.words())),
        ];
        load.extend(Self::load_destination_port(2 * self.words()));
        load
    }

    pub(super) fn has_protocol(protocol: Protocol) -> [Expression; 2] {
        [
            Expression::Meta { key: Meta::Protocol, to: FIRST },
            Expression::Compare {
                register: FIRST,
                comparison: Comparison::Equal,
                value: vec![protocol.number()],
            },
        ]
    }

    /// Translates the destination to the address in `chosen` and the port behind it.
    pub(super) fn destination_nat(self, chosen: Register) -> Expression {
        let port = Register::new(chosen.index() as u32 + self.words());
        Expression::DestinationNat { family: self.table_family(), address: chosen, port }
    }

    pub(super) const fn affinity(self) -> &'static [Datum] {
        match self.family {
            IpFamily::Ipv4 => &[Datum::Ipv4Address, Datum::Ipv4Address, Datum::Port],
            IpFamily::Ipv6 => &[Datum::Ipv6Address, Datum::Ipv6Address, Datum::Port],
        }
    }

    /// Loads `source address . endpoint` into the first registers.
    pub(super) fn load_client_of(self, address: IpAddr, port: u16) -> Vec<Expression> {
        let port_register = Register::new(2 * self.words());
        vec![
            self.load_address(Side::Source, FIRST),
            Expression::Immediate { value: address_bytes(address), to: self.endpoint_of_client() },
            Expression::Immediate { value: port.to_be_bytes().to_vec(), to: port_register },
        ]
    }

    /// Returns the register into which [`Language::load_client_of`] loads the endpoint.
    pub(super) const fn endpoint_of_client(self) -> Register {
        Register::new(self.words())
    }

    pub(super) fn is_in(self, side: Side, network: IpNet) -> Vec<Expression> {
        let (address, mask) = match (network.network(), network.netmask()) {
            (IpAddr::V4(address), IpAddr::V4(mask)) => (address.octets().to_vec(), mask.octets().to_vec()),
            (IpAddr::V6(address), IpAddr::V6(mask)) => (address.octets().to_vec(), mask.octets().to_vec()),
            // The address and the mask of a network have the same family.
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => (Vec::new(), Vec::new()),
        };
        let mut expressions = vec![self.load_address(side, FIRST)];
        if network.prefix_len() < network.max_prefix_len() {
            let xor = vec![0; mask.len()];
            expressions.push(Expression::Bitwise { register: FIRST, mask, xor });
        }
        expressions.push(equals(FIRST, address));
        expressions
    }

    /// Looks up the destination in the verdict map `set`, whose keys are frontends.
    pub(super) fn verdict_of_frontend(self, set: &str) -> Vec<Expression> {
        let mut expressions = self.load_frontend();
        expressions.push(Expression::Lookup { set: set.to_owned(), key: FIRST, to: Some(Register::VERDICT) });
        expressions
    }

    /// Looks up protocol and port of the destination in the verdict map `set`.
    pub(super) fn verdict_of_port(set: &str) -> Vec<Expression> {
        let mut expressions = Self::load_destination_port(0).to_vec();
        expressions.push(Expression::Lookup { set: set.to_owned(), key: FIRST, to: Some(Register::VERDICT) });
        expressions
    }

    /// Matches packets whose destination is in a set of addresses.
    pub(super) fn destination_in(self, set: &str) -> Vec<Expression> {
        vec![
            self.load_address(Side::Destination, FIRST),
            Expression::Lookup { set: set.to_owned(), key: FIRST, to: None },
        ]
    }

    /// Matches packets whose address on this side is one of the node's own.
    pub(super) fn is_local(side: Side) -> Vec<Expression> {
        vec![
            Expression::AddressType { of: side, to: FIRST },
            equals(FIRST, LOCAL_ADDRESS.to_ne_bytes().to_vec()),
        ]
    }
}

pub(super) fn equals(register: Register, value: Vec<u8>) -> Expression {
    Expression::Compare { register, comparison: Comparison::Equal, value }
}

/// Matches if at least one of the bits is set.
fn has_bit(register: Register, bits: u32) -> [Expression; 2] {
    [
        Expression::Bitwise { register, mask: bits.to_ne_bytes().to_vec(), xor: vec![0; 4] },
        Expression::Compare { register, comparison: Comparison::NotEqual, value: vec![0; 4] },
    ]
}

pub(super) fn is_new() -> Vec<Expression> {
    let mut expressions = vec![Expression::Conntrack { key: Conntrack::State, to: FIRST }];
    expressions.extend(has_bit(FIRST, NEW));
    expressions
}

pub(super) fn is_translated() -> Vec<Expression> {
    let mut expressions = vec![Expression::Conntrack { key: Conntrack::Status, to: FIRST }];
    expressions.extend(has_bit(FIRST, DESTINATION_TRANSLATED));
    expressions
}

pub(super) fn has_fwmark(fwmark: u32) -> Vec<Expression> {
    let mut expressions = vec![Expression::Meta { key: Meta::Mark, to: FIRST }];
    expressions.extend(has_bit(FIRST, fwmark));
    expressions
}

/// Sets or clears bits of the packet's fwmark. Its other bits stay.
pub(super) fn change_fwmark(fwmark: u32, set: bool) -> Vec<Expression> {
    let xor = if set { fwmark } else { 0 };
    vec![
        Expression::Meta { key: Meta::Mark, to: FIRST },
        Expression::Bitwise {
            register: FIRST,
            mask: (!fwmark).to_ne_bytes().to_vec(),
            xor: xor.to_ne_bytes().to_vec(),
        },
        Expression::SetMark { from: FIRST },
    ]
}

pub(super) fn from_interface(name: &str) -> Vec<Expression> {
    let mut value = name.as_bytes().to_vec();
    value.resize(INTERFACE_NAME, 0);
    vec![Expression::Meta { key: Meta::InputInterface, to: FIRST }, equals(FIRST, value)]
}

pub(super) fn from_interface_prefix(prefix: &str) -> Vec<Expression> {
    vec![Expression::Meta { key: Meta::InputInterface, to: FIRST }, equals(FIRST, prefix.as_bytes().to_vec())]
}

pub(super) fn jump(chain: &str) -> Expression {
    Expression::Verdict(Verdict::Jump(chain.to_owned()))
}

pub(super) fn goto(chain: &str) -> Expression {
    Expression::Verdict(Verdict::Goto(chain.to_owned()))
}

pub(super) fn rule(parts: impl IntoIterator<Item = Vec<Expression>>) -> super::objects::Rule {
    super::objects::Rule::new(parts.into_iter().flatten().collect())
}

/// Returns the length of an address in bytes.
pub(super) const fn address_length(family: IpFamily) -> usize {
    match family {
        IpFamily::Ipv4 => 4,
        IpFamily::Ipv6 => 16,
    }
}

pub(super) fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns the bytes of a key or value whose fields are padded to a multiple of 4 bytes each.
pub(super) fn padded<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

pub(super) fn endpoint_bytes(address: IpAddr, port: u16) -> Vec<u8> {
    padded([address_bytes(address).as_slice(), &port.to_be_bytes()])
}

pub(super) fn port_key(protocol: Protocol, port: u16) -> Vec<u8> {
    padded([&[protocol.number()][..], &port.to_be_bytes()])
}

pub(super) fn frontend_key(address: IpAddr, protocol: Protocol, port: u16) -> Vec<u8> {
    padded([address_bytes(address).as_slice(), &[protocol.number()], &port.to_be_bytes()])
}

pub(super) fn hairpin_key(address: IpAddr, protocol: Protocol, port: u16) -> Vec<u8> {
    let address = address_bytes(address);
    padded([address.as_slice(), &address, &[protocol.number()], &port.to_be_bytes()])
}
