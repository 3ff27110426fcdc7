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
    /// Network namespace and device of both ends.
    ends: [(String, String); 2],
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
        let ends = [(fabric, port), (netns, device)]
            .map(|(netns, device)| (netns.namespace.clone(), device.to_owned()));
        let card = Self { _link: link.with_context(|| format!("an XDP program on {port}"))?, ends };
        card.fill_in_checksums("off")?;
        Ok(card)
    }

    pub(super) fn take_out(self) -> Result<()> {
        self.fill_in_checksums("on")
    }

    /// `on`: by the device.
    fn fill_in_checksums(&self, by_device: &str) -> Result<()> {
        let set = |(namespace, device): &(String, String)| {
            run(namespace, "ethtool", &["-K", device, "tx", by_device]).map(drop)
        };
        self.ends.iter().try_for_each(set)
    }
}
