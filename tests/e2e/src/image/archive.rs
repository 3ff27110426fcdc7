//! The archive that `ctr images import` reads: images that share layers, in the form of
//! `docker save`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, BufWriter, Write as _},
    path::Path,
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use super::files::{Content, Files};

/// Image with a program to start, and the layer with its files.
#[derive(Debug)]
pub(super) struct Image {
    /// Name with registry and tag.
    pub(super) name: &'static str,
    /// Name of the image's layer.
    pub(super) layer: &'static str,
    pub(super) entry_point: &'static [&'static str],
    pub(super) arguments: &'static [&'static str],
}

/// Writes an archive of images with these layers.
pub(super) fn write(archive: &Path, layers: &[(&str, &Files)], images: &[Image]) -> Result<()> {
    let file = File::create(archive).with_context(|| format!("creating {}", archive.display()))?;
    let mut tar = Builder::new(BufWriter::new(file));
    let mut digests = BTreeMap::new();
    for (name, files) in layers {
        // The hash of a layer is part of its name, so the layer is written twice.
        let layer = archive.with_extension("layer");
        write_layer(&layer, files).with_context(|| format!("writing layer {name}"))?;
        let digest = digest_of(&layer)?;
        let mut content = File::open(&layer).with_context(|| format!("opening {}", layer.display()))?;
        tar.append_file(format!("{digest}/layer.tar"), &mut content).context("writing a layer")?;
        fs::remove_file(&layer).with_context(|| format!("removing {}", layer.display()))?;
        digests.insert(*name, digest);
    }
    let (mut written, mut manifest) = (BTreeSet::new(), Vec::new());
    for image in images {
        let digest = digests.get(image.layer).with_context(|| format!("no layer {}", image.layer))?;
        let configuration = serde_json::to_vec(&image.configuration(digest)?)?;
        let path = format!("{}.json", hexadecimal(&Sha256::digest(&configuration)));
        if written.insert(path.clone()) {
            append(&mut tar, &path, &configuration)?;
        }
        manifest.push(json!({
            "Config": path, "RepoTags": [image.name], "Layers": [format!("{digest}/layer.tar")],
        }));
    }
    append(&mut tar, "manifest.json", &serde_json::to_vec(&manifest)?)?;
    tar.into_inner().context("writing the archive")?.flush().context("writing the archive")
}

impl Image {
    fn configuration(&self, digest: &str) -> Result<Value> {
        let mut process = json!({
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "WorkingDir": "/",
        });
        for (field, words) in [("Entrypoint", self.entry_point), ("Cmd", self.arguments)] {
            if !words.is_empty() {
                process[field] = json!(words);
            }
        }
        Ok(json!({
            "architecture": architecture()?,
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
            "config": process,
        }))
    }
}

/// Returns this machine's architecture, as images name it.
fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("there are no images for {other}"),
    }
}

fn write_layer(layer: &Path, files: &Files) -> Result<()> {
    let file = File::create(layer).with_context(|| format!("creating {}", layer.display()))?;
    let mut tar = Builder::new(BufWriter::new(file));
    for (path, content) in &files.0 {
        match content {
            Content::Folder { mode } => {
                let mut header = header(EntryType::Directory, *mode, 0);
                tar.append_data(&mut header, path, io::empty())
            }
            Content::Text(text) => {
                let mut header = header(EntryType::Regular, 0o644, u64::try_from(text.len())?);
                tar.append_data(&mut header, path, text.as_bytes())
            }
            Content::Link(target) => tar.append_link(&mut header(EntryType::Symlink, 0o777, 0), path, target),
            Content::Copy { from, size, .. } => {
                let file = File::open(from).with_context(|| format!("opening {}", from.display()))?;
                tar.append_data(&mut header(EntryType::Regular, 0o755, *size), path, file)
            }
        }
        .with_context(|| format!("writing {path}"))?;
    }
    tar.into_inner().context("writing the layer")?.flush().context("writing the layer")
}

fn append(tar: &mut Builder<impl io::Write>, path: &str, content: &[u8]) -> Result<()> {
    let mut header = header(EntryType::Regular, 0o644, u64::try_from(content.len())?);
    tar.append_data(&mut header, path, content).with_context(|| format!("writing {path}"))
}

/// Makes a header without a time and an owner, so that the same files are the same layer.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn digest_of(file: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut content = File::open(file).with_context(|| format!("opening {}", file.display()))?;
    io::copy(&mut content, &mut hash).with_context(|| format!("reading {}", file.display()))?;
    Ok(hexadecimal(&hash.finalize()))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn images_share_a_layer_and_name_it_by_its_hash() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("program");
        fs::write(&source, "#!/bin/sh\n").unwrap();
        let files = Files(BTreeMap::from([
            ("etc/".to_owned(), Content::Folder { mode: 0o755 }),
            ("etc/name".to_owned(), Content::Text("x\n")),
            ("run".to_owned(), Content::Copy { from: source, size: 10, changed: 0 }),
        ]));
        let image = |name, arguments| Image { name, layer: "tools", entry_point: &["/run"], arguments };
        let archive = folder.path().join("images.tar");
        write(&archive, &[("tools", &files)], &[image("a:1", &[]), image("b:1", &["x"])]).unwrap();
        let mut contents = BTreeMap::new();
        for entry in tar::Archive::new(File::open(&archive).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            contents.insert(entry.path().unwrap().display().to_string(), content);
        }
        let manifest: Value = serde_json::from_slice(&contents["manifest.json"]).unwrap();
        assert_eq!(manifest[0]["Layers"], manifest[1]["Layers"]);
        assert_ne!(manifest[0]["Config"], manifest[1]["Config"]);
        let layer = &contents[manifest[0]["Layers"][0].as_str().unwrap()];
        let configuration: Value =
            serde_json::from_slice(&contents[manifest[1]["Config"].as_str().unwrap()]).unwrap();
        let digest = format!("sha256:{}", hexadecimal(&Sha256::digest(layer)));
        assert_eq!(configuration["rootfs"]["diff_ids"][0], digest);
        assert_eq!(configuration["config"]["Cmd"], json!(["x"]));
    }
}
