//! Log lines about refused or dropped clients. Other packets do not reach this code. The controller switches the log on
//! and off in the table `kernel_log`.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use aya_log_ebpf::debug;
use proxy_common::{
    family::{V4, V6},
    layout::{Address, LOG_LINES_PER_SECOND},
    packet::Packet,
    port::Port,
    reason::Reason,
};

use crate::{flow::FlowScratch, maps};

/// An address that a log line can show.
pub(crate) trait LogAddress: Address {
    /// The controller puts the reason's name in place of its number as [`Reason`]. A client whose socket has no address yet is
    /// shown as the unspecified one. `ports`: the source's and the destination's.
    fn log_refusal(source: &Self, destination: &Self, ports: [Port; 2], protocol: u8, reason: u32);
}

/// A family whose packets are logged.
pub(crate) trait LogPacket: FlowScratch {
    /// As [`LogAddress::log_refusal`], of the packet in [`FlowScratch::scratch`].
    fn log_packet(reason: Reason);
}

macro_rules! log_refusals {
    ($family:ty, $address:ty, $log_packet:ident) => {
        /// A global function, as it would be verified once for each reason. It reads the packet only, which its caller has parsed into memory
        /// that a helper gave: nothing of it is left in registers.
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $log_packet(reason: u32) -> u32 {
            if let Some(scratch) = <$family>::scratch() {
                let Packet { source, destination, source_port, destination_port, protocol, .. } =
                    &scratch.packet;
                let ports = [*source_port, *destination_port];
                <$address>::log_refusal(source, destination, ports, *protocol, reason);
            }
            0
        }

        impl LogPacket for $family {
            #[inline(always)]
            fn log_packet(reason: Reason) {
                $log_packet(reason as u32);
            }
        }

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
    };
}

log_refusals!(V4, [u8; 4], log_packet4);
log_refusals!(V6, [u8; 16], log_packet6);

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
