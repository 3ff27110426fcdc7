//! IPv4 and IPv6 as types, so that every decision is written once.

use crate::{
    layout::{Address, BACKEND_LOCAL, BACKEND_WEIGHT_SHIFT, Slot4, Slot6},
    port::Port,
};

pub trait Family: Copy + 'static {
    type Address: Address;
    type Slot: Slot<Address = Self::Address>;

    /// True if all fragments of a packet have the same protocol in their network header.
    const FRAGMENTS_BELONG_BY_PROTOCOL: bool;
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct V4;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct V6;

impl Family for V4 {
    type Address = [u8; 4];
    type Slot = Slot4;

    const FRAGMENTS_BELONG_BY_PROTOCOL: bool = true;
}

impl Family for V6 {
    type Address = [u8; 16];
    type Slot = Slot6;

    const FRAGMENTS_BELONG_BY_PROTOCOL: bool = false;
}

/// A slot of `slots4/6`: a backend as the packet programs need it.
pub trait Slot: Copy + Default {
    type Address: Address;

    fn new(address: Self::Address, port: Port, backend: u32, flags: u32) -> Self;
    fn address(&self) -> Self::Address;
    fn port(&self) -> Port;
    /// Returns the key of `backends4/6`. It is never 0 in a slot that is in use.
    fn backend(&self) -> u32;
    /// Returns the `BACKEND_*` flags.
    fn flags(&self) -> u32;

    /// Returns the weight less 1.
    #[inline(always)]
    fn more_weight(&self) -> u8 {
        (self.flags() >> BACKEND_WEIGHT_SHIFT) as u8
    }

    /// Returns true if this slot comes first in the order of an endpoint set: local ones, then the
    /// others, each by address and port.
    #[inline(always)]
    fn precedes(&self, other: &Self) -> bool {
        let (local, other_local) = (self.flags() & BACKEND_LOCAL, other.flags() & BACKEND_LOCAL);
        if local != other_local {
            return local != 0;
        }
        let ([upper, lower], [other_upper, other_lower]) =
            (self.address().halves(), other.address().halves());
        if upper != other_upper {
            return upper < other_upper;
        }
        if lower != other_lower {
            return lower < other_lower;
        }
        self.port() < other.port()
    }
}

macro_rules! slot {
    ($slot:ty, $address:ty) => {
        impl Slot for $slot {
            type Address = $address;

            #[inline(always)]
            fn new(address: $address, port: Port, backend: u32, flags: u32) -> Self {
                Self { address, port: port.number(), backend, flags, ..Self::default() }
            }

            #[inline(always)]
            fn address(&self) -> Self::Address {
                self.address
            }

            #[inline(always)]
            fn port(&self) -> Port {
                Port::new(self.port)
            }

            #[inline(always)]
            fn backend(&self) -> u32 {
                self.backend
            }

            #[inline(always)]
            fn flags(&self) -> u32 {
                self.flags
            }
        }
    };
}

slot!(Slot4, [u8; 4]);
slot!(Slot6, [u8; 16]);

/// The address and port that a connection or packet is sent to.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Destination<A> {
    pub address: A,
    pub port: Port,
    /// The IANA protocol number.
    pub protocol: u8,
}
