//! Builds the kernel programs and leaves the object where `dataplane::ebpf` embeds it.
//!
//! In this order: `PROXY_EBPF_OBJECT` (a prebuilt object); a rustc that brings its own core library for BPF
//! (distribution packages); rustup's nightly with rust-src. `cargo xtask setup` installs what is missing.

#[path = "build/toolchain.rs"]
mod toolchain;

use std::{
    env,
    ffi::OsString,
    fmt::Display,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
    process::Command,
};

use object::{
    build::elf::{Builder, SectionData},
    elf::SHT_STRTAB,
};

use self::toolchain::{NIGHTLY, TARGET, cargo_home, nightly_has_source, prebuilt_compiler};

const MISSING: &str =
    "the BPF toolchain is missing: run `cargo xtask setup`, or set PROXY_EBPF_OBJECT to a built object";

fn main() {
    if let Err(error) = build() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    println!("cargo:rerun-if-env-changed=PROXY_EBPF_OBJECT");
    println!("cargo:rerun-if-env-changed=PROXY_EBPF_LINES");
    let out = PathBuf::from(required("OUT_DIR")?);
    let object = out.join("proxy-ebpf");
    if let Some(prebuilt) = env::var_os("PROXY_EBPF_OBJECT") {
        let prebuilt = PathBuf::from(prebuilt);
        println!("cargo:rerun-if-changed={}", prebuilt.display());
        copy(&prebuilt, &object)?;
        println!("cargo:rustc-env=PROXY_EBPF_BUILT_WITH=prebuilt object");
        return Ok(());
    }
    let workspace = workspace()?;
    for part in ["proxy-ebpf", "proxy-common/src", "proxy-common/Cargo.toml", "Cargo.lock", "Cargo.toml"] {
        println!("cargo:rerun-if-changed={}", workspace.join(part).display());
    }
    let toolchain = Toolchain::find().ok_or(MISSING)?;
    println!("cargo:rustc-env=PROXY_EBPF_BUILT_WITH={}", toolchain.describe());
    let target = toolchain.folder(&workspace, &out);
    // Until it is copied, no other build may change what is there.
    let lock = target.join("lock");
    let locked = fs::create_dir_all(&target).and_then(|()| {
        let file = fs::File::create(&lock)?;
        file.lock()?;
        Ok(file)
    });
    let _locked = locked.map_err(|error| format!("{}: {error}", lock.display()))?;
    toolchain.build(&workspace, &target)?;
    copy(&target.join(TARGET).join("bpf/proxy-ebpf"), &object)
}

/// What can compile Rust for BPF here.
struct Toolchain {
    linker: PathBuf,
    compiler: Compiler,
}

enum Compiler {
    /// A rustc with a prebuilt core library for the target.
    Prebuilt(PathBuf),
    /// rustup's nightly with rust-src: core is built along.
    Nightly,
}

impl Toolchain {
    fn find() -> Option<Self> {
        let linker = on_path("bpf-linker")?;
        let compiler = match prebuilt_compiler() {
            Some(rustc) => Compiler::Prebuilt(rustc),
            None if nightly_has_source() => Compiler::Nightly,
            None => return None,
        };
        Some(Self { linker, compiler })
    }

    fn describe(&self) -> String {
        let version = |command: &mut Command| {
            command.arg("--version").output().map_or_else(
                |error| format!("unknown version ({error})"),
                |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
            )
        };
        let compiler = match &self.compiler {
            Compiler::Prebuilt(rustc) => version(&mut Command::new(rustc)),
            Compiler::Nightly => version(Command::new("rustup").args(["run", NIGHTLY, "rustc"])),
        };
        format!("{compiler}, {}", version(&mut Command::new(&self.linker)))
    }

