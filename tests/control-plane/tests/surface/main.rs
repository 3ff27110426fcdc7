//! What a kube-proxy shows on its ports, byte for byte where it can be, against a recording of the real one in the same
//! cluster. What differs, and why, is in docs/differences.md: each line there must be met, and nothing else may differ.
//!
//! `cargo test -p control-plane --test surface` compares. Needs root.
//! `cargo test -p control-plane --test surface -- --record` makes the recording, from the real kube-proxy.

mod compare;
mod page;
mod stage;

use std::{collections::BTreeMap, env, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use control_plane::{World, binaries::Program, scenarios};
use nix::unistd::Uid;
use serde_json::{Value, json};

use crate::{compare::Differences, stage::Stage};

/// Page or metric → what was seen.
pub(crate) type Recording = BTreeMap<String, Value>;

fn main() -> ExitCode {
    let done = match env::args().nth(1).as_deref() {
        Some("--record") => record(),
        Some("--show") => show(),
        _ => return scenarios::main("surface", scenarios![pages_and_metrics_are_those_of_kube_proxy]),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("surface: {error:#}");
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

impl World for Stage {
    fn missing() -> Option<String> {
        if !Uid::effective().is_root() {
            return Some("needs root".into());
        }
        scenarios::missing(&[Program::Etcd, Program::KubeApiServer])
    }

    fn start() -> Result<Self> {
        Self::set()
    }
}

fn record() -> Result<()> {
    let missing = Stage::missing().or_else(|| scenarios::missing(&[Program::KubeProxy]));
    if let Some(missing) = missing {
        bail!(missing);
    }
    let stage = Stage::set()?;
    let seen = stage.kube_proxy(&Program::KubeProxy.path()?)?.play(&stage)?;
    let text = serde_json::to_string_pretty(&json!(seen)).context("writing JSON")?;
    fs::write(recorded(), text + "\n").with_context(|| format!("writing {}", recorded().display()))?;
    println!("recorded {} pages and metrics", seen.len());
    Ok(())
}

/// Prints what ours shows, in the form of the recording.
fn show() -> Result<()> {
    let stage = Stage::set()?;
    let seen = stage.proxy_ctl(&proxy_ctl()?)?.play(&stage)?;
    println!("{}", serde_json::to_string_pretty(&json!(seen)).context("writing JSON")?);
    Ok(())
}

fn pages_and_metrics_are_those_of_kube_proxy(stage: &mut Stage) -> Result<()> {
    let text = fs::read_to_string(recorded()).with_context(|| format!("reading {}", recorded().display()))?;
    let theirs: Recording = serde_json::from_str(&text).context("the recording")?;
    let explained = Differences::read(&repository().join("docs/differences.md"))?;
    let ours = stage.proxy_ctl(&proxy_ctl()?)?.play(stage)?;
    explained.judge(&compare::all(&theirs, &ours))
}
