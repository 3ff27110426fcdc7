//! How many connections backends have, where new ones go by that.
//!
//! Programs only add to `connections`, by an instruction that is whole on all CPUs.

use core::{
    arch::asm,
    ptr::{addr_of, addr_of_mut, read_volatile},
};

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::{
    balance,
    family::{V4, V6},
    layout::{Collected, Connections, EndpointSet, FLOW_COUNTED},
};

use crate::maps::{self, map_access::KernelMaps};

/// As far as they are counted.
#[inline(always)]
pub(crate) fn open(backend: u32) -> u64 {
    // First, so that fewer numbers wait on the stack.
    // SAFETY: copied at once; without preallocation an element is freed only after a grace period.
    let collected = unsafe { maps::collected.get(backend) }.map_or(0, Collected::sum);
    let Some(counted) = maps::connections.get_ptr(backend) else { return 0 };
    // SAFETY: a map element in bounds and aligned to 8, of plain integers. It stays readable until the program ends; whose it is
    // then counts for one connection.
    let counted = unsafe {
        Connections {
            flows_opened: read_volatile(addr_of!((*counted).flows_opened)),
            flows_closed: read_volatile(addr_of!((*counted).flows_closed)),
            sockets_opened: read_volatile(addr_of!((*counted).sockets_opened)),
            sockets_closed: read_volatile(addr_of!((*counted).sockets_closed)),
        }
    };
    counted.open(collected)
}

/// [`balance::less_busy`] as a global function: as for the counters. `set`: [`EndpointSet::word`].
macro_rules! less_busy {
    ($($name:ident: $family:ty;)+) => { $(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) extern "C" fn $name(set: u64, bits: u32) -> u32 {
            balance::less_busy::<$family>(&KernelMaps, EndpointSet::from_word(set), bits)
        }
    )+ };
}

less_busy! {
    less_busy4: V4;
    less_busy6: V6;
}

/// # Safety
///
/// The counter is in bounds and aligned to 8.
#[inline(always)]
unsafe fn add_one(counter: *mut u64) {
    // The compiler has no atomic operations for this target. This one answers nothing: those that do are there since 5.12 only.
    // SAFETY: of the caller.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) 1_u64, options(nostack)) };
}

/// Not on the stack: below the deepest chain of calls there is little of it left.
static NO_CONNECTIONS: Connections =
    Connections { flows_opened: 0, flows_closed: 0, sockets_opened: 0, sockets_closed: 0 };

/// Each as a global function, so that the verifier goes through it once, whatever the flags, which say whether the connection is counted: a
/// flow's, or of a socket 1.
macro_rules! counters {
    ($($name:ident: $field:ident, $counted:expr, $is_begin:literal;)+) => { $(
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub(crate) extern "C" fn $name(backend: u32, flags: u32) -> u32 {
            if flags & $counted == 0 {
                return 0;
            }
            let mut counted = maps::connections.get_ptr_mut(backend);
            if $is_begin && counted.is_none() {
                // Fails if another CPU is faster, or without room: then it is not counted.
                let _known = maps::connections.insert(backend, &NO_CONNECTIONS, u64::from(BPF_NOEXIST));
                counted = maps::connections.get_ptr_mut(backend);
            }
            if let Some(counted) = counted {
                // SAFETY: a field of a map element, in bounds and aligned to 8.
                unsafe { add_one(addr_of_mut!((*counted).$field)) };
            }
            0
        }
    )+ };
}

counters! {
    count_flow_opened: flows_opened, FLOW_COUNTED, true;
    count_flow_closed: flows_closed, FLOW_COUNTED, false;
    count_socket_opened: sockets_opened, 1, true;
    count_socket_closed: sockets_closed, 1, false;
}
