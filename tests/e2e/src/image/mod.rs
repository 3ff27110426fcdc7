//! Images that the tests name. One layer has agnhost and the programs that tests call in
//! containers, taken from this machine with their libraries. The other layer has the program that
//! holds a pod's namespaces.

mod archive;
mod files;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use crate::programs::{self, Program};
use archive::Image;
use files::Files;
pub use files::missing_tool;

pub(crate) const PAUSE: &str = "registry.k8s.io/pause:3.10.2";

/// Returns the archive with all images. It is made anew if its programs differ from those of the
/// last one.
pub fn provide() -> Result<PathBuf> {
    let tools = Files::of_tools()?;
    let pause = Files::of_pause()?;
    let folder = Program::Agnhost.path()?;
    let folder = folder.parent().context("agnhost is in no folder")?;
    let hash: String = Sha256::digest(format!("{tools:?}{pause:?}{:?}", images()).as_bytes())
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let name = format!("images-{hash}.tar");
    let file = folder.join(&name);
    if file.exists() {
        return Ok(file);
    }
    eprintln!("making the images of the tests");
    // The archive is moved when it is complete, so it is never there in part.
    let partial = folder.join(format!("images-{}.partial", std::process::id()));
    archive::write(&partial, &[(TOOLS, &tools), (HOLDER, &pause)], &images())?;
    fs::rename(&partial, &file).with_context(|| format!("writing {}", file.display()))?;
    remove_others(&file)?;
    Ok(file)
}

/// Removes the archives that this one replaces.
fn remove_others(file: &std::path::Path) -> Result<()> {
    let folder = file.parent().context("an archive in no folder")?;
    for found in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = found.with_context(|| format!("reading {}", folder.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path != file && name.starts_with("images-") && name.ends_with(".tar") {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

/// Names of layers.
const TOOLS: &str = "tools";
const HOLDER: &str = "holder";

/// Returns the images of `test/utils/image/manifest.go` that tests of sig-network use, and the
/// first process of pods.
fn images() -> Vec<Image> {
    let image = |name: &'static str, entry_point: &'static [&'static str], arguments| Image {
        name,
        layer: TOOLS,
        entry_point,
        arguments,
    };
    const WEB_SERVER: &[&str] = &["/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/www"];
    vec![
        image("registry.k8s.io/e2e-test-images/agnhost:2.63.0", &["/agnhost"], &["pause"]),
        image("registry.k8s.io/e2e-test-images/agnhost:2.55", &["/agnhost"], &["pause"]),
        image("registry.k8s.io/e2e-test-images/busybox:1.37.0-1", &[], &["sh"]),
        image("registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0", &[], &["sh"]),
        image("registry.k8s.io/e2e-test-images/nginx:1.15-4", &[], WEB_SERVER),
        image("registry.k8s.io/e2e-test-images/nginx:1.27-0", &[], WEB_SERVER),
        image(
            "registry.k8s.io/e2e-test-images/regression-issue-74839:1.4",
            &["/regression-issue-74839"],
            &[],
        ),
        image("registry.k8s.io/build-image/distroless-iptables:v0.9.1", &[], &["sh"]),
        Image { name: PAUSE, layer: HOLDER, entry_point: &["/pause"], arguments: &[] },
    ]
}
