//! Tells those who watch what becomes of packets and system calls: `proxy-ctl monitor`, by the map `events`, and the controller's log of
//! refused and dropped clients. Packets of flows that are there, and what no service is concerned with, do not reach this code.

use core::{
    mem::MaybeUninit,
    ptr::{addr_of, read_volatile},
};

use aya_ebpf::{
    btf_maps::{Array, RingBuf},
    helpers::bpf_get_prandom_u32,
};
use proxy_common::{
    event::{self, EventKind},
    family::{Destination, V4, V6},
    layout::{Event, EventControl, SocketOrigin},
    port::Port,
    reason::Reason,
};

use crate::{
    log::{LogAddress, log_packet},
    maps::{
        self,
        flow::FlowScratch,
        map_access::{count, now},
    },
};

/// A family whose packets are told of.
pub(crate) trait TellPacket: FlowScratch<Address: LogAddress> {
    /// What becomes of the packet in [`FlowScratch::scratch`], if that is something to tell.
    fn tell_packet(reason: Reason);
}

macro_rules! tell_packets {
    ($($family:ty: $name:ident;)+) => { $(
        /// A global function, as it would be verified once for each reason. It reads what its caller has written into memory that a helper
        /// gave: nothing of it is left in registers.
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(reason: u32) -> u32 {
            if let Some(scratch) = <$family>::scratch() {
                tell(reason, |event| scratch.describe(reason, event));
                if event::is_refusal(reason) {
                    log_packet(reason, &scratch.packet);
                }
            }
            0
        }

        impl TellPacket for $family {
            #[inline(always)]
            fn tell_packet(reason: Reason) {
                if EventKind::of(reason).is_some() {
                    $name(reason as u32);
                }
            }
        }
    )+ };
}

tell_packets! {
    V4: tell_packet4;
    V6: tell_packet6;
}

/// What becomes of a system call that named `destination`; `sent_to`: the backend in its place.
// A function of its own, so that its stack is not the caller's.
#[inline(never)]
pub(crate) fn tell_socket<A: LogAddress>(
    reason: u32,
    destination: &Destination<A>,
    sent_to: Option<&SocketOrigin<A>>,
) {
    let Destination { address, port, protocol } = destination;
    tell(reason, |event| event.set_socket((address, *port), *protocol, sent_to));
    if event::is_refusal(reason) {
        A::log_refusal(&A::UNSPECIFIED, address, [Port::NONE, *port], *protocol, reason);
    }
}

#[inline(always)]
fn tell(reason: u32, describe: impl Fn(&mut Event)) {
    if let Some(now) = due(&maps::event_control, reason) {
        if !write(&maps::events, reason, now, &describe) {
            count(Reason::EventLost);
        }
    }
}

/// The time, if somebody watches and is to be told.
#[inline(always)]
fn due(control: &Array<EventControl, 1>, reason: u32) -> Option<u64> {
    let control = control.get_ptr(0)?;
    // SAFETY: a map value, in bounds and aligned to 8; one load, as user space may be writing it.
    if unsafe { read_volatile(addr_of!((*control).until)) } == 0 {
        return None;
    }
    // SAFETY: as above. User space may write meanwhile: plain integers, of which any value is valid.
    let control = unsafe { &*control };
    // SAFETY: no arguments.
    control.admits(reason, || unsafe { bpf_get_prandom_u32() }, now)
}

/// False: the ring is full.
#[inline(always)]
fn write<const BYTES: usize>(
    ring: &RingBuf<Event, BYTES>,
    reason: u32,
    now: u64,
    describe: impl Fn(&mut Event),
) -> bool {
    let Some(mut reserved) = ring.reserve(0) else { return false };
    let event = MaybeUninit::write(&mut reserved, Event::new(now, reason));
    describe(event);
    reserved.submit(0);
    true
}
