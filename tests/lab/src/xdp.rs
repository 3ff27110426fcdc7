//! Small XDP programs, as instructions.

use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use proxy_ctl::sys::bpf::{XdpMode, link_xdp, load_program};

use crate::namespace::within;

/// The instructions are: r0 = XDP_PASS; exit.
pub const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];

pub fn load(instructions: &[u64]) -> Result<OwnedFd> {
    const XDP: u32 = 6;
    const BPF_XDP: u32 = 37;
    load_program(XDP, BPF_XDP, instructions).context("loading an XDP program")
}

/// Attaches a program to a device of a network namespace. It is removed when the returned
/// descriptor is closed.
pub fn attach(namespace: &str, device: &str, instructions: &[u64]) -> Result<OwnedFd> {
    let attach = || {
        let program = load(instructions)?;
        Ok(link_xdp(program.as_fd(), if_nametoindex(device)?, XdpMode::Native)?)
    };
    within(namespace, attach).with_context(|| format!("an XDP program on {device} of {namespace}"))
}
