//! Computes one hash of all that the object is made of.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

/// Files and folders of the workspace whose every byte counts.
const WHOLE: [&str; 4] =
    ["proxy-ebpf/Cargo.toml", "proxy-ebpf/src", "proxy-common/Cargo.toml", "proxy-common/src"];
/// Sections of the workspace's Cargo.toml that decide how the object is compiled.
const SECTIONS: [&str; 3] = ["[workspace.package]", "[profile.release]", "[profile.bpf]"];
/// The package whose dependencies from registries are part of the object.
const PACKAGE: &str = "proxy-ebpf";

/// Every path below the workspace that [`hash`] reads, for cargo to watch.
pub fn paths() -> impl Iterator<Item = &'static str> {
    WHOLE.into_iter().chain(["Cargo.toml", "Cargo.lock"])
}

/// Returns the SHA-256 of the sources of the kernel programs, of the dependencies that Cargo.lock
/// chooses for them, and of the profile that compiles them, in hexadecimal digits.
pub fn hash(workspace: &Path) -> Result<String> {
    let read = |name: &str| {
        let path = workspace.join(name);
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    };
    let mut parts = BTreeMap::new();
    for name in WHOLE {
        add_files(workspace, Path::new(name), &mut parts)?;
    }
    parts.insert(PathBuf::from("Cargo.toml"), sections(&read("Cargo.toml")?).into_bytes());
    parts.insert(PathBuf::from("Cargo.lock"), locked(&read("Cargo.lock")?).into_bytes());
    let mut digest = Sha256::new();
    for (path, content) in parts {
        let name = path.to_string_lossy();
        for bytes in [name.as_bytes(), &content] {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        }
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Adds a file, or every file below a folder, under its path in the workspace.
fn add_files(workspace: &Path, name: &Path, to: &mut BTreeMap<PathBuf, Vec<u8>>) -> Result<()> {
    let path = workspace.join(name);
    let reading = || format!("reading {}", path.display());
    if path.is_dir() {
        for entry in fs::read_dir(&path).with_context(reading)? {
            add_files(workspace, &name.join(entry.with_context(reading)?.file_name()), to)?;
        }
    } else {
        to.insert(name.to_owned(), fs::read(&path).with_context(reading)?);
    }
    Ok(())
}

/// Returns the lines of [`SECTIONS`] in a Cargo.toml.
fn sections(manifest: &str) -> String {
    let mut counts = false;
    let mut kept = String::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            counts = SECTIONS.contains(&line.trim());
        }
        if counts && !line.trim().is_empty() && !line.starts_with('#') {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

/// Returns the name, version and checksum of each package that a Cargo.lock has for [`PACKAGE`].
/// Packages of the workspace are listed, and what else they depend on is not: Cargo.lock does not
/// tell a library's dependencies from those of its tests.
fn locked(lock: &str) -> String {
    let packages: Vec<Locked<'_>> = lock.split("[[package]]").skip(1).map(Locked::read).collect();
    let mut wanted = vec![PACKAGE];
    let mut found = BTreeSet::new();
    while let Some(dependency) = wanted.pop() {
        // A dependency is `name`, or `name version` where the lock has several versions.
        let is_meant = |package: &&Locked<'_>| match dependency.split_once(' ') {
            Some((name, version)) => package.name == name && package.version == version,
            None => package.name == dependency,
        };
        for package in packages.iter().filter(is_meant) {
            let is_new = found.insert((package.name, package.version, package.checksum));
            if is_new && (package.name == PACKAGE || !package.checksum.is_empty()) {
                wanted.extend(&package.dependencies);
            }
        }
    }
    found.into_iter().map(|(name, version, checksum)| format!("{name} {version} {checksum}\n")).collect()
}

/// An entry of Cargo.lock.
#[derive(Default)]
struct Locked<'a> {
    name: &'a str,
    version: &'a str,
    /// Empty for packages of the workspace.
    checksum: &'a str,
    dependencies: Vec<&'a str>,
}

impl<'a> Locked<'a> {
    fn read(entry: &'a str) -> Self {
        let mut locked = Self::default();
        for line in entry.lines() {
            match line.split_once(" = ") {
                Some(("name", value)) => locked.name = value.trim_matches('"'),
                Some(("version", value)) => locked.version = value.trim_matches('"'),
                Some(("checksum", value)) => locked.checksum = value.trim_matches('"'),
                Some(_) => {}
                None => locked
                    .dependencies
                    .extend(line.strip_prefix(" \"").and_then(|dependency| dependency.strip_suffix("\","))),
            }
        }
        locked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"version = 4

[[package]]
name = "aya-ebpf"
version = "0.2.1"
source = "registry"
checksum = "aa"
dependencies = [
 "macros 2.0.0",
]

[[package]]
name = "macros"
version = "1.0.0"
source = "registry"
checksum = "m1"

[[package]]
name = "macros"
version = "2.0.0"
source = "registry"
checksum = "m2"

[[package]]
name = "proxy-common"
version = "0.1.0"
dependencies = [
 "proptest",
]

[[package]]
name = "proptest"
version = "1.0.0"
source = "registry"
checksum = "pp"

[[package]]
name = "proxy-ebpf"
version = "0.1.0"
dependencies = [
 "aya-ebpf",
 "proxy-common",
]
"#;

    #[test]
    fn locked_packages_are_those_that_the_object_is_made_of() {
        assert_eq!(
            locked(LOCK),
            "aya-ebpf 0.2.1 aa\nmacros 2.0.0 m2\nproxy-common 0.1.0 \nproxy-ebpf 0.1.0 \n"
        );
    }

    #[test]
    fn sections_of_other_profiles_do_not_count() {
        let manifest =
            "[workspace]\nresolver = \"3\"\n[profile.bpf]\n# why\nlto = true\n\n[profile.dev]\ndebug = 1\n";
        assert_eq!(sections(manifest), "[profile.bpf]\nlto = true\n");
    }

    #[test]
    fn the_hash_changes_with_a_byte_of_a_source_and_with_its_name() {
        let folder = std::env::temp_dir().join(format!("kernel-object-sources-{}", std::process::id()));
        for (name, content) in [
            ("proxy-ebpf/src/main.rs", "fn main() {}"),
            ("proxy-ebpf/Cargo.toml", "[package]"),
            ("proxy-common/src/lib.rs", ""),
            ("proxy-common/Cargo.toml", "[package]"),
            ("Cargo.toml", "[profile.bpf]\nlto = true"),
            ("Cargo.lock", LOCK),
        ] {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let first = hash(&folder).unwrap();
        assert_eq!(first, hash(&folder).unwrap());
        fs::write(folder.join("Cargo.lock"), format!("{LOCK}\n[[package]]\nname = \"other\"\n")).unwrap();
        assert_eq!(first, hash(&folder).unwrap(), "a package that is no part of the object");
        fs::write(folder.join("proxy-ebpf/src/main.rs"), "fn main() { }").unwrap();
        let second = hash(&folder).unwrap();
        assert_ne!(first, second);
        fs::rename(folder.join("proxy-ebpf/src/main.rs"), folder.join("proxy-ebpf/src/lib.rs")).unwrap();
        assert_ne!(second, hash(&folder).unwrap());
        fs::remove_dir_all(folder).unwrap();
    }
}
