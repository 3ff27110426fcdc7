//! The files of the repository.

use std::{fs, path::Path};

/// A file that people have written.
pub(crate) struct File {
    /// The path below the root of the repository.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Returns the root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the files below a folder whose names end with one of `extensions`, in the order of their
/// paths. What cargo has built is left out.
pub(crate) fn files(folder: &str, extensions: &[&str]) -> Vec<File> {
    let mut found = Vec::new();
    collect(&root().join(folder), extensions, &mut found);
    found.sort_by(|one, other| one.path.cmp(&other.path));
    assert!(!found.is_empty(), "there are no files in {folder:?}");
    found
}

fn collect(folder: &Path, extensions: &[&str], found: &mut Vec<File>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, extensions, found);
            }
        } else if extensions.iter().any(|extension| name.ends_with(extension)) {
            let below = path.strip_prefix(root()).unwrap().to_str().unwrap();
            found.push(File { path: below.to_owned(), text: fs::read_to_string(&path).unwrap() });
        }
    }
}
