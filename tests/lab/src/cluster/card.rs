//! Veths that are like network cards to the XDP programs on them.

use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use proxy_ctl::sys::bpf::{XdpMode, link_xdp, load_program};

use super::Netns;
use crate::namespace::{run, within};

/// A veth stays one as long as this lives.
pub(super) struct Card {
    _link: OwnedFd,
}

impl Card {
    /// `device`, whose other end is `port`. What an XDP program sends back by it is taken by such a program at the other end, and what comes
    /// to it has whole checksums.
    pub(super) fn make(fabric: &Netns, port: &str, netns: &Netns, device: &str) -> Result<Self> {
        const XDP: u32 = 6;
        const BPF_XDP: u32 = 37;
        // r0 = XDP_PASS; exit
        const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
        let link = within(&fabric.namespace, || {
            let program = load_program(XDP, BPF_XDP, &PASS)?;
            Ok(link_xdp(program.as_fd(), if_nametoindex(port)?, XdpMode::Native)?)
        });
        for (netns, device) in [(fabric, port), (netns, device)] {
            run(&netns.namespace, "ethtool", &["-K", device, "tx", "off"])?;
        }
        Ok(Self { _link: link.with_context(|| format!("an XDP program on {port}"))? })
    }
}
