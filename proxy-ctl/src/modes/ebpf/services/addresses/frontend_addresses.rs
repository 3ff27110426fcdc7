//! Maintains the bits of `frontend_addresses4/6`. By one of these bits the programs see that no
//! frontend has an address, so that packets of no Service cost nothing more.
//!
//! Several frontends may share a bit, so the frontends of each bit are counted. If a bit cannot be
//! written, segments of unknown connections go on untouched, or packets of no Service take the slow
//! path.

use proxy_common::{
    flow::frontend_address_bit,
    layout::{Frontend, FrontendKey},
};
use rustc_hash::FxHashMap;

use crate::modes::ebpf::{
    maps::{family::MapFamily, handles::FamilyMaps},
    services::writer::FamilyWriter,
};

/// A word of the map, and the bit in it.
type BitPosition = (u32, u64);

/// The number of frontends that share each bit.
#[derive(Debug, Default)]
pub(crate) struct AddressBits(FxHashMap<BitPosition, u32>);

impl AddressBits {
    /// Returns the bits of these frontends. Node ports and cluster-IP entries do not count.
    pub(crate) fn of<'a, F: MapFamily>(keys: impl Iterator<Item = &'a FrontendKey<F::Address>>) -> Self {
        let mut bits = Self::default();
        for key in keys.filter(|key| key.is_of_address()) {
            *bits.0.entry(frontend_address_bit(&key.address)).or_default() += 1;
        }
        bits
    }

    /// Makes the map have these bits and no others.
    pub(crate) fn write_all<F: MapFamily>(&self, maps: &FamilyMaps<F>) {
        let mut words: FxHashMap<u32, u64> = FxHashMap::default();
        for (word, bit) in self.0.keys() {
            *words.entry(*word).or_default() |= bit;
        }
        for index in 0..maps.frontend_addresses.len() {
            let wanted = words.get(&(index as u32)).copied().unwrap_or(0);
            if maps.frontend_addresses.get(index) != Some(wanted) {
                let _written = maps.frontend_addresses.set(index, &wanted);
            }
        }
    }

    fn add<F: MapFamily>(&mut self, maps: &FamilyMaps<F>, address: &F::Address) {
        let position @ (word, bit) = frontend_address_bit(address);
        let users = self.0.entry(position).or_default();
        *users += 1;
        if *users == 1 {
            change(maps, word, |bits| bits | bit);
        }
    }

    fn remove<F: MapFamily>(&mut self, maps: &FamilyMaps<F>, address: &F::Address) {
        let position @ (word, bit) = frontend_address_bit(address);
        let Some(users) = self.0.get_mut(&position) else { return };
        *users -= 1;
        if *users == 0 {
            self.0.remove(&position);
            change(maps, word, |bits| bits & !bit);
        }
    }
}

fn change<F: MapFamily>(maps: &FamilyMaps<F>, word: u32, change: impl FnOnce(u64) -> u64) {
    let index = word as usize;
    if let Some(bits) = maps.frontend_addresses.get(index) {
        let _written = maps.frontend_addresses.set(index, &change(bits));
    }
}

impl<F: MapFamily> FamilyMaps<F> {
    /// Returns false if no frontend has the address, and true if one may have it.
    pub(crate) fn may_be_frontend(&self, address: &F::Address) -> bool {
        let (word, bit) = frontend_address_bit(address);
        self.frontend_addresses.get(word as usize).is_some_and(|bits| bits & bit != 0)
    }
}

impl<F: MapFamily> FamilyWriter<F> {
    /// Notes a frontend that is written, and returns the one that the key had before.
    pub(crate) fn note_frontend(
        &mut self,
        key: FrontendKey<F::Address>,
        frontend: Frontend,
    ) -> Option<Frontend> {
        let before = self.entries.frontends.insert(key, frontend);
        if before.is_none() && key.is_of_address() {
            self.entries.address_bits.add(&self.maps, &key.address);
        }
        before
    }

    /// Forgets a frontend that is removed.
    pub(crate) fn forget_frontend(&mut self, key: &FrontendKey<F::Address>) {
        if self.entries.frontends.remove(key).is_some() && key.is_of_address() {
            self.entries.address_bits.remove(&self.maps, &key.address);
        }
    }
}
