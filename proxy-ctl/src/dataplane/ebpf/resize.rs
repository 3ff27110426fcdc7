//! Gives maps another size while they serve.
//!
//! The map of the former size is pinned in a folder of its own until all of its entries are in the
//! map of the new size. Maps that only the controller writes are copied before the programs that
//! read the copy are attached. Programs that are attached already read the former map until then,
//! and nothing is written meanwhile.
//!
//! Flow maps are written by programs all the time, so these find both maps, see [`MAP_BEFORE`]. The
//! next start continues what was interrupted.

use std::{
    fs,
    os::fd::{AsFd as _, OwnedFd},
    panic::resume_unwind,
    path::Path,
    thread,
};

use aya::Pod;
use proxy_common::{
    inventory::{Limit, table},
    layout::*,
};

use super::{
    Error,
    error::Difference,
    growth::with_room_to_spare,
    layout,
    paths::{Paths, names, removed},
    tables::{Shape, difference, open_pinned, pinned_table, typed},
};
use crate::sys::{CallError, bpf, map::Map};

/// The operations on the entries of a map, whatever their types.
pub(super) struct Contents {
    /// Returns the least size that a map with these entries can have.
    needed: fn(&'static str, &OwnedFd) -> Result<u32, Error>,
    pub(super) transfer: Transfer,
}

/// Moves or copies the entries of the first map into the second. Returns false if there is no room
/// for all of them.
pub(super) type Transfer = fn(&'static str, &OwnedFd, &OwnedFd) -> Result<bool, Error>;

/// Returns the operations on the entries of a map whose size users set. It is `None` for other
/// maps, and for values that each CPU has for itself.
pub(super) fn contents(table: &str) -> Option<Contents> {
    type A4 = [u8; 4];
    type A6 = [u8; 16];
    macro_rules! of_table {
        (per_cpu_array, $key:ty, $value:ty, [$limit:ident]) => {
            None
        };
        (lpm_trie, $key:ty, $value:ty, [$limit:ident]) => {
            of_table!(hash, PrefixKey<$key>, $value, [$limit])
        };
        ($kind:ident, $key:ty, $value:ty, [$limit:ident]) => {{
            let transfer: Transfer =
                if maps_of(table).is_some() { move_live::<$key, $value> } else { copy::<$key, $value> };
            Some(Contents { needed: needed::<$key, $value>, transfer })
        }};
        ($kind:ident, $key:ty, $value:ty, $entries:tt) => {
            None
        };
    }
    macro_rules! contents {
        ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => {
            match table {
                $(stringify!($name) => of_table!($kind, $key, $value, $entries),)+
                _ => None,
            }
        };
    }
    proxy_common::tables!(contents)
}

/// Returns the array in which programs find a flow map.
fn maps_of(table: &str) -> Option<&'static str> {
    table::RESIZABLE.iter().find(|(name, _)| *name == table).map(|(_, maps)| *maps)
}

/// A pinned map whose size is not the one that the map will have.
struct OtherSize {
    entries: u32,
    map: OwnedFd,
    contents: Contents,
}

/// Compares the pinned maps with `shapes`, and makes `shapes` what the maps will be.
///
/// A map of another size is set aside, so that the loader makes a new one. If a map of a limit
/// holds more entries than its new size, all maps of that limit keep theirs. A map that differs in
/// another way is an error, or is removed if it may start empty.
pub(super) fn set_aside(paths: &Paths, shapes: &mut [Shape]) -> Result<(), Error> {
    remove_larger(paths)?;
    for shape in shapes.iter() {
        put_back(paths, shape.name)?;
    }
    keep_growth(paths, shapes)?;
    let mut others = Vec::new();
    for shape in shapes {
        if let Some(other) = compare(paths, shape)? {
            others.push((shape, other));
        }
    }
    let mut kept: Vec<Limit> = Vec::new();
    for (shape, other) in &others {
        let needed = needed_by(paths, shape.name, &other.contents, &other.map)?;
        if needed > shape.entries
            && let Some(limit) = shape.limit
        {
            tracing::warn!(
                table = shape.name,
                needed,
                limit = limit.name(),
                wanted = shape.entries,
                "the map's entries do not fit into the size of the limit; its maps keep their size until a start at which they fit"
            );
            kept.push(limit);
        }
    }
    for (shape, other) in others {
        if shape.limit.is_some_and(|limit| kept.contains(&limit)) {
            shape.entries = other.entries;
        } else {
            tracing::info!(
                table = shape.name,
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
        let failed = |source| Error::Table { table: name, source };
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

/// Doubles the size of the maps of `limit` until it is enough, as far as the limit allows.
pub(super) fn enlarge(shapes: &mut [Shape], limit: Limit, needed: u32) {
    for shape in shapes.iter_mut().filter(|shape| shape.limit == Some(limit)) {
        while shape.entries < needed.min(shape.most) {
            shape.entries = shape.entries.saturating_mul(2).min(shape.most);
        }
    }
}

/// Returns the size that the map needs for the entries of `map`.
fn needed_by(paths: &Paths, table: &'static str, contents: &Contents, map: &OwnedFd) -> Result<u32, Error> {
    match table {
        table::slots4 | table::slots6 => needed_slots(paths),
        table => (contents.needed)(table, map),
    }
}

/// Removes the larger maps that a controller was making when it was killed.
pub(super) fn remove_larger(paths: &Paths) -> Result<(), Error> {
    for name in names(&paths.larger())? {
        let path = paths.larger().join(name);
        removed(&path, fs::remove_file(&path))?;
    }
    Ok(())
}

/// Puts back a map that a killed controller had set aside, unless programs use the map that was
/// made to replace it. If they do not, no program has ever seen that new map.
fn put_back(paths: &Paths, table: &'static str) -> Result<(), Error> {
    let before = paths.before().join(table);
    if before.exists() && !is_shown(paths, table)? {
        rename(&before, &paths.maps().join(table))?;
    }
    Ok(())
}

fn compare(paths: &Paths, shape: &mut Shape) -> Result<Option<OtherSize>, Error> {
    let path = paths.maps().join(shape.name);
    let failed = |source| Error::Table { table: shape.name, source };
    let is_moving = paths.before().join(shape.name).exists();
    let Some(map) = open_pinned(&path).map_err(failed)? else { return Ok(None) };
    let found = bpf::map_info(map.as_fd()).map_err(failed)?;
    let Some(difference) = difference(&found, shape) else { return Ok(None) };
    match (difference, contents(shape.name)) {
        (Difference::Entries(..), Some(_)) if is_moving => {
            tracing::warn!(
                table = shape.name, %difference,
                "an earlier change of the map's size is not finished; this one is made at the next start"
            );
            shape.entries = found.max_entries;
        }
        (Difference::Entries(..), Some(contents)) => {
            return Ok(Some(OtherSize { entries: found.max_entries, map, contents }));
        }
        _ if shape.expendable => {
            tracing::warn!(table = shape.name, %difference, "the pinned map is replaced by an empty one");
            removed(&path, fs::remove_file(&path))?;
        }
        _ => return Err(Error::Shape { table: shape.name, path, difference }),
    }
    Ok(None)
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(|source| Error::Folder { path: from.to_owned(), source })
}

/// Returns true if programs use the map that is pinned under this name, which is that of a flow
/// map.
fn is_shown(paths: &Paths, table: &str) -> Result<bool, Error> {
    let Some(maps) = maps_of(table) else { return Ok(false) };
    let failed = |source| Error::Table { table: maps, source };
    let pinned = |table: &str| open_pinned(&paths.maps().join(table)).map_err(failed);
    let (Some(array), Some(map)) = (pinned(maps)?, pinned(table)?) else { return Ok(false) };
    let id = bpf::map_info(map.as_fd()).map_err(failed)?.id;
    Ok(typed::<u32, u32>(&array, maps)?.get(&MAP_IN_USE).map_err(failed)? == Some(id))
}

/// Shows the programs the pinned flow maps before they are attached. These are the maps in use, and
/// the former ones while their entries move.
pub(super) fn show_flows(paths: &Paths) -> Result<(), Error> {
    // Each change waits for a grace period. In parallel, they all wait for the same one.
    thread::scope(|scope| {
        let showing: Vec<_> = table::RESIZABLE
            .iter()
            .map(|&(table, maps)| scope.spawn(move || show(paths, table, maps)))
            .collect();
        showing.into_iter().try_for_each(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Shows the programs one flow map. Since Linux 4.20, a change returns when no program uses the
/// replaced map any more.
fn show(paths: &Paths, table: &'static str, maps: &'static str) -> Result<(), Error> {
    let failed = |source| Error::Table { table: maps, source };
    let array = typed::<u32, u32>(&pinned_table(&paths.maps(), maps)?, maps)?;
    let put = |place: u32, map: &OwnedFd| {
        let id = bpf::map_info(map.as_fd())?.id;
        if array.get(&place)? == Some(id) { Ok(()) } else { array.put_map(place, map.as_fd()) }
    };
    // The former map comes first, so that every program finds the entries of both when the other
    // changes.
    if let Some(before) = open_pinned(&paths.before().join(table)).map_err(failed)? {
        put(MAP_BEFORE, &before).map_err(failed)?;
    }
    put(MAP_IN_USE, &pinned_table(&paths.maps(), table)?).map_err(failed)
}

/// A map whose former map still has entries to be moved.
#[derive(Debug)]
pub(super) struct Unfinished {
    table: &'static str,
    before: OwnedFd,
    transfer: Transfer,
}

/// Returns the maps whose former maps are set aside.
pub(super) fn unfinished(paths: &Paths, shapes: &[Shape]) -> Result<Vec<Unfinished>, Error> {
    let mut all = Vec::new();
    for Shape { name: table, .. } in shapes {
        let Some(Contents { transfer, .. }) = contents(table) else { continue };
        let found = open_pinned(&paths.before().join(table));
        let found = found.map_err(|source| Error::Table { table, source })?;
        all.extend(found.map(|before| Unfinished { table, before, transfer }));
    }
    Ok(all)
}

/// Moves the entries into the new maps. Maps of flows without room stay in `unfinished`, and
/// programs still find these flows.
pub(super) fn transfer(paths: &Paths, unfinished: &mut Vec<Unfinished>) -> Result<(), Error> {
    let mut left = 0;
    while let Some(Unfinished { table, before, transfer }) = unfinished.get(left) {
        if transfer(table, before, &pinned_table(&paths.maps(), table)?)? {
            release(paths, table)?;
            unfinished.remove(left);
        } else {
            left += 1;
        }
    }
    Ok(())
}

/// Unpins a former map that has no entries any more, after hiding it from programs.
fn release(paths: &Paths, table: &str) -> Result<(), Error> {
    if let Some(maps) = maps_of(table) {
        let failed = |source| Error::Table { table: maps, source };
        typed::<u32, u32>(&pinned_table(&paths.maps(), maps)?, maps)?.remove(&MAP_BEFORE).map_err(failed)?;
    }
    let path = paths.before().join(table);
    removed(&path, fs::remove_file(&path)).map(drop)
}

fn needed<K: Pod + Default, V: Pod + Default + PartialEq>(
    table: &'static str,
    fd: &OwnedFd,
) -> Result<u32, Error> {
    let map = typed::<K, V>(fd, table)?;
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
    .map_err(|source| Error::Table { table, source })?;
    Ok(needed)
}

/// Returns the least size that holds all slots in use. Free slots keep their last content, so the
/// services say which are in use.
fn needed_slots(paths: &Paths) -> Result<u32, Error> {
    let services = typed::<u32, Service>(&pinned_table(&paths.maps(), table::services)?, table::services)?;
    let mut needed = 0;
    services
        .walk(|slice| {
            for (_, service) in slice {
                let range = layout::span([service.cluster, service.internal, service.external]);
                needed = needed.max(range.first.saturating_add(range.count));
            }
            Ok(true)
        })
        .map_err(|source| Error::Table { table: table::services, source })?;
    Ok(needed)
}

/// Copies a map that nobody writes meanwhile.
///
/// It also copies `connections`, which programs write. What they count until they are swapped is
/// lost, but all connections are counted again anyway.
fn copy<K: Pod + Default, V: Pod + Default + PartialEq>(
    table: &'static str,
    from: &OwnedFd,
    to: &OwnedFd,
) -> Result<bool, Error> {
    let (from, to) = (typed::<K, V>(from, table)?, typed::<K, V>(to, table)?);
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
    .map_err(|source| Error::Table { table, source })
}

/// Moves the entries of a map that programs write meanwhile. The programs search `from` first.
fn move_live<K: Pod + Default, V: Pod + Default + PartialEq>(
    table: &'static str,
    from: &OwnedFd,
    to: &OwnedFd,
) -> Result<bool, Error> {
    let (from, to) = (typed::<K, V>(from, table)?, typed::<K, V>(to, table)?);
    from.walk(|slice| {
        for (key, _) in slice {
            match move_entry(&from, &to, key) {
                Ok(()) => {}
                // The kernel may be short of memory for a moment.
                Err(error) if matches!(error.errno(), libc::E2BIG | libc::ENOMEM) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    })
    .map_err(|source| Error::Table { table, source })
}

/// Moves one entry. A program that has found it in `from` just before may write there once more.
/// That is lost: it is what one packet has changed.
fn move_entry<K: Pod + Default, V: Pod + Default + PartialEq>(
    from: &Map<K, V>,
    to: &Map<K, V>,
    key: &K,
) -> Result<(), CallError> {
    let Some(seen) = from.get(key)? else { return Ok(()) };
    // It is false if a controller that was killed has inserted the entry. Programs insert no key
    // that `from` has.
    let is_inserted = to.insert(key, &seen)?;
    match from.take(key)? {
        Some(last) if !is_inserted => to.set(key, &last),
        Some(last) if last != seen && to.get(key)?.as_ref() == Some(&seen) => to.set(key, &last),
        Some(_) => Ok(()),
        // A program has removed the entry, perhaps before it was inserted.
        None if is_inserted && to.get(key)?.as_ref() == Some(&seen) => to.remove(key).map(drop),
        None => Ok(()),
    }
}
