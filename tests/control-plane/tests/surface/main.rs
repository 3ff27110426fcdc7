//! What a kube-proxy shows on its ports, byte for byte where it can be: ours beside the real one in its modes iptables and
//! nftables, in one cluster that goes through the same states for all of them. What differs, and why, is in
//! docs/differences.md: each line there must be met, and nothing else may differ. Where there is no Go to build
//! kube-proxy with, what it showed when it was recorded is compared instead.
//!
//! `cargo test -p control-plane --test surface` compares. Needs root.
//! `cargo test -p control-plane --test surface -- --record` makes the recordings, from the real kube-proxy.
//! `cargo test -p control-plane --test surface -- --show` prints what each shows.

mod cluster;
mod compare;
mod network;
mod page;
mod peer;
mod script;

use std::{collections::BTreeMap, env, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail, ensure};
use control_plane::{KubeProxy, Outcome, World, binaries::Program, scenarios};
use nix::unistd::Uid;
use serde_json::{Value, json};

use crate::{
    compare::{Differences, Found},
    peer::{MODES, Program as Of},
    script::play,
};

/// Page or metric → what was seen.
pub(crate) type Recording = BTreeMap<String, Value>;

fn main() -> ExitCode {
    let done = match env::args().nth(1).as_deref() {
        Some("--record") => record(),
        Some("--show") => show(),
        _ => {
            let all = scenarios![
                what_is_shown_is_what_kube_proxy_shows_in_mode_iptables,
                what_is_shown_is_what_kube_proxy_shows_in_mode_nftables,
                the_recordings_are_what_kube_proxy_shows,
            ];
            return scenarios::main("surface", all);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("surface: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What all have shown, each beside the others.
struct Shown {
    ours: Recording,
    /// By mode; or why there is no real kube-proxy here.
    live: Result<BTreeMap<&'static str, Recording>, String>,
}

impl World for Shown {
    fn missing() -> Option<String> {
        if !Uid::effective().is_root() {
            return Some("needs root".into());
        }
        scenarios::missing(&[Program::Etcd, Program::KubeApiServer])
    }

    fn start() -> Result<Self> {
        let (kube_proxy, ours) = (KubeProxy::here()?, proxy_ctl()?);
        let theirs = kube_proxy.iter().flat_map(|program| MODES.map(|mode| Of::KubeProxy { program, mode }));
        let programs: Vec<Of<'_>> = theirs.chain([Of::ProxyCtl { program: &ours }]).collect();
        let mut seen = play(&programs)?;
        let ours = seen.pop().context("nothing was seen of ours")?;
        let live = match &kube_proxy {
            Ok(_) => Ok(MODES.into_iter().zip(seen).collect()),
            Err(reason) => Err(reason.clone()),
        };
        Ok(Self { ours, live })
    }
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn recorded(mode: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/surface/kube-proxy-v1.36.1-{mode}.json"))
}

fn recording(mode: &str) -> Result<Recording> {
    let path = recorded(mode);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
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

fn record() -> Result<()> {
    if let Some(missing) = Shown::missing() {
        bail!(missing);
    }
    let program = KubeProxy::binary()?;
    let programs = MODES.map(|mode| Of::KubeProxy { program: &program, mode });
    for (mode, seen) in MODES.into_iter().zip(play(&programs)?) {
        let text = serde_json::to_string_pretty(&json!(seen)).context("writing JSON")?;
        let path = recorded(mode);
        fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
        println!("recorded {} pages and metrics of mode {mode}", seen.len());
    }
    Ok(())
}

/// In the form of the recordings.
fn show() -> Result<()> {
    let shown = Shown::start()?;
    let all = json!({"ebpf": shown.ours, "kube-proxy": shown.live.map_err(anyhow::Error::msg)?});
    println!("{}", serde_json::to_string_pretty(&all).context("writing JSON")?);
    Ok(())
}

fn what_is_shown_is_what_kube_proxy_shows_in_mode_iptables(shown: &mut Shown) -> Result<Outcome> {
    shown.compare("iptables")
}

fn what_is_shown_is_what_kube_proxy_shows_in_mode_nftables(shown: &mut Shown) -> Result<Outcome> {
    shown.compare("nftables")
}

impl Shown {
    fn compare(&self, mode: &str) -> Result<Outcome> {
        let explained = Differences::read(&repository().join("docs/differences.md"), mode)?;
        match &self.live {
            Ok(live) => {
                let theirs = live.get(mode).with_context(|| format!("nothing was seen of mode {mode}"))?;
                explained.judge(&compare::all(theirs, &self.ours))?;
                Ok(Outcome::Passed)
            }
            Err(reason) => {
                explained.judge(&compare::all(&recording(mode)?, &self.ours))?;
                Ok(Outcome::Skipped(format!("compared with the recording, all is well: {reason}")))
            }
        }
    }
}

fn the_recordings_are_what_kube_proxy_shows(shown: &mut Shown) -> Result<Outcome> {
    let live = match &shown.live {
        Ok(live) => live,
        Err(reason) => return Ok(Outcome::Skipped(reason.clone())),
    };
    for (mode, live) in live {
        let found: Found = compare::all(&recording(mode)?, live);
        ensure!(found.is_empty(), "mode {mode}: record again, as described in {}: {found:#?}", file!());
    }
    Ok(Outcome::Passed)
}
