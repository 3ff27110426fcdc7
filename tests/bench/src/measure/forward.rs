//! Measures how many packets a second one core forwards.
//!
//! An XDP program runs with live frames at the other end of the node's device, as fast as one core
//! can. It writes each frame anew, as one of many flows, and sends it. So the node's device gets
//! the frames as from a wire. All that follows is done on the same core, up to the device where
//! frames are counted and dropped.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use etherparse::PacketBuilder;
use lab::{
    Lab, address,
    cluster::{FABRIC, OUTSIDE, node_name},
    namespace::{run, within},
    wait, xdp,
};

use super::{
    generator::{DEVICE, Generator, attach, link_address, within_on_one_core},
    program::{self, FIRST_PORT, FRAME},
};
use crate::{
    cluster::{BYTE_PORT, Cluster, NODE},
    plan::Route,
    results::{Figures, Settings},
    statistics::Spread,
};

/// Number of rounds, whose rates give the spread.
const ROUNDS: u32 = 5;

/// Treatment of a frame by the node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Treatment {
    /// The device drops the frame.
    Drops,
    /// The device sends the frame back unchanged.
    SendsBack,
    /// The node forwards the frame, which is for a pod.
    Forwards,
    /// The node translates the frame by rules.
    Translates,
    /// The node translates the frame by an XDP program of the proxy.
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
        // A driver runs an XDP program, whatever it does. Without one, frames would become packets
        // at once.
        Treatment::Forwards | Treatment::Translates => {
            attached.push(attach(lab, &node, DEVICE, &xdp::PASS)?);
        }
        Treatment::Drops | Treatment::TranslatesByXdp => {}
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
        let generator = Generator::new(lab, |device| program::generate(&frame, settings.flows, device))?;
        if !matches!(treatment, Treatment::Drops | Treatment::SendsBack) {
            open_flows(&generator, settings.flows, || Ok(received(lab, FABRIC, &node)?.frames))?;
        }
        for (pod, device) in sinks.iter().filter(|(name, _)| *name != FABRIC && *name != node) {
            attached.push(attach(lab, pod, device, &program::drop_datagrams())?);
        }
        let counted = || {
            let of_each = sinks.iter().map(|(name, device)| Ok(received(lab, name, device)?.frames));
            of_each.sum::<Result<u64>>()
        };
        // Before the measurement, this does what is slow only the first time.
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

/// Opens each flow, and makes pods of the node answer it, because XDP forwards only flows that were
/// answered. `answers` returns how many answers have come back so far. It also counts frames to
/// another node, as they are dropped there.
fn open_flows(generator: &Generator, flows: u32, answers: impl Fn() -> Result<u64>) -> Result<()> {
    /// Number of frames that are sent at once, fewer than a server's buffer holds.
    const AT_ONCE: u32 = 64;
    const LIMIT: Duration = Duration::from_secs(60);
    // Frames draw their flow at random. With eight frames for each flow, hardly any flow is left
    // out.
    let enough = answers()? + u64::from(flows) * 8;
    let failed = |error: anyhow::Error| format!("{error:#}");
    wait::until("flows are answered", LIMIT, || {
        let before = answers().map_err(failed)?;
        if before < enough {
            generator.send(AT_ONCE).map_err(failed)?;
            return Err(format!("{} answers are missing", enough - before));
        }
        Ok(Some(()))
    })
}

/// Makes a frame from the client outside to the node's device.
fn frame(lab: &Lab, to: SocketAddrV4) -> Result<[u8; FRAME]> {
    let builder = PacketBuilder::ethernet2(link_address(lab, OUTSIDE)?, link_address(lab, &node_name(NODE))?)
        .ipv4(address::outside().v4.octets(), Ipv4Addr::octets(to.ip()), 64)
        .udp(FIRST_PORT, to.port());
    let mut bytes = Vec::with_capacity(FRAME);
    builder.write(&mut bytes, &[0; FRAME - 42])?;
    // The datagram has no checksum, because the program gives each frame another port.
    bytes[40..42].fill(0);
    bytes.try_into().map_err(|_| anyhow!("a frame of another length"))
}

/// Frames that have come to a device so far.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Received {
    /// Number of frames, including those that a program has dropped.
    pub(crate) frames: u64,
    /// Number of frames for which the device had no room.
    pub(crate) lost: u64,
}

pub(crate) fn received(lab: &Lab, name: &str, device: &str) -> Result<Received> {
    let table = within(&lab.netns(name)?.namespace, || {
        fs::read_to_string("/proc/thread-self/net/dev").context("reading net/dev")
    })?;
    received_in(&table, device).with_context(|| format!("no {device} in net/dev of {name}"))
}

fn received_in(table: &str, device: &str) -> Option<Received> {
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
    let column = |number| line.split_whitespace().nth(number)?.parse().ok();
    Some(Received { frames: column(1)?, lost: column(3)? })
}

/// One rule for the Service of a route, as a person would write it. It is removed when this is
/// dropped.
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
        let table =
            "Inter-|   Receive\n face |bytes    packets errs drop\n    lo: 10 1 0 0\n  eth0: 1890 27 0 4\n";
        assert_eq!(received_in(table, "eth0"), Some(Received { frames: 27, lost: 4 }));
        assert_eq!(received_in(table, "eth"), None);
    }
}
