//! The expressions that rules consist of, written as netlink attributes.

use super::{TableFamily, attributes::*};
use crate::sys::net::netlink::Messages;

/// A register of 4 bytes. Longer values continue in the next registers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Register(u32);

impl Register {
    /// The register that gets the verdict of a lookup.
    pub const VERDICT: Self = Self(0);

    /// Returns the register with this index, which must be below 16.
    pub const fn new(index: u32) -> Self {
        Self(8 + index)
    }

    pub const fn index(self) -> usize {
        self.0.saturating_sub(8) as usize
    }
}

/// The verdict on a packet.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Jump(String),
    Goto(String),
}

impl Verdict {
    const JUMP: i32 = -3;
    const GOTO: i32 = -4;
    const RETURN: i32 = -5;

    pub(super) fn write(&self, out: &mut Messages) {
        let (code, chain) = match self {
            Self::Accept => (libc::NF_ACCEPT, None),
            Self::Drop => (libc::NF_DROP, None),
            Self::Return => (Self::RETURN, None),
            Self::Jump(chain) => (Self::JUMP, Some(chain)),
            Self::Goto(chain) => (Self::GOTO, Some(chain)),
        };
        out.nested(DATA_VERDICT, |verdict| {
            verdict.attribute(VERDICT_CODE, &code.to_be_bytes());
            if let Some(chain) = chain {
                verdict.text(VERDICT_CHAIN, chain);
            }
        });
    }

