//! Gives the maps of flows another size after a start.
//!
//! Programs write these maps at any time, so they are copied twice:
//!
//! 1. Programs are loaded anew, with maps of the new size in the folder `larger`.
//! 2. No flow of TCP opens for a moment. What is in the maps is copied.
//! 3. The former maps are pinned in the folder `before`, and the new ones take over their pins.
//! 4. All programs are swapped, and flows open again.
//! 5. What the former programs have changed since the first copy is copied, and the former maps are
//!    unpinned. Until then, no segment of an unknown connection is answered, and no flow expires.
//!
//! If flows opened during the first copy, some would be missing in it. Their answers would pass
//! untranslated to clients, and a client's RST would end the connection at its backend.
//!
//! A successor removes what a killed controller has left in `larger`. If it finds a former map in
//! `before`, some programs may use that map and others the new one. So it copies before it swaps
//! all programs, and once more after that.

mod follow;

use std::{collections::BTreeMap, fs, os::fd::AsFd as _, time::Duration};

use aya::Pod;
use proxy_common::{
    family::{V4, V6},
    flow::{
        Stage,
        collect::Entry,
        copy::{Copied, copied},
    },
    inventory::map_name,
    layout::{Flow, FlowKey, HostConnection},
};

use super::{
    Error,
    maps::{
        family::MapFamily,
        handles::{Shape, open_pinned, pinned_map, typed},
        paths::{Paths, removed},
        resize::{KeptSizes, contents, remove_larger, rename, with_room_to_spare},
    },
};
use crate::sys::{
    CallError,
    bpf::{self, map::Map},
};

/// The time after which flows open again in any case. A copy of a million flows takes a second.
const HELD_FOR: Duration = Duration::from_secs(5);

/// The changes to the sizes of flow maps that are still to be made.
#[derive(Debug, Default)]
pub(super) struct FlowMapResize {
    /// The sizes that the configuration asks for, by the names of maps that have another size. It
    /// is empty once they were tried.
    wanted: BTreeMap<&'static str, u32>,
    /// The maps whose former map may have entries that they lack, in the order of their copies.
    unfinished: Vec<&'static str>,
}

impl FlowMapResize {
    /// Adopts the pinned maps with the sizes that they have, and writes these into `shapes`.
    pub(super) fn adopt(paths: &Paths, shapes: &mut [Shape]) -> Result<Self, Error> {
        for name in map_name::FORMER {
            let path = paths.maps().join(name);
            removed(&path, fs::remove_file(&path))?;
        }
        let mut adopted = Self::default();
        for name in map_name::OF_FLOWS {
            let Some(shape) = shapes.iter_mut().find(|shape| shape.name == name) else { continue };
            let failed = |source| Error::Map { name: shape.name, source };
            if has_former(paths, shape.name)? {
                adopted.unfinished.push(shape.name);
            }
            let Some(found) = open_pinned(&paths.maps().join(shape.name)).map_err(failed)? else { continue };
            let entries = bpf::map_info(found.as_fd()).map_err(failed)?.max_entries;
            if entries != shape.entries {
                adopted.wanted.insert(shape.name, shape.entries);
                *shape = shape.with_entries(entries);
            }
        }
        Ok(adopted)
    }

