//! The tools of iptables that mode iptables runs, in both backends, with the libraries that they
//! need. They are Debian's packages, because there are no static ones.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use xtask::{command::target, cross::Architecture, packages::PrivateApt};

use crate::{
    archive::{Content, File},
    components::{Component, read},
};

const SUITES: [&str; 2] = ["bookworm", "bookworm-security"];
const GPL: &str = "GPL-2.0-only AND GPL-2.0-or-later AND Artistic-1.0-Perl";

/// The packages, each with the terms under which it may be passed on. Their notices name the
/// authors of each file.
const PACKAGES: [(&str, &str); 7] = [
    ("iptables", GPL),
    ("libip4tc2", GPL),
    ("libip6tc2", GPL),
    ("libxtables12", GPL),
    ("libmnl0", "LGPL-2.1-or-later AND GPL-2.0-or-later"),
    ("libnftnl11", "GPL-2.0-only AND GPL-2.0-or-later"),
    ("libc6", "LGPL-2.1-or-later AND GPL-2.0-or-later"),
];
/// The package with the texts of the licences that the notices of other packages point to.
const LICENSES: &str = "base-files";
const LICENSE_TEXTS: [&str; 3] = ["GPL-2", "LGPL-2.1", "Artistic"];

const TOOLS: [&str; 2] = ["legacy", "nft"];

pub(super) struct Tools {
    architecture: Architecture,
    /// The folder that the packages are unpacked into.
    folder: PathBuf,
    /// The files of the packages, in the order of [`PACKAGES`].
    downloads: Vec<PathBuf>,
}

impl Tools {
    pub(super) fn fetch(architecture: Architecture) -> Result<Self> {
        let base = target().join("image").join(format!("iptables-{}", architecture.name()));
        let (folder, downloaded) = (base.join("root"), base.join("packages"));
        for stale in [&folder, &downloaded] {
            if stale.exists() {
                fs::remove_dir_all(stale).with_context(|| format!("removing {}", stale.display()))?;
            }
        }
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        // Debian names architectures as container images do.
        let apt = PrivateApt::create(&base.join("apt"), architecture.name(), &SUITES)?;
        let names = PACKAGES.iter().map(|(name, _)| *name);
        let downloads = names.map(|name| apt.unpack(name, &downloaded, &folder)).collect::<Result<_>>()?;
        apt.unpack(LICENSES, &downloaded, &folder)?;
        Ok(Self { architecture, folder, downloads })
    }

    /// Returns the name that Debian gives folders of libraries.
    const fn triplet(&self) -> &'static str {
        match self.architecture {
            Architecture::Amd64 => "x86_64-linux-gnu",
            Architecture::Arm64 => "aarch64-linux-gnu",
        }
    }

    pub(super) fn files(&self) -> Result<Vec<File>> {
        let triplet = self.triplet();
        let mut paths = vec![match self.architecture {
            Architecture::Amd64 => "lib64/ld-linux-x86-64.so.2".to_owned(),
            Architecture::Arm64 => "lib/ld-linux-aarch64.so.1".to_owned(),
        }];
        for backend in TOOLS {
            paths.push(format!("usr/sbin/xtables-{backend}-multi"));
            for (program, suffix) in ["iptables", "ip6tables"]
                .iter()
                .flat_map(|program| ["", "-save", "-restore"].map(|end| (program, end)))
            {
                paths.push(format!("usr/sbin/{program}-{backend}{suffix}"));
            }
        }
        for name in ["libc.so.6", "libm.so.6", "ld-linux"] {
            paths.extend(self.names(&format!("lib/{triplet}"), name)?);
        }
        for name in ["libip4tc.so", "libip6tc.so", "libxtables.so", "libmnl.so", "libnftnl.so"] {
            paths.extend(self.names(&format!("usr/lib/{triplet}"), name)?);
        }
        // The folder has matches and targets.
        paths.extend(self.names(&format!("usr/lib/{triplet}/xtables"), "lib")?);
        paths.sort();
        paths.dedup();
        paths.into_iter().map(|path| self.file(path)).collect()
    }

    /// Returns the files of a folder whose names begin with `begin`.
    fn names(&self, folder: &str, begin: &str) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let at = self.folder.join(folder);
        for found in fs::read_dir(&at).with_context(|| format!("reading {}", at.display()))? {
            let name = found?.file_name().to_string_lossy().into_owned();
            if name.starts_with(begin) {
                names.push(format!("{folder}/{name}"));
            }
        }
        Ok(names)
    }

    fn file(&self, path: String) -> Result<File> {
        let at = self.folder.join(&path);
        let found =
            fs::symlink_metadata(&at).with_context(|| format!("iptables for the image: {}", at.display()))?;
        let content = if found.is_symlink() {
            let to = fs::read_link(&at).with_context(|| format!("reading {}", at.display()))?;
            Content::Link(to.to_string_lossy().into_owned())
        } else {
            let bytes = fs::read(&at).with_context(|| format!("reading {}", at.display()))?;
            let is_program = found.permissions().mode() & 0o111 != 0;
            if is_program { Content::Program(bytes) } else { Content::Plain(bytes) }
        };
        Ok(File { path, content })
    }

    pub(super) fn components(&self) -> Result<Vec<Component>> {
        let texts = LICENSE_TEXTS.map(|name| read(&self.folder.join("usr/share/common-licenses").join(name)));
        let texts = texts.into_iter().collect::<Result<Vec<_>>>()?;
        let component = |((name, license), file): (&(&str, &str), &PathBuf)| {
            let notice = read(&self.folder.join("usr/share/doc").join(name).join("copyright"))?;
            Ok(Component {
                name: (*name).to_owned(),
                version: version(file)?,
                license: (*license).to_owned(),
                kind: "deb/debian",
                qualifiers: format!("?arch={}&distro={}", self.architecture.name(), SUITES[0]),
                sha256: None,
                notices: std::iter::once(notice).chain(texts.iter().cloned()).collect(),
            })
        };
        PACKAGES.iter().zip(&self.downloads).map(component).collect()
    }
}

/// Returns the version in a name such as `iptables_1.8.9-2_amd64.deb`.
fn version(file: &Path) -> Result<String> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let Some(version) = name.split('_').nth(1) else { bail!("{name} has no version") };
    Ok(version.replace("%3a", ":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_in_names_of_files() {
        assert_eq!(version(Path::new("/x/iptables_1.8.9-2_amd64.deb")).unwrap(), "1.8.9-2");
        assert_eq!(version(Path::new("libc6_1%3a2.36_amd64.deb")).unwrap(), "1:2.36");
        assert!(version(Path::new("iptables.deb")).is_err());
    }
}