    /// Parses a verdict. Returns `None` for one that this module does not make.
    pub(super) fn read(code: i32, chain: Option<&str>) -> Option<Self> {
        match (code, chain) {
            (libc::NF_ACCEPT, _) => Some(Self::Accept),
            (libc::NF_DROP, _) => Some(Self::Drop),
            (Self::RETURN, _) => Some(Self::Return),
            (Self::JUMP, Some(chain)) => Some(Self::Jump(chain.to_owned())),
            (Self::GOTO, Some(chain)) => Some(Self::Goto(chain.to_owned())),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Header {
    Network,
    Transport,
}

impl Header {
    const fn number(self) -> u32 {
        match self {
            Self::Network => 1,
            Self::Transport => 2,
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Meta {
    /// The fwmark: 4 bytes in the machine's byte order.
    Mark,
    /// The name of the interface by which the packet came: 16 bytes, filled up with zeros.
    InputInterface,
    /// The group of the process that opened the sending socket: 4 bytes in the machine's byte
    /// order. A packet that no socket of this node has sent ends the rule.
    SocketGroup,
    /// IANA's number of the protocol in one byte.
    Protocol,
}

impl Meta {
    const fn number(self) -> u32 {
        match self {
            Self::Mark => 3,
            Self::InputInterface => 6,
            Self::SocketGroup => 11,
            Self::Protocol => 16,
        }
    }
}

/// Facts about the packet's connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Conntrack {
    /// The state: 4 bytes in the machine's byte order, like the status.
    State,
    /// The status, with bits such as [`DESTINATION_TRANSLATED`].
    Status,
    /// The direction in one byte: [`ORIGINAL`] or [`REPLY`].
    Direction,
    /// The address that the first packet was sent to: 4 or 16 bytes in network byte order. Its port
    /// has 2 bytes.
    CalledAddress,
    CalledPort,
}

/// A bit of [`Conntrack::Status`]: the destination is translated.
pub const DESTINATION_TRANSLATED: u32 = 1 << 5;
/// Values of [`Conntrack::Direction`].
pub(super) const ORIGINAL: u8 = 0;
pub const REPLY: u8 = 1;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Comparison {
    Equal,
    NotEqual,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    Source,
    Destination,
}

/// A step of a rule. A comparison that fails, or a lookup that finds nothing, ends the rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Expression {
    Immediate {
        value: Vec<u8>,
        to: Register,
    },
    Payload {
        header: Header,
        offset: u32,
        length: u32,
        to: Register,
    },
    /// Writes to the packet, and updates checksums. In the network header, that includes the
    /// checksum of the transport. `checksum` is the offset of the header's own checksum from its
    /// start.
    SetPayload {
        header: Header,
        offset: u32,
        length: u32,
        checksum: Option<u32>,
        from: Register,
    },
    Meta {
        key: Meta,
        to: Register,
    },
    SetMark {
        from: Register,
    },
    Conntrack {
        key: Conntrack,
        to: Register,
    },
    /// The type of the packet's address in routing, such as [`LOCAL_ADDRESS`], in the machine's
    /// byte order.
    AddressType {
        of: Side,
        to: Register,
    },
    /// Computes `(register & mask) ^ xor`, both of the same length.
    Bitwise {
        register: Register,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    Compare {
        register: Register,
        comparison: Comparison,
        value: Vec<u8>,
    },
    /// Looks a key up in a set or a map. `to` gets the value from a map.
    Lookup {
        set: String,
        key: Register,
        to: Option<Register>,
    },
    /// Draws a number from `offset..offset + modulus`, in the machine's byte order.
    Random {
        modulus: u32,
        offset: u32,
        to: Register,
    },
    /// Adds a key to a set from within a rule, or renews its lifetime. A full set ends the rule.
    Remember {
        set: String,
        key: Register,
        milliseconds: u64,
    },
    DestinationNat {
        family: TableFamily,
        address: Register,
        port: Register,
    },
    /// Redirects to an address of this node. That is an address of the interface by which the
    /// packet came, or loopback for a packet that this node sends.
    Redirect {
        port: Register,
    },
    /// Masquerades with random source ports. `ports` are registers with the first and the last port
    /// in network byte order. `None` allows any port from 1024 on.
    Masquerade {
        ports: Option<[Register; 2]>,
    },
    /// Rejects the packet with ICMP port unreachable.
    Reject {
        family: TableFamily,
    },
    Verdict(Verdict),
}

/// `RTN_LOCAL`: an address of this node.
pub const LOCAL_ADDRESS: u32 = 2;

const FIB_ADDRESS_TYPE: u32 = 3;
const NUMGEN_RANDOM: u32 = 1;
const DYNSET_UPDATE: u32 = 1;
const NAT_DESTINATION: u32 = 1;
/// `NF_NAT_RANGE_PROTO_SPECIFIED` and `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const PORTS_SPECIFIED: u32 = 1 << 1;
const FULLY_RANDOM: u32 = 1 << 4;
const REJECT_BY_ICMP: u32 = 0;
const INTERNET_CHECKSUM: u32 = 1;
const OF_PSEUDO_HEADER: u32 = 1;

pub(super) fn expression(list: &mut Messages, name: &str, fill: impl FnOnce(&mut Messages)) {
    list.nested(LIST_MEMBER, |expression| {
        expression.text(EXPRESSION_NAME, name).nested(EXPRESSION_DATA, fill);
    });
}

fn number(out: &mut Messages, kind: u16, value: u32) -> &mut Messages {
    out.attribute(kind, &value.to_be_bytes())
}

fn value(out: &mut Messages, kind: u16, value: &[u8]) {
    out.nested(kind, |data| {
        data.attribute(DATA_VALUE, value);
    });
}

impl Expression {
    /// Returns the netlink attributes. Equal expressions give equal bytes.
    pub fn encode(expressions: &[Self]) -> Vec<u8> {
        let mut list = Messages::default();
        list.begin(0, 0, &[]);
        expressions.iter().for_each(|expression| expression.write(&mut list));
        list.bytes().to_vec()
    }

    pub(super) fn write(&self, list: &mut Messages) {
        match self {
            Self::Immediate { value: constant, to } => expression(list, "immediate", |out| {
                value(number(out, IMMEDIATE_REGISTER, to.0), IMMEDIATE_DATA, constant);
            }),
            Self::Payload { header, offset, length, to } => expression(list, "payload", |out| {
                number(number(out, PAYLOAD_REGISTER, to.0), PAYLOAD_BASE, header.number());
                number(number(out, PAYLOAD_OFFSET, *offset), PAYLOAD_LENGTH, *length);
            }),
            Self::SetPayload { header, offset, length, checksum, from } => {
                expression(list, "payload", |out| {
                    number(number(out, PAYLOAD_SOURCE, from.0), PAYLOAD_BASE, header.number());
                    number(number(out, PAYLOAD_OFFSET, *offset), PAYLOAD_LENGTH, *length);
                    if let Some(at) = checksum {
                        number(out, PAYLOAD_CHECKSUM_TYPE, INTERNET_CHECKSUM);
                        number(out, PAYLOAD_CHECKSUM_OFFSET, *at);
                    }
                    if *header == Header::Network {
                        number(out, PAYLOAD_CHECKSUM_FLAGS, OF_PSEUDO_HEADER);
                    }
                });
            }
            Self::Meta { key, to } => expression(list, "meta", |out| {
                number(number(out, META_KEY, key.number()), META_REGISTER, to.0);
            }),
            Self::SetMark { from } => expression(list, "meta", |out| {
                number(number(out, META_KEY, Meta::Mark.number()), META_SOURCE, from.0);
            }),
            Self::Conntrack { key, to } => expression(list, "ct", |out| {
                let (key, direction) = match key {
                    Conntrack::State => (0, None),
                    Conntrack::Direction => (1, None),
                    Conntrack::Status => (2, None),
                    Conntrack::CalledAddress => (9, Some(ORIGINAL)),
                    Conntrack::CalledPort => (12, Some(ORIGINAL)),
                };
                number(number(out, CT_KEY, key), CT_REGISTER, to.0);
                if let Some(direction) = direction {
                    out.attribute(CT_DIRECTION, &[direction]);
                }
            }),
            Self::AddressType { of, to } => expression(list, "fib", |out| {
                let side = match of {
                    Side::Source => 1,
                    Side::Destination => 2,
                };
                number(number(out, FIB_FLAGS, side), FIB_RESULT, FIB_ADDRESS_TYPE);
                number(out, FIB_REGISTER, to.0);
            }),
            Self::Bitwise { register, mask, xor } => expression(list, "bitwise", |out| {
                number(number(out, BITWISE_SOURCE, register.0), BITWISE_REGISTER, register.0);
                number(out, BITWISE_LENGTH, mask.len() as u32);
                value(out, BITWISE_MASK, mask);
                value(out, BITWISE_XOR, xor);
            }),
            Self::Compare { register, comparison, value: wanted } => expression(list, "cmp", |out| {
                let operation = match comparison {
                    Comparison::Equal => 0,
                    Comparison::NotEqual => 1,
                };
                number(number(out, COMPARE_REGISTER, register.0), COMPARE_OPERATION, operation);
                value(out, COMPARE_DATA, wanted);
            }),
            Self::Lookup { set, key, to } => expression(list, "lookup", |out| {
                number(out.text(LOOKUP_SET, set), LOOKUP_KEY, key.0);
                if let Some(to) = to {
                    number(out, LOOKUP_REGISTER, to.0);
                }
            }),
            Self::Random { modulus, offset, to } => expression(list, "numgen", |out| {
                number(number(out, NUMGEN_REGISTER, to.0), NUMGEN_MODULUS, *modulus);
                number(number(out, NUMGEN_TYPE, NUMGEN_RANDOM), NUMGEN_OFFSET, *offset);
            }),
            Self::Remember { set, key, milliseconds } => expression(list, "dynset", |out| {
                number(out.text(DYNSET_SET, set), DYNSET_OPERATION, DYNSET_UPDATE);
                number(out, DYNSET_KEY, key.0).attribute(DYNSET_TIMEOUT, &milliseconds.to_be_bytes());
            }),
            Self::DestinationNat { family, address, port } => expression(list, "nat", |out| {
                number(number(out, NAT_TYPE, NAT_DESTINATION), NAT_FAMILY, u32::from(family.number()));
                number(number(out, NAT_ADDRESS, address.0), NAT_PORT, port.0);
            }),
            Self::Redirect { port } => expression(list, "redir", |out| {
                number(out, REDIRECT_PORT, port.0);
            }),
            Self::Masquerade { ports } => expression(list, "masq", |out| match ports {
                None => {
                    number(out, MASQUERADE_FLAGS, FULLY_RANDOM);
                }
                Some([first, last]) => {
                    number(out, MASQUERADE_FLAGS, FULLY_RANDOM | PORTS_SPECIFIED);
                    number(number(out, MASQUERADE_FIRST_PORT, first.0), MASQUERADE_LAST_PORT, last.0);
                }
            }),
            Self::Reject { family } => expression(list, "reject", |out| {
                let port_unreachable = match family {
                    TableFamily::Ipv4 => 3,
                    TableFamily::Ipv6 => 4,
                };
                number(out, REJECT_TYPE, REJECT_BY_ICMP).attribute(REJECT_CODE, &[port_unreachable]);
            }),
            Self::Verdict(verdict) => expression(list, "immediate", |out| {
                number(out, IMMEDIATE_REGISTER, Register::VERDICT.0)
                    .nested(IMMEDIATE_DATA, |data| verdict.write(data));
            }),
        }
    }
}