    pub(super) fn is_change_wanted(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Returns true if no former map has entries that are missing in the map in use.
    pub(super) fn are_finished(&self) -> bool {
        self.unfinished.is_empty()
    }

    /// Returns `shapes` with the sizes that are wanted. If a map of a limit holds more entries than
    /// have room to spare in its new size, all maps of that limit keep theirs until another start.
    pub(super) fn take_wanted(&mut self, paths: &Paths, shapes: &[Shape]) -> Result<Vec<Shape>, Error> {
        let wanted = std::mem::take(&mut self.wanted);
        let resized = |shape: &Shape| Some(shape.with_entries(*wanted.get(shape.name)?));
        let mut kept = KeptSizes::default();
        for new in shapes.iter().filter_map(resized) {
            let Some(contents) = contents(new.name) else { continue };
            let needed = (contents.needed)(new.name, &pinned_map(&paths.maps(), new.name)?)?;
            kept.see(&new, with_room_to_spare(needed.into()));
        }
        let new = |shape: &Shape| resized(shape).filter(|new| !kept.has(new)).unwrap_or(*shape);
        Ok(shapes.iter().map(new).collect())
    }

    /// Copies everything into the maps in `larger`.
    pub(super) fn copy_to_larger(paths: &Paths, former: &[Shape], new: &[Shape]) -> Result<(), Error> {
        for Shape { name, .. } in resized(former, new) {
            let Some(contents) = contents(name) else { continue };
            let (from, to) = (pinned_map(&paths.maps(), name)?, pinned_map(&paths.larger(), name)?);
            (contents.transfer)(name, &from, &to)?;
        }
        Ok(())
    }

    /// Makes the maps in `larger` the ones in use. The former maps are pinned in `before` until
    /// [`finish`](Self::finish).
    pub(super) fn replace(&mut self, paths: &Paths, former: &[Shape], new: &[Shape]) -> Result<(), Error> {
        for Shape { name, entries, .. } in resized(former, new) {
            let before = paths.before().join(name);
            bpf::pin(pinned_map(&paths.maps(), name)?.as_fd(), &before)
                .map_err(|source| Error::Map { name, source })?;
            self.unfinished.push(name);
            rename(&paths.larger().join(name), &paths.maps().join(name))?;
            tracing::info!(map = name, entries, "the map has got another size");
        }
        Ok(())
    }

    /// Forgets maps that did not replace the former ones, whose pins are restored already.
    pub(super) fn give_up(&mut self, paths: &Paths) -> Result<(), Error> {
        for name in self.unfinished.drain(..) {
            unpin_former(paths, name)?;
        }
        remove_larger(paths)
    }

    /// Copies entries that are in a former map alone, or that have changed there.
    pub(super) fn copy(&self, paths: &Paths) -> Result<(), Error> {
        self.unfinished.iter().try_for_each(|name| copy_map(paths, name))
    }

    /// Copies what is left in the former maps, which no program uses any more, and unpins them.
    pub(super) fn finish(&mut self, paths: &Paths) -> Result<(), Error> {
        self.copy(paths)?;
        while let Some(name) = self.unfinished.last() {
            unpin_former(paths, name)?;
            self.unfinished.pop();
        }
        Ok(())
    }
}

/// Returns the maps that get another size, in the order of their copies. The maps of opening flows
/// come first: a flow that is established meanwhile goes from them to the other maps, and would be
/// in neither copy if the other maps had been copied already.
fn resized<'a>(former: &'a [Shape], new: &'a [Shape]) -> impl Iterator<Item = &'a Shape> {
    let of_name = |name: &&'static str| new.iter().find(|shape| shape.name == *name);
    map_name::OF_FLOWS.iter().filter_map(of_name).filter(|shape| !former.contains(shape))
}

/// Returns true if a map of another size was to replace this one, and entries may be
/// missing. A killed controller may also have left a second pin of the map in use.
fn has_former(paths: &Paths, name: &'static str) -> Result<bool, Error> {
    let failed = |source| Error::Map { name, source };
    let (map, before) = (paths.maps().join(name), paths.before().join(name));
    let Some(former) = open_pinned(&before).map_err(failed)? else { return Ok(false) };
    let id = |map: &std::os::fd::OwnedFd| bpf::map_info(map.as_fd()).map(|info| info.id).map_err(failed);
    match open_pinned(&map).map_err(failed)? {
        None => rename(&before, &map)?,
        Some(in_use) if id(&in_use)? == id(&former)? => unpin_former(paths, name)?,
        Some(_) => return Ok(true),
    }
    Ok(false)
}

fn unpin_former(paths: &Paths, name: &str) -> Result<(), Error> {
    let path = paths.before().join(name);
    removed(&path, fs::remove_file(&path)).map(drop)
}

fn copy_map(paths: &Paths, name: &'static str) -> Result<(), Error> {
    match name {
        map_name::flows4 => copy_flows::<V4>(paths, Stage::Established),
        map_name::flows6 => copy_flows::<V6>(paths, Stage::Established),
        map_name::opening_flows4 => copy_flows::<V4>(paths, Stage::Opening),
        map_name::opening_flows6 => copy_flows::<V6>(paths, Stage::Opening),
        map_name::host_connections4 => copy_host_connections::<[u8; 4]>(paths, name),
        _ => copy_host_connections::<[u8; 16]>(paths, name),
    }
}

fn copy_flows<F: MapFamily>(paths: &Paths, stage: Stage) -> Result<(), Error>
where
    FlowKey<F::Address>: Pod + Default,
    Flow<F::Address>: Pod + Default,
{
    type Flows<A> = Map<FlowKey<A>, Flow<A>>;
    let new = |name| -> Result<Flows<F::Address>, Error> { typed(&pinned_map(&paths.maps(), name)?, name) };
    let (established, opening) = (new(F::FLOWS)?, new(F::OPENING_FLOWS)?);
    let new = |stage| match stage {
        Stage::Established => &established,
        Stage::Opening => &opening,
    };
    let name = match stage {
        Stage::Established => F::FLOWS,
        Stage::Opening => F::OPENING_FLOWS,
    };
    copy_entries(paths, name, |key, flow| {
        let met = Entry { stage, key: *key, flow: *flow };
        match copied(&met, |stage, key| new(stage).get(key))? {
            Copied::Inserted => new(stage).insert(key, flow).map(drop),
            Copied::Joined(flow) => new(stage).replace(key, &flow).map(drop),
            Copied::Ended(flow) => established.replace(key, &flow).map(drop),
            Copied::Left => Ok(()),
        }
    })
}

/// The later time counts, whichever program has written it.
fn copy_host_connections<A>(paths: &Paths, name: &'static str) -> Result<(), Error>
where
    FlowKey<A>: Pod + Default,
{
    let new: Map<FlowKey<A>, HostConnection> = typed(&pinned_map(&paths.maps(), name)?, name)?;
    copy_entries(paths, name, |key, former: &HostConnection| match new.get(key)? {
        Some(found) if found.last_seen >= former.last_seen => Ok(()),
        Some(_) | None => new.set(key, former),
    })
}

/// Calls `copy` with each entry of the former map.
fn copy_entries<K: Pod + Default, V: Pod + Default>(
    paths: &Paths,
    name: &'static str,
    copy: impl Fn(&K, &V) -> Result<(), CallError>,
) -> Result<(), Error> {
    let former: Map<K, V> = typed(&pinned_map(&paths.before(), name)?, name)?;
    let mut left_out = 0_u64;
    former
        .walk(|slice| {
            for (key, value) in slice {
                match copy(key, value) {
                    Ok(()) => {}
                    Err(error) if matches!(error.errno(), libc::E2BIG | libc::ENOMEM) => left_out += 1,
                    Err(error) => return Err(error),
                }
            }
            Ok(true)
        })
        .map_err(|source| Error::Map { name, source })?;
    if left_out > 0 {
        tracing::warn!(
            map = name,
            left_out,
            "the map has no room for all entries of the former one, so some connections are forgotten"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::ebpf::maps::handles::shapes;

    #[test]
    fn opening_flows_are_copied_before_established_ones() {
        let former = shapes(&Default::default());
        let new = former.iter().map(|shape| shape.with_entries(shape.entries * 2)).collect::<Vec<_>>();
        let names = resized(&former, &new).map(|shape| shape.name).collect::<Vec<_>>();
        assert_eq!(names.len(), map_name::OF_FLOWS.len());
        let position = |name| names.iter().position(|one| *one == name);
        assert!(position(map_name::opening_flows4) < position(map_name::flows4), "{names:?}");
        assert!(position(map_name::opening_flows6) < position(map_name::flows6), "{names:?}");
    }
}
