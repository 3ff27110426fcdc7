//! Runs packets through the loaded TC programs by BPF_PROG_TEST_RUN.
//!
//! A case fills the maps, sends packets through programs, and says what comes out and what is
//! counted. It needs root. `cargo test --test packets [-- [--list] [part of a name]]` runs the
//! cases. With `-- --bench [part of a name]` it measures nanoseconds a packet instead.

#![expect(clippy::unwrap_used, reason = "a header that cannot be encoded is a broken case")]

mod bench;
mod cases;
mod katran;
mod restored;
mod wire;
mod world;

use std::{
    collections::{HashMap, hash_map::Entry},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CloneFlags, CpuSet, sched_setaffinity, unshare},
    unistd::{Pid, Uid},
};
use scenario::{Scenario, Started};

use cases::{Case, WorldKind};
use world::{Globals, Sizes, World};

/// Returns the embedded object, or the one that PROXY_EBPF_OBJECT names.
pub(crate) fn object() -> Result<Vec<u8>> {
    match std::env::var_os("PROXY_EBPF_OBJECT") {
        Some(path) => std::fs::read(&path).with_context(|| format!("PROXY_EBPF_OBJECT={}", path.display())),
        None => Ok(proxy_ctl::modes::ebpf::OBJECT.to_vec()),
    }
}

/// Loaded programs of each kind. Each is loaded for the first case that needs it, because a
/// verifier takes seconds.
struct Worlds {
    object: Vec<u8>,
    loaded: HashMap<WorldKind, World>,
}

impl Worlds {
    fn get(&mut self, kind: WorldKind) -> Result<&mut World> {
        Ok(match self.loaded.entry(kind) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(none) => none.insert(load(&self.object, kind)?),
        })
    }
}

fn load(object: &[u8], kind: WorldKind) -> Result<World> {
    let usual = Globals { lease: 1, ..Globals::default() };
    let resetting = Globals { resets_gone: 1, drop_unallocated: 1, answer_ping: 1, skip_stack: 1, ..usual };
    let load = |globals, sizes| World::load(object, globals, sizes);
    match kind {
        WorldKind::Usual => load(usual, Sizes::Small),
        WorldKind::Resetting => load(resetting, Sizes::Small),
        WorldKind::HostPackets => load(Globals { host_packets: 1, ..resetting }, Sizes::Small),
        WorldKind::Masquerading => load(Globals { masquerade_as_kube_proxy: 1, ..usual }, Sizes::Small),
        WorldKind::Large => load(usual, Sizes::Default),
    }
}

fn start() -> Result<Started<Worlds>> {
    if !Uid::effective().is_root() {
        return Ok(Err("loading BPF programs needs root".to_owned()));
    }
    // The programs look up routes. A new namespace has none, whatever the machine has.
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    // A map that evicts keeps free entries for each CPU, so a small one would hold less on several
    // CPUs.
    let mut one_cpu = CpuSet::new();
    one_cpu.set(0)?;
    sched_setaffinity(Pid::from_raw(0), &one_cpu).context("staying on one CPU")?;
    Ok(Ok(Worlds { object: object()?, loaded: HashMap::new() }))
}

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    if arguments.any(|argument| argument == "--bench") {
        let filter = arguments.next().unwrap_or_default();
        let bench = || {
            unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
            bench::run(&object()?, &filter)
        };
        return match bench() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let cases = cases::all().into_iter().map(|Case { name, world, run }| {
        Scenario::new(name, move |worlds: &mut Worlds| {
            let world = worlds.get(world)?;
            world.clear()?;
            run(world)
        })
    });
    scenario::main(start, cases)
}
