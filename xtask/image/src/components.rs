//! The components of the image: the notices that its crates ask to be passed on, and a bill of
//! materials in CycloneDX's form.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use xtask::{
    command::{cargo, output, workspace},
    cross::Toolchain,
};

use crate::VERSION;

/// The package of the kernel programs, which are in the binary, and its target.
const KERNEL: (&str, &str) = ("proxy-ebpf", "bpfel-unknown-none");

/// A crate or another library that is linked into the binary, or a package that is beside it.
pub(super) struct Component {
    pub(super) name: String,
    pub(super) version: String,
    /// An SPDX expression.
    pub(super) license: String,
    /// The type of its package URL, which tells where it is from.
    pub(super) kind: &'static str,
    /// The qualifiers of its package URL, with the question mark. They are usually empty.
    pub(super) qualifiers: String,
    /// The hash of the crate in the registry.
    pub(super) sha256: Option<String>,
    pub(super) notices: Vec<String>,
}

/// Returns everything in the binaries that were compiled for these targets. The notice of musl is
/// the one that the first toolchain has.
pub(super) fn linked(toolchains: &[Toolchain], targets: &[String]) -> Result<Vec<Component>> {
    let mut components = crates(targets)?;
    let rustc = |arguments: &[&str]| output(Command::new("rustc").args(arguments).current_dir(workspace()));
    let release = rustc(&["--version"])?.split(' ').nth(1).context("rustc --version")?.to_owned();
    let documents = PathBuf::from(rustc(&["--print", "sysroot"])?.trim()).join("share/doc/rust");
    let musl = toolchains.first().context("no architecture")?.musl_notice()?;
    for (name, license, notice) in [
        ("rust-std", "MIT OR Apache-2.0", documents.join("COPYRIGHT-library.html")),
        ("musl-of-rust-std", "MIT", musl),
    ] {
        components.push(Component {
            name: name.to_owned(),
            version: release.clone(),
            license: license.to_owned(),
            kind: "generic",
            qualifiers: String::new(),
            sha256: None,
            notices: vec![read(&notice).with_context(|| format!("the licence of {name}"))?],
        });
    }
    Ok(components)
}

/// Returns the crates that are compiled into proxy-ctl for these targets, and into its kernel
/// programs.
fn crates(targets: &[String]) -> Result<Vec<Component>> {
    let mut wanted = BTreeSet::new();
    let mut platforms = Vec::new();
    for (package, target) in targets.iter().map(|target| ("proxy-ctl", target.as_str())).chain([KERNEL]) {
        let tree = ["tree", "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}"];
        let tree = output(cargo(&tree).args(["--package", package, "--target", target]))?;
        for line in tree.lines() {
            let (name, rest) = line.split_once(" v").with_context(|| format!("cargo tree: {line}"))?;
            wanted.insert((name.to_owned(), rest.split(' ').next().unwrap_or_default().to_owned()));
        }
        platforms.extend(["--filter-platform", target]);
    }
    let metadata = output(cargo(&["metadata", "--format-version", "1"]).args(platforms))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    let checksums = checksums(&read(&workspace().join("Cargo.lock"))?);
    let mut components = Vec::new();
    for package in metadata["packages"].as_array().context("cargo metadata: packages")? {
        let text = |field: &str| package[field].as_str().unwrap_or_default().to_owned();
        let key = (text("name"), text("version"));
        if wanted.remove(&key) {
            components.push(Component {
                license: text("license").replace('/', " OR "),
                kind: "cargo",
                qualifiers: String::new(),
                sha256: checksums.get(&key).cloned(),
                notices: notices_of(package)?,
                name: key.0,
                version: key.1,
            });
        }
    }
    if let Some((name, version)) = wanted.first() {
        bail!("cargo metadata does not name {name} {version}");
    }
    Ok(components)
}

/// Returns the checksums of packages, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let package = |text: &str| {
        let field = |name: &str| {
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix(" = ").map(str::to_owned);
            Some(text.lines().find_map(value)?.trim_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    };
    lock.split("[[package]]").filter_map(package).collect()
}

