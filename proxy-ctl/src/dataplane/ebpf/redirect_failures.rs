//! Counts frames that XDP has sent to another uplink, and that no device has taken. That is known
//! only after the program has ended, at two tracepoints of the kernel.
//!
//! The links are not pinned, because the kernel cannot swap their programs. While no controller
//! runs, nothing is counted.

use std::{fs, io, os::fd::OwnedFd, os::unix::fs::MetadataExt as _};

use aya::EbpfLoader;
use proxy_common::inventory::program;

use super::{Error, load::Programs};
use crate::sys::{bpf, kernel_types::KernelTypes};

/// The offsets at which programs find what identifies a device. All are zero if they are unknown.
#[derive(Debug, Default)]
pub(super) struct DeviceFields {
    index: u32,
    network: u32,
    number: u32,
    own_network: u32,
}

impl DeviceFields {
    fn find() -> io::Result<Self> {
        let types = KernelTypes::read()?;
        let number = types.offset("net", "ns")?.saturating_add(types.offset("ns_common", "inum")?);
        // The kernel stores the number in 32 bits.
        let own_network = fs::metadata("/proc/thread-self/ns/net")?.ino() as u32;
        Ok(Self {
            index: types.offset("net_device", "ifindex")?.into(),
            network: types.offset("net_device", "nd_net")?.into(),
            number: number.into(),
            own_network,
        })
    }

    /// Returns what [`find`](Self::find) does, or logs why it fails and returns zeros.
    pub(super) fn find_or_warn() -> Self {
        Self::find().unwrap_or_else(|error| {
            warn_uncounted(&error);
            Self::default()
        })
    }

    pub(super) fn set<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        loader
            .override_global("DEVICE_INDEX", &self.index, true)
            .override_global("DEVICE_NETWORK", &self.network, true)
            .override_global("NETWORK_NUMBER", &self.number, true)
            .override_global("OWN_NETWORK", &self.own_network, true);
    }
}

/// The links to the tracepoints. Failures are counted while it lives.
#[derive(Debug, Default)]
pub(super) struct RedirectFailures {
    links: Vec<OwnedFd>,
    is_tried: bool,
}

impl RedirectFailures {
    pub(super) fn follow(&mut self, are_redirected: bool, programs: &mut Programs) {
        if !are_redirected {
            *self = Self::default();
        } else if !std::mem::replace(&mut self.is_tried, true) {
            match attach(programs) {
                Ok(links) => self.links = links,
                Err(error) => warn_uncounted(&error),
            }
        }
    }
}

fn warn_uncounted(error: &dyn std::error::Error) {
    tracing::warn!(%error, "frames that XDP sends by another uplink, and that it does not take, are not counted");
}

fn attach(programs: &mut Programs) -> Result<Vec<OwnedFd>, Error> {
    let tracepoints =
        [(program::redirect_sent, c"xdp_devmap_xmit"), (program::redirect_failed, c"xdp_redirect_err")];
    let mut links = Vec::new();
    for (program, tracepoint) in tracepoints {
        let failed =
            |source| Error::Attach { program, target: tracepoint.to_string_lossy().into_owned(), source };
        links.push(bpf::open_raw_tracepoint(programs.get(program)?, tracepoint).map_err(failed)?);
    }
    Ok(links)
}
