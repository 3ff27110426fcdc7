//! The archive: an OCI image layout in a tar file, with the index that `docker load` reads beside
//! it.
//!
//! The same image gives the same bytes. Files are in order, and nothing in the archive tells when
//! or where it was written.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
};

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

const BINARY: &str = "usr/local/bin/proxy-ctl";
/// The name by which the same binary is kube-proxy.
const KUBE_PROXY: &str = "usr/local/bin/kube-proxy";
const DOCUMENTS: &str = "usr/share/doc/proxy-ctl/";

/// An image with one program in it, for each architecture.
pub(super) struct Image<'a> {
    /// The name, with registry and tag.
    pub(super) name: &'a str,
    /// The creation of the image, in seconds since the epoch.
    pub(super) created: i64,
    pub(super) labels: BTreeMap<&'static str, String>,
    pub(super) programs: &'a [Program],
    /// The documents that accompany the program, by name of file.
    pub(super) documents: &'a [(&'static str, Vec<u8>)],
}

pub(super) struct Program {
    /// The name that container images use, such as `amd64`.
    pub(super) architecture: &'static str,
    pub(super) binary: Vec<u8>,
    /// The other files that the program runs, in the order of their paths. None is in a folder of
    /// the program's.
    pub(super) files: Vec<File>,
}

/// A file below the root of the image.
pub(super) struct File {
    /// The path, without a leading slash.
    pub(super) path: String,
    pub(super) content: Content,
}

pub(super) enum Content {
    Program(Vec<u8>),
    Plain(Vec<u8>),
    /// A link to another file of its folder, or to a path from the root.
    Link(String),
}

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// A file of the layout, by the hash of its content.
struct Blob {
    media_type: &'static str,
    content: Vec<u8>,
    digest: String,
}

impl Blob {
    fn new(media_type: &'static str, content: Vec<u8>) -> Self {
        let digest = sha256(&content);
        Self { media_type, content, digest }
    }

    fn json(media_type: &'static str, content: &Value) -> Result<Self> {
        Ok(Self::new(media_type, serde_json::to_vec(content)?))
    }

    fn path(&self) -> String {
        format!("blobs/sha256/{}", self.digest)
    }

    fn descriptor(&self) -> Value {
        json!({
            "mediaType": self.media_type,
            "digest": format!("sha256:{}", self.digest),
            "size": self.content.len(),
        })
    }
}

fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Image<'_> {
    /// Writes the archive and returns the image's digest. It is that of the manifest, or with
    /// several architectures that of the list of manifests.
    pub(super) fn write(&self, archive: impl Write) -> Result<String> {
        let mut blobs = Vec::new();
        let mut manifests = Vec::new();
        let mut docker = Vec::new();
        for program in self.programs {
            let files = self.files(program)?;
            let layer = Blob::new("application/vnd.oci.image.layer.v1.tar+gzip", compressed(&files)?);
            let config = self.config(program.architecture, &files)?;
            let config = Blob::json("application/vnd.oci.image.config.v1+json", &config)?;
            let manifest = Blob::json(
                "application/vnd.oci.image.manifest.v1+json",
                &json!({
                    "schemaVersion": 2,
                    "mediaType": "application/vnd.oci.image.manifest.v1+json",
                    "config": config.descriptor(),
                    "layers": [layer.descriptor()],
                }),
            )?;
            let mut entry = manifest.descriptor();
            entry["platform"] = json!({"os": "linux", "architecture": program.architecture});
            manifests.push(entry);
            docker.push(json!({"Config": config.path(), "RepoTags": [self.name], "Layers": [layer.path()]}));
            blobs.extend([layer, config, manifest]);
        }
        let mut top = match <[Value; 1]>::try_from(manifests) {
            Ok([manifest]) => manifest,
            Err(manifests) => {
                let list = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
                let list = Blob::json(INDEX, &list)?;
                let entry = list.descriptor();
                blobs.push(list);
                entry
            }
        };
        top["annotations"] = json!({
            "org.opencontainers.image.ref.name": self.name,
            "io.containerd.image.name": self.name,
        });
        let digest = top["digest"].as_str().context("a descriptor without a digest")?.to_owned();
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [top]});
        let mut contents = BTreeMap::from([
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".to_owned(), serde_json::to_vec(&index)?),
        ]);
        // This older form has only one architecture.
        if let [_] = self.programs {
            contents.insert("manifest.json".to_owned(), serde_json::to_vec(&docker)?);
        }
        contents.extend(blobs.into_iter().map(|blob| (blob.path(), blob.content)));
        let mut tar = Builder::new(archive);
        for folder in ["blobs/", "blobs/sha256/"] {
            self.append(&mut tar, EntryType::Directory, folder, 0o755, &[])?;
        }
        for (path, content) in &contents {
            self.append(&mut tar, EntryType::Regular, path, 0o644, content)?;
        }
        tar.into_inner().context("writing the archive")?.flush().context("writing the archive")?;
        Ok(digest)
    }

    /// Returns the root file system, as a tar file. The container runtime creates what it mounts
    /// on.
    fn files(&self, program: &Program) -> Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        let mut folders = BTreeSet::from(["usr/", "usr/local/", "usr/local/bin/"]);
        for File { path, .. } in &program.files {
            folders.extend(path.match_indices('/').map(|(at, _)| &path[..=at]));
        }
        for folder in folders {
            self.append(&mut tar, EntryType::Directory, folder, 0o755, &[])?;
        }
        for File { path, content } in &program.files {
            match content {
                Content::Program(bytes) => self.append(&mut tar, EntryType::Regular, path, 0o755, bytes)?,
                Content::Plain(bytes) => self.append(&mut tar, EntryType::Regular, path, 0o644, bytes)?,
                Content::Link(target) => {
                    let mut link = self.header(EntryType::Symlink, 0o777, 0)?;
                    tar.append_link(&mut link, path, target).with_context(|| format!("writing {path}"))?;
                }
            }
        }
        let mut link = self.header(EntryType::Symlink, 0o777, 0)?;
        tar.append_link(&mut link, KUBE_PROXY, "proxy-ctl")?;
        self.append(&mut tar, EntryType::Regular, BINARY, 0o755, &program.binary)?;
        for folder in ["usr/share/", "usr/share/doc/", DOCUMENTS] {
            self.append(&mut tar, EntryType::Directory, folder, 0o755, &[])?;
        }
        for (name, text) in self.documents {
            self.append(&mut tar, EntryType::Regular, &format!("{DOCUMENTS}{name}"), 0o644, text)?;
        }
        tar.into_inner().context("writing the layer")
    }

    fn header(&self, kind: EntryType, mode: u32, size: usize) -> Result<Header> {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(u64::try_from(self.created).context("an image made before 1970")?);
        header.set_size(u64::try_from(size)?);
        Ok(header)
    }

    fn append(
        &self,
        tar: &mut Builder<impl Write>,
        kind: EntryType,
        path: &str,
        mode: u32,
        content: &[u8],
    ) -> Result<()> {
        let mut header = self.header(kind, mode, content.len())?;
        tar.append_data(&mut header, path, content).with_context(|| format!("writing {path}"))
    }

    /// Returns the configuration of an image. `files` is the layer before compression.
    fn config(&self, architecture: &str, files: &[u8]) -> Result<Value> {
        let created = jiff::Timestamp::from_second(self.created).context("when the image was made")?;
        let created = created.to_string();
        Ok(json!({
            "created": created,
            "architecture": architecture,
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/bin:/usr/sbin"],
                "Entrypoint": ["/usr/local/bin/proxy-ctl"],
                "WorkingDir": "/",
                "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", sha256(files))]},
            "history": [{"created": created, "created_by": "cargo xtask image"}],
        }))
    }
}