    /// That of all cargo's builds has one for these sources and tools: the object is the same in each, and compiling it takes a minute.
    fn folder(&self, workspace: &Path, out: &Path) -> PathBuf {
        let mut hash = DefaultHasher::new();
        (workspace, self.describe()).hash(&mut hash);
        // `<target>[/<triple>]/<profile>/build/<package>/out`; the triple's folder has a tag too.
        let all = out.ancestors().take(6).filter(|folder| folder.join("CACHEDIR.TAG").is_file()).last();
        all.unwrap_or(out).join(format!("bpf-{:016x}", hash.finish()))
    }

    fn build(&self, workspace: &Path, target: &Path) -> Result<(), String> {
        let mut cargo = match &self.compiler {
            Compiler::Prebuilt(rustc) => {
                let mut cargo = Command::new(required("CARGO")?);
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
            // Pieces that are compiled alone make programs for which the verifier needs a third more.
            .env("CARGO_INCREMENTAL", "0")
            // Without full debug information for every crate --btf lacks func_info, which kernels ask for.
            .env("CARGO_ENCODED_RUSTFLAGS", "-Cdebuginfo=2\u{1f}-Clink-arg=--btf");
        let output = cargo.output().map_err(|error| format!("running {cargo:?} failed: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!(
            "compiling proxy-ebpf failed: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ))
    }
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(cargo_home().map(|home| home.join("bin")))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

fn workspace() -> Result<PathBuf, String> {
    let manifest = PathBuf::from(required("CARGO_MANIFEST_DIR")?);
    manifest.parent().map(Path::to_path_buf).ok_or_else(|| "proxy-ctl lies outside its workspace".to_owned())
}

fn required(name: &str) -> Result<OsString, String> {
    env::var_os(name).ok_or_else(|| format!("cargo did not set {name}"))
}

/// Without the debug information and relocations of it, of which only the linker makes use, and without the lines of the source, for each
/// function of which aya copies those of all functions: 32 MB whenever it loads the object. With `PROXY_EBPF_LINES` they stay, and the
/// kernel's log shows them if it refuses a program.
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let told =
        |error: &dyn Display| format!("copying {} to {} failed: {error}", from.display(), to.display());
    let bytes = fs::read(from).map_err(|error| told(&error))?;
    let mut elf = Builder::read(bytes.as_slice()).map_err(|error| told(&error))?;
    let keeps_lines = env::var_os("PROXY_EBPF_LINES").is_some();
    for section in &mut elf.sections {
        let is_for_linker = [".debug_", ".rel.debug_", ".rel.BTF"];
        section.delete |= is_for_linker.iter().any(|name| section.name.starts_with(name.as_bytes()));
        if let SectionData::Data(data) = &mut section.data
            && *section.name == *b".BTF.ext"
            && !keeps_lines
        {
            remove_lines(data.to_mut()).ok_or_else(|| told(&"its section .BTF.ext is too short"))?;
        }
    }
    elf.delete_orphans();
    // The linker keeps the names of sections and symbols together, which `Builder` cannot.
    let names = elf.sections.add();
    names.name = ".shstrtab".into();
    names.sh_type = SHT_STRTAB;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    elf.write(&mut stripped).map_err(|error| told(&error))?;
    fs::write(to, stripped).map_err(|error| told(&error))
}

/// The header of .BTF.ext has its own length, then where each part begins behind it and how long it is: functions, lines, relocations.
/// `None`: it is shorter than it says.
fn remove_lines(data: &mut Vec<u8>) -> Option<()> {
    const HEADER_LENGTH: usize = 4;
    const LINES: usize = 16;
    const LINES_LENGTH: usize = 20;
    const RELOCATIONS: usize = 24;
    let number = |data: &[u8], at: usize| {
        let bytes = data.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    let length = number(data, LINES_LENGTH)?;
    let header = number(data, HEADER_LENGTH)?;
    if header < RELOCATIONS + 4 {
        return None;
    }
    let begin = header + number(data, LINES)?;
    let relocations = number(data, RELOCATIONS)?;
    data.get(begin..begin + length)?;
    data.drain(begin..begin + length);
    let mut write = |at: usize, value: usize| data[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
    write(LINES_LENGTH, 0);
    write(RELOCATIONS, relocations.checked_sub(length)?);
    Some(())
}
