//! Frames that come to the node's device as from a wire, as fast as one core can make them or at a pace.

use std::{
    fs,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use aya::{
    TestRun as _, TestRunOptions,
    programs::{TestRunAttrs, Xdp},
};
use aya_obj::programs::xdp::XdpAttachType;
use lab::{
    Lab,
    cluster::node_name,
    namespace::{run, within},
    xdp,
};
use nix::{
    net::if_::if_nametoindex,
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use proxy_ctl::sys::bpf::pin;

use crate::{cluster::NODE, program::FRAME};

pub(crate) const DEVICE: &str = "eth0";
/// Frames before the kernel looks after what it has received.
const BATCH: u32 = 64;
/// Frames of one call.
const FRAMES: u32 = 1 << 16;

/// A program that is run with live frames at the other end of the node's device: it writes each of them anew and sends it.
pub(crate) struct Generator {
    program: Xdp,
    context: Vec<u8>,
}

impl Generator {
    /// In the network namespace of the fabric. `program`, by the index of the device by which it sends.
    pub(crate) fn new(lab: &Lab, program: impl FnOnce(u32) -> Vec<u64>) -> Result<Self> {
        let port = if_nametoindex(node_name(NODE).as_str())?;
        let program = xdp::load(&program(port))?;
        // aya makes programs of object files and of pins.
        let at = lab.bpffs(NODE).join("bench-generator");
        pin(program.as_fd(), &at)?;
        let opened = Xdp::from_pin(&at, XdpAttachType::Interface);
        fs::remove_file(&at).with_context(|| format!("removing {}", at.display()))?;
        // As `xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context = [0, FRAME as u32, 0, port, 0, 0].map(u32::to_ne_bytes).concat();
        Ok(Self { program: opened?, context })
    }

    /// Answers how long one of so many frames has taken.
    pub(crate) fn send(&self, frames: u32) -> Result<Duration> {
        let options = TestRunOptions {
            data_in: Some(&[0; FRAME]),
            ctx_in: Some(&self.context),
            repeat: frames,
            attrs: TestRunAttrs::new().xdp_live_frames(BATCH.min(frames)),
            ..TestRunOptions::default()
        };
        let done = self.program.test_run(options).context("sending live frames (Linux 5.18)")?;
        Ok(done.duration)
    }

    /// Answers how many it has sent, and in how many seconds: what the kernel does before the first and after the last frame of a call takes
    /// as long as thousands of them.
    pub(crate) fn run_for(&self, time: Duration) -> Result<(f64, f64)> {
        let (start, mut sent, mut seconds) = (Instant::now(), 0.0, 0.0);
        while start.elapsed() < time {
            seconds += self.send(FRAMES)?.as_secs_f64() * f64::from(FRAMES);
            sent += f64::from(FRAMES);
        }
        Ok((sent, seconds))
    }
}

/// An XDP program to a device of a network namespace.
pub(crate) fn attach(lab: &Lab, name: &str, device: &str, instructions: &[u64]) -> Result<OwnedFd> {
    xdp::attach(&lab.netns(name)?.namespace, device, instructions)
}

/// On a thread of its own: the last core, as the first has most interrupts.
pub(crate) fn within_on_one_core<T: Send>(
    namespace: &str,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    within(namespace, || {
        let last = std::thread::available_parallelism().map_or(0, |cores| usize::from(cores) - 1);
        let mut cores = CpuSet::new();
        cores.set(last)?;
        sched_setaffinity(Pid::from_raw(0), &cores).context("staying on one core")?;
        work()
    })
}

/// Of a network namespace's device.
pub(crate) fn link_address(lab: &Lab, name: &str) -> Result<[u8; 6]> {
    let text = run(&lab.netns(name)?.namespace, "ip", &["-j", "link", "show", "dev", DEVICE])?;
    let devices: serde_json::Value = serde_json::from_str(&text).context("reading what ip shows")?;
    let address = devices[0]["address"].as_str().context("a device without address")?;
    let bytes = address.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<_>, _>>()?;
    bytes.try_into().map_err(|_| anyhow!("{address} is no link address"))
}
