//! Log lines about refused or dropped clients. Other packets do not reach this code. The controller switches the log on
//! and off in the map `kernel_log`.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_log_ebpf::debug;
use proxy_common::{
    layout::{Address, LOG_LINES_PER_SECOND},
    packet::Packet,
    port::Port,
};

use crate::maps;

/// An address that a log line can show.
pub(crate) trait LogAddress: Address {
    /// The controller puts the reason's name in place of its number as [`Reason`](proxy_common::reason::Reason). A client whose socket has no address yet is
    /// shown as the unspecified one. `ports`: the source's and the destination's.
    fn log_refusal(source: &Self, destination: &Self, ports: [Port; 2], protocol: u8, reason: u32);
}

#[inline(always)]
pub(crate) fn log_packet<A: LogAddress>(reason: u32, packet: &Packet<A>) {
    let Packet { source, destination, source_port, destination_port, protocol, .. } = packet;
    A::log_refusal(source, destination, [*source_port, *destination_port], *protocol, reason);
}

macro_rules! log_refusals {
    ($($address:ty),+) => { $(
        impl LogAddress for $address {
            // A function of its own, so that its stack is not the caller's.
            #[inline(never)]
            fn log_refusal(
                source: &Self,
                destination: &Self,
                [source_port, destination_port]: [Port; 2],
                protocol: u8,
                reason: u32,
            ) {
                if is_due() {
                    debug!(
                        (),
                        "reason {}: protocol {}, from {:i} port {} to {:i} port {}",
                        reason,
                        protocol,
                        *source,
                        source_port.number(),
                        *destination,
                        destination_port.number()
                    );
                }
            }
        }
    )+ };
}

log_refusals!([u8; 4], [u8; 16]);

/// Is the log switched on, and is there room for a line in this second? CPUs that count at the same moment may pass a
/// few lines more.
#[inline(always)]
fn is_due() -> bool {
    let Some(control) = maps::kernel_log.get_ptr_mut(0) else { return false };
    // SAFETY: a map value in bounds; the controller writes it as a whole.
    if unsafe { read_volatile(addr_of!((*control).enabled)) } == 0 {
        return false;
    }
    // SAFETY: no arguments; since 5.8.
    let second = unsafe { bpf_ktime_get_boot_ns() } / 1_000_000_000;
    // SAFETY: as above. Other CPUs may count meanwhile: plain integers, of which any value is valid.
    let control = unsafe { &mut *control };
    if control.second != second {
        control.second = second;
        control.lines = 0;
    }
    control.lines = control.lines.wrapping_add(1);
    control.lines <= LOG_LINES_PER_SECOND
}
