//! Services, EndpointSlices, ServiceCIDRs and the own Node from a folder of YAML or JSON files.
//!
//! Every file whose name ends in `.yaml`, `.yml` or `.json` and does not start with a dot is read, with any number
//! of documents and lists in it; kinds other than v1 Service and Node, discovery.k8s.io/v1 EndpointSlice and
//! networking.k8s.io/v1 ServiceCIDR are ignored. The folder is watched, and after every change everything it holds is sent.
//!
//! A folder without any Node stands for a node about which nothing is known, which is served all the same. One with
//! Nodes among which the own is missing most likely has the wrong name, which is said: that node is not eligible.
//!
//! What cannot be read is named with file, document, line and field, and leaves the rest working:
//!
//! - A document that was good and now is not: every object stays that its file last held and does not hold now. So it is with a
//!   file that cannot be opened or is no UTF-8.
//! - A file that is removed takes its objects with it.
//! - A folder that disappears: everything stays, until a folder comes to its path again.
//!
//! A file should be replaced by renaming another one over it. One that is written in place is read when its writer
//! closes it, and may be seen half written if another file changes meanwhile.

mod document;
mod folder;
#[cfg(test)]
mod tests;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::mpsc;

use self::folder::{Folder, Listing};
use super::{InvalidField, Update};
use crate::path_watch::PathWatch;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("manifests folder {folder}: {source}; must be a folder of .yaml, .yml or .json files")]
    Folder { folder: PathBuf, source: io::Error },
    #[error("reading manifests folder {folder} was interrupted")]
    Interrupted { folder: PathBuf },
}

/// A folder that is being watched.
pub struct Manifests {
    folder: Folder,
    watch: PathWatch,
}

impl Manifests {
    /// # Errors
    /// The folder does not exist, is no folder, or cannot be read.
    pub fn open(folder: &Path, node_name: impl Into<Arc<str>>) -> Result<Self, Error> {
        std::fs::read_dir(folder).map_err(|source| Error::Folder { folder: folder.to_owned(), source })?;
        // Watched before it is first read: nothing is missed.
        let watch = PathWatch::new(folder);
        Ok(Self { folder: Folder::new(folder.to_owned(), node_name.into()), watch })
    }

    /// Sends what the folder holds, at once and after every change, until nobody receives.
    /// `report` is told what is left out, once until it is mended.
    ///
    /// # Errors
    /// A read was interrupted.
    pub async fn run(
        mut self,
        updates: mpsc::Sender<Update>,
        report: impl Fn(InvalidField) + Send + Sync,
    ) -> Result<(), Error> {
        let mut sent = Vec::new();
        loop {
            let listing;
            (self.folder, listing) = list(self.folder).await?;
            match listing {
                Ok(listing) => {
                    listing.invalid.into_iter().for_each(&report);
                    let all = [
                        Update::Node(listing.node),
                        Update::ReplaceServiceCidrs(listing.service_cidrs),
                        Update::ReplaceServices(listing.services),
                        Update::ReplaceSlices(listing.slices),
                    ];
                    if sent != all {
                        sent = all.to_vec();
                        for update in all {
                            if updates.send(update).await.is_err() {
                                return Ok(());
                            }
                        }
                    }
                }
                Err(source) => report(InvalidField {
                    object: self.folder.path().display().to_string(),
                    field: String::new(),
                    problem: format!("{source}; what was read before stays"),
                }),
            }
            tokio::select! {
                () = self.watch.changed() => {}
                () = updates.closed() => return Ok(()),
            }
        }
    }
}

/// Reading and parsing thousands of objects takes its time: not on a thread that others wait for.
async fn list(mut folder: Folder) -> Result<(Folder, io::Result<Listing>), Error> {
    let path = folder.path().to_owned();
    let read = tokio::task::spawn_blocking(move || {
        let listing = folder.list();
        (folder, listing)
    });
    read.await.map_err(|_| Error::Interrupted { folder: path })
}
