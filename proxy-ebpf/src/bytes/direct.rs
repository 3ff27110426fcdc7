//! Bytes of a packet that a program reaches without a helper.

use core::{arch::asm, hint::black_box};

use proxy_common::reason::Reason;

/// Where they are.
pub(crate) trait Direct: Copy {
    /// Addresses of the first of them and of what follows the last one. Each time anew: what the compiler keeps is cut to 32 bits, which the
    /// verifier forbids.
    fn bounds(self) -> (usize, usize);

    /// None: they end before.
    #[inline(always)]
    fn at<const N: usize>(self, offset: u32) -> Option<*mut [u8; N]> {
        let (begin, end) = self.bounds();
        // Compared and added in one register: the verifier of 5.10 forgets the bounds of a number on the stack.
        let offset = black_box(offset);
        if offset > FARTHEST {
            return None;
        }
        // The compiler must not compute what is compared and what is read apart: the verifier knows the bounds of one pointer.
        let pointer = black_box(begin + offset as usize);
        if pointer + N > end { None } else { Some(pointer as *mut [u8; N]) }
    }

    #[inline(always)]
    fn load<const N: usize>(self, offset: u32) -> Result<[u8; N], Reason> {
        let pointer = self.at::<N>(offset).ok_or(Reason::Malformed)?;
        let mut bytes = [0; N];
        let (words, rest) = bytes.as_chunks_mut::<4>();
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: inside of the bytes.
            *word = unsafe { load_word(pointer.cast::<u32>().add(index)) }.to_ne_bytes();
        }
        let loaded = N - rest.len();
        for (index, byte) in rest.iter_mut().enumerate() {
            // SAFETY: as above.
            *byte = unsafe { pointer.cast::<u8>().add(loaded + index).read() };
        }
        Ok(bytes)
    }

    /// As [`load`](Self::load), of any length. Of those of addresses the bounds are checked once.
    #[inline(always)]
    fn load_into(self, offset: u32, into: &mut [u8]) -> Result<(), Reason> {
        if let Ok(address) = <&mut [u8; 16]>::try_from(&mut *into) {
            *address = self.load(offset)?;
            return Ok(());
        }
        for (byte, offset) in into.iter_mut().zip(offset..) {
            [*byte] = self.load(offset)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn store<const N: usize>(self, offset: u32, bytes: [u8; N]) -> Result<(), Reason> {
        let pointer = self.at::<N>(offset).ok_or(Reason::RewriteFailed)?;
        let (words, rest) = bytes.as_chunks::<4>();
        for (index, word) in words.iter().enumerate() {
            // SAFETY: inside of the bytes, which are this program's own while it runs.
            unsafe { store_word(pointer.cast::<u32>().add(index), u32::from_ne_bytes(*word)) };
        }
        let stored = N - rest.len();
        for (index, byte) in rest.iter().enumerate() {
            // SAFETY: as above.
            unsafe { pointer.cast::<u8>().add(stored + index).write(*byte) };
        }
        Ok(())
    }

    /// As [`store`](Self::store), of any length. Of those of addresses, ports and most headers the bounds are checked once.
    #[inline(always)]
    fn store_from(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        if let Ok(ports) = <[u8; 4]>::try_from(bytes) {
            self.store(offset, ports)
        } else if let Ok(half) = <[u8; 8]>::try_from(bytes) {
            self.store(offset, half)
        } else if let Ok(begin) = <[u8; 12]>::try_from(bytes) {
            self.store(offset, begin)
        } else if let Ok(address) = <[u8; 16]>::try_from(bytes) {
            self.store(offset, address)
        } else {
            bytes.iter().zip(offset..).try_for_each(|(byte, offset)| self.store(offset, [*byte]))
        }
    }
}

/// Headers end before: the verifier follows offsets that have a bound.
const FARTHEST: u32 = 0x3ff;

/// A word of a packet. Its address is not aligned, which rustc makes four loads of; the verifier asks for alignment only where a
/// machine does.
///
/// # Safety
/// All four bytes are the packet's.
#[inline(always)]
unsafe fn load_word(pointer: *const u32) -> u32 {
    let word: u64;
    // SAFETY: as the caller says.
    unsafe {
        asm!("{word} = *(u32 *)({pointer} + 0)", pointer = in(reg) pointer, word = lateout(reg) word, options(pure, readonly, nostack));
    }
    word as u32
}

/// As [`load_word`].
///
/// # Safety
/// All four bytes are the packet's, and nobody else uses them.
#[inline(always)]
unsafe fn store_word(pointer: *mut u32, word: u32) {
    // SAFETY: as the caller says.
    unsafe {
        asm!("*(u32 *)({pointer} + 0) = {word}", pointer = in(reg) pointer, word = in(reg) u64::from(word), options(nostack));
    }
}
