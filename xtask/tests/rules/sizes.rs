//! The sizes of source files and their folders.

use std::collections::BTreeMap;

use crate::{
    exceptions::{self, Broken},
    tree::{self, File},
};

/// The most lines of a file of Rust.
const LINES: usize = 600;
/// The most files of Rust in one folder, without those in folders below it.
const FILES: usize = 16;

fn larger(files: &[File]) -> Broken {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    let mut broken = Broken::new();
    for File { path, text } in files {
        let folder = path.rsplit_once('/').map_or(".", |(folder, _)| folder);
        *folders.entry(folder).or_default() += 1;
        broken.insert(format!("file {path}"), text.lines().count());
    }
    broken.retain(|_, lines| *lines > LINES);
    let folders = folders.into_iter().filter(|(_, files)| *files > FILES);
    broken.extend(folders.map(|(folder, files)| (format!("folder {folder}"), files)));
    broken
}

pub(crate) fn broken() -> Broken {
    larger(&tree::files("", &[".rs"]))
}

#[test]
fn files_and_folders_are_small() {
    let broken = broken();
    exceptions::hold("file", &broken, |_| vec![format!("a file of Rust has at most {LINES} lines:")]);
    exceptions::hold("folder", &broken, |_| vec![format!("a folder has at most {FILES} files of Rust:")]);
}

#[test]
fn large_files_and_folders_are_found() {
    let file = |path: String, lines| File { path, text: "\n".repeat(lines) };
    let mut files: Vec<_> = (0..FILES).map(|number| file(format!("a/{number}.rs"), LINES)).collect();
    files.push(file("a/below/0.rs".to_owned(), 1));
    assert_eq!(larger(&files), Broken::new());
    files.push(file("a/mod.rs".to_owned(), LINES + 1));
    let found = Broken::from([("file a/mod.rs".to_owned(), 601), ("folder a".to_owned(), 17)]);
    assert_eq!(larger(&files), found);
}
