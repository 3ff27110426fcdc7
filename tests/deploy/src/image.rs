//! An image from its archive, as a container runtime gets it.

use std::{collections::BTreeMap, fs::File, io::Read as _, path::Path};

use anyhow::{Context as _, Result, bail, ensure};
use flate2::read::GzDecoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// OCI image layout in a tar file, with one image in it.
pub struct Archive {
    files: BTreeMap<String, Vec<u8>>,
    /// Name of the image where it is loaded.
    pub name: String,
    /// Configuration of the image.
    pub config: Value,
    manifest: Value,
}

impl Archive {
    /// Opens an archive, and checks all its content against the hashes.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(file).entries().context("reading the archive")? {
            let mut entry = entry.context("reading the archive")?;
            let mut content = Vec::new();
            entry.read_to_end(&mut content).context("reading the archive")?;
            files.insert(entry.path()?.display().to_string(), content);
        }
        let index: Value = serde_json::from_slice(files.get("index.json").context("no index.json")?)?;
        let mut manifest: Value = serde_json::from_slice(blob(&files, &index["manifests"][0])?)?;
        if let Some(list) = manifest["manifests"].as_array() {
            let own = platform()?;
            let own = list.iter().find(|entry| entry["platform"] == own);
            manifest = serde_json::from_slice(blob(&files, own.context("not for this machine")?)?)?;
        }
        let config = serde_json::from_slice(blob(&files, &manifest["config"])?)?;
        let name = index["manifests"][0]["annotations"]["io.containerd.image.name"].as_str();
        let name = name.context("the image has no name")?.to_owned();
        Ok(Self { files, name, config, manifest })
    }

    /// Writes the root file system to `folder`.
    pub fn unpack(&self, folder: &Path) -> Result<()> {
        for layer in self.manifest["layers"].as_array().context("layers")? {
            let layer = GzDecoder::new(blob(&self.files, layer)?);
            tar::Archive::new(layer).unpack(folder).context("unpacking a layer")?;
        }
        Ok(())
    }
}

/// Returns the platform of this machine, as an index writes it.
fn platform() -> Result<Value> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("there are no images for {other}"),
    };
    Ok(json!({"os": "linux", "architecture": architecture}))
}

fn blob<'a>(files: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Result<&'a [u8]> {
    let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:"));
    let digest = digest.with_context(|| format!("no digest: {descriptor}"))?;
    let content =
        files.get(&format!("blobs/sha256/{digest}")).with_context(|| format!("no blob {digest}"))?;
    let found: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(found == digest && descriptor["size"] == content.len(), "blob {digest} is another: {found}");
    Ok(content)
}
