//! Leaves the object of the kernel programs where `modes::ebpf` embeds it; see the package
//! `kernel-object`. Passes the commit to `version`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result};
use kernel_object::{KEEP_LINES, PREBUILT, committed, provide, sources, workspace};

/// Names the commit for a build outside of its repository.
const COMMIT: &str = "PROXY_CTL_COMMIT";
/// Seconds since the epoch: the date for a build outside of its repository (reproducible-builds.org).
const DATE: &str = "SOURCE_DATE_EPOCH";

fn main() -> ExitCode {
    match build().and_then(|()| tell_commit()) {
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

/// Sets the commit, and the seconds since the epoch at which it was made. Each is empty where it is not known.
///
/// git is asked in the profile release only: a build for tests would be compiled anew after each commit.
fn tell_commit() -> Result<()> {
    for variable in [COMMIT, DATE] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let named = env::var(COMMIT).ok().filter(|commit| !commit.is_empty());
    let asks_git = named.is_none() && env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let from_git = if asks_git { commit_of_repository(&workspace()) } else { None };
    let given = || (named.unwrap_or_default(), env::var(DATE).unwrap_or_default().trim().to_owned());
    let (commit, time) = from_git.unwrap_or_else(given);
    if !time.is_empty() {
        time.parse::<i64>()
            .with_context(|| format!("{DATE} must be seconds since the epoch, found {time:?}"))?;
    }
    println!("cargo:rustc-env={COMMIT}={commit}");
    println!("cargo:rustc-env=PROXY_CTL_COMMIT_TIME={time}");
    Ok(())
}

/// Asks git, if there is one and this folder is a repository of its own, and has Cargo ask again after the next commit and
/// the next change of a file in it. `-dirty` follows the commit if the files are not those of the commit.
fn commit_of_repository(workspace: &Path) -> Option<(String, String)> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(workspace).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let top = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?);
    if top.canonicalize().ok()? != workspace.canonicalize().ok()? {
        return None;
    }
    for name in ["HEAD", "logs/HEAD"] {
        let path = workspace.join(git(&["rev-parse", "--git-path", name])?);
        // Cargo would run this program each time for a file that is not there.
        if path.exists() {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    for name in git(&["ls-files", "-z"])?.split_terminator('\0') {
        println!("cargo:rerun-if-changed={}", workspace.join(name).display());
    }
    let commit = git(&["log", "-1", "--format=%H %ct"])?;
    let (commit, time) = commit.split_once(' ')?;
    let is_changed =
        !git(&["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])?.is_empty();
    let dirty = if is_changed { "-dirty" } else { "" };
    Some((format!("{commit}{dirty}"), time.to_owned()))
}
