//! Where kube-apiserver, kube-proxy and etcd come from.
//!
//! 1. `KUBEBUILDER_ASSETS`, a folder that people who test controllers have;
//! 2. what an earlier run built, in the cache folder;
//! 3. PATH, if an etcd there is new enough;
//! 4. built from the Go module in `tests/kubernetes`: once, some minutes, with progress on stderr.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::go::{self, Build, Module};

/// A program of the control plane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    Etcd,
    KubeApiServer,
    KubeProxy,
}

impl Program {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiServer => "kube-apiserver",
            Self::KubeProxy => "kube-proxy",
        }
    }

    /// Finds the program, or builds it. The error says what is missing and where it was looked for.
    pub fn path(self) -> Result<PathBuf> {
        match self.installed() {
            Some(found) => Ok(found),
            None => self.build(),
        }
    }

    /// The program, if nothing has to be built for it.
    pub fn installed(self) -> Option<PathBuf> {
        let given = env::var_os("KUBEBUILDER_ASSETS").map(|folder| Path::new(&folder).join(self.name()));
        given
            .filter(|file| go::is_executable(file))
            .or_else(|| module().built(self.name()))
            .or_else(|| go::on_path(self.name()).filter(|file| self != Self::Etcd || streams_lists(file)))
    }

    /// Why it is not here and cannot be built, if so. A build that fails is another matter.
    pub fn absent(self) -> Option<String> {
        let error = self.installed().map_or_else(go::find_go, Ok).err()?;
        Some(format!("{} is neither in KUBEBUILDER_ASSETS nor on PATH: {error}", self.name()))
    }

    fn build(self) -> Result<PathBuf> {
        let (module, program) = (module(), self.name());
        let linker_flags = linker_flags(&module.required("k8s.io/kubernetes")?);
        let package = format!("./cmd/{program}");
        module
            .build(&Build { program, package: &package, tags: "", linker_flags: &linker_flags })
            .with_context(|| format!("{program} is neither in KUBEBUILDER_ASSETS nor on PATH"))
    }
}

/// The Go module with the real programs.
pub fn module() -> Module {
    Module::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../kubernetes"), "kube")
}

/// Whether an API server can stream lists with this etcd: it refuses to with one that is older.
fn streams_lists(etcd: &Path) -> bool {
    let Ok(output) = Command::new(etcd).arg("--version").stdin(Stdio::null()).output() else { return false };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("etcd Version: ")).is_some_and(is_recent)
}

fn is_recent(version: &str) -> bool {
    let numbers: Vec<u32> = version.trim().split('.').map_while(|number| number.parse().ok()).collect();
    match numbers.as_slice() {
        [3, 4, patch, ..] => *patch >= 31,
        [3, 5, patch, ..] => *patch >= 13,
        numbers => numbers >= &[3, 6][..],
    }
}

/// A Kubernetes program without a version refuses to emulate one, and does not start.
fn linker_flags(version: &str) -> String {
    let mut numbers = version.trim_start_matches('v').split('.');
    let major = numbers.next().unwrap_or_default();
    let minor = numbers.next().unwrap_or_default();
    let prefix = "k8s.io/component-base/version";
    format!(
        "-s -w -X {prefix}.gitVersion={version} -X {prefix}.gitMajor={major} -X {prefix}.gitMinor={minor}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_go_mod_and_goes_into_the_program() {
        let version = module().required("k8s.io/kubernetes").unwrap();
        assert!(version.starts_with("v1."), "{version}");
        let flags = linker_flags("v1.36.1");
        for flag in ["gitVersion=v1.36.1", "gitMajor=1 ", "gitMinor=36"] {
            assert!(flags.contains(flag), "{flags}");
        }
    }

    #[test]
    fn an_old_etcd_is_not_used() {
        for (version, recent) in [
            ("3.4.23", false),
            ("3.4.31", true),
            ("3.5.12", false),
            ("3.5.13", true),
            ("3.6.8", true),
            ("4.0", true),
        ] {
            assert_eq!(is_recent(version), recent, "{version}");
        }
    }
}
