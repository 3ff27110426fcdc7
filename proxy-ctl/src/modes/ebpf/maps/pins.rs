//! Restores pins that another program removes. Without pins, maps and links would not outlive this
//! process.
//!
//! The controller holds a descriptor of everything that it has pinned. So nothing is freed or
//! detached when another program empties the bpffs, and the same maps and links can be pinned
//! again.

use std::{
    collections::BTreeMap,
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::{
    handles::{Shape, open_pinned, pinned_map},
    paths::{Paths, is_there},
};
use crate::{
    modes::ebpf::Error,
    sys::{
        CallError,
        bpf::{self, LinkTarget},
        proc::lock::Lock,
    },
};

/// The descriptors of the pinned maps, and the lock on the folder.
#[derive(Debug)]
pub(crate) struct MapPins {
    maps: Vec<(&'static str, OwnedFd)>,
    lock: Lock,
}

impl MapPins {
    /// Holds all maps of `shapes`. Each must be pinned.
    pub(crate) fn hold(paths: &Paths, shapes: &[Shape], lock: Lock) -> Result<Self, Error> {
        Ok(Self { maps: pinned_maps(paths, shapes)?, lock })
    }

    /// Holds the maps that are pinned now, after larger ones have replaced some.
    pub(crate) fn hold_again(&mut self, paths: &Paths, shapes: &[Shape]) -> Result<(), Error> {
        self.maps = pinned_maps(paths, shapes)?;
        Ok(())
    }

    /// Makes folders, lock and pins anew if they are gone. Returns the maps that were not pinned.
    pub(crate) fn restore(&mut self, bpffs: &Path, paths: &Paths) -> Result<Vec<&'static str>, Error> {
        paths.create(bpffs)?;
        let failed = |source| Error::Folder { path: paths.top.clone(), source };
        if !self.lock.is_of(&paths.top).map_err(failed)? {
            self.lock = paths.lock()?;
        }
        let mut restored = Vec::new();
        for (name, map) in &self.maps {
            let again =
                pin_map(&paths.maps().join(name), map).map_err(|source| Error::Map { name, source })?;
            if again {
                restored.push(*name);
            }
        }
        Ok(restored)
    }
}

fn pinned_maps(paths: &Paths, shapes: &[Shape]) -> Result<Vec<(&'static str, OwnedFd)>, Error> {
    let folder = paths.maps();
    shapes.iter().map(|shape| Ok((shape.name, pinned_map(&folder, shape.name)?))).collect()
}

/// Pins the map at `path`, and returns true if it was not pinned there before.
fn pin_map(path: &Path, map: &OwnedFd) -> Result<bool, CallError> {
    if let Some(found) = open_pinned(path)? {
        if bpf::map_info(found.as_fd())?.id == bpf::map_info(map.as_fd())?.id {
            return Ok(false);
        }
        unlink(path)?;
    }
    bpf::pin(map.as_fd(), path)?;
    Ok(true)
}

fn unlink(path: &Path) -> Result<(), CallError> {
    fs::remove_file(path).map_err(|e| CallError { call: "unlinking the old pin", source: e })
}

/// The outcome of [`LinkPins::ensure`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ensured {
    /// Nothing had to be done.
    Unchanged,
    /// Our link was attached already, and has got its pin or its program again.
    Repaired,
    /// Nothing of ours was attached, and now it is.
    Attached,
}

impl Ensured {
    pub(crate) fn is_change(self) -> bool {
        self != Self::Unchanged
    }
}

/// The links that are held, each with the path at which it is pinned.
#[derive(Debug, Default)]
pub(crate) struct LinkPins {
    held: BTreeMap<PathBuf, OwnedFd>,
}

impl LinkPins {
    /// Makes the link at `path` run `program` on a target that `is_target` accepts. `create` makes
    /// a new link if there is none.
    ///
    /// Only an error of `create` means that nothing of ours is attached there.
    pub(crate) fn ensure(
        &mut self,
        path: &Path,
        program: BorrowedFd<'_>,
        is_target: impl Fn(LinkTarget) -> bool,
        create: impl Fn() -> Result<OwnedFd, CallError>,
    ) -> Result<Ensured, CallError> {
        let pinned = open_pinned(path)?;
        let is_pinned = pinned.is_some();
        if let Some(link) = pinned {
            self.held.insert(path.to_owned(), link);
        }
        if let Some(link) = self.held.get(path) {
            let info = bpf::link_info(link.as_fd())?;
            if is_target(info.target) {
                match run(link, info.program, program) {
                    Ok(swapped) => {
                        if !is_pinned {
                            bpf::pin(link.as_fd(), path)?;
                        }
                        let is_repaired = swapped || !is_pinned;
                        return Ok(if is_repaired { Ensured::Repaired } else { Ensured::Unchanged });
                    }
                    // The target has vanished at this moment.
                    Err(e) if e.errno() == libc::ENOLINK => {}
                    Err(e) => return Err(e),
                }
            }
        }
        let new = create()?;
        if is_pinned {
            unlink(path)?;
        }
        bpf::pin(new.as_fd(), path)?;
        self.held.insert(path.to_owned(), new);
        Ok(Ensured::Attached)
    }

    /// Detaches the link at `path`, and pins `new` there, which is attached already.
    pub(crate) fn replace(&mut self, path: &Path, new: OwnedFd) -> Result<(), Error> {
        self.remove(path)?;
        bpf::pin(new.as_fd(), path).map_err(|source| Error::Link { path: path.to_owned(), source })?;
        self.held.insert(path.to_owned(), new);
        Ok(())
    }

    /// Detaches the link and removes its pin. Returns false if there was none.
    pub(crate) fn remove(&mut self, path: &Path) -> Result<bool, Error> {
        let held = self.held.remove(path);
        if let Some(link) = &held {
            detach(link).map_err(|source| Error::Link { path: path.to_owned(), source })?;
        }
        Ok(remove_link(path)? || held.is_some())
    }

    /// Returns true if there is a link at `path`, even if its interface is gone.
    pub(crate) fn has(&self, path: &Path) -> Result<bool, Error> {
        Ok(self.held.contains_key(path) || is_there(path)?)
    }

    /// Returns the paths of all links that are held, whether they are still pinned or not.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.held.keys().map(PathBuf::as_path)
    }
}

/// Makes the link run `program`, and returns true if it ran another one before.
fn run(link: &OwnedFd, running: u32, program: BorrowedFd<'_>) -> Result<bool, CallError> {
    if running == bpf::program_id(program)? {
        return Ok(false);
    }
    bpf::link_update(link.as_fd(), program)?;
    Ok(true)
}

/// Detaches the link at `path` and removes its pin. Returns false if nothing was pinned there.
pub(crate) fn remove_link(path: &Path) -> Result<bool, Error> {
    let failed = |source| Error::Link { path: path.to_owned(), source };
    if let Some(link) = open_pinned(path).map_err(failed)? {
        detach(&link).map_err(failed)?;
    }
    remove_pin(path)
}

fn detach(link: &OwnedFd) -> Result<(), CallError> {
    match bpf::link_detach(link.as_fd()) {
        // ENOLINK and ENOENT say that the target of the link is gone.
        Err(e) if !matches!(e.errno(), libc::ENOLINK | libc::ENOENT | libc::EOPNOTSUPP) => Err(e),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Removes the pin. Returns false if nothing was pinned there.
pub(crate) fn remove_pin(path: &Path) -> Result<bool, Error> {
    super::paths::removed(path, fs::remove_file(path))
}
