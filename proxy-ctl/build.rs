//! Leaves the object of the kernel programs where `dataplane::ebpf` embeds it; see the package
//! `kernel-object`.

use std::{env, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use kernel_object::{KEEP_LINES, PREBUILT, committed, provide, sources, workspace};

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<()> {
    for variable in [PREBUILT, KEEP_LINES] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if let Some(prebuilt) = env::var_os(PREBUILT) {
        println!("cargo:rerun-if-changed={}", PathBuf::from(prebuilt).display());
    }
    for name in sources::paths().chain([committed::OBJECT, committed::MADE_OF]) {
        println!("cargo:rerun-if-changed={}", workspace().join(name).display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("cargo did not set OUT_DIR")?);
    let object = provide(&out)?;
    println!("cargo:rustc-env=PROXY_EBPF_BUILT_WITH={}", object.built_with);
    let path = out.join("proxy-ebpf");
    fs::write(&path, &object.bytes).with_context(|| format!("writing {}", path.display()))
}
