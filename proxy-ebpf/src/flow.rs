//! `FlowTables` over the BPF maps.

use core::ptr::{addr_of, addr_of_mut, read_volatile, write_volatile};

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_boot_ns},
};
use proxy_common::{
    family::{Family, V4, V6},
    flow::{FlowEntry, FlowTables, InsertError, Masquerade, Scratch, Stage},
    layout::*,
    port::PortRanges,
    reason::Reason,
};

use crate::{
    maps,
    tables::{Maps, count, count_connection, settings},
};

const EEXIST: i32 = -17;

/// An element of a flow table. It stays readable until the program ends, also when it is removed meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Entry<A>(*mut Flow<A>);

impl<A: Address> FlowEntry<A> for Entry<A> {
    #[inline(always)]
    fn read(&self) -> Flow<A> {
        // SAFETY: a map element, in bounds. Only `last_seen` and `flags` ever change in place.
        unsafe { *self.0 }
    }

    #[inline(always)]
    fn flags(&self) -> u32 {
        // SAFETY: as above.
        unsafe { read_volatile(addr_of!((*self.0).flags)) }
    }

    #[inline(always)]
    fn last_seen(&self) -> u64 {
        // SAFETY: as above.
        unsafe { read_volatile(addr_of!((*self.0).last_seen)) }
    }

    #[inline(always)]
    fn set_last_seen(&self, now: u64) {
        // SAFETY: as above, aligned to 8.
        unsafe { write_volatile(addr_of_mut!((*self.0).last_seen), now) };
    }

    #[inline(always)]
    fn add_flags(&self, flags: u32) {
        // An atomic OR needs 5.12.
        // SAFETY: as above.
        unsafe { write_volatile(addr_of_mut!((*self.0).flags), self.flags() | flags) };
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

macro_rules! flow_tables {
    ($family:ty, $address:ty, $flows:ident, $opening:ident, $masquerade:ident, $scratch:ident) => {
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
            fn masquerade(&self) -> Masquerade<$address> {
                match settings() {
                    Some(settings) => Masquerade {
                        address: settings.$masquerade,
                        ports: PortRanges(settings.masquerade_ports),
                    },
                    None => Masquerade { address: Address::UNSPECIFIED, ports: PortRanges::EMPTY },
                }
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

flow_tables!(V4, [u8; 4], flows4, opening_flows4, masquerade4, scratch4);
flow_tables!(V6, [u8; 16], flows6, opening_flows6, masquerade6, scratch6);
