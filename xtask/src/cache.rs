//! The cache of what is downloaded once and kept, in `$XDG_CACHE_HOME/proxy-ctl`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow};

use crate::command::run;

/// Returns a folder of the cache, and creates it if it is not there.
pub fn folder(name: &str) -> Result<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME")
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))
        .ok_or_else(|| anyhow!("neither XDG_CACHE_HOME nor HOME is set"))?;
    let folder = base.join("proxy-ctl").join(name);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// Returns a Python environment with one package, such as `name==1.0`, in it. It is made if it is
/// not there, for which `setup` has installed what Python needs.
pub fn python_environment(requirement: &str, why: &str) -> Result<PathBuf> {
    let environment = folder("python")?.join(requirement.replace("==", "-"));
    fill_once(&environment, || {
        println!("installing {requirement} for {why}");
        run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        run(Command::new(environment.join("bin/pip")).args(["install", "-q", requirement]))
    })?;
    Ok(environment)
}

/// Fills a folder of the cache, unless that was done before. What was interrupted is done again.
pub fn fill_once(folder: &Path, fill: impl FnOnce() -> Result<()>) -> Result<()> {
    let complete = folder.join(".complete");
    if complete.exists() {
        return Ok(());
    }
    fill()?;
    fs::write(&complete, "").with_context(|| format!("writing {}", complete.display()))
}
