//! Call stacks by frame pointers. They can be taken in signal handlers, because this needs no
//! unwind tables, no locks and no heap. All Rust code of this workspace is compiled with frame
//! pointers (`.cargo/config.toml`, `cargo xtask image`).
//!
//! Code without frame pointers (hand-written assembly, musl's own C code) leaves any value in the
//! register. So the memory that the register points to is read by a system call, which fails if
//! there is no such memory.

use std::{fs::File, os::unix::fs::FileExt, sync::OnceLock};

use nix::errno::Errno;

use super::CallError;

/// The largest number of frames that is kept. The outermost ones beyond it are left out.
pub(super) const DEEPEST: usize = 128;
/// A limit that no stack exceeds. An address further away than this is not a frame.
const LARGEST_STACK: usize = 64 << 20;
const WORD: usize = size_of::<usize>();
/// The bytes that one system call reads. Frames lie close together, so that a call reads several.
const WINDOW: usize = 1024;

/// This process's memory. A forked child reads its parent's memory through it, which does no harm.
static MEMORY: OnceLock<File> = OnceLock::new();

/// Opens the file through which stacks are read. Before that, no frames are found.
///
/// # Errors
/// Fails if there is no /proc.
pub(super) fn prepare() -> Result<(), CallError> {
    if MEMORY.get().is_none() {
        let memory =
            File::open("/proc/self/mem").map_err(|error| CallError::new("open(/proc/self/mem)", error))?;
        // Another thread may have set it meanwhile. Its file serves as well.
        let _ = MEMORY.set(memory);
    }
    Ok(())
}

/// A call stack: the return address of each call, the innermost first.
pub(super) struct Frames {
    addresses: [usize; DEEPEST],
    count: usize,
}

impl Frames {
    pub(super) fn addresses(&self) -> &[usize] {
        self.addresses.get(..self.count).unwrap_or_default()
    }

    const fn empty() -> Self {
        Self { addresses: [0; DEEPEST], count: 0 }
    }

    /// Returns the stack of the code that a signal has interrupted. Leaves errno as it was.
    pub(super) fn interrupted(registers: Registers) -> Self {
        let _errno = KeptErrno::now();
        let mut frames = Self::empty();
        // Return addresses lie behind the instruction that called, so this one is made to do the
        // same.
        frames.push(registers.instruction.wrapping_add(1));
        frames.follow(registers.frame, registers.stack);
        frames
    }

    fn push(&mut self, address: usize) -> bool {
        let Some(place) = self.addresses.get_mut(self.count) else { return false };
        *place = address;
        self.count += 1;
        true
    }

    /// Follows the chain of frames. `frame` is the address of a saved frame pointer, with a return
    /// address above it. `stack` is the lowest address in use.
    fn follow(&mut self, mut frame: usize, stack: usize) {
        let Some(memory) = MEMORY.get() else { return };
        let mut window = Window { start: 0, length: 0, words: [0; WINDOW / WORD] };
        let mut lowest = stack;
        // Each frame must lie above the one that it called, so that the walk cannot go in circles.
        while frame >= lowest && frame.is_multiple_of(WORD) && frame - stack < LARGEST_STACK {
            let Some((outer, back)) = window.pair(memory, frame) else { return };
            if back == 0 || !self.push(back) {
                return;
            }
            lowest = frame + 2 * WORD;
            frame = outer;
        }
    }
}

/// A copy of a piece of the stack.
struct Window {
    start: usize,
    length: usize,
    words: [usize; WINDOW / WORD],
}

impl Window {
    /// Returns two words of memory, or `None` if there is no such memory.
    fn pair(&mut self, memory: &File, address: usize) -> Option<(usize, usize)> {
        let known = address
            .checked_sub(self.start)
            .is_some_and(|distance| distance < self.length && self.length - distance >= 2 * WORD);
        if !known {
            let mut bytes = [0; WINDOW];
            self.length = memory.read_at(&mut bytes, address as u64).unwrap_or(0);
            self.start = address;
            for (word, bytes) in self.words.iter_mut().zip(bytes.as_chunks::<WORD>().0) {
                *word = usize::from_ne_bytes(*bytes);
            }
            if self.length < 2 * WORD {
                return None;
            }
        }
        let at = (address - self.start) / WORD;
        Some((*self.words.get(at)?, *self.words.get(at + 1)?))
    }
}

/// The registers of the code that a signal has interrupted.
#[derive(Clone, Copy)]
pub(super) struct Registers {
    instruction: usize,
    frame: usize,
    stack: usize,
}

impl Registers {
    #[cfg(target_arch = "x86_64")]
    pub(super) fn of(context: &libc::ucontext_t) -> Self {
        let register = |number: libc::c_int| context.uc_mcontext.gregs[number as usize] as usize;
        Self {
            instruction: register(libc::REG_RIP),
            frame: register(libc::REG_RBP),
            stack: register(libc::REG_RSP),
        }
    }

    #[cfg(target_arch = "aarch64")]
    pub(super) fn of(context: &libc::ucontext_t) -> Self {
        let machine = &context.uc_mcontext;
        Self {
            instruction: machine.pc as usize,
            frame: machine.regs[29] as usize,
            stack: machine.sp as usize,
        }
    }
}

/// A value of errno that is restored when this is dropped, because the interrupted code may be
/// about to read it.
struct KeptErrno(i32);

impl KeptErrno {
    fn now() -> Self {
        Self(Errno::last_raw())
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        Errno::set_raw(self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn follow(frame: usize, stack: usize) -> Vec<usize> {
        prepare().unwrap();
        let mut frames = Frames::empty();
        frames.follow(frame, stack);
        frames.addresses().to_vec()
    }

    #[test]
    fn chains_are_followed_upwards_and_end_where_they_are_broken() {
        let chain = |links: &dyn Fn(usize) -> [usize; 4]| {
            let mut words = Box::new([0; 4]);
            let base = words.as_ptr() as usize;
            *words = links(base);
            follow(base, base)
        };
        assert_eq!(chain(&|base| [base + 2 * WORD, 11, 0, 12]), [11, 12]);
        assert_eq!(chain(&|base| [base, 11, 0, 0]), [11], "itself");
        assert_eq!(chain(&|base| [base + 2 * WORD, 11, base, 12]), [11, 12], "back to where it was");
        assert_eq!(chain(&|base| [base + WORD + 1, 11, 0, 0]), [11], "between two words");
        assert_eq!(chain(&|base| [base + WORD, 11, 12, 13]), [11], "into what was read");
        assert_eq!(chain(&|base| [base + 2 * WORD, 11, 0, 0]), [11], "no return address");
        assert_eq!(chain(&|base| [base + LARGEST_STACK, 11, 0, 0]), [11], "too far away");
    }

    #[test]
    fn what_cannot_be_read_is_no_frame_and_no_fault() {
        for address in [0, WORD, 1 << 46, usize::MAX - 15, usize::MAX - 7] {
            assert_eq!(follow(address, address), [0; 0], "{address:x}");
        }
        Errno::EXDEV.set();
        let nowhere = Registers { instruction: 6, frame: WORD, stack: WORD };
        assert_eq!(Frames::interrupted(nowhere).addresses(), [7]);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EXDEV));
    }
}
