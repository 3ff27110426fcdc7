//! Packets a second that one core forwards.
//!
//! A program of ours is run with live frames at the other end of the node's device, as fast as one core can: it writes each frame
//! anew, as one of many flows, and sends it. So the node's device gets them as from a wire, and all that follows, up to the device
//! where they are counted and dropped, is done on the same core.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use aya::{
    TestRun as _, TestRunOptions,
    programs::{TestRunAttrs, Xdp},
};
use aya_obj::programs::xdp::XdpAttachType;
use etherparse::PacketBuilder;
use lab::{
    Lab, address,
    cluster::{FABRIC, OUTSIDE, node_name},
    namespace::{run, within},
    xdp,
};
use nix::{
    net::if_::if_nametoindex,
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use proxy_ctl::sys::bpf::pin;

use crate::{
    cluster::{BYTE_PORT, Cluster, NODE},
    plan::Route,
    program::{self, FIRST_PORT, FRAME},
    results::{Figures, Settings},
    statistics::Spread,
};

const DEVICE: &str = "eth0";
/// Frames before the kernel looks after what it has received.
const BATCH: u32 = 64;
/// Frames of one call.
const FRAMES: u32 = 1 << 16;
/// Rates whose spread is told.
const ROUNDS: u32 = 5;

/// What the node does with a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Treatment {
    /// Drops it at the device.
    Drops,
    /// Sends it back by the device, untouched.
    SendsBack,
    /// Forwards it, as it is for a pod.
    Forwards,
    /// Translates it, by rules.
    Translates,
    /// Translates it, by an XDP program of the proxy.
    TranslatesByXdp,
}

pub(crate) fn packets(
    cluster: &Cluster,
    settings: &Settings,
    route: Route,
    treatment: Treatment,
) -> Result<Figures> {
    let lab = &cluster.lab;
    let node = node_name(NODE);
    let mut attached = vec![attach(lab, FABRIC, &node, &program::drop_datagrams())?];
    let sinks = match (treatment, route) {
        (Treatment::Drops, _) => {
            attached.push(attach(lab, &node, DEVICE, &program::drop_datagrams())?);
            vec![(node.as_str(), DEVICE)]
        }
        (_, Route::NodePortRemote) => vec![(FABRIC, node.as_str())],
        (_, Route::ClusterIp | Route::NodePortLocal) => route.servers().map(|pod| (pod, DEVICE)).to_vec(),
    };
    match treatment {
        Treatment::SendsBack => attached.push(attach(lab, &node, DEVICE, &program::send_back())?),
        // As a driver runs one, whatever it does: else frames are no frames.
        Treatment::Forwards | Treatment::Translates => {
            attached.push(attach(lab, &node, DEVICE, &xdp::PASS)?);
        }
        Treatment::Drops | Treatment::TranslatesByXdp => {}
    }
    for (pod, device) in sinks.iter().filter(|(name, _)| *name != FABRIC && *name != node) {
        attached.push(attach(lab, pod, device, &program::drop_datagrams())?);
    }
    let to = match treatment {
        Treatment::Forwards => SocketAddrV4::new(lab.netns(route.servers()[0])?.addresses.v4, BYTE_PORT),
        Treatment::Drops | Treatment::SendsBack | Treatment::Translates | Treatment::TranslatesByXdp => {
            let target = cluster.targets(route, false)?.service;
            SocketAddrV4::new(address::node(NODE).v4, target.port())
        }
    };
    let frame = frame(lab, to)?;
    let rates = within_on_one_core(&lab.netns(FABRIC)?.namespace, || {
        let generator = Generator::new(lab, &frame, settings.flows)?;
        let counted = || sinks.iter().map(|(name, device)| received(lab, name, device)).sum::<Result<u64>>();
        // Neighbours are asked for, flows are opened, what is only slow the first time is done.
        generator.run_for(Duration::from_secs_f64(settings.seconds / 5.0))?;
        let round = Duration::from_secs_f64(settings.seconds / f64::from(ROUNDS));
        let rate = |_| {
            let before = counted()?;
            let (sent, seconds) = generator.run_for(round)?;
            let came = (counted()? - before) as f64;
            Ok((came / seconds, 1.0 - came / sent))
        };
        (0..ROUNDS).map(rate).collect::<Result<Vec<(f64, f64)>>>()
    })?;
    let of = |part: fn(&(f64, f64)) -> f64| Spread::of(rates.iter().map(part)).context("no rounds");
    let (per_second, lost) = (of(|(rate, _)| *rate)?, of(|(_, lost)| *lost)?);
    ensure!(per_second.median > 1_000.0, "{:.0} packets a second came through", per_second.median);
    Ok(Figures::Packets { per_second, nanos: 1e9 / per_second.median, lost: lost.median.max(0.0) })
}

fn attach(lab: &Lab, name: &str, device: &str, instructions: &[u64]) -> Result<OwnedFd> {
    xdp::attach(&lab.netns(name)?.namespace, device, instructions)
}

/// On a thread of its own: the last core, as the first has most interrupts.
fn within_on_one_core<T: Send>(namespace: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    within(namespace, || {
        let last = std::thread::available_parallelism().map_or(0, |cores| usize::from(cores) - 1);
        let mut cores = CpuSet::new();
        cores.set(last)?;
        sched_setaffinity(Pid::from_raw(0), &cores).context("staying on one core")?;
        work()
    })
}

