//! Provides the object file of the kernel programs.
//!
//! `proxy-ebpf.o` in this folder is the stripped object, and `made-of.txt` beside it says which
//! sources and which tools made it. A build uses that file if the sources are still the same, so
//! that it needs neither LLVM nor bpf-linker. Otherwise the sources are compiled. `cargo xtask
//! object` writes both files anew, and the test of this package compares them with what the sources
//! compile to.
//!
//! Why a file in the repository: a release artifact exists for releases only and needs the network,
//! and a cache helps nobody on a new machine. A change of the kernel programs adds 120 kB to the
//! history, as git compresses it. The bytes can be compared because they depend neither on the
//! folder nor on the architecture of the machine that compiled them, see [`btf`].

pub mod btf;
pub mod committed;
pub mod compile;
pub mod sources;
pub mod strip;
pub mod toolchain;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    committed::Committed,
    compile::Toolchain,
    strip::{Lines, strip},
};

/// An object file that user space can load.
#[derive(Debug)]
pub struct Object {
    pub bytes: Vec<u8>,
    /// The tools that made it, for `proxy-ctl --version`, or `prebuilt object`.
    pub built_with: String,
}

/// The environment variable that names a built object, which is used whatever its sources are.
pub const PREBUILT: &str = "PROXY_EBPF_OBJECT";
/// The environment variable that keeps the lines of the source in the object. The kernel's log then
/// shows them if it refuses a program. The sources are always compiled for this.
pub const KEEP_LINES: &str = "PROXY_EBPF_LINES";

/// The folder of this workspace.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map_or_else(PathBuf::new, Path::to_owned)
}

/// Returns the object that a build embeds. In this order: the one that [`PREBUILT`] names, the
/// committed one if it is of these sources, and what these sources compile to.
///
/// `built` is any path below cargo's target folder, where compiled objects are kept.
pub fn provide(built: &Path) -> Result<Object> {
    let lines = if env::var_os(KEEP_LINES).is_some() { Lines::Keep } else { Lines::Remove };
    if let Some(path) = env::var_os(PREBUILT) {
        let path = PathBuf::from(path);
        let bytes = fs::read(&path).with_context(|| format!("{PREBUILT}: reading {}", path.display()))?;
        let bytes = strip(&bytes, lines).with_context(|| format!("{PREBUILT}={}", path.display()))?;
        return Ok(Object { bytes, built_with: "prebuilt object".to_owned() });
    }
    let workspace = workspace();
    let sources = sources::hash(&workspace)?;
    if lines == Lines::Remove
        && let Some(committed) = Committed::read(&workspace)?
        && committed.made_of.sources == sources
    {
        return Ok(Object { bytes: committed.bytes, built_with: committed.made_of.tools.describe() });
    }
    let Some(toolchain) = Toolchain::find() else {
        bail!(
            "the kernel programs must be compiled, as {} is not made of these sources or {KEEP_LINES} is set, \
             and what compiles them is missing: run `cargo xtask setup`, or set {PREBUILT} to a built object",
            committed::OBJECT
        );
    };
    let built_with = toolchain.tools()?.describe();
    Ok(Object { bytes: strip(&toolchain.compile(&workspace, built)?, lines)?, built_with })
}
