//! The metrics of the process that Prometheus clients of every language have.

use std::fs;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

use crate::sys::proc::process;

/// The number of clock ticks a second in /proc. This is USER_HZ, which is 100 on every architecture
/// that we build for.
const TICKS: f64 = 100.0;

/// A collector that reads /proc/self on each scrape. Values that cannot be read are left out.
#[derive(Debug)]
pub(super) struct Process;

/// A collector of nothing but the start time of the process.
#[derive(Debug)]
pub(crate) struct StartTime;

impl Collector for StartTime {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        start_time(&mut encoder, stat().map(|stat| stat.start_time_seconds))
    }
}

/// Returns when the process started, in seconds since the epoch.
pub(crate) fn started() -> Option<f64> {
    stat().map(|stat| stat.start_time_seconds)
}

fn start_time(encoder: &mut DescriptorEncoder<'_>, seconds: Option<f64>) -> std::fmt::Result {
    gauge(
        encoder,
        "process_start_time_seconds",
        "When the process started, in seconds since the Unix epoch.",
        seconds,
    )
}

struct Stat {
    cpu_seconds: f64,
    start_time_seconds: f64,
    resident_bytes: u64,
    virtual_bytes: u64,
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let (limits, network) = (read("/proc/self/limits"), read("/proc/self/net/netstat"));
        let stat = stat();
        let of_stat = |value: fn(&Stat) -> f64| stat.as_ref().map(value);
        let counters = [
            (
                "process_cpu_seconds",
                "CPU time of the process, user and system, in seconds.",
                of_stat(|stat| stat.cpu_seconds),
            ),
            (
                "process_network_receive_bytes",
                "Bytes received over IP in the network namespace of the process.",
                ip_statistic(&network, "InOctets"),
            ),
            (
                "process_network_transmit_bytes",
                "Bytes sent over IP from the network namespace of the process.",
                ip_statistic(&network, "OutOctets"),
            ),
        ];
        for (name, help, value) in counters {
            let Some(value) = value else { continue };
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let gauges = [
            (
                "process_resident_memory_bytes",
                "Resident memory of the process, in bytes.",
                of_stat(|stat| stat.resident_bytes as f64),
            ),
            (
                "process_virtual_memory_bytes",
                "Virtual memory of the process, in bytes.",
                of_stat(|stat| stat.virtual_bytes as f64),
            ),
            (
                "process_open_fds",
                "File descriptors that the process has open.",
                fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as f64),
            ),
            (
                "process_max_fds",
                "File descriptors that the process may have open.",
                limit(&limits, "Max open files"),
            ),
            (
                "process_virtual_memory_max_bytes",
                "Virtual memory that the process may have, in bytes; 1.8e+19: no limit.",
                limit(&limits, "Max address space"),
            ),
        ];
        for (name, help, value) in gauges {
            gauge(&mut encoder, name, help, value)?;
        }
        start_time(&mut encoder, of_stat(|stat| stat.start_time_seconds))
    }
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: Option<f64>,
) -> std::fmt::Result {
    let Some(value) = value else { return Ok(()) };
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
}

fn stat() -> Option<Stat> {
    let number = process::stat("self")?;
    let boot = fs::read_to_string("/proc/stat").ok()?;
    let boot: f64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let resident: u64 = resident.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(Stat {
        cpu_seconds: (number(14)? + number(15)?) as f64 / TICKS,
        start_time_seconds: boot + number(22)? as f64 / TICKS,
        virtual_bytes: number(23)?,
        resident_bytes: resident * 1024,
    })
}

/// Returns a soft limit from /proc/self/limits. If there is no limit, it is the largest number, as
/// in Go's clients.
fn limit(limits: &str, resource: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(resource))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX as f64),
        number => number.parse().ok(),
    }
}

/// Returns a number from /proc/net/netstat, which has a line of names and a line of numbers for
/// each protocol.
fn ip_statistic(netstat: &str, column: &str) -> Option<f64> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt: "));
    let (names, numbers) = (lines.next()?, lines.next()?);
    names.split(' ').zip(numbers.split(' ')).find(|(name, _)| *name == column)?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let stat = stat().unwrap();
        let now = jiff::Timestamp::now().as_second() as f64;
        assert!(stat.resident_bytes > 100_000 && stat.virtual_bytes > stat.resident_bytes);
        assert!(stat.start_time_seconds <= now + 1.0 && stat.start_time_seconds > now - 86_400.0);
    }

    #[test]
    fn limits_and_statistics() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096                 files\nMax address space         unlimited            unlimited            bytes\n";
        assert_eq!(limit(limits, "Max open files"), Some(1024.0));
        assert_eq!(limit(limits, "Max address space"), Some(u64::MAX as f64));
        assert_eq!(limit(limits, "Max stack size"), None);
        let netstat =
            "TcpExt: SyncookiesSent\nTcpExt: 5\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 1 200 300\n";
        assert_eq!(ip_statistic(netstat, "OutOctets"), Some(300.0));
        assert_eq!(ip_statistic(netstat, "InPkts"), None);
    }
}
