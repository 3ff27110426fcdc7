//! A network namespace for each proxy, all at one bridge in a namespace of this process's own.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};

/// The API server, on the bridge.
pub(crate) const SERVER: &str = "192.0.2.100";
/// The node that all proxies take themselves to be on; only reachable from within.
pub(crate) const NODE_ADDRESS: &str = "192.0.2.1";
const BRIDGE: &str = "bridge0";

/// Moves this process to a network namespace of its own, which ends with it. To be called before there are other
/// threads.
pub(crate) fn set_up() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    ip(&["link", "set", "lo", "up"])?;
    ip(&["link", "add", BRIDGE, "type", "bridge"])?;
    ip(&["address", "add", &format!("{SERVER}/24"), "dev", BRIDGE])?;
    ip(&["link", "set", BRIDGE, "up"])
}

/// Deleted when dropped.
pub(crate) struct Namespace {
    pub(crate) name: String,
}

impl Namespace {
    /// `number` tells it from all others.
    pub(crate) fn create(number: u8) -> Result<Self> {
        let namespace = Self { name: format!("px-surface-{}-{number}", std::process::id()) };
        let (name, outside) = (namespace.name.as_str(), format!("peer{number}"));
        ip(&["netns", "add", name])?;
        ip(&["link", "add", &outside, "type", "veth", "peer", "name", "eth0", "netns", name])?;
        ip(&["link", "set", &outside, "master", BRIDGE, "up"])?;
        let address = format!("192.0.2.{}/24", 10 + number);
        for arguments in [
            &["link", "set", "lo", "up"] as &[&str],
            &["link", "set", "eth0", "up"],
            &["address", "add", &address, "dev", "eth0"],
            &["address", "add", &format!("{NODE_ADDRESS}/32"), "dev", "lo"],
        ] {
            ip(&[&["-n", name], arguments].concat())?;
        }
        Ok(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "delete", &self.name]) {
            eprintln!("{error:#}");
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let status = Command::new("ip").args(arguments).status().context("starting ip (package iproute2)")?;
    ensure!(status.success(), "ip {} failed", arguments.join(" "));
    Ok(())
}
