//! The objects of all files of a folder, and which of them stay when a file breaks.
//!
//! While a document cannot be read, every object that its file last held and does not hold now is
//! kept.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::document::{self, Identity, ManifestKind, ManifestObject};
use crate::{
    kubernetes::convert::invalid::InvalidField,
    model::objects::{EndpointSlice, Node, Service, ServiceCidr},
};

const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Everything that the folder holds now.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) services: Vec<Service>,
    pub(super) slices: Vec<EndpointSlice>,
    pub(super) node: Option<Node>,
    pub(super) service_cidrs: Vec<ServiceCidr>,
    /// The invalid fields that the listing before did not have.
    pub(super) invalid: Vec<InvalidField>,
}

#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    node_name: Arc<str>,
    files: BTreeMap<String, File>,
    reported: HashSet<InvalidField>,
}

#[derive(Debug, Default)]
struct File {
    /// The text when the file was last read. None if it could not be read.
    text: Option<String>,
    objects: Vec<FileObject>,
    invalid: Vec<InvalidField>,
}

#[derive(Clone, Debug)]
struct FileObject {
    identity: Identity,
    object: ManifestObject,
    /// True if the object comes from an earlier text of the file.
    is_former: bool,
}

impl Folder {
    pub(super) fn new(path: PathBuf, node_name: Arc<str>) -> Self {
        Self { path, node_name, files: BTreeMap::new(), reported: HashSet::new() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the folder. Files whose text is the same as last time are not parsed again.
    pub(super) fn list(&mut self) -> io::Result<Listing> {
        let names = file_names(&self.path)?;
        self.files.retain(|name, _| names.contains(name));
        for name in names {
            match read(&self.path.join(&name)) {
                Ok(bytes) => self.load(name, String::from_utf8(bytes).map_err(|error| error.to_string())),
                // The file was removed since the folder was read, or it is a link that leads
                // nowhere.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.files.remove(&name);
                }
                Err(error) => self.load(name, Err(error.to_string())),
            }
        }
        Ok(self.merge())
    }

    fn load(&mut self, name: String, text: Result<String, String>) {
        let file = self.files.entry(name.clone()).or_default();
        let text = match text {
            Ok(text) if file.text.as_ref() == Some(&text) => return,
            Ok(text) => text,
            Err(problem) => {
                file.text = None;
                for held in &mut file.objects {
                    held.is_former = true;
                }
                file.invalid = vec![InvalidField { object: name, field: String::new(), problem }];
                return;
            }
        };
        let parsed = document::parse(&name, &text, &self.node_name);
        let present: BTreeSet<&Identity> = parsed.objects.iter().map(|(identity, _)| identity).collect();
        let before = std::mem::take(&mut file.objects);
        let kept = before.into_iter().filter(|held| parsed.is_broken && !present.contains(&held.identity));
        let kept: Vec<_> = kept.map(|held| FileObject { is_former: true, ..held }).collect();
        let fresh = parsed.objects.into_iter().map(|(identity, object)| FileObject {
            identity,
            object,
            is_former: false,
        });
        file.objects = fresh.chain(kept).collect();
        file.invalid = parsed.invalid;
        file.text = Some(text);
    }

    /// Returns what the folder holds. Of several versions of an object, the first one in the order
    /// of file names counts. Versions from the present text of a file come before those from an
    /// earlier text.
    fn merge(&mut self) -> Listing {
        let mut chosen: BTreeMap<&Identity, (&str, &FileObject)> = BTreeMap::new();
        let mut invalid: HashSet<InvalidField> = HashSet::new();
        let held = || {
            let files = self.files.iter();
            files.flat_map(|(name, file)| file.objects.iter().map(move |held| (name.as_str(), held)))
        };
        let fresh = held().filter(|(_, held)| !held.is_former);
        for (file, held) in fresh.chain(held().filter(|(_, held)| held.is_former)) {
            let Some((first, _)) = chosen.get(&held.identity) else {
                chosen.insert(&held.identity, (file, held));
                continue;
            };
            if !held.is_former {
                invalid.insert(InvalidField {
                    object: format!("{file}: {}", held.identity),
                    field: "metadata.name".into(),
                    problem: format!("is also in {first}, which counts; must be unique"),
                });
            }
        }
        let mut listing = Listing::default();
        let mut other_nodes = Vec::new();
        for (identity, (_, held)) in chosen {
            match held.object.clone() {
                ManifestObject::Service(service) => listing.services.push(service),
                ManifestObject::EndpointSlice(slice) => listing.slices.push(slice),
                ManifestObject::Node(node) => listing.node = Some(node),
                ManifestObject::ServiceCidr(cidr) => listing.service_cidrs.push(cidr),
                ManifestObject::NotServed if identity.kind == ManifestKind::Node => {
                    other_nodes.push(&*identity.name.name)
                }
                ManifestObject::NotServed => {}
            }
        }
        if listing.node.is_none() && other_nodes.is_empty() {
            listing.node = Some(Node { name: Arc::clone(&self.node_name), ..Node::default() });
        } else if listing.node.is_none() {
            invalid.insert(InvalidField {
                object: format!("Node {}", self.node_name),
                field: "metadata.name".into(),
                problem: format!(
                    "is in no file, found only {}; --hostname-override must be the name of this node's Node",
                    other_nodes.join(", ")
                ),
            });
        }
        let found = self.files.values().flat_map(|file| &file.invalid).cloned().collect::<Vec<_>>();
        let mut duplicates: Vec<InvalidField> = invalid.drain().collect();
        duplicates.sort_by(|a, b| a.object.cmp(&b.object));
        let all = found.into_iter().chain(duplicates);
        let mut now = HashSet::new();
        for field in all {
            if !self.reported.contains(&field) && !now.contains(&field) {
                listing.invalid.push(field.clone());
            }
            now.insert(field);
        }
        self.reported = now;
        listing
    }
}

/// Reads a regular file. Others are refused, because a pipe or a device may have no end, or may
/// block.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("found a pipe, socket or device, must be a regular file"));
    }
    fs::read(path)
}

/// Returns the names of the manifest files, including links to files. Hidden files are left out.
fn file_names(folder: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        let manifest = extension.is_some_and(|extension| EXTENSIONS.contains(&extension));
        if manifest && !name.starts_with('.') && !path.is_dir() {
            names.insert(name);
        }
    }
    Ok(names)
}
