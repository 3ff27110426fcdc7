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
    let mut links = names(&current.links())?;
    // Those before the stack first: what they leave to the stack needs the others.
    links.sort_by_key(|name| !name.contains("_xdp_"));
    for name in links {
        if remove_link(&current.links().join(&name))? {
            removed.links.push(name);
        }
    }
    for index in names(&current.clsact())?.iter().filter_map(|name| name.parse().ok()) {
        removed.filters += remove_filters(&current, index)?;
    }
    for folder in [current.links(), current.clsact()] {
        remove_folder(&folder)?;
    }
    for version in names(&current.top)? {
        let paths = Paths { root: current.top.join(&version), ..current.clone() };
        for folder in [paths.maps(), paths.before(), paths.larger()] {
            for name in names(&folder)? {
                if remove_pin(&folder.join(&name))? {
                    removed.tables.push(name);
                }
            }
            remove_folder(&folder)?;
        }
        remove_folder(&paths.root)?;
    }
    remove_folder(&current.top)?;
    drop(lock);
    Ok(removed)
}
