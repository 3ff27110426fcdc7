//! `FlowMaps` over the BPF maps.

use core::{
    hint::black_box,
    ptr::{addr_of, addr_of_mut, read_volatile, write_volatile},
};

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::bpf_get_prandom_u32,
};
use proxy_common::{
    family::{Family, V4, V6},
    flow::{
        self, Change, Clock, FlowEntry, FlowMaps, InsertError, OPENING_SERVICES, Routine, Scratch,
        ServiceOpenings, Stage,
    },
    layout::*,
    port::{Port, PortPool, PortRanges},
    reason::Reason,
};

use crate::{
    event::TellPacket as _,
    globals,
    maps::{
        self,
        connections::{count_flow_closed, count_flow_opened},
        map_access::{KernelMaps, count, count_connection, now, recently, settings},
    },
};

const EEXIST: i32 = -17;

/// An element of a flow map. It stays readable until the program ends, but the kernel may give it to another flow meanwhile: one of an
/// LRU map on every kernel, one of a hash map from 6.1 on.
#[derive(Clone, Copy)]
pub(crate) struct Entry<A>(*mut Flow<A>);

impl<A: Address> FlowEntry<A> for Entry<A> {
    #[inline(always)]
    fn read_into(&self, flow: &mut Flow<A>) {
        let (from, to) = (self.0.cast::<u64>(), addr_of_mut!(*flow).cast::<u64>());
        // In words: what the compiler calls for a copy of this size goes byte by byte.
        for word in 0..size_of::<Flow<A>>() / size_of::<u64>() {
            // SAFETY: a map element and a flow, both in bounds, aligned to 8 and of whole words. Plain integers: whether they are of one
            // flow shows in `opened`.
            unsafe { *to.add(word) = read_volatile(from.add(word)) };
        }
    }

    #[inline(always)]
    fn opened(&self) -> u64 {
        // SAFETY: as above.
        unsafe { read_volatile(addr_of!((*self.0).opened)) }
    }

    #[inline(always)]
    fn write(&self, change: Change<A>) {
        let entry = self.0;
        // SAFETY: as above; each field is written whole, and belongs to the CPUs in common. In the moment between a look at `opened` and
        // this the element may become another flow's: its next packets set the field right, or it is refreshed. A next hop tells by its stamp
        // that it is not the flow's.
        unsafe {
            match change {
                Change::LastSeen(now) => write_volatile(addr_of_mut!((*entry).last_seen), now),
                Change::Epoch(epoch) => write_volatile(addr_of_mut!((*entry).epoch), epoch),
                Change::Reached(by, number) => {
                    write_volatile(&raw mut by.numbers_of(&mut *entry).reached, number);
                }
                Change::Awaited(by, number) => {
                    write_volatile(&raw mut by.numbers_of(&mut *entry).awaited, number);
                }
                Change::Progress(progress) => write_volatile(addr_of_mut!((*entry).state.progress), progress),
                Change::ClientFin(fin) => write_volatile(addr_of_mut!((*entry).state.client_fin), fin),
                Change::BackendFin(fin) => write_volatile(addr_of_mut!((*entry).state.backend_fin), fin),
                Change::Reset(reset) => write_volatile(addr_of_mut!((*entry).state.reset), reset),
                Change::Masquerade(address, port) => {
                    write_volatile(addr_of_mut!((*entry).masquerade), address);
                    // Last: with it the address counts.
                    (*entry).set_masquerade_port(port);
                }
                Change::ForwardToken(token) => write_volatile(addr_of_mut!((*entry).forward_token), token),
                Change::NextHop(hop) => {
                    // In words, each by one store.
                    let (from, to) =
                        (addr_of!(hop).cast::<u64>(), addr_of_mut!((*entry).next_hop).cast::<u64>());
                    for word in 0..size_of::<CachedHop>() / size_of::<u64>() {
                        write_volatile(to.add(word), *from.add(word));
                    }
                }
            }
        }
    }
}

/// Working memory of one family.
pub(crate) trait FlowScratch: Family {
    /// At most once in a program, and in each of its functions that are verified alone.
    fn scratch() -> Option<&'static mut Scratch<Self::Address>>;
}

#[inline(always)]
fn inserted(result: Result<(), i32>) -> Result<(), InsertError> {
    match result {
        Ok(()) => Ok(()),
        Err(EEXIST) => Err(InsertError::Exists),
        Err(_) => Err(InsertError::Full),
    }
}

