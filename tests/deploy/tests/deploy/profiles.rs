//! Expects profiles of the image's busy program with `enableProfiling`. The tool that reads such
//! profiles must find the program's functions in them.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use deploy::tools;
use lab::{http, namespace};

const METRICS: &str = "127.0.0.1:10249";
/// Longest wait for an answer. Code that is not optimised looks up names.
const ANSWER: Duration = Duration::from_secs(60);
/// Path of the functions that encode metrics. Requests for metrics make the program call them.
const OURS: &str = "proxy_ctl::report::metrics::";

/// Takes profiles and checks them. `namespace` is that of the node.
pub(super) fn name_our_functions(namespace: &str) -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder")?;
    let get = |path: &str| -> Result<Vec<u8>> {
        let (status, body) = namespace::within(namespace, || http::get(METRICS.parse()?, path, ANSWER))?;
        ensure!(status == 200, "{path}: {status} {}", String::from_utf8_lossy(&body));
        Ok(body)
    };
    let stop = AtomicBool::new(false);
    let cpu = thread::scope(|scope| {
        let busy = scope.spawn(|| -> Result<()> {
            while !stop.load(Ordering::Relaxed) {
                get("/metrics")?;
            }
            Ok(())
        });
        let cpu = get("/debug/pprof/profile?seconds=2");
        stop.store(true, Ordering::Relaxed);
        busy.join().map_err(|_| anyhow::anyhow!("asking for metrics panicked"))??;
        cpu
    })?;
    let file = folder.path().join("cpu.pprof");
    fs::write(&file, &cpu).with_context(|| format!("writing {}", file.display()))?;
    let named = cpu.windows(OURS.len()).any(|part| part == OURS.as_bytes());
    ensure!(named, "no {OURS} in the CPU profile of {} bytes", cpu.len());
    if tools::go().is_ok() {
        let top = tools::top_of_profile(&file, "cpu")?;
        ensure!(top.contains(OURS), "no {OURS} in\n{top}");
    }
    Ok(())
}
