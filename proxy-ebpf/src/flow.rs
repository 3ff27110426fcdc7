//! `FlowTables` over the BPF maps.

use core::ptr::{addr_of, addr_of_mut, read_volatile, write_volatile};

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_boot_ns},
};
use proxy_common::{
    family::{Family, V4, V6},
    flow::{Change, FlowEntry, FlowTables, InsertError, Scratch, Stage},
    layout::*,
    port::{Port, PortRanges},
    reason::Reason,
};

use crate::{
    maps,
    tables::{Maps, count, count_connection, settings},
};

const EEXIST: i32 = -17;

/// An element of a flow table. It stays readable until the program ends, but the kernel may give it to another flow meanwhile: one of an
/// LRU table on every kernel, one of a hash table from 6.1 on.
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
        // this the element may become another flow's: its next packets set the field right, or it is refreshed.
        unsafe {
            match change {
                Change::LastSeen(now) => write_volatile(addr_of_mut!((*entry).last_seen), now),
                Change::Epoch(epoch) => write_volatile(addr_of_mut!((*entry).epoch), epoch),
                Change::Acknowledged(by, number) => {
                    write_volatile(&raw mut by.numbers_of(&mut *entry).acknowledged, number);
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
            }
        }
    }
}

/// Working memory of one family.
pub(crate) trait FlowScratch: Family {
    /// At most once in a program.
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

// Not inlined: the verifier would go through what follows once for each way through this.
#[inline(never)]
fn masquerade_port(random: u32, attempt: u32) -> Port {
    settings().map_or(Port::NONE, |settings| PortRanges(settings.masquerade_ports).choose(random, attempt))
}

macro_rules! flow_tables {
    ($family:ty, $address:ty, $flows:ident, $opening:ident, $fragments:ident, $masquerade:ident, $device:ident, $scratch:ident) => {
        impl FlowScratch for $family {
            #[inline(always)]
            fn scratch() -> Option<&'static mut Scratch<$address>> {
                let scratch = maps::$scratch.get_ptr_mut(0)?;
                // SAFETY: this CPU's own. Programs of TC run with softirqs off and call this once, so nothing
                // else on this CPU uses it meanwhile.
                Some(unsafe { &mut *scratch })
            }
        }

        impl FlowTables<$family> for Maps {
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
                    Stage::Established => maps::$flows.insert(key, flow, u64::from(BPF_NOEXIST)),
                    Stage::Opening => maps::$opening.insert(key, flow, u64::from(BPF_NOEXIST)),
                };
                // An entry that was never looked up is evicted before old ones that were, so also before its flow's
                // answer is there.
                if stage == Stage::Opening && result.is_ok() {
                    let _referenced = maps::$opening.get_ptr(key);
                }
                inserted(result)
            }

            #[inline(always)]
            fn replace(&self, stage: Stage, key: &FlowKey<$address>, flow: &Flow<$address>) {
                // Replacing an element that exists fails only without memory; the old one then stays.
                let _kept = match stage {
                    Stage::Established => maps::$flows.insert(key, flow, u64::from(BPF_ANY)),
                    Stage::Opening => maps::$opening.insert(key, flow, u64::from(BPF_ANY)),
                };
            }

            #[inline(always)]
            fn remove(&self, stage: Stage, key: &FlowKey<$address>) {
                // Fails only if it is gone already.
                let _gone = match stage {
                    Stage::Established => maps::$flows.remove(key),
                    Stage::Opening => maps::$opening.remove(key),
                };
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
                let of_device =
                    unsafe { maps::masquerade_devices.get(interface) }.map(|device| device.$device);
                if let Some(address) = of_device.filter(|address| *address != <$address>::UNSPECIFIED) {
                    return address;
                }
                settings().map_or(Address::UNSPECIFIED, |settings| settings.$masquerade)
            }

            #[inline(always)]
            fn masquerade_port(&self, random: u32, attempt: u32) -> Port {
                masquerade_port(random, attempt)
            }

            #[inline(always)]
            fn epoch(&self) -> u32 {
                settings().map_or(0, |settings| settings.epoch)
            }

            #[inline(always)]
            fn now(&self) -> u64 {
                // SAFETY: no arguments; since 5.8.
                unsafe { bpf_ktime_get_boot_ns() }
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
            fn count_connection(&self, service: u32) {
                count_connection(service);
            }
        }
    };
}

flow_tables!(V4, [u8; 4], flows4, opening_flows4, fragments4, masquerade4, v4, scratch4);
flow_tables!(V6, [u8; 16], flows6, opening_flows6, fragments6, masquerade6, v6, scratch6);
