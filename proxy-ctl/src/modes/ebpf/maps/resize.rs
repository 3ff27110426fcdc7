//! Gives the maps that only the controller writes another size, at a start.
//!
//! The map of the former size is pinned in a folder of its own until all of its entries are in the
//! map of the new size, and the next start begins anew with what was interrupted. Programs that are
//! attached already read the former map until they are replaced, and nothing is written meanwhile.
//!
//! `flow_maps` does this for maps that programs write.

use std::{
    fs,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use aya::Pod;
use proxy_common::{
    inventory::{Limit, map_name},
    layout::*,
};

use super::{
    handles::{Shape, difference, open_pinned, pinned_map, typed},
    paths::{Paths, names, removed},
};
use crate::{
    modes::ebpf::{Error, error::Difference},
    sys::bpf,
};

/// The operations on the entries of a map, whatever their types.
pub(crate) struct Contents {
    /// Returns the least size that a map with these entries can have.
    pub(crate) needed: fn(&'static str, &OwnedFd) -> Result<u32, Error>,
    pub(crate) transfer: Transfer,
}

/// Copies the entries of the first map into the second.
pub(crate) type Transfer = fn(&'static str, &OwnedFd, &OwnedFd) -> Result<(), Error>;

/// Returns the operations on the entries of a map whose size users set. It is `None` for other
/// maps, and for values that each CPU has for itself.
pub(crate) fn contents(name: &str) -> Option<Contents> {
    type A4 = [u8; 4];
    type A6 = [u8; 16];
    macro_rules! of_kind {
        (per_cpu_array, $key:ty, $value:ty, [$limit:ident]) => {
            None
        };
        (lpm_trie, $key:ty, $value:ty, [$limit:ident]) => {
            of_kind!(hash, PrefixKey<$key>, $value, [$limit])
        };
        ($kind:ident, $key:ty, $value:ty, [$limit:ident]) => {
            Some(Contents { needed: needed::<$key, $value>, transfer: copy::<$key, $value> })
        };
        ($kind:ident, $key:ty, $value:ty, $entries:tt) => {
            None
        };
    }
    macro_rules! contents {
        ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => {
            match name {
                $(stringify!($name) => of_kind!($kind, $key, $value, $entries),)+
                _ => None,
            }
        };
    }
    proxy_common::maps!(contents)
}

/// The limits whose maps keep their sizes until another start, because the entries of one of them
/// do not fit into its new size.
#[derive(Debug, Default)]
pub(crate) struct KeptSizes(Vec<Limit>);

impl KeptSizes {
    /// Keeps the sizes of a limit's maps if `needed` entries do not fit into the new size of one.
    pub(crate) fn see(&mut self, new: &Shape, needed: u64) {
        let Shape { name, entries: wanted, limit, .. } = *new;
        if let Some(limit) = limit.filter(|_| needed > u64::from(wanted)) {
            tracing::warn!(
                name,
                needed,
                limit = limit.name(),
                wanted,
                "the map's entries do not fit into the size of the limit; its maps keep their size until a start at which they fit"
            );
            self.0.push(limit);
        }
    }

    pub(crate) fn has(&self, shape: &Shape) -> bool {
        shape.limit.is_some_and(|limit| self.0.contains(&limit))
    }
}

/// A pinned map whose size is not the one that the map will have.
struct OtherSize {
    entries: u32,
    map: OwnedFd,
    contents: Contents,
}

/// Compares the pinned maps with `shapes`, and makes `shapes` what the maps will be. The sizes of
/// flow maps must be adopted already.
///
/// A map of another size is set aside, so that the loader makes a new one. If a map of a limit
/// holds more entries than its new size, all maps of that limit keep theirs. A map that differs in
/// another way is an error, or is removed if it may start empty.
pub(crate) fn set_aside(paths: &Paths, shapes: &mut [Shape]) -> Result<(), Error> {
    remove_larger(paths)?;
    for shape in shapes.iter().filter(|shape| !shape.is_of_flows()) {
        put_back(paths, shape.name)?;
    }
    keep_growth(paths, shapes)?;
    let mut others = Vec::new();
    for shape in shapes {
        if let Some(other) = compare(paths, shape)? {
            others.push((shape, other));
        }
    }
    let mut kept = KeptSizes::default();
    for (shape, other) in &others {
        let needed = needed_by(paths, shape.name, &other.contents, &other.map)?;
        kept.see(shape, needed.into());
    }
    for (shape, other) in others {
        if kept.has(shape) {
            shape.entries = other.entries;
        } else {
            tracing::info!(
                map = shape.name,
                from = other.entries,
                to = shape.entries,
                "the map gets another size"
            );
            rename(&paths.maps().join(shape.name), &paths.before().join(shape.name))?;
        }
    }
    Ok(())
}

/// Raises the sizes in `shapes` for pinned maps that have grown, if their entries would have no
/// room to spare in the first size.
fn keep_growth(paths: &Paths, shapes: &mut [Shape]) -> Result<(), Error> {
    for index in 0..shapes.len() {
        let Some(Shape { name, entries, limit: Some(limit), most, .. }) = shapes.get(index).copied() else {
            continue;
        };
        let failed = |source| Error::Map { name, source };
        let (Some(contents), true) = (contents(name), entries < most) else { continue };
        let Some(found) = open_pinned(&paths.maps().join(name)).map_err(failed)? else { continue };
        let grown = bpf::map_info(found.as_fd()).map_err(failed)?.max_entries;
        if grown <= entries {
            continue;
        }
        let needed = with_room_to_spare(needed_by(paths, name, &contents, &found)?.into());
        // The map is made no larger than it is: the kernel may refuse that, and the pinned one is
        // large enough.
        enlarge(shapes, limit, u32::try_from(needed).unwrap_or(most).min(grown));
    }
    Ok(())
}

/// Returns the size at which `entries` take three quarters of a map. What is desired at the start
/// takes no more of a map, because a rolling update needs more for a while, and growth loads the
/// programs anew.
pub(crate) const fn with_room_to_spare(entries: u64) -> u64 {
    entries + entries / 3
}

/// Doubles the size of the maps of `limit` until it is enough, as far as the limit allows.
pub(crate) fn enlarge(shapes: &mut [Shape], limit: Limit, needed: u32) {
    for shape in shapes.iter_mut().filter(|shape| shape.limit == Some(limit)) {
        while shape.entries < needed.min(shape.most) {
            shape.entries = shape.entries.saturating_mul(2).min(shape.most);
        }
    }
}

/// Returns the size that the map needs for the entries of `map`.
fn needed_by(paths: &Paths, name: &'static str, contents: &Contents, map: &OwnedFd) -> Result<u32, Error> {
    match name {
        map_name::slots4 | map_name::slots6 => needed_slots(paths),
        name => (contents.needed)(name, map),
    }
}

/// Removes the larger maps that a controller was making when it was killed.
pub(crate) fn remove_larger(paths: &Paths) -> Result<(), Error> {
    for name in names(&paths.larger())? {
        let path = paths.larger().join(name);
        removed(&path, fs::remove_file(&path))?;
    }
    Ok(())
}

/// Puts back a map that a killed controller had set aside. No program has seen the map that was
/// made to replace it.
fn put_back(paths: &Paths, name: &'static str) -> Result<(), Error> {
    let before = paths.before().join(name);
    if before.exists() { rename(&before, &paths.maps().join(name)) } else { Ok(()) }
}

fn compare(paths: &Paths, shape: &mut Shape) -> Result<Option<OtherSize>, Error> {
    let path = paths.maps().join(shape.name);
    let failed = |source| Error::Map { name: shape.name, source };
    let Some(map) = open_pinned(&path).map_err(failed)? else { return Ok(None) };
    let found = bpf::map_info(map.as_fd()).map_err(failed)?;
    let Some(difference) = difference(&found, shape) else { return Ok(None) };
    match (difference, contents(shape.name)) {
        (Difference::Entries(..), Some(contents)) => {
            return Ok(Some(OtherSize { entries: found.max_entries, map, contents }));
        }
        _ if shape.expendable => {
            tracing::warn!(map = shape.name, %difference, "the pinned map is replaced by an empty one");
            removed(&path, fs::remove_file(&path))?;
        }
        _ => return Err(Error::Shape { name: shape.name, path, difference }),
    }
    Ok(None)
}

pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(|source| Error::Folder { path: from.to_owned(), source })
}

/// Gives the maps that a former version has pinned under other names the names of today. If both
/// names exist, the former version was started once more after this one, and its map is in use.
pub(crate) fn follow_names(paths: &Paths) -> Result<(), Error> {
    for folder in [paths.maps(), paths.before()] {
        for (former, name) in map_name::RENAMED {
            let (former, name) = (folder.join(former), folder.join(name));
            if former.exists() {
                rename(&former, &name)?;
            }
        }
    }
    Ok(())
}

/// Copies the maps that were set aside into the ones made instead of them.
pub(crate) fn transfer(paths: &Paths, shapes: &[Shape]) -> Result<(), Error> {
    for Shape { name, .. } in shapes.iter().filter(|shape| !shape.is_of_flows()) {
        let (Some(contents), path) = (contents(name), paths.before().join(name)) else { continue };
        let found = open_pinned(&path).map_err(|source| Error::Map { name, source })?;
        if let Some(before) = found {
            (contents.transfer)(name, &before, &pinned_map(&paths.maps(), name)?)?;
            removed(&path, fs::remove_file(&path))?;
        }
    }
    Ok(())
}

fn needed<K: Pod + Default, V: Pod + Default + PartialEq>(
    name: &'static str,
    fd: &OwnedFd,
) -> Result<u32, Error> {
    let map = typed::<K, V>(fd, name)?;
    if map.evicts() {
        return Ok(0);
    }
    let (mut index, mut needed) = (0, 0);
    map.walk(|slice| {
        for (_, value) in slice {
            index += 1;
            if !map.is_array() || *value != V::default() {
                needed = index;
            }
        }
        Ok(true)
    })
    .map_err(|source| Error::Map { name, source })?;
    Ok(needed)
}

/// Returns the least size that holds all slots in use. Free slots keep their last content, so the
/// services say which are in use.
fn needed_slots(paths: &Paths) -> Result<u32, Error> {
    let services =
        typed::<u32, Service>(&pinned_map(&paths.maps(), map_name::services)?, map_name::services)?;
    let mut needed = 0;
    services
        .walk(|slice| {
            for (_, service) in slice {
                needed = needed.max(end_of_slots([service.cluster, service.internal, service.external]));
            }
            Ok(true)
        })
        .map_err(|source| Error::Map { name: map_name::services, source })?;
    Ok(u32::try_from(needed).unwrap_or(u32::MAX))
}

/// Returns the first index behind these sets and their lookup tables.
pub(crate) fn end_of_slots(sets: [EndpointSet; 3]) -> u64 {
    let used = sets.iter().filter(|set| set.count() > 0);
    used.map(|set| u64::from(set.first) + u64::from(set.slot_count())).max().unwrap_or(0)
}

/// Copies a map that nobody writes meanwhile.
///
/// It also copies `connections`, which programs write. What they count until they are swapped is
/// lost, but all connections are counted again anyway. Flow maps are copied once more later.
fn copy<K: Pod + Default, V: Pod + Default + PartialEq>(
    name: &'static str,
    from: &OwnedFd,
    to: &OwnedFd,
) -> Result<(), Error> {
    let (from, to) = (typed::<K, V>(from, name)?, typed::<K, V>(to, name)?);
    let mut index = 0;
    let mut is_there = |(_, value): &&(K, V)| {
        index += 1;
        !from.is_array() || (*value != V::default() && index <= to.capacity())
    };
    from.walk(|slice| {
        let (keys, values): (Vec<K>, Vec<V>) = slice.iter().filter(&mut is_there).copied().unzip();
        to.set_all(&keys, &values).map_err(|(_, source)| source)?;
        Ok(true)
    })
    .map_err(|source| Error::Map { name, source })?;
    Ok(())
}