fn compressed(content: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().write(Vec::new(), Compression::best());
    gzip.write_all(content).context("compressing the layer")?;
    gzip.finish().context("compressing the layer")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn tools() -> Vec<File> {
        vec![
            File { path: "lib/libxtables.so".to_owned(), content: Content::Plain(b"library".to_vec()) },
            File { path: "usr/sbin/iptables".to_owned(), content: Content::Link("xtables-multi".to_owned()) },
            File { path: "usr/sbin/xtables-multi".to_owned(), content: Content::Program(b"tool".to_vec()) },
        ]
    }

    fn written(programs: &[(&'static str, &[u8])]) -> Vec<u8> {
        let programs: Vec<_> = programs
            .iter()
            .map(|(architecture, binary)| Program { architecture, binary: binary.to_vec(), files: tools() })
            .collect();
        let labels = BTreeMap::from([("org.opencontainers.image.title", "proxy-ctl".to_owned())]);
        let name = "localhost/proxy-ctl:1";
        let documents = &[("NOTICES", b"notices".to_vec())];
        let mut archive = Vec::new();
        let image = Image { name, created: 1_700_000_000, labels, programs: &programs, documents };
        image.write(&mut archive).unwrap();
        archive
    }

    /// Returns path, mode and content of each file. For a link, the content is where it leads.
    fn entries(archive: impl Read) -> Vec<(String, u32, Vec<u8>)> {
        let read = |entry: std::io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            let link = entry.link_name().unwrap().map(|link| link.display().to_string());
            let path = entry.path().unwrap().display().to_string();
            (path, entry.header().mode().unwrap(), link.map_or(content, String::into_bytes))
        };
        tar::Archive::new(archive).entries().unwrap().map(read).collect()
    }

    fn contents(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        entries(archive).into_iter().map(|(path, _, content)| (path, content)).collect()
    }

    /// Returns what a descriptor points to, after a check of its size and hash.
    fn blob<'a>(contents: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> &'a [u8] {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let content = &contents[&format!("blobs/sha256/{digest}")];
        assert_eq!(sha256(content), digest);
        assert_eq!(descriptor["size"], content.len());
        content
    }

    #[test]
    fn the_same_image_gives_the_same_bytes_and_another_binary_does_not() {
        assert_eq!(written(&[("amd64", b"program")]), written(&[("amd64", b"program")]));
        assert_ne!(written(&[("amd64", b"program")]), written(&[("amd64", b"another")]));
    }

    fn json(content: &[u8]) -> Value {
        serde_json::from_slice(content).unwrap()
    }

    /// Checks the whole image of a program, found from its entry in an index.
    fn check_image(contents: &BTreeMap<String, Vec<u8>>, entry: &Value, architecture: &str, program: &[u8]) {
        assert_eq!(entry["platform"], json!({"os": "linux", "architecture": architecture}));
        let manifest = json(blob(contents, entry));
        let config = json(blob(contents, &manifest["config"]));
        assert_eq!((&config["os"], &config["architecture"]), (&"linux".into(), &architecture.into()));
        assert_eq!(config["created"], "2023-11-14T22:13:20Z");
        assert_eq!(config["config"]["Entrypoint"], json!(["/usr/local/bin/proxy-ctl"]));

        let mut layer = Vec::new();
        flate2::read::GzDecoder::new(blob(contents, &manifest["layers"][0])).read_to_end(&mut layer).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], json!([format!("sha256:{}", sha256(&layer))]));
        let expected: [(&str, u32, &[u8]); 14] = [
            ("lib/", 0o755, b""),
            ("usr/", 0o755, b""),
            ("usr/local/", 0o755, b""),
            ("usr/local/bin/", 0o755, b""),
            ("usr/sbin/", 0o755, b""),
            ("lib/libxtables.so", 0o644, b"library"),
            ("usr/sbin/iptables", 0o777, b"xtables-multi"),
            ("usr/sbin/xtables-multi", 0o755, b"tool"),
            (KUBE_PROXY, 0o777, b"proxy-ctl"),
            (BINARY, 0o755, program),
            ("usr/share/", 0o755, b""),
            ("usr/share/doc/", 0o755, b""),
            (DOCUMENTS, 0o755, b""),
            ("usr/share/doc/proxy-ctl/NOTICES", 0o644, b"notices"),
        ];
        assert_eq!(
            entries(&layer[..]),
            expected.map(|(path, mode, content)| (path.to_owned(), mode, content.to_vec()))
        );
    }

    #[test]
    fn an_image_for_one_architecture_is_found_by_its_hashes() {
        let contents = contents(&written(&[("amd64", b"program")]));
        let entry = &json(&contents["index.json"])["manifests"][0];
        assert_eq!(entry["annotations"]["io.containerd.image.name"], "localhost/proxy-ctl:1");
        check_image(&contents, entry, "amd64", b"program");

        let docker = json(&contents["manifest.json"]);
        assert!(contents.contains_key(docker[0]["Layers"][0].as_str().unwrap()));
        assert!(contents.contains_key(docker[0]["Config"].as_str().unwrap()));
    }

    #[test]
    fn images_for_several_architectures_are_under_one_name() {
        let programs: [(&str, &[u8]); 2] = [("amd64", b"program"), ("arm64", b"another")];
        let contents = contents(&written(&programs));
        let index = json(&contents["index.json"]);
        let [top] = &index["manifests"].as_array().unwrap()[..] else { panic!("{index}") };
        assert_eq!(top["mediaType"], INDEX);
        assert_eq!(top["annotations"]["io.containerd.image.name"], "localhost/proxy-ctl:1");
        let list = json(blob(&contents, top));
        assert_eq!(list["manifests"].as_array().unwrap().len(), 2);
        for (entry, (architecture, program)) in list["manifests"].as_array().unwrap().iter().zip(programs) {
            check_image(&contents, entry, architecture, program);
        }
        assert!(!contents.contains_key("manifest.json"));
    }
}
