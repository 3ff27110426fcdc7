//! Capabilities of network devices, as the kernel and their drivers report them.

use std::{collections::BTreeSet, fs, io};

use libc::{IFLA_INFO_KIND, IFLA_LINKINFO, IFLA_MTU, IFLA_QDISC};

use super::{
    generic_netlink::{GenericFamily, HEADER, header},
    link,
    netlink::{Attributes, Messages, NLM_F_ACK, word},
    tc::{Direction, has_filters, tcx_program_ids},
    veth::{self, PeerChecksums},
};
use crate::sys::CallError;

/// Facts about a device. `None` in a field means that the kernel does not report it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DeviceFacts {
    /// The name of the driver. For a device that the kernel itself provides, it is the name of its
    /// kind.
    pub driver: Option<String>,
    pub mtu: Option<u32>,
    /// The number of queues that receive.
    pub queues: Option<u32>,
    /// The offloads that are on, by ethtool's names. It is empty if none is on or if they are not
    /// known.
    pub offloads: BTreeSet<String>,
    pub xdp: Option<XdpFeatures>,
    /// The kind of the queueing discipline for packets that leave. `None` also means that there is
    /// none.
    pub discipline: Option<String>,
    /// The number of tcx programs on the device, in both directions. Known since Linux 6.6.
    pub programs: Option<usize>,
    /// True if traffic control has filters on the device.
    pub filters: Option<bool>,
    /// The checksums of packets that a veth receives from its peer. Only [`facts_of_uplink`] asks
    /// for them.
    pub peer: Option<PeerChecksums>,
    /// The size of a memory page in bytes.
    pub page: u32,
}

/// The flags `NETDEV_XDP_ACT_*`, which the kernel reports since Linux 6.3. Some change with what is
/// attached to the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct XdpFeatures(pub u64);

