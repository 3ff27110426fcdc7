//! What becomes of frames that XDP has sent on by another interface, where no device takes them: the program has ended before.

use aya_ebpf::{helpers::bpf_probe_read_kernel, programs::RawTracePointContext};
use proxy_common::reason::Reason;

use crate::{globals, maps, tables::count_times};

/// A device was given some frames: `from_dev`, `to_dev`, `sent`, `drops`, `err`.
#[inline(always)]
pub(crate) fn sent(ctx: &RawTracePointContext) -> i32 {
    let dropped = ctx.arg::<u64>(3) as u32;
    if dropped > 0 && has_come_by_uplink(ctx.arg(0)) {
        count_times(Reason::RedirectFailed, dropped.into());
    }
    0
}

/// A frame was not even given to a device: `dev`, that it has come by, and others.
#[inline(always)]
pub(crate) fn failed(ctx: &RawTracePointContext) -> i32 {
    if has_come_by_uplink(ctx.arg(0)) {
        count_times(Reason::RedirectFailed, 1);
    }
    0
}

/// Is the device, a `net_device`, one whose frames our program sends on? No other program of XDP is on it then.
#[inline(always)]
fn has_come_by_uplink(device: u64) -> bool {
    let own_network = globals::OWN_NETWORK.load();
    if own_network == 0 {
        // The controller does not know the kernel's types.
        return false;
    }
    let Some(network) = field::<u64>(device, globals::DEVICE_NETWORK.load()) else { return false };
    let is_of_node = field::<u32>(network, globals::NETWORK_NUMBER.load()) == Some(own_network);
    let Some(interface) = field::<u32>(device, globals::DEVICE_INDEX.load()) else { return false };
    // SAFETY: nothing is read of what is found.
    is_of_node && unsafe { maps::redirect_sources.get(interface) }.is_some()
}

/// Of a struct of the kernel at this address.
#[inline(always)]
fn field<T>(of: u64, offset: u32) -> Option<T> {
    // SAFETY: the helper reads, and fails where there is no memory.
    unsafe { bpf_probe_read_kernel((of + u64::from(offset)) as *const T) }.ok()
}
