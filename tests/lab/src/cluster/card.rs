//! Veths that are like network cards to the XDP programs on them.

use std::os::fd::OwnedFd;

use anyhow::Result;

use super::Netns;
use crate::{namespace::run, xdp};

/// A veth takes frames that XDP programs send to it if the other end has queues of its own, which GRO makes.
pub(super) fn let_take_frames(pod: &Netns, take: bool) -> Result<()> {
    run(&pod.namespace, "ethtool", &["-K", "eth0", "gro", if take { "on" } else { "off" }]).map(drop)
}

/// Tags of VLANs stay in the frames that come to `device`, whose other end is `port`.
pub(super) fn leave_tags(fabric: &Netns, port: &str, netns: &Netns, device: &str) -> Result<()> {
    run(
        &netns.namespace,
        "ethtool",
        &["-K", device, "rx-vlan-hw-parse", "off", "rx-vlan-stag-hw-parse", "off"],
    )?;
    // The other end writes them.
    run(&fabric.namespace, "ethtool", &["-K", port, "txvlan", "off"]).map(drop)
}

/// A veth stays one as long as this lives.
pub(super) struct Card {
    /// The program at the other end. `None`: another one is to take its place.
    link: Option<OwnedFd>,
    /// Network namespace and device of both ends.
    ends: [(String, String); 2],
}

impl Card {
    /// `device`, whose other end is `port`. What an XDP program sends back by it is taken by such a program at the other end, and what comes
    /// to it has whole checksums.
    pub(super) fn make(fabric: &Netns, port: &str, netns: &Netns, device: &str) -> Result<Self> {
        let link = xdp::attach(&fabric.namespace, port, &xdp::PASS)?;
        let ends = [(fabric, port), (netns, device)]
            .map(|(netns, device)| (netns.namespace.clone(), device.to_owned()));
        let card = Self { link: Some(link), ends };
        card.fill_in_checksums("off")?;
        Ok(card)
    }

    /// Leaves the other end to a program of the caller. Checksums stay whole: proxy-ctl takes its
    /// native XDP off a veth to which they come unfinished.
    pub(super) fn free_other_end(&mut self) {
        self.link = None;
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
