//! The backends that are programmed, by their keys.
//!
//! Backends are in a vector, and a hash table has their indexes. A `HashMap`, which keeps them in
//! its own table, is half empty when it has grown, and there may be 250,000 backends of 40 bytes.

use std::hash::{BuildHasher as _, Hash};

use hashbrown::{HashTable, hash_table::Entry};
use rustc_hash::FxBuildHasher;

use super::programmed::{BackendKey, Uses};

type Element<A> = (BackendKey<A>, Uses);

#[derive(Debug)]
pub(crate) struct Backends<A> {
    elements: Vec<Element<A>>,
    indexes: HashTable<u32>,
}

impl<A> Default for Backends<A> {
    fn default() -> Self {
        Self { elements: Vec::new(), indexes: HashTable::new() }
    }
}

impl<A: Copy + Eq + Hash> Backends<A> {
    pub(crate) fn len(&self) -> usize {
        self.elements.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&BackendKey<A>, &Uses)> {
        self.elements.iter().map(|(key, uses)| (key, uses))
    }

    /// Removes all backends, and keeps their memory for others.
    pub(crate) fn clear(&mut self) {
        self.elements.clear();
        self.indexes.clear();
    }

    pub(crate) fn contains_key(&self, key: &BackendKey<A>) -> bool {
        self.get(key).is_some()
    }

    pub(crate) fn get(&self, key: &BackendKey<A>) -> Option<&Uses> {
        let index = self.indexes.find(hash(key), is_of(&self.elements, key))?;
        self.elements.get(*index as usize).map(|(_, uses)| uses)
    }

    pub(crate) fn get_mut(&mut self, key: &BackendKey<A>) -> Option<&mut Uses> {
        let index = *self.indexes.find(hash(key), is_of(&self.elements, key))?;
        self.elements.get_mut(index as usize).map(|(_, uses)| uses)
    }

    /// Inserts a backend, or replaces the one that the key has.
    pub(crate) fn insert(&mut self, key: BackendKey<A>, uses: Uses) {
        let elements = &self.elements;
        let hash_of = |index: &u32| elements.get(*index as usize).map_or(0, |(key, _)| hash(key));
        match self.indexes.entry(hash(&key), is_of(elements, &key), hash_of) {
            Entry::Occupied(index) => {
                if let Some(element) = self.elements.get_mut(*index.get() as usize) {
                    element.1 = uses;
                }
            }
            Entry::Vacant(vacant) => {
                vacant.insert(elements.len() as u32);
                self.elements.push((key, uses));
            }
        }
    }

    pub(crate) fn remove(&mut self, key: &BackendKey<A>) {
        let Ok(found) = self.indexes.find_entry(hash(key), is_of(&self.elements, key)) else { return };
        let (index, _) = found.remove();
        self.elements.swap_remove(index as usize);
        let Some((moved, _)) = self.elements.get(index as usize) else { return };
        let former = self.elements.len() as u32;
        if let Some(moved) = self.indexes.find_mut(hash(moved), |at| *at == former) {
            *moved = index;
        }
    }
}

fn hash<A: Hash>(key: &BackendKey<A>) -> u64 {
    FxBuildHasher.hash_one(key)
}

fn is_of<A: Eq>(elements: &[Element<A>], key: &BackendKey<A>) -> impl Fn(&u32) -> bool {
    move |index| elements.get(*index as usize).is_some_and(|(at, _)| at == key)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use proxy_common::port::Port;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u8, u32),
        Change(u8, u32),
        Remove(u8),
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            30 => (0..100_u8, any::<u32>()).prop_map(|(key, id)| Step::Insert(key, id)),
            10 => (0..100_u8, any::<u32>()).prop_map(|(key, id)| Step::Change(key, id)),
            20 => (0..100_u8).prop_map(Step::Remove),
            1 => Just(Step::Clear),
        ]
    }

    fn key(number: u8) -> BackendKey<[u8; 4]> {
        BackendKey { address: [10, 0, 0, number], port: Port::new(80), protocol: 6, owner: 0 }
    }

    proptest! {
        #[test]
        fn they_are_found_as_in_a_map(steps in prop::collection::vec(step(), 1..400)) {
            let (mut backends, mut expected) = (Backends::default(), HashMap::new());
            for step in steps {
                match step {
                    Step::Insert(number, id) => {
                        let mut uses = Uses::default();
                        uses.id = id;
                        backends.insert(key(number), uses);
                        expected.insert(key(number), uses);
                    }
                    Step::Change(number, id) => {
                        let found = backends.get_mut(&key(number)).map(|uses| uses.id = id);
                        prop_assert_eq!(found, expected.get_mut(&key(number)).map(|uses| uses.id = id));
                    }
                    Step::Remove(number) => {
                        backends.remove(&key(number));
                        expected.remove(&key(number));
                    }
                    Step::Clear => {
                        backends.clear();
                        expected.clear();
                    }
                }
                prop_assert_eq!(backends.len(), expected.len());
                for number in 0..100 {
                    prop_assert_eq!(backends.get(&key(number)), expected.get(&key(number)));
                    prop_assert_eq!(backends.contains_key(&key(number)), expected.contains_key(&key(number)));
                }
                let all: HashMap<_, _> = backends.iter().map(|(key, uses)| (*key, *uses)).collect();
                prop_assert_eq!(&all, &expected);
            }
        }
    }
}
