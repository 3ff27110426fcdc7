//! Ones' complement sums, of which checksums are made.

use core::ops::{Add, AddAssign};

/// A ones' complement sum of 16-bit words, each in the order of its bytes in the packet. The sum of
/// a change is that of the new bytes less that of the old ones.
#[derive(Clone, Copy, Debug)]
pub struct Sum(u64);

impl Sum {
    pub const ZERO: Self = Self(0);

    /// Returns the sum of bytes. Their number must be a multiple of 4.
    #[inline(always)]
    pub fn of(bytes: &[u8]) -> Self {
        Self(words(bytes).map(u64::from).sum())
    }

    /// Returns by how much a sum changes if old bytes become new ones. Their number must be a
    /// multiple of 4.
    #[inline(always)]
    pub fn of_change(old: &[u8], new: &[u8]) -> Self {
        let old: u64 = words(old).map(|word| u64::from(!word)).sum();
        Self(old) + Self::of(new)
    }

    /// Returns true if the sum changes nothing. In ones' complement, 0 has two forms, and both
    /// count.
    #[inline(always)]
    pub const fn is_zero(self) -> bool {
        matches!(self.folded(), 0 | u32::MAX)
    }

    /// Returns the same sum in 32 bits.
    #[inline(always)]
    pub const fn folded(self) -> u32 {
        let once = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        ((once & 0xffff_ffff) + (once >> 32)) as u32
    }

    /// Returns the bytes of the checksum that makes up for the sum.
    #[inline(always)]
    pub const fn checksum(self) -> [u8; 2] {
        let sum = self.folded();
        let once = (sum & 0xffff) + (sum >> 16);
        let twice = (once & 0xffff) + (once >> 16);
        (!(twice as u16)).to_ne_bytes()
    }

    /// Returns the checksum after this change of what it covers.
    #[inline(always)]
    pub fn changed(self, checksum: [u8; 2]) -> [u8; 2] {
        (self + Self(u64::from(!u16::from_ne_bytes(checksum)))).checksum()
    }
}

/// Returns the bytes as words of 4 bytes. A sum of these is a sum of their 16-bit halves too.
#[inline(always)]
fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word))
}

impl Add for Sum {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // A packet has too few words for an overflow.
        Self(self.0 + other.0)
    }
}

impl AddAssign for Sum {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}
