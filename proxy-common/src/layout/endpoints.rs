//! Endpoints: the maps `slots4/6` and `backends4/6`.

/// Contiguous slots of `slots4/6`, and the lookup table behind them if there is one.
///
/// New connections draw from the lookup table, which consists of copies of the slots, or else from
/// the slots. The alignment lets one 8-byte load or store move all of it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct EndpointSet {
    pub first: u32,
    /// The number of slots, in the lowest `TABLE_SHIFT` bits. The bits above have the binary
    /// logarithm of the lookup table's size; 0: there is no lookup table.
    sizes: u32,
}

const TABLE_SHIFT: u32 = 27;

impl EndpointSet {
    /// The largest number of slots that a set can have.
    pub const MOST: u32 = (1 << TABLE_SHIFT) - 1;
    /// The binary logarithm of the largest lookup table.
    pub const MOST_TABLE_BITS: u32 = 16;

    /// Returns a set without lookup table.
    #[inline(always)]
    pub const fn new(first: u32, count: u32) -> Self {
        Self { first, sizes: count & Self::MOST }
    }

    /// Returns the set with a lookup table of `2^bits` slots; 0: without one.
    #[inline(always)]
    pub const fn with_table(self, bits: u32) -> Self {
        Self { sizes: self.count() | bits << TABLE_SHIFT, ..self }
    }

    /// Returns the set from the word that maps hold.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self { first: word as u32, sizes: (word >> 32) as u32 }
    }

    #[inline(always)]
    pub const fn word(&self) -> u64 {
        (self.sizes as u64) << 32 | self.first as u64
    }

    /// Returns the number of slots, without those of the lookup table.
    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.sizes & Self::MOST
    }

    #[inline(always)]
    pub const fn table_bits(&self) -> u32 {
        self.sizes >> TABLE_SHIFT
    }

    /// Returns the number of slots, with those of the lookup table.
    pub const fn slot_count(&self) -> u32 {
        self.count() + if self.table_bits() == 0 { 0 } else { 1 << self.table_bits() }
    }

    /// Returns the first index that is drawn from, and how many there are.
    #[inline(always)]
    const fn drawn_from(&self) -> (u32, u32) {
        let (count, table_bits) = (self.count(), self.table_bits());
        // There is no branch, because the verifier follows both ways of each. `is_copied` is 1 if
        // there is a lookup table, and `mask` has all bits set then.
        let is_copied = (table_bits + (u32::BITS - 1)) >> u32::BITS.ilog2();
        let mask = 0_u32.wrapping_sub(is_copied);
        (self.first.wrapping_add(count & mask), count & !mask | is_copied << table_bits)
    }

    /// Returns the index that 32 random bits choose. All indexes are equally likely.
    #[inline(always)]
    pub const fn index(&self, bits: u32) -> u32 {
        let (start, size) = self.drawn_from();
        start.wrapping_add(scaled(bits, size))
    }

    /// Returns another index than `index`, chosen by 32 random bits. Only if there is no other
    /// index, it returns the same.
    #[inline(always)]
    pub const fn other_index(&self, index: u32, bits: u32) -> u32 {
        let (start, size) = self.drawn_from();
        let step = scaled(bits, size.wrapping_sub(1)).wrapping_add(1);
        let drawn = index.wrapping_sub(start).wrapping_add(step);
        start.wrapping_add(if drawn < size { drawn } else { drawn.wrapping_sub(size) })
    }
}

/// Scales random bits to a number below `size`, without a division.
#[inline(always)]
const fn scaled(bits: u32, size: u32) -> u32 {
    ((bits as u64 * size as u64) >> u32::BITS) as u32
}

/// The backend runs on this node.
pub const BACKEND_LOCAL: u32 = 1;
/// A slot's endpoint terminates. Only nodes that do not know that yet send it new connections of
/// the set (direct server return).
pub const BACKEND_DRAINING: u32 = 2;
/// The position in a slot's flags from which on the bits hold its weight less 1.
pub const BACKEND_WEIGHT_SHIFT: u32 = 8;

/// Value of the map `slots4/6` (mmapable array): all that the packet programs need of a backend.
///
/// The slots of an endpoint set are in the order of
/// [`Slot::precedes`](crate::family::Slot::precedes). The slots of its lookup table are in the
/// order of the [lookup table](crate::balance).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Slot4 {
    pub address: [u8; 4],
    pub(crate) port: u16,
    pub(crate) _reserved: u16,
    /// Key of `backends4`.
    pub backend: u32,
    /// Flags of the backend (`BACKEND_*`).
    pub flags: u32,
}

/// Value of the map `slots6`, with the meaning of [`Slot4`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Slot6 {
    pub address: [u8; 16],
    pub(crate) port: u16,
    pub(crate) _reserved: u16,
    /// Key of `backends6`.
    pub backend: u32,
    /// Flags of the backend (`BACKEND_*`).
    pub flags: u32,
    pub(crate) _reserved2: u32,
}

pub const BACKEND_ACTIVE: u8 = 1;
/// The endpoint terminates. It gets new connections only if no other endpoint is left, and keeps
/// established ones.
pub const BACKEND_TERMINATING: u8 = 2;

/// Value of the map `backends4/6` (hash, key: backend id): endpoints that a service uses, and
/// endpoints that a service has used and that still serve.
///
/// Ids grow and are never given again, so an id that is not in the map belongs to a backend that is
/// gone.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Backend<A> {
    pub address: A,
    /// The port in host byte order. Only people and the controller read it.
    pub port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// `BACKEND_ACTIVE` or `BACKEND_TERMINATING`.
    pub state: u8,
    /// The number of service ports that use the backend. 0: it is kept for flows and sockets alone.
    pub uses: u32,
    /// Flags of the backend (`BACKEND_LOCAL`).
    pub flags: u32,
    /// A hash of the name of the one service port that a UDP backend belongs to. 0: all service
    /// ports that use the endpoint share the backend.
    ///
    /// A UDP backend is gone as soon as the endpoint leaves its service port, so that the flows
    /// notice it.
    pub owner: u32,
}

const _: () = {
    assert!(size_of::<EndpointSet>() == 8 && align_of::<EndpointSet>() == 8);
    assert!(size_of::<Slot4>() == 16);
    assert!(size_of::<Slot6>() == 32);
    assert!(size_of::<Backend<[u8; 4]>>() == 20 && size_of::<Backend<[u8; 16]>>() == 32);
};
