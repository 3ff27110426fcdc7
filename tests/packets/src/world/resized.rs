//! Maps of flows that are being resized.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, Result, ensure};
use aya::{Ebpf, Pod};
use proxy_common::layout::MAP_BEFORE;
use proxy_ctl::sys::map::Map as Table;

use super::{
    World,
    tables::{flow_map, open},
};

/// Map of flows that is being resized. Before each run, all entries are put back into the old map,
/// so the programs find none in the new one.
pub(super) trait Moving: Send + Sync {
    fn set_back(&self) -> Result<()>;
    fn bring(&self) -> Result<()>;
}

pub(super) struct Resized<K, V> {
    in_use: Table<K, V>,
    before: Table<K, V>,
}

impl<K: Pod + Default, V: Pod + Default> Resized<K, V> {
    pub(super) fn begin(world: &World, before: &Ebpf, table: &str) -> Result<Box<dyn Moving>> {
        let (in_use, before) = (flow_map(&world.ebpf, table)?, flow_map(before, table)?);
        let maps = world.flow_maps.get(table).with_context(|| format!("no maps of {table}"))?;
        maps.put_map(MAP_BEFORE, before.fd().as_fd())?;
        Ok(Box::new(Self { in_use: open(in_use)?, before: open(before)? }))
    }
}

impl<K: Pod + Default, V: Pod + Default> Moving for Resized<K, V> {
    fn set_back(&self) -> Result<()> {
        for (key, value) in self.in_use.read_all()? {
            self.in_use.remove(&key)?;
            self.before.set(&key, &value)?;
        }
        Ok(())
    }

    fn bring(&self) -> Result<()> {
        for (key, value) in self.before.read_all()? {
            self.before.remove(&key)?;
            ensure!(self.in_use.insert(&key, &value)?, "an entry of the map before was inserted again");
        }
        Ok(())
    }
}
