//! The command `cargo xtask test --fresh`. It tests as on a machine that has never seen this
//! repository. Only the distribution's packages and rustup's toolchains are there.

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

use anyhow::{Context as _, Result};

use crate::command::{as_root, output, run as execute, workspace};

const PREFIX: &str = "proxy-ctl-fresh-";
/// The programs of rustup, which stay as they are.
const OF_RUSTUP: [&str; 8] =
    ["rustup", "cargo", "rustc", "rustdoc", "rustfmt", "cargo-fmt", "cargo-clippy", "clippy-driver"];

/// Runs `cargo xtask test` with the arguments of this command in a clean clone of HEAD.
pub(crate) fn run() -> Result<ExitCode> {
    let start = Instant::now();
    let folder = Folder::create()?;
    println!("everything goes to {}, and is removed at the end", folder.0.display());
    let clone = clone(&folder.0)?;
    let mut test = Command::new("cargo");
    test.args(["xtask", "test"]).args(env::args_os().skip(2).filter(|argument| argument != "--fresh"));
    for (name, value) in environment(&folder.0)? {
        match value {
            Some(value) => test.env(name, value),
            None => test.env_remove(name),
        };
    }
    let status = test.current_dir(clone).status().context("starting cargo")?;
    println!("with fresh caches in {} s", start.elapsed().as_secs());
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    /// Creates the folder, and removes those that killed runs have left.
    fn create() -> Result<Self> {
        let parent = env::temp_dir();
        for found in fs::read_dir(&parent).with_context(|| format!("reading {}", parent.display()))? {
            let path = found.context("reading the temporary directory")?.path();
            let owner = path.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX));
            if owner.is_some_and(|owner| !Path::new("/proc").join(owner).exists()) {
                drop(Self(path));
            }
        }
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Suites that ran as root have written here too, and Go's modules cannot be written.
        if let Err(error) = execute(as_root("rm").arg("-rf").arg(&self.0)) {
            eprintln!("xtask: {} is left: {error:#}", self.0.display());
        }
    }
}

fn clone(folder: &Path) -> Result<PathBuf> {
    let git = |arguments: &[&str]| output(Command::new("git").args(arguments).current_dir(workspace()));
    let head = git(&["rev-parse", "HEAD"])?;
    if !git(&["status", "--porcelain"])?.is_empty() {
        println!("what is not committed is not tested");
    }
    let clone = folder.join("clone");
    execute(Command::new("git").args(["clone", "--quiet", "--no-checkout"]).arg(workspace()).arg(&clone))?;
    execute(Command::new("git").args(["checkout", "--quiet", head.trim()]).current_dir(&clone))?;
    Ok(clone)
}

/// Returns variables for empty homes and caches, where `None` means that the variable is not set.
/// Configuration stays as it is, such as where registries are.
fn environment(folder: &Path) -> Result<Vec<(&'static str, Option<OsString>)>> {
    let home = env::var_os("HOME").map(PathBuf::from).context("HOME is not set")?;
    let or_in_home =
        |name: &str, path: &str| env::var_os(name).map_or_else(|| home.join(path), PathBuf::from);
    let cargo_home = or_in_home("CARGO_HOME", ".cargo");
    let new_cargo_home = folder.join("cargo");
    let programs = new_cargo_home.join("bin");
    fs::create_dir_all(&programs).with_context(|| format!("creating {}", programs.display()))?;
    for name in OF_RUSTUP {
        let program = cargo_home.join("bin").join(name);
        if program.exists() {
            symlink(&program, programs.join(name)).with_context(|| format!("linking {name}"))?;
        }
    }
    let configuration = cargo_home.join("config.toml");
    if configuration.exists() {
        fs::copy(&configuration, new_cargo_home.join("config.toml"))
            .context("copying cargo's config.toml")?;
    }
    let new_home = folder.join("home");
    fs::create_dir(&new_home).with_context(|| format!("creating {}", new_home.display()))?;
    let path = env::var_os("PATH").unwrap_or_default();
    let others = env::split_paths(&path).filter(|entry| *entry != cargo_home.join("bin"));
    let path = env::join_paths([programs].into_iter().chain(others)).context("joining PATH")?;
    let kept = [
        ("RUSTUP_HOME", or_in_home("RUSTUP_HOME", ".rustup")),
        ("XDG_CONFIG_HOME", or_in_home("XDG_CONFIG_HOME", ".config")),
        ("GIT_CONFIG_GLOBAL", or_in_home("GIT_CONFIG_GLOBAL", ".gitconfig")),
    ];
    let fresh = [("HOME", new_home), ("CARGO_HOME", new_cargo_home)];
    let unset = ["CARGO", "CARGO_TARGET_DIR", "XDG_CACHE_HOME", "GOPATH", "GOCACHE", "GOMODCACHE"];
    let set = kept.into_iter().chain(fresh).map(|(name, value)| (name, Some(value.into_os_string())));
    Ok(set.chain([("PATH", Some(path))]).chain(unset.map(|name| (name, None))).collect())
}
