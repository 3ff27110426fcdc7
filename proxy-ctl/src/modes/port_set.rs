//! A set of service ports that is searched by name. Each port costs one pointer here, because it
//! holds its name itself. A node may have 50,000 ports.

use std::{
    hash::{BuildHasher as _, Hash},
    sync::Arc,
};

use hashbrown::{HashTable, hash_table::Entry};
use rustc_hash::FxBuildHasher;

use crate::model::desired::{DesiredPort, ServicePortName};

#[derive(Clone, Debug, Default)]
pub(super) struct PortSet(HashTable<Arc<DesiredPort>>);

impl PortSet {
    /// Inserts a port. Returns the port that had its name before.
    pub(super) fn insert(&mut self, port: Arc<DesiredPort>) -> Option<Arc<DesiredPort>> {
        match self.0.entry(hash(&port.name), |one| one.name == port.name, |one| hash(&one.name)) {
            Entry::Occupied(mut found) => Some(std::mem::replace(found.get_mut(), port)),
            Entry::Vacant(vacant) => {
                vacant.insert(port);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, name: &ServicePortName) -> Option<Arc<DesiredPort>> {
        let found = self.0.find_entry(hash(name), |one| one.name == *name).ok()?;
        Some(found.remove().0)
    }

    pub(super) fn get(&self, name: &ServicePortName) -> Option<&Arc<DesiredPort>> {
        self.0.find(hash(name), |one| one.name == *name)
    }

    /// Returns all ports, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<DesiredPort>> {
        self.0.iter()
    }
}

impl FromIterator<Arc<DesiredPort>> for PortSet {
    fn from_iter<T: IntoIterator<Item = Arc<DesiredPort>>>(ports: T) -> Self {
        let mut set = Self::default();
        for port in ports {
            set.insert(port);
        }
        set
    }
}

fn hash(name: &impl Hash) -> u64 {
    FxBuildHasher.hash_one(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Model,
        test_support::{port, service},
    };

    #[test]
    fn a_port_replaces_the_one_with_its_name() {
        let mut model = Model::new("node");
        model.apply_service(service("default/web", &["10.96.0.1"]).ports(vec![port("a", 80), port("b", 81)]));
        let first = model.take_changes().changed;
        let mut set: PortSet = first.iter().cloned().collect();
        model.apply_service(service("default/web", &["10.96.0.2"]).ports(vec![port("a", 80), port("b", 81)]));
        let second = model.take_changes().changed;
        for one in &second {
            assert!(set.insert(Arc::clone(one)).is_some_and(|before| first.contains(&before)));
            assert_eq!(set.get(&one.name), Some(one));
        }
        assert_eq!(set.iter().count(), 2);
        assert_eq!(set.remove(&second[0].name), Some(Arc::clone(&second[0])));
        assert_eq!((set.remove(&second[0].name), set.get(&second[0].name)), (None, None));
    }
}