#[inline(always)]
fn masquerade_port(random: u32, attempt: u32) -> Port {
    let Some(settings) = settings() else { return Port::NONE };
    let pool = PortPool {
        ports: settings.masquerade_ports.into(),
        reserved: settings.masquerade_ports_reserved.into(),
    };
    if pool.ports == 0 {
        return Port::NONE;
    }
    let index = pool.index(random, attempt);
    let Some(four) = maps::masquerade_ports.get_ptr(index / 4) else { return Port::NONE };
    // SAFETY: of a map value, in bounds and aligned to 8; one load, as the controller replaces four ports by one store.
    let four = unsafe { read_volatile(four.cast::<u64>()) };
    // The BPF object is little-endian.
    Port::new((four >> (index % 4 * 16)) as u16)
}

#[inline(always)]
fn generation_of_remapped_ports() -> u32 {
    // A former controller has left 0 there, and programs have set ports to 1.
    maps::remapped_ports.get(u32::from(Port::NONE.number())).map_or(1, |generation| (*generation).max(1))
}

/// Each [`Routine`] as a global function. The verifier goes through one once, whatever its callers know; since 5.6. It gets the [`Scratch`] of
/// its caller itself. The caller lets its reference escape by [`black_box`] before, so that the compiler keeps nothing of it in registers over
/// the call.
macro_rules! routines {
    ($($routine:ident: $name4:ident $name6:ident;)+) => {
        routines!(V4 call4: $($routine $name4,)+);
        routines!(V6 call6: $($routine $name6,)+);
    };
    ($family:ident $call:ident: $($routine:ident $name:ident,)+) => {
        $(
            #[unsafe(no_mangle)]
            #[inline(never)]
            extern "C" fn $name() -> u32 {
                if let Some(scratch) = $family::scratch() {
                    flow::run::<$family, KernelMaps>(&KernelMaps, scratch, Routine::$routine);
                }
                0
            }
        )+

        #[inline(always)]
        fn $call(routine: Routine) {
            match routine {
                $(Routine::$routine => $name(),)+
            };
        }
    };
}

routines! {
    SetKey: set_key4 set_key6;
    TryAliasPort: try_alias_port4 try_alias_port6;
    TryMasqueradePort: try_masquerade_port4 try_masquerade_port6;
    TrackSlow: track_slow4 track_slow6;
    FindRemapped: find_remapped4 find_remapped6;
    Prepare: prepare4 prepare6;
    Insert: insert4 insert6;
    Masquerade: masquerade4 masquerade6;
    Establish: establish4 establish6;
    Refresh: refresh4 refresh6;
    Restore: restore4 restore6;
    Demote: demote4 demote6;
    Leave: leave4 leave6;
    Replace: replace4 replace6;
    FollowFragment: follow_fragment4 follow_fragment6;
    RecordFragment: record_fragment4 record_fragment6;
    NoteHostConnection: note_host_connection4 note_host_connection6;
    Encapsulate: encapsulate4 encapsulate6;
    AllowForwarding: allow_forwarding4 allow_forwarding6;
    NoteForwardedByXdp: note_forwarded_by_xdp4 note_forwarded_by_xdp6;
    LeaveToStack: leave_to_stack4 leave_to_stack6;
    GoOnDirectly: go_on_directly4 go_on_directly6;
    TrackClient: track_client4 track_client6;
}

