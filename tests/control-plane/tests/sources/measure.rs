//! What a list costs, in a process of its own: time, and peak of resident memory.

use std::{
    env, fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use control_plane::PROXY;
use proxy_ctl::{
    config::Encoding,
    model::{Model, Update},
    source::kubernetes::{Config, Kubernetes, ListMethod, ResourceKind, SourceState},
};
use tokio::sync::mpsc;

use crate::{
    follower::{NODE, kubeconfig_at},
    relay::Relay,
    world::World,
};

pub(crate) const FLAG: &str = "--list-once";

/// Runs [`list_once`] and returns what it says, and how much the API server sent.
pub(crate) fn in_a_process(world: &World, encoding: Encoding) -> Result<String> {
    let relay = Relay::start(world)?;
    let output = Command::new(env::current_exe().context("our own program")?)
        .arg(FLAG)
        .arg(encoding.name())
        .arg(kubeconfig_at(world, PROXY, relay.address)?)
        .output()
        .context("starting ourselves")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let said = String::from_utf8_lossy(&output.stdout);
    Ok(format!("{}, {:.1} MB from the API server", said.trim(), relay.answered() as f64 / 1e6))
}

/// Lists everything into a model and prints what that took.
pub(crate) fn list_once(encoding: &str, kubeconfig: &str) -> Result<()> {
    let encoding = Encoding::ALL.into_iter().find(|of| of.name() == encoding).context("no such encoding")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting a runtime")?;
    let (before, cpu_before) = (peak_memory()?, cpu_time()?);
    let start = Instant::now();
    let state = SourceState::new();
    let config = Config { kubeconfig: Some(kubeconfig.into()), content_type: encoding, ..Config::default() };
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
    let (peak_listing, cpu) = (peak_memory()?, cpu_time()?.saturating_sub(cpu_before));
    model.take_changes();
    let endpoints: usize = model.desired().iter().map(|port| port.endpoints.all.len()).sum();
    let method = [ListMethod::Streamed, ListMethod::Whole]
        .into_iter()
        .find(|method| state.lists(ResourceKind::EndpointSlices, *method) > 0)
        .context("no list")?;
    println!(
        "{} services and {} slices with {endpoints} endpoints, {} in {}: listed after {:.2} s with {:.2} s of CPU, peak {} MiB (before: {} MiB)",
        state.objects(ResourceKind::Services),
        state.objects(ResourceKind::EndpointSlices),
        method.name(),
        state.encoding(ResourceKind::EndpointSlices).map_or("nothing", Encoding::name),
        listed.as_secs_f64(),
        cpu.as_secs_f64(),
        peak_listing >> 10,
        before >> 10,
    );
    Ok(())
}

/// Of this process so far, in user and kernel space; to 10 ms.
fn cpu_time() -> Result<Duration> {
    const TICKS_A_SECOND: u64 = 100;
    let stat = fs::read_to_string("/proc/self/stat").context("/proc/self/stat")?;
    // The name, which may have spaces, is in brackets; what follows begins with field 3.
    let (_, fields) = stat.rsplit_once(") ").context("/proc/self/stat")?;
    let ticks: u64 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(Duration::from_millis(ticks * 1000 / TICKS_A_SECOND))
}

/// In KiB.
fn peak_memory() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    line.trim().trim_end_matches("kB").trim().parse().context("VmHWM")
}
