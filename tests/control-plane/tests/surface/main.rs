//! What a kube-proxy shows on its ports, byte for byte where it can be: ours beside the real one in its modes iptables and
//! nftables, in one cluster that goes through the same states for all of them. What differs, and why, is in
//! docs/differences.md: each line there must be met, and nothing else may differ. Where there is no Go to build
//! kube-proxy with, what it showed when it was recorded is compared instead.
//!
//! `cargo test --test surface` compares. Needs root.
//! `cargo test --test surface -- --record` makes the recordings, from the real kube-proxy.
//! `cargo test --test surface -- --show` prints what each shows.

mod cluster;
mod compare;
mod network;
mod page;
mod peer;
mod script;

use std::{collections::BTreeMap, env, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail, ensure};
use control_plane::{
    KubeProxy,
    binaries::{self, Program},
};
use nix::unistd::Uid;
use scenario::{Outcome, Started, scenarios};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    compare::Differences,
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
            return scenario::main(Shown::start, all);
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

impl Shown {
    /// Answers what this machine lacks, if so.
    fn start() -> Result<Started<Self>> {
        if let Some(missing) = missing()? {
            return Ok(Err(missing));
        }
        let (kube_proxy, ours) = (KubeProxy::here()?, lab::program("proxy-ctl")?);
        let theirs = kube_proxy.iter().flat_map(|program| MODES.map(|mode| Of::KubeProxy { program, mode }));
        let programs: Vec<Of<'_>> = theirs.chain([Of::ProxyCtl { program: &ours }]).collect();
        let mut seen = play(&programs)?;
        let ours = seen.pop().context("nothing was seen of ours")?;
        let live = match &kube_proxy {
            Ok(_) => Ok(MODES.into_iter().zip(seen).collect()),
            Err(reason) => Err(reason.clone()),
        };
        Ok(Ok(Self { ours, live }))
    }
}

fn missing() -> Result<Option<String>> {
    if !Uid::effective().is_root() {
        return Ok(Some("needs root".to_owned()));
    }
    binaries::provide(&[Program::Etcd, Program::KubeApiServer])
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What kube-proxy showed when it was recorded: in both modes, and in one only. An entry a line.
#[derive(Default, Deserialize, Serialize)]
struct Recordings {
    both: Recording,
    iptables: Recording,
    nftables: Recording,
}

impl Recordings {
    fn path() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/surface/kube-proxy-v1.36.1.json")
    }

    fn read() -> Result<Self> {
        let path = Self::path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))
    }

    fn of(iptables: Recording, nftables: Recording) -> Self {
        let is_in = |other: &Recording, (name, value): (&String, &Value)| other.get(name) == Some(value);
        let mut this = Self { both: iptables.clone(), iptables, nftables };
        this.both.retain(|name, value| is_in(&this.nftables, (name, value)));
        for own in [&mut this.iptables, &mut this.nftables] {
            own.retain(|name, _| !this.both.contains_key(name));
        }
        this
    }

    fn write(&self) -> Result<()> {
        let line = |(name, value): (&String, &Value)| format!("{}: {value}", json!(name));
        let part = |name: &str, of: &Recording| {
            format!("\"{name}\": {{\n{}\n}}", of.iter().map(line).collect::<Vec<_>>().join(",\n"))
        };
        let parts = [("both", &self.both), ("iptables", &self.iptables), ("nftables", &self.nftables)];
        let text = parts.map(|(name, of)| part(name, of)).join(",\n");
        let path = Self::path();
        fs::write(&path, format!("{{\n{text}\n}}\n")).with_context(|| format!("writing {}", path.display()))
    }

    fn in_mode(self, mode: &str) -> Recording {
        let own = if mode == "iptables" { self.iptables } else { self.nftables };
        self.both.into_iter().chain(own).collect()
    }
}

fn record() -> Result<()> {
    if let Some(missing) = missing()? {
        bail!(missing);
    }
    let program = KubeProxy::binary()?;
    let seen = play(&MODES.map(|mode| Of::KubeProxy { program: &program, mode }))?;
    let [iptables, nftables]: [Recording; 2] =
        seen.try_into().ok().context("another number of modes than were recorded")?;
    println!("recorded {} and {} pages and metrics", iptables.len(), nftables.len());
    Recordings::of(iptables, nftables).write()
}

/// In the form of the recordings.
fn show() -> Result<()> {
    let shown = Shown::start()?.map_err(anyhow::Error::msg)?;
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
                explained.judge(&compare::all(&Recordings::read()?.in_mode(mode), &self.ours))?;
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
        let found = compare::all(&Recordings::read()?.in_mode(mode), live);
        ensure!(found.is_empty(), "mode {mode}: record again, as described in {}: {found:#?}", file!());
    }
    Ok(Outcome::Passed)
}
