//! Interfaces that take no packet programs of a proxy, because their hooks and their ingress qdisc
//! are in use.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use proxy_ctl::sys::{
    bpf,
    net::tc::{self, Direction},
};

use crate::{
    namespace::{ip, run, within},
    wait,
};

/// The instructions are: r0 = TCX_NEXT; exit.
const NEXT: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];
const SCHED_CLS: u32 = 3;
const TAKEN_WITHIN: Duration = Duration::from_secs(10);

/// Interface that takes no packet programs until this is given back.
pub struct Taken {
    namespace: String,
    device: String,
    /// Links of programs that fill a hook, if the kernel has tcx.
    _links: Vec<OwnedFd>,
}

impl Taken {
    /// Keeps the proxy's programs from `device` of a network namespace. `links` is the folder in
    /// which the proxy pins its links. An ingress qdisc replaces clsact, and sends everything by
    /// another device and back, as CNI's bandwidth plugin does. With tcx, programs also fill the
    /// hook.
    pub fn take(namespace: &str, device: &str, links: &Path) -> Result<Self> {
        let filled = within(namespace, || {
            let index = if_nametoindex(device)?;
            if tc::has_tcx(index) { fill(index, links) } else { Ok(Vec::new()) }
        });
        let links = filled.with_context(|| format!("filling the hook of {device}"))?;
        // The proxy reacts to a new device by checking its programs on all interfaces. So the ifb
        // is added while clsact is still there: the proxy must not add clsact again once it is
        // removed.
        let ifb = limiting(device);
        run(namespace, "ip", &["link", "add", &ifb, "type", "ifb"])?;
        run(namespace, "ip", &["link", "set", &ifb, "up"])?;
        take_qdisc(namespace, device)?;
        let filter = "parent ffff: protocol all prio 1 u32 match u32 0 0 action mirred egress redirect dev";
        let mut arguments = vec!["filter", "add", "dev", device];
        arguments.extend(filter.split(' ').chain([ifb.as_str()]));
        run(namespace, "tc", &arguments)?;
        Ok(Self { namespace: namespace.to_owned(), device: device.to_owned(), _links: links })
    }

    /// Returns true if the kernel has the device type that this needs.
    pub fn can_be_made() -> Result<bool> {
        let namespace = format!("px-ifb-{}", std::process::id());
        ip(None, &format!("netns add {namespace}\n"))?;
        let has = run(&namespace, "ip", &["link", "add", "ifb-tried", "type", "ifb"]).is_ok();
        ip(None, &format!("netns del {namespace}\n"))?;
        Ok(has)
    }

    /// Removes the qdisc, so that the interface takes packet programs again.
    pub fn give_back(self) -> Result<()> {
        run(&self.namespace, "tc", &["qdisc", "del", "dev", &self.device, "ingress"])?;
        run(&self.namespace, "ip", &["link", "del", &limiting(&self.device)]).map(drop)
    }
}

/// Replaces clsact by an ingress qdisc. The proxy may add clsact again between the two commands, so
/// they are repeated until it does not.
pub fn take_qdisc(namespace: &str, device: &str) -> Result<()> {
    wait::until(&format!("clsact at {device} is replaced"), TAKEN_WITHIN, || {
        // With tcx nothing is there.
        let _missing = run(namespace, "tc", &["qdisc", "del", "dev", device, "clsact"]);
        let added = run(namespace, "tc", &["qdisc", "add", "dev", device, "ingress"]);
        added.map(Some).map_err(|error| format!("{error:#}"))
    })
    .map(drop)
}

/// Returns the name of the device by which the packets of `device` are sent, and from which they
/// come back.
fn limiting(device: &str) -> String {
    format!("bwp-{device}")
}

/// Fills the hook. The proxy's program is removed last, when the hook has no other free position:
/// the proxy checks its hooks every ten seconds, and would attach its program again while 60 others
/// are attached.
fn fill(index: u32, links: &Path) -> Result<Vec<OwnedFd>> {
    let pin = links.join(format!("{index}_{}", Direction::Egress.name()));
    let mut filling = Vec::new();
    while let Some(link) = attach_one(index)? {
        filling.push(link);
    }
    let last = wait::until(&format!("the hook of interface {index} is full"), TAKEN_WITHIN, || {
        let taken = bpf::pinned(&pin).and_then(|proxys| bpf::link_detach(proxys.as_fd()));
        taken.map_err(|error| error.to_string())?;
        attach_one(index).map_err(|error| format!("{error:#}"))
    })?;
    filling.push(last);
    Ok(filling)
}

/// Attaches a program to the hook. Returns `None` if the hook is full.
fn attach_one(index: u32) -> Result<Option<OwnedFd>> {
    let program = bpf::load_program(SCHED_CLS, 0, &NEXT)?;
    match bpf::link_tcx(program.as_fd(), index, Direction::Egress.tcx_hook()) {
        Ok(link) => Ok(Some(link)),
        Err(error) if error.errno() == libc::ERANGE => Ok(None),
        Err(error) => Err(error.into()),
    }
}
