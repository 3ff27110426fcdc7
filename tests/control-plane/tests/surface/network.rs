//! A network namespace for each proxy. All are at one bridge, in a namespace of this process.

use anyhow::{Context, Result};
use lab::namespace::ip;
use nix::sched::{CloneFlags, unshare};

/// Address of the API server, on the bridge.
pub(crate) const SERVER: &str = "192.0.2.100";
/// Address of the node that all proxies run on, as they see it. It is reachable only from within
/// the namespace.
pub(crate) const NODE_ADDRESS: &str = "192.0.2.1";

/// Moves this process to a network namespace that ends with it. It must be called before there are
/// other threads.
pub(crate) fn set_up() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    let bridge = format!(
        "link set lo up\nlink add bridge0 type bridge\naddress add {SERVER}/24 dev bridge0\nlink set bridge0 up\n"
    );
    ip(None, &bridge)
}

/// Network namespace that is deleted when this is dropped.
pub(crate) struct Namespace {
    pub(crate) name: String,
}

impl Namespace {
    /// Makes a namespace. `number` must differ from all others.
    pub(crate) fn create(number: u8) -> Result<Self> {
        let name = format!("px-surface-{}-{number}", std::process::id());
        ip(None, &format!("netns add {name}\n"))?;
        let namespace = Self { name };
        let name = namespace.name.as_str();
        let link = format!(
            "link add peer{number} type veth peer name eth0 netns {name}\nlink set peer{number} master bridge0 up\n"
        );
        ip(None, &link)?;
        let own = format!(
            "link set lo up\nlink set eth0 up\naddress add 192.0.2.{}/24 dev eth0\naddress add {NODE_ADDRESS}/32 dev lo\n",
            10 + number
        );
        ip(Some(name), &own)?;
        Ok(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(None, &format!("netns delete {}\n", self.name)) {
            eprintln!("{error:#}");
        }
    }
}
