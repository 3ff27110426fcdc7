//! Capabilities by their names, as container runtimes write them.

use std::fs;

use anyhow::{Context as _, Result};

/// Names of the capabilities in the order of their numbers.
const NAMES: &str = "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE \
     NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT \
     SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE \
     AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ \
     PERFMON BPF CHECKPOINT_RESTORE";

/// Returns the capabilities of a `privileged` container: all that this machine has to give.
pub(crate) fn all() -> Result<Vec<String>> {
    let status = fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let held = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).context("no CapBnd")?;
    let held = u64::from_str_radix(held.trim(), 16).context("CapBnd")?;
    let held = NAMES.split_whitespace().enumerate().filter(|(bit, _)| held & (1 << bit) != 0);
    Ok(held.map(|(_, name)| format!("CAP_{name}")).collect())
}
