//! Description of the machine that was measured. It does not name the host.

use std::{fs, process::Command, thread};

use behaviour::setting::ProxyKind;
use control_plane::binaries::Program;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Machine {
    pub processor: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub kernel: String,
    /// Version of the real kube-proxy.
    pub kube_proxy: String,
}

impl Machine {
    pub fn describe() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            processor: processor(&text("/proc/cpuinfo")),
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_gib(&text("/proc/meminfo")),
            kernel: upstream_version(text("/proc/sys/kernel/osrelease").trim()),
            kube_proxy: kube_proxy().unwrap_or_else(|| UNKNOWN.to_owned()),
        }
    }
}

const UNKNOWN: &str = "unknown";

fn kube_proxy() -> Option<String> {
    behaviour::proxy::missing_for(ProxyKind::KubeProxyNftables).ok()?.is_none().then_some(())?;
    let output = Command::new(Program::KubeProxy.installed()?).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace().last().map(str::to_owned)
}

/// Returns the processor's name. On arm64, /proc/cpuinfo does not have one.
fn processor(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    let name = line.and_then(|line| line.split_once(':'));
    name.map_or_else(|| UNKNOWN.to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory_gib(meminfo: &str) -> f64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0.0);
    (kib / f64::from(1 << 20) * 10.0_f64).round() / 10.0
}

/// Returns the version without what a distribution adds.
fn upstream_version(release: &str) -> String {
    release.split(['-', '+']).next().unwrap_or(release).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_named_without_its_distribution() {
        assert_eq!(
            ["6.8.0-45-generic", "6.18.0+", "5.10.0"].map(upstream_version),
            ["6.8.0", "6.18.0", "5.10.0"]
        );
    }

    #[test]
    fn the_kernel_tells_of_processor_and_memory() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nmodel name\t: other\n";
        assert_eq!(processor(text), "AMD EPYC 7B13");
        assert_eq!(processor("processor\t: 0\nBogoMIPS\t: 243.75\n"), "unknown");
        assert_eq!(memory_gib("MemTotal:       24610396 kB\nMemFree: 1 kB\n"), 23.5);
    }
}
