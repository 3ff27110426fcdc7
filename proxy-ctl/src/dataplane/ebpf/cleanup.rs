//! Removes everything of ours, and nothing else.

use std::path::Path;

use super::{
    Error,
    attach::remove_filters,
    paths::{Paths, names, remove_folder},
    pins::{remove_link, remove_pin},
};
use crate::dataplane::Removed;

/// Detaches the programs first, then removes the tables, of every layout version. Nothing of ours there: nothing is
/// done. If a controller runs: [`Error::Locked`].
pub fn cleanup(bpffs: &Path) -> Result<Removed, Error> {
    let mut removed = Removed::default();
    let current = Paths::new(bpffs);
    if !current.top.exists() {
        return Ok(removed);
    }
    let lock = current.lock()?;
    for version in names(&current.top)? {
        let root = current.top.join(&version);
        let paths = Paths { root: root.clone(), ..current.clone() };
        for name in names(&paths.links())? {
            if remove_link(&paths.links().join(&name))? {
                removed.links.push(name);
            }
        }
        for index in names(&paths.clsact())?.iter().filter_map(|name| name.parse().ok()) {
            removed.filters += remove_filters(&paths, index)?;
        }
        for name in names(&paths.maps())? {
            if remove_pin(&paths.maps().join(&name))? {
                removed.tables.push(name);
            }
        }
        for folder in [paths.links(), paths.clsact(), paths.maps(), root] {
            remove_folder(&folder)?;
        }
    }
    remove_folder(&current.top)?;
    drop(lock);
    Ok(removed)
}
