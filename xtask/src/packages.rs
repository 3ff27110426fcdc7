//! Unpacks Debian's packages into a folder. None of them is installed, and the machine's own apt is
//! left alone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::command::{find, output, run as execute};

/// An apt with sources of our own.
pub struct PrivateApt {
    folder: PathBuf,
    /// The name that Debian gives the architecture.
    architecture: &'static str,
}

impl PrivateApt {
    /// Creates an apt in a folder. `suites` are those of Debian's archive, such as `bookworm` and
    /// `bookworm-security`.
    pub fn create(folder: &Path, architecture: &'static str, suites: &[&str]) -> Result<Self> {
        if find("apt-get").is_none() {
            bail!("this needs Debian's packages, and there is no apt-get here");
        }
        for part in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::write(folder.join("sources.list"), suites.iter().map(|suite| source(suite)).collect::<String>())?;
        fs::write(folder.join("status"), "")?;
        let at = folder.display();
        fs::write(
            folder.join("apt.conf"),
            format!(
                "Dir::Etc::SourceList \"{at}/sources.list\";\nDir::Etc::SourceParts \"/dev/null\";\n\
                 Dir::State \"{at}/state\";\nDir::State::status \"{at}/status\";\nDir::Cache \"{at}/cache\";\n\
                 APT::Sandbox::User \"root\";\nAPT::Architecture \"{architecture}\";\n\
                 APT::Architectures {{ \"{architecture}\"; }};\n"
            ),
        )?;
        let apt = Self { folder: folder.to_owned(), architecture };
        execute(apt.command("apt-get").args(["-q", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("-c").arg(self.folder.join("apt.conf"));
        command
    }

    /// Returns the newest package `<prefix>…-<architecture>`, by the numbers in its name.
    pub fn newest(&self, prefix: &str) -> Result<String> {
        let names = output(self.command("apt-cache").args(["pkgnames", prefix]))?;
        let architecture = self.architecture;
        names
            .lines()
            .filter(|name| is_plain(name.strip_prefix(prefix).unwrap_or_default(), architecture))
            .max_by_key(|name| numbers(name))
            .map(str::to_owned)
            .ok_or_else(|| {
                anyhow!("no package {prefix}…-{architecture}; the names change, see xtask/src/vm/mod.rs")
            })
    }

    /// Downloads one package to a folder that keeps it, and unpacks it. Returns its file.
    pub fn unpack(&self, package: &str, downloads: &Path, target: &Path) -> Result<PathBuf> {
        fs::create_dir_all(downloads).with_context(|| format!("creating {}", downloads.display()))?;
        execute(self.command("apt-get").args(["-q", "download", package]).current_dir(downloads))?;
        let file = files(downloads)?
            .into_iter()
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&format!("{package}_")))
            })
            .ok_or_else(|| anyhow!("{package} was not downloaded"))?;
        execute(Command::new("dpkg").arg("-x").args([file.as_path(), target]))?;
        Ok(file)
    }

    /// Downloads these packages and what they depend on, and unpacks all of them.
    pub fn unpack_with_dependencies(&self, packages: &[&str], target: &Path) -> Result<()> {
        let flags = ["-q", "-y", "--no-install-recommends", "--download-only", "install"];
        execute(self.command("apt-get").args(flags).args(packages))?;
        for file in files(&self.folder.join("cache/archives"))? {
            if file.extension().is_some_and(|extension| extension == "deb") {
                execute(Command::new("dpkg").arg("-x").args([&file, target]))?;
            }
        }
        Ok(())
    }
}

fn source(suite: &str) -> String {
    let archive = if suite.contains("-security") { "debian-security" } else { "debian" };
    let key = "/usr/share/keyrings/debian-archive-keyring.gpg";
    format!("deb [signed-by={key}] http://deb.debian.org/{archive} {suite} main\n")
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let found = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    Ok(found.filter_map(|found| Some(found.ok()?.path())).collect())
}

/// Returns true for the usual flavour of a kernel. Cloud and real-time kernels do not boot here,
/// and release candidates have no plain number.
fn is_plain(rest: &str, architecture: &str) -> bool {
    rest.strip_suffix(architecture).is_some_and(|version| {
        !["cloud", "rt", "dbg", "unsigned", "rc", "16k"].iter().any(|flavour| version.contains(flavour))
    })
}

fn numbers(name: &str) -> Vec<u64> {
    name.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::{is_plain, numbers};

    #[test]
    fn newer_is_by_number_and_flavours_are_left_out() {
        assert!(numbers("linux-image-5.10.0-9-amd64") < numbers("linux-image-5.10.0-32-amd64"));
        assert!(is_plain("32-amd64", "amd64") && is_plain("117+deb12-arm64", "arm64"));
        for flavour in ["32-cloud-amd64", "32-amd64-dbg", "32-amd64-unsigned", "32-arm64", ""] {
            assert!(!is_plain(flavour, "amd64"), "{flavour}");
        }
        assert!(!is_plain("117+deb12-arm64-16k", "arm64") && !is_plain("117+deb12-rt-arm64", "arm64"));
    }
}
