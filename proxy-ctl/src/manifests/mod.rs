//! Services, EndpointSlices, ServiceCIDRs and the own Node from a folder of YAML or JSON files.
//!
//! Every file whose name ends in `.yaml`, `.yml` or `.json` and does not start with a dot is read.
//! It may hold any number of documents and lists. Kinds other than v1 Service and Node,
//! discovery.k8s.io/v1 EndpointSlice and networking.k8s.io/v1 ServiceCIDR are ignored. The folder
//! is watched, and after every change everything that it holds is sent.
//!
//! A folder without any Node stands for a node about which nothing is known, and Services are
//! served all the same. If there are Nodes, but none with the name of this node, that name is most
//! likely wrong. This is reported, and the node is not eligible for load balancers.
//!
//! What cannot be read is reported with file, document, line and field. The rest goes on working:
//!
//! - If a document was good and now is not, every object that its file last held and does not hold
//!   now is kept. The same applies to a file that cannot be opened or is not UTF-8.
//! - If a file is removed, its objects are removed with it.
//! - If the folder disappears, everything is kept until a folder appears at its path again.
//!
//! A file should be replaced by renaming another one over it. One that is written in place is read
//! when its writer closes it. It may be seen half written if another file changes meanwhile.

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
use crate::{kubernetes::convert::invalid::InvalidField, model::Update, path_watch::PathWatch};

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
    /// Opens a folder and begins to watch it.
    ///
    /// # Errors
    /// The folder does not exist, is no folder, or cannot be read.
    pub fn open(folder: &Path, node_name: impl Into<Arc<str>>) -> Result<Self, Error> {
        std::fs::read_dir(folder).map_err(|source| Error::Folder { folder: folder.to_owned(), source })?;
        // The watch begins before the first read, so that no change is missed.
        let watch = PathWatch::new(folder);
        Ok(Self { folder: Folder::new(folder.to_owned(), node_name.into()), watch })
    }

    /// Sends what the folder holds, at once and after every change, until nobody receives. `report`
    /// gets each field that is left out, once until it is corrected.
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

/// Lists the folder on a blocking thread: reading and parsing thousands of objects takes too long
/// for a thread that other tasks share.
async fn list(mut folder: Folder) -> Result<(Folder, io::Result<Listing>), Error> {
    let path = folder.path().to_owned();
    let read = tokio::task::spawn_blocking(move || {
        let listing = folder.list();
        (folder, listing)
    });
    read.await.map_err(|_| Error::Interrupted { folder: path })
}
