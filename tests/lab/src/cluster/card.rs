//! Veths that behave like network cards for the XDP programs on them.

use std::os::fd::OwnedFd;

use anyhow::Result;

use super::Netns;
use crate::{namespace::run, xdp};

/// Makes a pod's veth take frames that XDP programs send to it, or not. It takes them if the other
/// end has queues of its own, which GRO makes.
pub(super) fn let_take_frames(pod: &Netns, take: bool) -> Result<()> {
    run(&pod.namespace, "ethtool", &["-K", "eth0", "gro", if take { "on" } else { "off" }]).map(drop)
}

/// Leaves VLAN tags in the frames that come to `device`, whose other end is `port`.
pub(super) fn leave_tags(fabric: &Netns, port: &str, netns: &Netns, device: &str) -> Result<()> {
    run(
        &netns.namespace,
        "ethtool",
        &["-K", device, "rx-vlan-hw-parse", "off", "rx-vlan-stag-hw-parse", "off"],
    )?;
    // The other end must write the tags into the frames.
    run(&fabric.namespace, "ethtool", &["-K", port, "txvlan", "off"]).map(drop)
}

/// Veth that behaves like a network card as long as this lives.
pub(super) struct Card {
    /// Program at the other end. `None` if the caller attaches a program there.
    link: Option<OwnedFd>,
    /// Network namespace and device of both ends.
    ends: [(String, String); 2],
}

impl Card {
    /// Makes a card of `device`, whose other end is `port`. An XDP program at the other end takes
    /// what such a program sends back by the device. Packets that come to the device have whole
    /// checksums.
    pub(super) fn make(fabric: &Netns, port: &str, netns: &Netns, device: &str) -> Result<Self> {
        let link = xdp::attach(&fabric.namespace, port, &xdp::PASS)?;
        let ends = [(fabric, port), (netns, device)]
            .map(|(netns, device)| (netns.namespace.clone(), device.to_owned()));
        let card = Self { link: Some(link), ends };
        card.fill_in_checksums("off")?;
        Ok(card)
    }

    /// Leaves the other end to a program of the caller. Checksums stay whole, because proxy-ctl
    /// removes its native XDP program from a veth where they are unfinished.
    pub(super) fn free_other_end(&mut self) {
        self.link = None;
    }

    pub(super) fn take_out(self) -> Result<()> {
        self.fill_in_checksums("on")
    }

    /// Makes the devices compute checksums if `by_device` is `on`, or the kernel before them.
    fn fill_in_checksums(&self, by_device: &str) -> Result<()> {
        let set = |(namespace, device): &(String, String)| {
            run(namespace, "ethtool", &["-K", device, "tx", by_device]).map(drop)
        };
        self.ends.iter().try_for_each(set)
    }
}
