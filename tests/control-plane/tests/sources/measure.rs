//! What a list costs, in a process of its own: time, and peak of resident memory.

use std::{
    env, fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use control_plane::PROXY;
use proxy_ctl::{
    model::{Model, Update},
    source::kubernetes::{Config, Kubernetes, ListMethod, ResourceKind, SourceState},
};
use tokio::sync::mpsc;

use crate::{follower::NODE, world::World};

pub(crate) const FLAG: &str = "--list-once";

/// Runs [`list_once`] and returns what it says.
pub(crate) fn in_a_process(world: &World) -> Result<String> {
    let output = Command::new(env::current_exe().context("our own program")?)
        .arg(FLAG)
        .arg(world.server.kubeconfig(PROXY))
        .output()
        .context("starting ourselves")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Lists everything into a model and prints what that took.
pub(crate) fn list_once(kubeconfig: &str) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting a runtime")?;
    let before = peak_memory()?;
    let start = Instant::now();
    let state = SourceState::new();
    let config = Config { kubeconfig: Some(kubeconfig.into()), ..Config::default() };
    let source = Kubernetes::new(config, NODE, state.clone())?;
    let mut model = Model::new(NODE);
    let mut listed = Duration::ZERO;
    runtime.block_on(async {
        let (sender, mut updates) = mpsc::channel(64);
        let source = tokio::spawn(source.run(sender));
        let (mut services, mut slices) = (false, false);
        while !(services && slices) {
            let update = updates.recv().await.context("the source ended")?;
            services |= matches!(update, Update::ReplaceServices(_));
            slices |= matches!(update, Update::ReplaceSlices(_));
            listed = start.elapsed();
            model.update(update);
        }
        source.abort();
        anyhow::Ok(())
    })?;
    let peak_listing = peak_memory()?;
    model.take_changes();
    let endpoints: usize = model.desired().iter().map(|port| port.endpoints.all.len()).sum();
    let method = [ListMethod::Streamed, ListMethod::Paged]
        .into_iter()
        .find(|method| state.lists(ResourceKind::EndpointSlices, *method) > 0)
        .context("no list")?;
    println!(
        "{} services and {} slices with {endpoints} endpoints, {}: listed after {:.2} s, peak {} MiB (before: {} MiB)",
        state.objects(ResourceKind::Services),
        state.objects(ResourceKind::EndpointSlices),
        method.name(),
        listed.as_secs_f64(),
        peak_listing >> 10,
        before >> 10,
    );
    Ok(())
}

/// In KiB.
fn peak_memory() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    line.trim().trim_end_matches("kB").trim().parse().context("VmHWM")
}
