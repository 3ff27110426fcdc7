//! Builds the static binary, for this machine's architecture or the other one.
//!
//! Rust brings musl, its start files and a linker for each target. The binary also has a few C
//! files (the allocator, cryptography). Their C compilers come with Zig, which is one Python
//! package for every architecture.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::{
    cache,
    command::{cargo, run as execute, target, workspace},
    toolchain::cargo_home,
};

const ZIG: &str = "ziglang==0.15.2";

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, ValueEnum)]
pub enum Architecture {
    Amd64,
    Arm64,
}

impl Architecture {
    pub fn of_this_machine() -> Result<Self> {
        match env::consts::ARCH {
            "x86_64" => Ok(Self::Amd64),
            "aarch64" => Ok(Self::Arm64),
            other => bail!("images are for amd64 and arm64, this machine is {other}: give --arch"),
        }
    }

    /// Returns the name that container images use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    const fn rust_target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-musl",
            Self::Arm64 => "aarch64-unknown-linux-musl",
        }
    }

    const fn zig_target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-musl",
            Self::Arm64 => "aarch64-linux-musl",
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Profile {
    Release,
    Dev,
}

impl Profile {
    const fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Dev => "dev",
        }
    }

    const fn folder(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Dev => "debug",
        }
    }
}

/// The parts of a build that come from elsewhere.
pub struct Toolchain {
    architecture: Architecture,
    /// A Python environment with Zig in it.
    zig: PathBuf,
}

impl Toolchain {
    /// Installs what is not there. An error means that a tool or the network is missing.
    pub fn install(architecture: Architecture) -> Result<Self> {
        let triple = architecture.rust_target();
        execute(Command::new("rustup").args(["-q", "target", "add", triple]).current_dir(workspace()))
            .with_context(|| format!("installing Rust's standard library for {triple}"))?;
        Ok(Self { architecture, zig: cache::python_environment(ZIG, "C compilers for static binaries")? })
    }

    pub const fn architecture(&self) -> Architecture {
        self.architecture
    }

    pub const fn target(&self) -> &'static str {
        self.architecture.rust_target()
    }

    /// Returns the file of musl's licence, which is in Zig because it has musl too.
    pub fn musl_notice(&self) -> Result<PathBuf> {
        let zig = zig(&self.zig)?;
        Ok(zig.with_file_name("lib").join("libc/musl/COPYRIGHT"))
    }
}

/// Builds proxy-ctl and returns where it is.
pub fn build(toolchain: &Toolchain, profile: Profile) -> Result<PathBuf> {
    Ok(build_packages(toolchain, profile, &["proxy-ctl"])?.join("proxy-ctl"))
}

/// Builds the programs of these packages and returns the folder that they are in.
pub fn build_packages(toolchain: &Toolchain, profile: Profile, packages: &[&str]) -> Result<PathBuf> {
    let triple = toolchain.architecture.rust_target();
    let compiler = compiler(toolchain)?;
    let variable = triple.replace('-', "_");
    let mut build = cargo(&["build", "-q", "--bins", "--target", triple]);
    build
        .args(packages.iter().flat_map(|package| ["-p", package]))
        .args(["--profile", profile.name()])
        .env(format!("CC_{variable}"), compiler.join("cc"))
        .env(format!("AR_{variable}"), compiler.join("ar"))
        .env(format!("CFLAGS_{variable}"), "-fno-omit-frame-pointer")
        .env(format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase()), "rust-lld")
        .env("CARGO_ENCODED_RUSTFLAGS", flags().join("\u{1f}"))
        .env("CARGO_PROFILE_DEV_DEBUG", "false");
    execute(&mut build)?;
    Ok(target().join(triple).join(profile.folder()))
}

/// Returns the flags of rustc, which replace those in `.cargo/config.toml`. `perf record -g` finds
/// stacks by frame pointers. Paths are remapped so that a binary does not tell where it was built.
fn flags() -> Vec<String> {
    let folders = [(Some(workspace()), "/proxy-ctl"), (cargo_home(), "/cargo")];
    let remapped = folders
        .into_iter()
        .filter_map(|(folder, to)| Some(format!("--remap-path-prefix={}={to}", folder?.display())));
    let own = [
        "-Cforce-frame-pointers=yes",
        "-Ctarget-feature=+crt-static",
        "-Clinker-flavor=ld.lld",
        "-Clink-self-contained=yes",
    ];
    own.map(str::to_owned).into_iter().chain(remapped).collect()
}

/// Returns a folder with `cc` and `ar` for the architecture.
fn compiler(toolchain: &Toolchain) -> Result<PathBuf> {
    let Toolchain { architecture, zig: environment } = toolchain;
    let zig = zig(environment)?;
    let folder = environment.join(architecture.name());
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let (zig, target) = (zig.display(), architecture.zig_target());
    // Zig knows targets by other names than the one that is passed to clang. It also checks for
    // undefined behaviour with a run-time library that is not linked here.
    let cc = format!(
        "#!/bin/sh\nfor word do shift; case \"$word\" in --target=*) ;; *) set -- \"$@\" \"$word\";; esac; done\n\
         exec '{zig}' cc -target {target} -fno-sanitize=all \"$@\"\n"
    );
    script(&folder.join("cc"), &cc)?;
    script(&folder.join("ar"), &format!("#!/bin/sh\nexec '{zig}' ar \"$@\"\n"))?;
    Ok(folder)
}

fn zig(environment: &Path) -> Result<PathBuf> {
    let library = environment.join("lib");
    let library = fs::read_dir(&library).with_context(|| format!("reading {}", library.display()))?;
    let mut packages = library.filter_map(|found| Some(found.ok()?.path().join("site-packages/ziglang/zig")));
    packages.find(|zig| zig.is_file()).with_context(|| format!("no zig in {}", environment.display()))
}

/// Writes a script, unless it is there already. A new file would make cargo build everything again.
fn script(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    let write = || {
        fs::write(path, text)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// Builds static programs of these packages, not optimised, for arm64, and returns the folder that
/// they are in.
pub fn programs_for_arm64(packages: &[&str]) -> Result<PathBuf> {
    build_packages(&Toolchain::install(Architecture::Arm64)?, Profile::Dev, packages)
}
