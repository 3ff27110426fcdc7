//! Where our pins are, and the lock on them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use proxy_common::layout::LAYOUT_VERSION;

use super::{Error, error::Holder};
use crate::sys::{
    filesystem,
    lock::{self, Attempt, Lock},
};

/// The folder of ours on the bpffs.
const OURS: &str = "proxy-ctl";

/// `<bpffs>/proxy-ctl/v1` and what is in it.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    /// `<bpffs>/proxy-ctl`: holds the lock.
    pub(super) top: PathBuf,
    pub(super) root: PathBuf,
}

impl Paths {
    pub(super) fn new(bpffs: &Path) -> Self {
        let top = bpffs.join(OURS);
        let root = top.join(format!("v{LAYOUT_VERSION}"));
        Self { top, root }
    }

    pub(super) fn maps(&self) -> PathBuf {
        self.root.join("maps")
    }

    pub(super) fn links(&self) -> PathBuf {
        self.root.join("links")
    }

    /// A folder for each interface that has filters of ours on a clsact qdisc.
    pub(super) fn clsact(&self) -> PathBuf {
        self.root.join("clsact")
    }

    /// Mounts the bpffs if necessary, and makes the folders.
    pub(super) fn create(&self, bpffs: &Path) -> Result<(), Error> {
        filesystem::provide_bpffs(bpffs)
            .map_err(|source| Error::NoBpffs { path: bpffs.to_owned(), source })?;
        for path in [self.maps(), self.links(), self.clsact()] {
            fs::create_dir_all(&path).map_err(|source| Error::Folder { path, source })?;
        }
        Ok(())
    }

    /// Locks `top`, which must exist.
    pub(super) fn lock(&self) -> Result<Lock, Error> {
        let path = self.top.clone();
        match lock::try_lock(&path) {
            Ok(Attempt::Held(lock)) => Ok(lock),
            Ok(Attempt::Taken(process)) => Err(Error::Locked { path, holder: Holder(process) }),
            Err(source) => Err(Error::Folder { path, source }),
        }
    }
}
