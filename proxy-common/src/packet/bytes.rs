//! Access to a packet's bytes. The kernel reaches them by helpers or directly, the host as a slice.

use core::cell::Cell;

use super::Sum;
use crate::reason::Reason;

/// The checksum of a transport header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Checksum {
    pub offset: u32,
    /// True for UDP: 0 says that there is no checksum, and stays. A sum that comes out as 0 is
    /// written as 0xffff.
    pub is_optional: bool,
}

impl Checksum {
    /// Returns the bytes of the checksum after this change of what it covers.
    #[inline(always)]
    pub fn after(self, old: [u8; 2], change: Sum) -> [u8; 2] {
        if self.is_optional && old == [0; 2] {
            return old;
        }
        let new = change.changed(old);
        if self.is_optional && new == [0; 2] { [0xff; 2] } else { new }
    }
}

/// Access to one packet. Offsets are from its first byte.
///
/// It is passed by value. In the kernel it is a pointer, or a pointer and a number, and takes no
/// stack.
pub trait Bytes: Copy {
    /// True if parsing fails for all but plain packets: whole ones, with TCP or UDP right behind a
    /// network header without options.
    const PLAIN_ONLY: bool = false;

    fn length(self) -> u32;

    /// Reads bytes. Fails with `Malformed` if the packet ends before the last of them.
    fn read_into(self, offset: u32, into: &mut [u8]) -> Result<(), Reason>;

    #[inline(always)]
    fn read<const N: usize>(self, offset: u32) -> Result<[u8; N], Reason> {
        let mut bytes = [0; N];
        self.read_into(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes bytes that a checksum of the packet covers. The caller changes that checksum too, so
    /// that the sum over the whole packet stays the same. If the packet cannot be written, this
    /// method and those below return `RewriteFailed`.
    fn write(self, offset: u32, bytes: &[u8]) -> Result<(), Reason>;

    /// Writes bytes that no checksum of the packet covers. If a device has summed up the whole
    /// packet, this changes its sum too.
    fn write_uncovered(self, offset: u32, bytes: &[u8]) -> Result<(), Reason>;

    /// Changes the checksum of an IPv4 header.
    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason>;

    /// Changes the checksum of a transport by the changes of addresses in the network header, and
    /// of what follows that header.
    ///
    /// If a device completes the checksum, the field holds the sum of the addresses only.
    fn change_checksum(self, checksum: Checksum, addresses: Sum, payload: Sum) -> Result<(), Reason>;
}

/// A packet on the host. Its checksums are whole.
impl Bytes for &[Cell<u8>] {
    fn length(self) -> u32 {
        self.len() as u32
    }

    fn read_into(self, offset: u32, into: &mut [u8]) -> Result<(), Reason> {
        let from = part(self, offset, into.len()).ok_or(Reason::Malformed)?;
        from.iter().zip(into).for_each(|(from, to)| *to = from.get());
        Ok(())
    }

    fn write(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        let to = part(self, offset, bytes.len()).ok_or(Reason::RewriteFailed)?;
        to.iter().zip(bytes).for_each(|(to, from)| to.set(*from));
        Ok(())
    }

    fn write_uncovered(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        self.write(offset, bytes)
    }

    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason> {
        self.write(offset, &change.changed(self.read(offset)?))
    }

    fn change_checksum(self, checksum: Checksum, addresses: Sum, payload: Sum) -> Result<(), Reason> {
        let new = checksum.after(self.read(checksum.offset)?, addresses + payload);
        self.write(checksum.offset, &new)
    }
}

fn part(bytes: &[Cell<u8>], offset: u32, length: usize) -> Option<&[Cell<u8>]> {
    bytes.get(offset as usize..)?.get(..length)
}
