//! What `enableProfiling` shows of the image's program while it is busy: the tool that reads such profiles finds its
//! functions in them.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use deploy::tools;
use lab::namespace;

const METRICS: &str = "127.0.0.1:10249";
/// Names are looked up by code that is not optimised.
const ANSWER: Duration = Duration::from_secs(60);
/// Encodes metrics, which asking for them makes it do.
const OURS: &str = "proxy_ctl::report::metrics::";

/// `namespace`: of the node.
pub(super) fn name_our_functions(namespace: &str) -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder")?;
    let get = |path: &str| namespace::within(namespace, || get(path));
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

/// The body of an answer with status 200.
fn get(path: &str) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect(METRICS)?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let head = answer.windows(4).position(|part| part == b"\r\n\r\n").context("half an answer")?;
    if !answer.starts_with(b"HTTP/1.1 200") {
        bail!("{path}: {}", String::from_utf8_lossy(&answer));
    }
    Ok(answer.split_off(head + 4))
}
