//! Makes frames come to the node's device as from a wire, as fast as one core can or at a pace.

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

use super::program::FRAME;
use crate::cluster::NODE;

pub(crate) const DEVICE: &str = "eth0";
/// Number of frames that are sent before the kernel processes what it has received.
const BATCH: u32 = 64;
/// Number of frames that one call of BPF_PROG_TEST_RUN sends.
const FRAMES: u32 = 1 << 16;

/// XDP program that runs with live frames at the other end of the node's device. It writes each
/// frame anew and sends it.
pub(crate) struct Generator {
    program: Xdp,
    context: Vec<u8>,
}

impl Generator {
    /// Loads the program in the network namespace of the fabric. `program` makes it for the index
    /// of the device by which it sends.
    pub(crate) fn new(lab: &Lab, program: impl FnOnce(u32) -> Vec<u64>) -> Result<Self> {
        let port = if_nametoindex(node_name(NODE).as_str())?;
        let program = xdp::load(&program(port))?;
        // aya makes programs only of object files and of pins.
        let at = lab.bpffs(NODE).join("bench-generator");
        pin(program.as_fd(), &at)?;
        let opened = Xdp::from_pin(&at, XdpAttachType::Interface);
        fs::remove_file(&at).with_context(|| format!("removing {}", at.display()))?;
        // The context is an `xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index,
        // egress_ifindex.
        let context = [0, FRAME as u32, 0, port, 0, 0].map(u32::to_ne_bytes).concat();
        Ok(Self { program: opened?, context })
    }

    /// Sends `frames` frames, and returns the time that each has taken.
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

    /// Sends frames for this time. Returns their number and the seconds that they took. Before the
    /// first and after the last frame of a call, the kernel works as long as for thousands of
    /// frames, which does not count.
    pub(crate) fn run_for(&self, time: Duration) -> Result<(f64, f64)> {
        let (start, mut sent, mut seconds) = (Instant::now(), 0.0, 0.0);
        while start.elapsed() < time {
            seconds += self.send(FRAMES)?.as_secs_f64() * f64::from(FRAMES);
            sent += f64::from(FRAMES);
        }
        Ok((sent, seconds))
    }
}

/// Attaches an XDP program to a device of a network namespace.
pub(crate) fn attach(lab: &Lab, name: &str, device: &str, instructions: &[u64]) -> Result<OwnedFd> {
    xdp::attach(&lab.netns(name)?.namespace, device, instructions)
}

/// Runs `work` on a thread that stays on the last core, because the first core has most interrupts.
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

/// Returns the link address of the device of a network namespace.
pub(crate) fn link_address(lab: &Lab, name: &str) -> Result<[u8; 6]> {
    let text = run(&lab.netns(name)?.namespace, "ip", &["-j", "link", "show", "dev", DEVICE])?;
    let devices: serde_json::Value = serde_json::from_str(&text).context("reading what ip shows")?;
    let address = devices[0]["address"].as_str().context("a device without address")?;
    let bytes = address.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<_>, _>>()?;
    bytes.try_into().map_err(|_| anyhow!("{address} is no link address"))
}