impl XdpFeatures {
    /// The driver runs XDP programs.
    pub const BASIC: Self = Self(1);
    /// A program on the device may redirect frames to other devices.
    pub const REDIRECTS: Self = Self(1 << 1);
    /// The device sends frames that were redirected to it from other devices.
    pub const SENDS: Self = Self(1 << 2);
    /// The device receives frames in fragments.
    pub const FRAGMENTS: Self = Self(1 << 5);
    /// The device sends redirected frames that are in fragments.
    pub const SENDS_FRAGMENTS: Self = Self(1 << 2 | 1 << 6);

    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Returns what is known of an interface of this thread's network namespace.
pub fn facts(index: u32, name: &str) -> DeviceFacts {
    let mut facts = DeviceFacts { page: page(), ..DeviceFacts::default() };
    let asked = [
        of_link(index, &mut facts),
        filters(index, &mut facts),
        ethtool(index, &mut facts),
        netdev(index, &mut facts),
    ];
    for error in asked.into_iter().filter_map(Result::err) {
        tracing::debug!(interface = name, %error, "not all is known of the device");
    }
    if facts.driver.is_none() {
        facts.driver = driver(name);
    }
    facts.programs = programs(index);
    facts
}

/// Returns [`facts`], and for a veth also what its peer does with checksums.
pub fn facts_of_uplink(index: u32, name: &str) -> DeviceFacts {
    let mut facts = facts(index, name);
    if facts.driver.as_deref() == Some("veth") {
        match veth::peer_checksums(index) {
            Ok(peer) => facts.peer = Some(peer),
            Err(error) => {
                tracing::debug!(interface = name, %error, "the other end of a veth was not asked");
                facts.peer = Some(PeerChecksums::OutOfSight);
            }
        }
    }
    facts
}

/// Returns the offloads of a device that are on, by ethtool's names.
pub(crate) fn offloads(index: u32) -> Result<BTreeSet<String>, CallError> {
    let mut facts = DeviceFacts::default();
    ethtool(index, &mut facts)?;
    Ok(facts.offloads)
}

/// Returns true if XDP programs may redirect frames to this interface, as far as its driver reports
/// that.
pub fn takes_frames(index: u32, name: &str) -> bool {
    let mut facts = DeviceFacts::default();
    if let Err(error) = netdev(index, &mut facts) {
        tracing::debug!(interface = name, %error, "not all is known of the device");
    }
    facts.xdp.is_some_and(|features| features.has(XdpFeatures::SENDS))
}

/// Returns a number that exceeds the number of every online CPU.
pub fn cpus() -> u32 {
    aya::util::online_cpus().ok().and_then(|cpus| cpus.into_iter().max()).map_or(u32::MAX, |last| last + 1)
}

fn page() -> u32 {
    const USUAL: u32 = 4_096;
    // SAFETY: no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    page.try_into().unwrap_or(USUAL)
}

/// Returns the driver of a hardware device. /sys shows the network namespace in which it was
/// mounted.
fn driver(name: &str) -> Option<String> {
    let driver = fs::read_link(format!("/sys/class/net/{name}/device/driver")).ok()?;
    Some(driver.file_name()?.to_str()?.to_owned())
}

fn of_link(index: u32, facts: &mut DeviceFacts) -> Result<(), CallError> {
    link::ask(index, |attributes| {
        facts.mtu = attributes.get(IFLA_MTU).and_then(|mtu| word(mtu, 0));
        let kind = attributes.nested(IFLA_LINKINFO).and_then(|info| info.text(IFLA_INFO_KIND));
        facts.driver = kind.map(str::to_owned);
        // A device that is down has the discipline noop.
        let discipline = attributes.text(IFLA_QDISC).filter(|kind| !["noqueue", "noop"].contains(kind));
        facts.discipline = discipline.map(str::to_owned);
    })
}

fn programs(index: u32) -> Option<usize> {
    Direction::ALL.into_iter().map(|direction| Some(tcx_program_ids(index, direction)?.len())).sum()
}

fn filters(index: u32, facts: &mut DeviceFacts) -> Result<(), CallError> {
    let mut has_any = false;
    for direction in Direction::ALL {
        has_any |= has_filters(index, direction)?;
    }
    facts.filters = Some(has_any);
    Ok(())
}

const ETHTOOL_FEATURES_GET: u8 = 11;
const ETHTOOL_CHANNELS_GET: u8 = 17;
/// The attribute for the header of every message.
const ETHTOOL_HEADER: u16 = 1;
const ETHTOOL_DEVICE: u16 = 1;
const FEATURES_ACTIVE: u16 = 4;
const BITSET_BITS: u16 = 3;
const BIT_NAME: u16 = 2;
const CHANNELS_RX: u16 = 6;
const CHANNELS_COMBINED: u16 = 9;

fn ethtool(index: u32, facts: &mut DeviceFacts) -> Result<(), CallError> {
    // The kernel has this family since Linux 5.6.
    let Some(family) = GenericFamily::open("ethtool")? else { return Ok(()) };
    let ask = |command, take: &mut dyn FnMut(Attributes<'_>)| {
        let mut request = Messages::default();
        request.begin(family.id, NLM_F_ACK, &header(command, 1)).nested(ETHTOOL_HEADER, |device| {
            device.attribute(ETHTOOL_DEVICE, &index.to_ne_bytes());
        });
        let answered = family
            .connection
            .request(&request, |_, body| take(Attributes(body.get(HEADER..).unwrap_or_default())));
        answered.or_else(not_supported)
    };
    let offloads = ask(ETHTOOL_FEATURES_GET, &mut |told| facts.offloads.extend(names(told)));
    let queues = ask(ETHTOOL_CHANNELS_GET, &mut |told| {
        let counts = [CHANNELS_RX, CHANNELS_COMBINED].map(|kind| told.get(kind).and_then(|of| word(of, 0)));
        facts.queues = Some(counts.iter().flatten().sum()).filter(|queues| *queues > 0);
    });
    offloads.and(queues).map_err(CallError::of("netlink of ethtool"))
}

/// Returns the names of the bits that are set.
fn names(told: Attributes<'_>) -> impl Iterator<Item = String> {
    let bits = told.nested(FEATURES_ACTIVE).and_then(|active| active.nested(BITSET_BITS));
    let name = |(_, bit)| Attributes(bit).text(BIT_NAME).map(str::to_owned);
    bits.into_iter().flatten().filter_map(name)
}

/// Ignores the error of a driver that does not answer a question. Not every driver answers each.
fn not_supported(error: io::Error) -> io::Result<()> {
    if error.raw_os_error() == Some(libc::EOPNOTSUPP) { Ok(()) } else { Err(error) }
}

fn netdev(index: u32, facts: &mut DeviceFacts) -> Result<(), CallError> {
    const GET: u8 = 1;
    const INTERFACE: u16 = 1;
    const XDP_FEATURES: u16 = 3;
    // The kernel has this family since Linux 6.3.
    let Some(family) = GenericFamily::open("netdev")? else { return Ok(()) };
    let mut request = Messages::default();
    request.begin(family.id, NLM_F_ACK, &header(GET, 1)).attribute(INTERFACE, &index.to_ne_bytes());
    let answered = family.connection.request(&request, |_, body| {
        let told = Attributes(body.get(HEADER..).unwrap_or_default()).get(XDP_FEATURES);
        facts.xdp =
            told.and_then(|told| told.first_chunk()).map(|told| XdpFeatures(u64::from_ne_bytes(*told)));
    });
    answered.map_err(CallError::of("netlink NETDEV_CMD_DEV_GET"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn run(program: &str, arguments: &str) {
        let status = Command::new(program).args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "{program} {arguments}");
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_devices_tell_what_they_can_do() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        run("ip", "link add here mtu 3000 type veth peer name there");
        run("ip", "link add bridge type bridge");
        let index = |name: &str| link::index(name).unwrap().unwrap();
        let here = || facts(index("here"), "here");
        let strips = |facts: &DeviceFacts| facts.offloads.contains("rx-vlan-hw-parse");
        let before = here();
        assert_eq!(
            (before.driver.as_deref(), before.mtu, before.queues),
            (Some("veth"), Some(3000), Some(1))
        );
        assert!(strips(&before), "{before:?}");
        run("ethtool", "-K here rxvlan off");
        assert!(!strips(&here()), "{:?}", here());
        let bridge = facts(index("bridge"), "bridge");
        assert_eq!((bridge.driver.as_deref(), bridge.queues), (Some("bridge"), None));
        // The kernel reports these features since Linux 6.3.
        if let (Some(of_pair), Some(of_bridge)) = (before.xdp, bridge.xdp) {
            assert!(of_pair.has(XdpFeatures::BASIC) && of_pair.has(XdpFeatures::FRAGMENTS), "{of_pair:?}");
            assert!(!of_bridge.has(XdpFeatures::BASIC), "{of_bridge:?}");
        }
        let acts = || (here().discipline, here().filters);
        assert_eq!(acts(), (None, Some(false)));
        run("tc", "qdisc add dev here root tbf rate 1mbit burst 10k latency 1s");
        run("tc", "qdisc add dev here clsact");
        assert_eq!(acts(), (Some("tbf".to_owned()), Some(false)));
        run("tc", "qdisc del dev here root");
        run("tc", "filter add dev here ingress u32 match u32 0 0");
        assert_eq!(acts(), (None, Some(true)));
        let nowhere = DeviceFacts { filters: None, ..facts(u32::MAX >> 1, "nowhere") };
        assert_eq!(nowhere, DeviceFacts { page: page(), ..DeviceFacts::default() });
    }
}