/// Returns the texts that come with a package of cargo's metadata. If there are none, it returns
/// the package's licence in its usual wording.
fn notices_of(package: &Value) -> Result<Vec<String>> {
    let text = |field: &str| package[field].as_str().unwrap_or_default();
    let folder = Path::new(text("manifest_path")).parent().context("a package without a folder")?;
    let mut files = Vec::new();
    find(folder, &mut files)?;
    if !files.is_empty() {
        files.sort();
        return files.iter().map(|file| read(file)).collect();
    }
    if text("license").contains("Apache-2.0") {
        return Ok(vec![read(&workspace().join("LICENSE"))?]);
    }
    let authors = package["authors"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let authors = authors.collect::<Vec<_>>().join(", ");
    if text("license") == "MIT" && !authors.is_empty() {
        let mit = read(&workspace().join("proxy-common/LICENSE-MIT"))?;
        let (_, terms) = mit.split_once("\n\nPermission is").context("LICENSE-MIT")?;
        return Ok(vec![format!("MIT License\n\nCopyright (c) {authors}\n\nPermission is{terms}")]);
    }
    bail!("{} {} has no text of its licence, {}", text("name"), text("version"), text("license"))
}

/// Finds the files of licences, with those of code that a crate has taken from elsewhere.
fn find(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        let is_text = path.extension().is_none_or(|extension| extension != "rs" && extension != "yml");
        if path.is_dir() {
            if name != "TARGET" && !name.starts_with('.') {
                find(&path, files)?;
            }
        } else if is_text
            && ["LICEN", "COPYING", "COPYRIGHT", "NOTICE", "UNLICEN"]
                .iter()
                .any(|word| name.starts_with(word))
        {
            files.push(path);
        }
    }
    Ok(())
}

pub(super) fn read(file: &Path) -> Result<String> {
    let content = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    Ok(String::from_utf8_lossy(&content).into_owned())
}

/// Returns each text once, below the names of the components that it is from.
pub(super) fn notices(components: &[Component]) -> String {
    let mut texts = BTreeMap::<&str, Vec<String>>::new();
    for Component { name, version, license, notices, .. } in components {
        for notice in notices {
            texts.entry(notice.trim()).or_default().push(format!("{name} {version} ({license})\n"));
        }
    }
    let sections = texts.iter().map(|(text, names)| (names, text)).collect::<BTreeSet<_>>();
    let rule = "=".repeat(80);
    sections.iter().map(|(names, text)| format!("{rule}\n{}{rule}\n\n{text}\n\n", names.concat())).collect()
}

/// Returns the bill of materials in the form of CycloneDX 1.5. `created` is in seconds since the
/// epoch.
pub(super) fn bill_of_materials(components: &[Component], created: i64) -> Result<Value> {
    let described = |component: &Component| {
        let Component { name, version, license, kind, qualifiers, sha256, .. } = component;
        let url = format!("pkg:{kind}/{name}@{version}{qualifiers}");
        let mut described = json!({
            "type": "library", "bom-ref": url, "purl": url, "name": name, "version": version,
            "licenses": [{"expression": license}],
        });
        if let Some(sha256) = sha256 {
            described["hashes"] = json!([{"alg": "SHA-256", "content": sha256}]);
        }
        described
    };
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": jiff::Timestamp::from_second(created)?.to_string(),
            "component": {"type": "container", "bom-ref": "image", "name": "proxy-ctl", "version": VERSION},
        },
        "components": components.iter().map(described).collect::<Vec<_>>(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_the_binary_are_in_both_documents_and_others_in_none() {
        let targets = ["x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl"].map(str::to_owned);
        let components = crates(&targets).unwrap();
        let (notices, bill) = (notices(&components), bill_of_materials(&components, 0).unwrap());
        let listed = |name: &str| {
            let of_name = |component: &&Value| component["name"] == name;
            let found = bill["components"].as_array().unwrap().iter().find(of_name);
            assert_eq!(notices.contains(&format!("\n{name} ")), found.is_some(), "{name}");
            found
        };
        for Component { name, notices, .. } in &components {
            assert!(listed(name).is_some() && notices.iter().all(|text| !text.trim().is_empty()), "{name}");
        }
        for name in ["proxy-ctl", "proxy-ebpf", "aya-ebpf", "tikv-jemalloc-sys"] {
            assert!(listed(name).is_some(), "{name} is missing");
        }
        // These crates belong to tests or build scripts, are run by the compiler, or are for
        // another system.
        for name in ["rstest", "cc", "serde_derive", "windows-sys"] {
            assert!(listed(name).is_none(), "{name} is not in the binary");
        }
        let kube = listed("kube").unwrap();
        assert_eq!(kube["purl"], format!("pkg:cargo/kube@{}", kube["version"].as_str().unwrap()));
        assert_eq!(kube["hashes"][0]["content"].as_str().unwrap().len(), 64);
        // A crate has code of somebody else.
        assert!(notices.contains("Jason Evans"));
    }

    #[test]
    fn a_crate_without_its_licence_is_named() {
        let empty = std::env::temp_dir().join(format!("xtask-components-{}", std::process::id()));
        fs::create_dir_all(&empty).unwrap();
        let package = |license: &str| {
            let manifest = empty.join("Cargo.toml");
            json!({"name": "bare", "version": "1.0.0", "license": license, "manifest_path": manifest, "authors": ["A. Smith"]})
        };
        let (own, other) = (notices_of(&package("MIT")), notices_of(&package("BSD-3-Clause")));
        fs::remove_dir(&empty).unwrap();
        assert!(own.unwrap()[0].contains("Copyright (c) A. Smith\n"));
        assert_eq!(other.unwrap_err().to_string(), "bare 1.0.0 has no text of its licence, BSD-3-Clause");
    }
}
