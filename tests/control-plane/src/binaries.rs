//! Finds kube-apiserver, kube-proxy and etcd. They are looked for in this order:
//!
//! 1. `KUBEBUILDER_ASSETS`, a folder that people who test controllers have;
//! 2. what an earlier run built, in the cache folder;
//! 3. PATH, if an etcd there is new enough;
//! 4. the Go module in `tests/kubernetes`, from which they are built once, in some minutes, with
//!    progress on stderr.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::go::{self, Module};

/// Program of the control plane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    Etcd,
    KubeApiServer,
    KubeProxy,
    /// Prints the feature gates of kube-proxy.
    FeatureGates,
}

impl Program {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiServer => "kube-apiserver",
            Self::KubeProxy => "kube-proxy",
            Self::FeatureGates => "feature-gates",
        }
    }

    /// Finds the program, or builds it. The error says what is missing, and where it was looked
    /// for.
    pub fn path(self) -> Result<PathBuf> {
        if self.installed().is_none() {
            build(&[self])?;
        }
        self.installed().with_context(|| format!("{} is not there after it was built", self.name()))
    }

    /// Returns the program if nothing has to be built for it.
    pub fn installed(self) -> Option<PathBuf> {
        let given = env::var_os("KUBEBUILDER_ASSETS").map(|folder| Path::new(&folder).join(self.name()));
        given
            .filter(|file| go::is_executable(file))
            .or_else(|| module().built(self.name()))
            .or_else(|| go::on_path(self.name()).filter(|file| self != Self::Etcd || streams_lists(file)))
    }

    /// Returns why the program is not here and cannot be built, if so. It does not say whether a
    /// build would fail.
    pub fn absent(self) -> Option<String> {
        let error = self.installed().map_or_else(go::find_go, Ok).err()?;
        Some(format!("{} is neither in KUBEBUILDER_ASSETS nor on PATH: {error}", self.name()))
    }

    /// Finds or builds the program. The inner error is the reason why there is none, for callers
    /// that can do without it. The outer error is that of a build that has failed.
    pub fn here(self) -> Result<Result<PathBuf, String>> {
        match self.absent() {
            Some(reason) => Ok(Err(reason)),
            None => self.path().map(Ok),
        }
    }

    const fn package(self) -> &'static str {
        match self {
            Self::Etcd => "./cmd/etcd",
            Self::KubeApiServer => "./cmd/kube-apiserver",
            Self::KubeProxy => "./cmd/kube-proxy",
            Self::FeatureGates => "./cmd/feature-gates",
        }
    }
}

/// Builds the programs that are missing. Returns the reason if there is no Go to build them with.
/// It must be called before a network namespace is entered, from which nothing can be downloaded.
pub fn provide(programs: &[Program]) -> Result<Option<String>> {
    if let Some(reason) = programs.iter().find_map(|program| program.absent()) {
        return Ok(Some(reason));
    }
    let missing: Vec<Program> =
        programs.iter().copied().filter(|program| program.installed().is_none()).collect();
    build(&missing).map(|()| None)
}

fn build(programs: &[Program]) -> Result<()> {
    if programs.is_empty() {
        return Ok(());
    }
    let module = module();
    let version = linker_flags(&module.required("k8s.io/kubernetes")?);
    let packages: Vec<&str> = programs.iter().map(|program| program.package()).collect();
    let names: Vec<&str> = programs.iter().map(|program| program.name()).collect();
    module.with_linker_flags(&version).build(&packages).with_context(|| {
        format!("neither in KUBEBUILDER_ASSETS nor on PATH, so to be built: {}", names.join(", "))
    })
}

/// Returns the Go module with the real programs.
pub fn module() -> Module {
    Module::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../kubernetes"), "kube")
}

/// Returns true if an API server can stream lists with this etcd. It refuses to do so with an older
/// one.
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

/// Returns the flags of Go's linker that tell a program its version. A Kubernetes program without
/// a version refuses to emulate one, and does not start.
pub fn linker_flags(version: &str) -> String {
    let mut numbers = version.trim_start_matches('v').split('.');
    let major = numbers.next().unwrap_or_default();
    let minor = numbers.next().unwrap_or_default();
    let prefix = "k8s.io/component-base/version";
    format!("-X {prefix}.gitVersion={version} -X {prefix}.gitMajor={major} -X {prefix}.gitMinor={minor}")
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