macro_rules! flow_maps {
    ($family:ty, $address:ty, $flows:ident, $opening:ident, $host_connections:ident, $fragments:ident, $masquerade:ident, $scratch:ident,
     $call:ident, $frontend_addresses:ident) => {
        impl FlowScratch for $family {
            #[inline(always)]
            fn scratch() -> Option<&'static mut Scratch<$address>> {
                let scratch = maps::$scratch.get_ptr_mut(0)?;
                // SAFETY: this CPU's own. Programs of TC and XDP run with softirqs off, so nothing else on this CPU uses it meanwhile. A
                // global function has its own reference while its caller waits, and the caller's has escaped by then.
                Some(unsafe { &mut *scratch })
            }
        }

        impl FlowMaps<$family> for KernelMaps {
            type Entry = Entry<$address>;

            #[inline(always)]
            fn flow(&self, stage: Stage, key: &FlowKey<$address>) -> Option<Self::Entry> {
                match stage {
                    Stage::Established => maps::$flows.get_ptr_mut(key),
                    Stage::Opening => maps::$opening.get_ptr_mut(key),
                }
                .map(Entry)
            }

            #[inline(always)]
            fn insert(
                &self,
                stage: Stage,
                key: &FlowKey<$address>,
                flow: &Flow<$address>,
            ) -> Result<(), InsertError> {
                let result = match stage {
                    Stage::Established => maps::$flows.insert(key, flow, BPF_NOEXIST.into()),
                    Stage::Opening => maps::$opening.insert(key, flow, BPF_NOEXIST.into()),
                };
                // An entry that was never looked up is evicted before old ones that were, so also before its flow's
                // answer is there.
                if stage == Stage::Opening && result.is_ok() {
                    let _referenced = maps::$opening.get_ptr(key);
                }
                inserted(result)
            }

            #[inline(always)]
            fn remove(&self, stage: Stage, key: &FlowKey<$address>) -> bool {
                match stage {
                    Stage::Established => maps::$flows.remove(key),
                    Stage::Opening => maps::$opening.remove(key),
                }
                .is_ok()
            }

            #[inline(always)]
            fn host_connection(&self, key: &FlowKey<$address>) -> Option<u64> {
                // SAFETY: an element, aligned to 8; one load. If the kernel gives it to another connection meanwhile, a port is left out
                // for nothing.
                maps::$host_connections
                    .get_ptr(key)
                    .map(|connection| unsafe { read_volatile(addr_of!((*connection).last_seen)) })
            }

            #[inline(always)]
            fn note_host_connection(&self, key: &FlowKey<$address>, now: u64) {
                // Fails only without memory, of which the map has its own.
                let _noted =
                    maps::$host_connections.insert(key, &HostConnection { last_seen: now }, BPF_ANY.into());
            }

            #[inline(always)]
            fn forget_host_connection(&self, key: &FlowKey<$address>) {
                let _there_was_none = maps::$host_connections.remove(key);
            }

            #[inline(always)]
            fn is_remapped(&self, port: Port) -> bool {
                // Most ports were never set: then the generation is not looked up.
                maps::remapped_ports.get(u32::from(port.number())).is_some_and(|set_in| {
                    *set_in != 0 && flow::is_remapped(*set_in, generation_of_remapped_ports())
                })
            }

            #[inline(always)]
            fn set_remapped(&self, port: Port) {
                if port == Port::NONE {
                    return;
                }
                let generation = generation_of_remapped_ports();
                if let Some(set_in) = maps::remapped_ports.get_ptr_mut(u32::from(port.number())) {
                    // SAFETY: the pointer is to a map value, aligned to 4. Others write this
                    // generation too, or the one before or after it.
                    unsafe { write_volatile(set_in, generation) };
                }
            }

            #[inline(always)]
            fn is_reserved(&self, port: Port) -> bool {
                settings().is_some_and(|settings| PortRanges(settings.reserved_ports).contain(port))
            }

            #[inline(always)]
            fn first_fragment(
                &self,
                key: &FragmentKey<$address>,
                into: &mut FirstFragment<$address>,
            ) -> bool {
                let Some(first) = maps::$fragments.get_ptr(key) else { return false };
                let (from, to) = (first.cast::<u64>(), addr_of_mut!(*into).cast::<u64>());
                for word in 0..size_of::<FirstFragment<$address>>() / size_of::<u64>() {
                    // SAFETY: an element and a record, both in bounds, aligned to 8 and of whole words. Plain integers: whether they are
                    // of one packet shows in `seen`.
                    unsafe { *to.add(word) = read_volatile(from.add(word)) };
                }
                // SAFETY: as above.
                unsafe { read_volatile(addr_of!((*first).seen)) == into.seen }
            }

            #[inline(always)]
            fn record_fragment(&self, key: &FragmentKey<$address>, first: &FirstFragment<$address>) {
                // Fails only without memory: the other fragments are then passed and counted.
                let _recorded = maps::$fragments.insert(key, first, u64::from(BPF_ANY));
            }

            #[inline(always)]
            fn masquerade_address(&self, interface: u32) -> $address {
                // SAFETY: a map element, copied at once. One that is removed meanwhile becomes no other interface's before the next change.
                let of_interface =
                    unsafe { maps::interfaces.get(interface) }.map(|interface| interface.$masquerade);
                if let Some(address) = of_interface.filter(|address| *address != <$address>::UNSPECIFIED) {
                    return address;
                }
                settings().map_or(Address::UNSPECIFIED, |settings| settings.$masquerade)
            }

            #[inline(always)]
            fn masquerade_port(&self, random: u32, attempt: u32) -> Port {
                masquerade_port(random, attempt)
            }

            #[inline(always)]
            fn run(&self, scratch: &mut Scratch<$address>, routine: Routine) {
                black_box(scratch);
                $call(routine);
            }

            #[inline(always)]
            fn recently(&self, clock: &mut Clock) -> u64 {
                recently(clock)
            }

            #[inline(always)]
            fn epoch(&self) -> u32 {
                settings().map_or(0, |settings| settings.epoch)
            }

            #[inline(always)]
            fn xdp_sends_to(&self, interface: u32) -> bool {
                maps::redirect_targets.get(interface | TO_POD).is_some()
            }

            #[inline(always)]
            fn may_skip_stack(&self) -> bool {
                globals::SKIP_STACK.load() == globals::ON
            }

            #[inline(always)]
            fn xdp_redirects_from(&self, interface: u32) -> bool {
                // SAFETY: not read.
                unsafe { maps::redirect_sources.get(interface) }.is_some()
            }

            #[inline(always)]
            fn route_epoch(&self) -> u32 {
                let Some(epoch) = maps::route_epoch.get_ptr(0) else { return 0 };
                // SAFETY: of a map value, aligned to 8; one load, as the controller may be raising it.
                unsafe { read_volatile(addr_of!((*epoch).number)) }
            }

            #[inline(always)]
            fn resets_gone(&self) -> bool {
                globals::RESETS_GONE.load() == globals::ON
            }

            #[inline(always)]
            fn masquerades_as_kube_proxy(&self) -> bool {
                globals::MASQUERADE_AS_KUBE_PROXY.load() == globals::ON
            }

            #[inline(always)]
            fn masquerades_all(&self) -> bool {
                settings().is_some_and(|settings| settings.masquerade_all != 0)
            }

            #[inline(always)]
            fn holds_packets(&self) -> bool {
                settings().is_some_and(|settings| settings.packets_held != 0)
            }

            #[inline(always)]
            fn holds_openings(&self) -> bool {
                let Some(until) = maps::openings_held_until.get_ptr(0) else { return false };
                // SAFETY: the pointer is to a map value, aligned to 8. It is one load, as the
                // controller may be changing it.
                let until = unsafe { read_volatile(until) };
                until != 0 && now() < until
            }

            #[inline(always)]
            fn answers_unknown(&self) -> bool {
                settings().is_some_and(|settings| settings.answers_unknown != 0)
            }

            #[inline(always)]
            fn may_be_frontend(&self, address: &$address) -> bool {
                let (word, bit) = flow::frontend_address_bit(address);
                let Some(word) = maps::$frontend_addresses.get_ptr(word) else { return false };
                // SAFETY: the pointer is to a map value, aligned to 8. It is one load, as the
                // controller may be changing it.
                unsafe { read_volatile(word) & bit != 0 }
            }

            #[inline(always)]
            fn openings_per_window(&self) -> u32 {
                settings().map_or(0, |settings| settings.openings_per_window)
            }

            #[inline(always)]
            fn most_unproven_entries(&self) -> u32 {
                settings().map_or(0, |settings| settings.most_unproven_entries)
            }

            #[inline(always)]
            fn encapsulation(&self) -> u16 {
                settings().map_or(ENCAPSULATION_IP, |settings| settings.encapsulation)
            }

            #[inline(always)]
            fn count_opening(&self, service: u32, allow: impl FnOnce(&mut ServiceOpenings) -> bool) -> bool {
                let Some(openings) = maps::service_openings.get_ptr_mut(service % OPENING_SERVICES) else {
                    return true;
                };
                // SAFETY: a value of this CPU, in bounds and aligned to 4. Programs of TC run with softirqs off, so nothing else on this CPU
                // uses it meanwhile.
                allow(unsafe { &mut *openings })
            }

            #[inline(always)]
            fn random(&self) -> u32 {
                // SAFETY: no arguments.
                unsafe { bpf_get_prandom_u32() }
            }

            #[inline(always)]
            fn count(&self, reason: Reason) {
                count(reason);
            }

            #[inline(always)]
            fn tell(&self, scratch: &mut Scratch<$address>, reason: Reason) {
                count(reason);
                black_box(scratch);
                <$family>::tell_packet(reason);
            }

            #[inline(always)]
            fn count_connection(&self, service: u32) {
                count_connection(service);
            }

            #[inline(always)]
            fn count_opened(&self, backend: u32, flags: u32) {
                count_flow_opened(backend, flags);
            }

            #[inline(always)]
            fn count_closed(&self, backend: u32, flags: u32) {
                count_flow_closed(backend, flags);
            }
        }
    };
}

flow_maps!(
    V4,
    [u8; 4],
    flows4,
    opening_flows4,
    host_connections4,
    fragments4,
    masquerade4,
    scratch4,
    call4,
    frontend_addresses4
);
flow_maps!(
    V6,
    [u8; 16],
    flows6,
    opening_flows6,
    host_connections6,
    fragments6,
    masquerade6,
    scratch6,
    call6,
    frontend_addresses6
);
