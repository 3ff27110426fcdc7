//! What a kube-proxy shows on its ports, byte for byte where it can be, against a recording of the real one in the same
//! cluster. What differs, and why, is in docs/differences.md: each line there must be met, and nothing else may differ.
//!
//! `cargo test -p control-plane --test surface` compares. Needs root.
//! `cargo test -p control-plane --test surface -- --record` makes the recording, from the real kube-proxy.

mod compare;
mod page;
mod stage;

use std::{collections::BTreeMap, env, fs, path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context, Result, bail};
use control_plane::binaries::Program;
use nix::unistd::Uid;
use serde_json::{Value, json};

use crate::{compare::Differences, stage::Stage};

/// Page or metric → what was seen.
pub(crate) type Recording = BTreeMap<String, Value>;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let start = Instant::now();
    let outcome = match arguments.first().map(String::as_str) {
        Some("--list") => {
            println!("surface: test");
            return ExitCode::SUCCESS;
        }
        Some("--record") => record(),
        Some("--show") => show(),
        _ => compare(),
    };
    let seconds = start.elapsed().as_secs_f32();
    match outcome {
        Ok(None) => {
            println!("surface: 1 passed, 0 failed, 0 skipped ({seconds:.1} s)");
            ExitCode::SUCCESS
        }
        Ok(Some(missing)) => {
            println!("  skipped: {missing}");
            println!("surface: 0 passed, 0 failed, 1 skipped ({seconds:.1} s)");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("  FAILED  {error:#}");
            println!("surface: 0 passed, 1 failed, 0 skipped ({seconds:.1} s)");
            ExitCode::FAILURE
        }
    }
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn recorded() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/surface/kube-proxy-v1.36.1.json")
}

/// proxy-ctl beside this test, or `PROXY_CTL`.
fn proxy_ctl() -> Result<PathBuf> {
    if let Some(path) = env::var_os("PROXY_CTL") {
        return Ok(path.into());
    }
    let own = env::current_exe().context("the path of this program")?;
    let built = own.parent().and_then(|deps| deps.parent()).map(|folder| folder.join("proxy-ctl"));
    built.filter(|path| path.exists()).context("no proxy-ctl: cargo build -p proxy-ctl builds it")
}

fn missing() -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("needs root".into());
    }
    [Program::Etcd, Program::KubeApiServer]
        .into_iter()
        .find_map(|program| program.path().err())
        .map(|error| format!("{error:#}"))
}

fn record() -> Result<Option<String>> {
    let missing = missing().or_else(|| Program::KubeProxy.path().err().map(|error| format!("{error:#}")));
    if let Some(missing) = missing {
        bail!(missing);
    }
    let stage = Stage::set()?;
    let seen = stage.kube_proxy(&Program::KubeProxy.path()?)?.play(&stage)?;
    let text = serde_json::to_string_pretty(&json!(seen)).context("writing JSON")?;
    fs::write(recorded(), text + "\n").with_context(|| format!("writing {}", recorded().display()))?;
    println!("recorded {} pages and metrics", seen.len());
    Ok(None)
}

/// Prints what ours shows, in the form of the recording.
fn show() -> Result<Option<String>> {
    let stage = Stage::set()?;
    let seen = stage.proxy_ctl(&proxy_ctl()?)?.play(&stage)?;
    println!("{}", serde_json::to_string_pretty(&json!(seen)).context("writing JSON")?);
    Ok(None)
}

fn compare() -> Result<Option<String>> {
    if let Some(missing) = missing() {
        return Ok(Some(missing));
    }
    let text = fs::read_to_string(recorded()).with_context(|| format!("reading {}", recorded().display()))?;
    let theirs: Recording = serde_json::from_str(&text).context("the recording")?;
    let explained = Differences::read(&repository().join("docs/differences.md"))?;
    let stage = Stage::set()?;
    let ours = stage.proxy_ctl(&proxy_ctl()?)?.play(&stage)?;
    explained.judge(&compare::all(&theirs, &ours))?;
    Ok(None)
}
