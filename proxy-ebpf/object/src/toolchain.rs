//! What can compile Rust for BPF here, for the build script and for `cargo xtask setup`.

use std::{env, path::PathBuf, process::Command};

/// aya-ebpf 0.2.1 compiles with this one; much newer ones refuse it.
pub const NIGHTLY: &str = "nightly-2026-05-15";
pub const TARGET: &str = "bpfel-unknown-none";

/// A rustc outside rustup whose sysroot has a core library for BPF.
pub fn prebuilt_compiler() -> Option<PathBuf> {
    ["/usr/bin/rustc", "/usr/local/bin/rustc"].into_iter().map(PathBuf::from).find(|rustc| {
        sysroot(&mut Command::new(rustc))
            .is_some_and(|sysroot| sysroot.join("lib/rustlib").join(TARGET).is_dir())
    })
}

/// Whether rustup's nightly is there, with rust-src.
pub fn nightly_has_source() -> bool {
    sysroot(Command::new("rustup").args(["run", NIGHTLY, "rustc"]))
        .is_some_and(|sysroot| sysroot.join("lib/rustlib/src/rust/library/core").is_dir())
}

/// Cargo's own folder, with what `cargo install` has built.
pub fn cargo_home() -> Option<PathBuf> {
    env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")))
}

fn sysroot(rustc: &mut Command) -> Option<PathBuf> {
    let output = rustc.args(["--print", "sysroot"]).env_remove("RUSTUP_TOOLCHAIN").output().ok()?;
    let sysroot = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(sysroot.trim()))
}