/// From the client outside to the node's device.
fn frame(lab: &Lab, to: SocketAddrV4) -> Result<[u8; FRAME]> {
    let [from, via] = [OUTSIDE.to_owned(), node_name(NODE)].map(|name| link_address(lab, &name));
    let builder = PacketBuilder::ethernet2(from?, via?)
        .ipv4(address::outside().v4.octets(), Ipv4Addr::octets(to.ip()), 64)
        .udp(FIRST_PORT, to.port());
    let mut bytes = Vec::with_capacity(FRAME);
    builder.write(&mut bytes, &[0; FRAME - 42])?;
    // No checksum: the program gives each frame another port.
    bytes[40..42].fill(0);
    bytes.try_into().map_err(|_| anyhow!("a frame of another length"))
}

fn link_address(lab: &Lab, name: &str) -> Result<[u8; 6]> {
    let text = run(&lab.netns(name)?.namespace, "ip", &["-j", "link", "show", "dev", DEVICE])?;
    let devices: serde_json::Value = serde_json::from_str(&text).context("reading what ip shows")?;
    let address = devices[0]["address"].as_str().context("a device without address")?;
    let bytes = address.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<Vec<_>, _>>()?;
    bytes.try_into().map_err(|_| anyhow!("{address} is no link address"))
}

/// Frames that a device has received so far, those included that a program has dropped.
fn received(lab: &Lab, name: &str, device: &str) -> Result<u64> {
    let table = within(&lab.netns(name)?.namespace, || {
        fs::read_to_string("/proc/thread-self/net/dev").context("reading net/dev")
    })?;
    received_in(&table, device).with_context(|| format!("no {device} in net/dev of {name}"))
}

fn received_in(table: &str, device: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'));
    line?.split_whitespace().nth(1)?.parse().ok()
}

struct Generator {
    program: Xdp,
    frame: [u8; FRAME],
    context: Vec<u8>,
}

impl Generator {
    /// In the network namespace of the fabric.
    fn new(lab: &Lab, frame: &[u8; FRAME], flows: u32) -> Result<Self> {
        let port = if_nametoindex(node_name(NODE).as_str())?;
        let program = xdp::load(&program::generate(frame, flows, port))?;
        // aya makes programs of object files and of pins.
        let at = lab.bpffs(NODE).join("bench-generator");
        pin(program.as_fd(), &at)?;
        let opened = Xdp::from_pin(&at, XdpAttachType::Interface);
        fs::remove_file(&at).with_context(|| format!("removing {}", at.display()))?;
        // As `xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context = [0, FRAME as u32, 0, port, 0, 0].map(u32::to_ne_bytes).concat();
        Ok(Self { program: opened?, frame: *frame, context })
    }

    /// Answers how many it has sent, and in how many seconds: what the kernel does before the first and after the last frame of a call takes
    /// as long as thousands of them.
    fn run_for(&self, time: Duration) -> Result<(f64, f64)> {
        let (start, mut sent, mut seconds) = (Instant::now(), 0.0, 0.0);
        while start.elapsed() < time {
            let options = TestRunOptions {
                data_in: Some(&self.frame),
                ctx_in: Some(&self.context),
                repeat: FRAMES,
                attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
                ..TestRunOptions::default()
            };
            let done = self.program.test_run(options).context("sending live frames (Linux 5.18)")?;
            sent += f64::from(FRAMES);
            // Of one frame.
            seconds += done.duration.as_secs_f64() * f64::from(FRAMES);
        }
        Ok((sent, seconds))
    }
}

/// One rule for the Service of a route, as one writes it by hand; gone with the value.
pub(crate) struct OneRule<'a> {
    namespace: &'a str,
    rules: [Vec<String>; 2],
}

impl<'a> OneRule<'a> {
    pub(crate) fn install(cluster: &'a Cluster, route: Route) -> Result<Self> {
        let service = cluster.targets(route, false)?.service;
        let pod = cluster.lab.netns(route.servers()[0])?.addresses.v4;
        let words = |text: String| Vec::from_iter(text.split(' ').map(str::to_owned));
        let to = format!("PREROUTING -d {} -p udp --dport {}", service.ip(), service.port());
        let rules = [
            words(format!("{to} -j DNAT --to-destination {pod}:{BYTE_PORT}")),
            words(format!("POSTROUTING -d {pod} -p udp --dport {BYTE_PORT} -j MASQUERADE")),
        ];
        let rule = Self { namespace: &cluster.lab.netns(&node_name(NODE))?.namespace, rules };
        rule.iptables("-A")?;
        Ok(rule)
    }

    fn iptables(&self, what: &str) -> Result<()> {
        self.rules.iter().try_for_each(|rule| {
            let words = ["-w", "-t", "nat", what].into_iter().chain(rule.iter().map(String::as_str));
            run(self.namespace, "iptables", &Vec::from_iter(words)).map(drop)
        })
    }
}

impl Drop for OneRule<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.iptables("-D") {
            eprintln!("bench: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_what_a_device_has_received() {
        let table = "Inter-|   Receive\n face |bytes    packets errs\n    lo: 10 1 0\n  eth0: 1890 27 0 0\n";
        assert_eq!(received_in(table, "eth0"), Some(27));
        assert_eq!(received_in(table, "eth"), None);
    }
}
