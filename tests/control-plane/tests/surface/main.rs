//! Compares what proxies show on their ports, byte for byte where possible: proxy-ctl beside the
//! real kube-proxy in its modes iptables and nftables. All are in one cluster, which goes through
//! the same states for all of them. docs/differences.md says what differs and why. Each line there
//! must be met, and nothing else may differ.
//!
//! `cargo test --test surface` runs it. It needs root, and Go to build kube-proxy with.

mod cluster;
mod compare;
mod network;
mod page;
mod peer;
mod script;

use std::{collections::BTreeMap, path::Path, process::ExitCode};

use anyhow::{Context, Result};
use control_plane::binaries::{self, Program};
use nix::unistd::Uid;
use scenario::{Started, scenarios};
use serde_json::Value;

use crate::{
    compare::Differences,
    peer::{MODES, Program as Of},
    script::play,
};

/// Values that were seen, by page or metric.
pub(crate) type Seen = BTreeMap<String, Value>;

fn main() -> ExitCode {
    let all = scenarios![
        what_is_shown_is_what_kube_proxy_shows_in_mode_iptables,
        what_is_shown_is_what_kube_proxy_shows_in_mode_nftables,
    ];
    scenario::main(Shown::start, all)
}

/// Values that all proxies have shown in one run.
struct Shown {
    ours: Seen,
    /// Values that the real kube-proxy has shown, by mode.
    theirs: BTreeMap<&'static str, Seen>,
}

impl Shown {
    /// Runs all proxies. Returns what this machine lacks, if so.
    fn start() -> Result<Started<Self>> {
        if !Uid::effective().is_root() {
            return Ok(Err("needs root".to_owned()));
        }
        if let Some(missing) =
            binaries::provide(&[Program::Etcd, Program::KubeApiServer, Program::KubeProxy])?
        {
            return Ok(Err(missing));
        }
        let (kube_proxy, ours) = (Program::KubeProxy.path()?, lab::program("proxy-ctl")?);
        let theirs = MODES.map(|mode| Of::KubeProxy { program: &kube_proxy, mode });
        let programs: Vec<Of<'_>> = theirs.into_iter().chain([Of::ProxyCtl { program: &ours }]).collect();
        let mut seen = play(&programs)?;
        let ours = seen.pop().context("nothing was seen of ours")?;
        Ok(Ok(Self { ours, theirs: MODES.into_iter().zip(seen).collect() }))
    }

    fn compare(&self, mode: &str) -> Result<()> {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/differences.md");
        let theirs = self.theirs.get(mode).with_context(|| format!("nothing was seen of mode {mode}"))?;
        Differences::read(&page, mode)?.judge(&compare::all(theirs, &self.ours))
    }
}

fn what_is_shown_is_what_kube_proxy_shows_in_mode_iptables(shown: &mut Shown) -> Result<()> {
    shown.compare("iptables")
}

fn what_is_shown_is_what_kube_proxy_shows_in_mode_nftables(shown: &mut Shown) -> Result<()> {
    shown.compare("nftables")
}
