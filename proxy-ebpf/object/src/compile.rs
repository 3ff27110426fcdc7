//! Compiles the kernel programs.

use std::{
    env,
    fs::{self, File},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    committed::Tools,
    toolchain::{NIGHTLY, TARGET, cargo_home, nightly_has_source, prebuilt_compiler},
};

/// The compiler and the linker for BPF of this machine.
pub struct Toolchain {
    linker: PathBuf,
    compiler: Compiler,
}

enum Compiler {
    /// A rustc outside rustup that brings a core library for the target, as distributions package
    /// it.
    Prebuilt(PathBuf),
    /// rustup's nightly with rust-src. The core library is compiled along.
    Nightly,
}

impl Toolchain {
    /// Returns what is installed, or `None` if the compiler or the linker is missing.
    pub fn find() -> Option<Self> {
        let linker = on_path("bpf-linker")?;
        let compiler = match prebuilt_compiler() {
            Some(rustc) => Compiler::Prebuilt(rustc),
            None if nightly_has_source() => Compiler::Nightly,
            None => return None,
        };
        Some(Self { linker, compiler })
    }

    /// Returns the versions of the compiler and the linker, as they tell them.
    pub fn tools(&self) -> Result<Tools> {
        let compiler = match &self.compiler {
            Compiler::Prebuilt(rustc) => version(&mut Command::new(rustc)),
            Compiler::Nightly => version(Command::new("rustup").args(["run", NIGHTLY, "rustc"])),
        };
        Ok(Tools { compiler: compiler?, linker: version(&mut Command::new(&self.linker))? })
    }

    /// Compiles the sources in `workspace` and returns the object as it was linked. `built` is any
    /// path below cargo's target folder. What is compiled is kept there for every build of these
    /// sources with these tools.
    pub fn compile(&self, workspace: &Path, built: &Path) -> Result<Vec<u8>> {
        let target = self.folder(workspace, built)?;
        let lock = target.join("lock");
        let locked = fs::create_dir_all(&target).and_then(|()| {
            let file = File::create(&lock)?;
            file.lock()?;
            Ok(file)
        });
        // No other build may change what is there until it has been read.
        let _locked = locked.with_context(|| format!("locking {}", lock.display()))?;
        self.build(workspace, &target)?;
        let object = target.join(TARGET).join("bpf/proxy-ebpf");
        fs::read(&object).with_context(|| format!("reading {}", object.display()))
    }

    /// The topmost folder of cargo's target folder is shared by the profiles and by the targets
    /// that `--target` names. Compiling takes a minute, and the object is the same for all of them.
    fn folder(&self, workspace: &Path, built: &Path) -> Result<PathBuf> {
        let mut hash = DefaultHasher::new();
        (workspace, self.tools()?.describe()).hash(&mut hash);
        // `<target>[/<triple>]/<profile>/build/<package>/out`: the folder of a triple is tagged
        // too.
        let all = built.ancestors().take(6).filter(|folder| folder.join("CACHEDIR.TAG").is_file()).last();
        Ok(all.unwrap_or(built).join(format!("bpf-{:016x}", hash.finish())))
    }

    fn build(&self, workspace: &Path, target: &Path) -> Result<()> {
        let mut cargo = match &self.compiler {
            Compiler::Prebuilt(rustc) => {
                let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
                cargo.arg("build");
                // Allows the unstable features that aya-ebpf needs, without adding `-Z build-std`.
                cargo.env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1");
                cargo
            }
            Compiler::Nightly => {
                let mut cargo = Command::new("rustup");
                cargo.args(["run", NIGHTLY, "cargo", "build", "-Z", "build-std=core"]);
                cargo.env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
                cargo
            }
        };
        cargo
            .args(["--package", "proxy-ebpf", "--profile", "bpf", "--target", TARGET, "--target-dir"])
            .arg(target)
            .current_dir(workspace)
            .env_remove("RUSTC_WRAPPER")
            .env_remove("RUSTC_WORKSPACE_WRAPPER")
            .env_remove("RUSTFLAGS")
            .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &self.linker)
            // Pieces that are compiled alone make programs for which the verifier needs a third
            // more.
            .env("CARGO_INCREMENTAL", "0")
            // If a crate has less than full debug information, --btf lacks func_info, which kernels
            // ask for.
            .env("CARGO_ENCODED_RUSTFLAGS", "-Cdebuginfo=2\u{1f}-Clink-arg=--btf");
        let output = cargo.output().with_context(|| format!("running {cargo:?}"))?;
        if !output.status.success() {
            bail!("compiling proxy-ebpf: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }
}

/// The first line of `--version`.
fn version(program: &mut Command) -> Result<String> {
    let output = program.arg("--version").output().with_context(|| format!("running {program:?}"))?;
    if !output.status.success() {
        bail!("{program:?}: {}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(cargo_home().map(|home| home.join("bin")))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}
