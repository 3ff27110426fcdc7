//! Decides whether XDP forwards packets that leave by the uplink by which they came, and says why.
//! This module has no side effects.

use std::io;

use crate::{
    config::Xdp,
    model::node::{Device, Interface},
    sys::{
        bpf::XdpMode,
        net::{
            device::{DeviceFacts, XdpFeatures},
            veth::PeerChecksums,
        },
    },
};

/// Returns the word for a mode that people read.
pub const fn word(mode: XdpMode) -> &'static str {
    match mode {
        XdpMode::Native => "native",
        XdpMode::Generic => "generic",
    }
}

/// Returns the mode that a word of [`word`] names.
pub fn of_word(text: &str) -> Option<XdpMode> {
    [XdpMode::Native, XdpMode::Generic].into_iter().find(|mode| word(*mode) == text)
}

/// The reason why packets of an uplink take the way through the stack.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NoXdp {
    #[error("ebpf.xdp is off")]
    Off,
    #[error("its packets have no Ethernet header, as those of tunnels")]
    Bare,
    #[error("it is a VLAN: XDP sees its packets on the device below it")]
    Vlan,
    #[error(
        "it is a bond, whose program would run on its ports and not know the routes and VLANs of the bond, or a team, which takes no program"
    )]
    Bond,
    #[error("it is not a hardware device (driver {0}); ebpf.xdp native tries it")]
    NoCard(String),
    #[error(
        "the card strips the tags of VLANs, so XDP could not tell the VLANs apart: run ethtool -K {interface} {switches}"
    )]
    StripsTags { interface: String, switches: String },
    #[error(
        "its other end, {0}, leaves checksums to the device, so XDP would forward packets with unfinished \
         ones: run ethtool -K {0} tx off in the network namespace of that end"
    )]
    PartialChecksums(String),
    #[error(
        "its other end is in a network namespace that is not mounted in sight, and may leave checksums to the \
         device: mount that namespace below /run/netns, and switch tx off there with ethtool -K"
    )]
    UnknownChecksums,
    #[error("the card joins packets of a stream: run ethtool -K {0} lro off")]
    JoinsPackets(String),
    #[error("its driver {0} has no XDP, or not with its settings")]
    NoDriver(String),
    #[error(
        "its driver {driver} has no XDP for frames in fragments, which the MTU of {mtu} needs: run ip link set \
         {interface} mtu {longest}, or choose the MTU that the driver takes"
    )]
    LongFrames { interface: String, driver: String, mtu: u32, longest: u32 },
}

/// Returns how XDP runs on an uplink, and the reason for that.
pub fn choose(
    configured: Xdp,
    interface: &Interface,
    facts: &DeviceFacts,
) -> Result<(XdpMode, String), NoXdp> {
    if configured == Xdp::Off {
        return Err(NoXdp::Off);
    }
    if !interface.ethernet {
        return Err(NoXdp::Bare);
    }
    let driver = facts.driver.clone().unwrap_or_else(|| "unknown".to_owned());
    let strips = ["rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"];
    let stripping = strips.into_iter().filter(|offload| facts.offloads.contains(*offload));
    let switches: Vec<String> = stripping.map(|offload| format!("{offload} off")).collect();
    if interface.has_vlans && !switches.is_empty() {
        let (interface, switches) = (interface.name.clone(), switches.join(" "));
        return Err(NoXdp::StripsTags { interface, switches });
    }
    if facts.offloads.contains("rx-lro") {
        return Err(NoXdp::JoinsPackets(interface.name.clone()));
    }
    match (configured, interface.device) {
        (Xdp::Generic, _) => return Ok((XdpMode::Generic, "ebpf.xdp says so".to_owned())),
        (_, Device::Vlan(_)) => return Err(NoXdp::Vlan),
        (_, Device::Bond) => return Err(NoXdp::Bond),
        (Xdp::Auto, Device::Other) => return Err(NoXdp::NoCard(driver)),
        (Xdp::Auto, Device::Card) | (Xdp::Native | Xdp::Off, Device::Card | Device::Other) => {}
    }
    match &facts.peer {
        Some(PeerChecksums::Partial(peer)) => return Err(NoXdp::PartialChecksums(peer.clone())),
        Some(PeerChecksums::OutOfSight) => return Err(NoXdp::UnknownChecksums),
        Some(PeerChecksums::Whole) | None => {}
    }
    let (mtu, longest) = (facts.mtu.unwrap_or(0), longest_in_a_page(facts.page));
    match facts.xdp {
        Some(features) if !features.has(XdpFeatures::BASIC) => return Err(NoXdp::NoDriver(driver)),
        Some(features) if !features.has(XdpFeatures::FRAGMENTS) && mtu > longest => {
            return Err(NoXdp::LongFrames { interface: interface.name.clone(), driver, mtu, longest });
        }
        Some(_) | None => {}
    }
    Ok((XdpMode::Native, describe(&driver, facts)))
}

/// Returns the length of the longest packet that fits in a page. Drivers also keep room before the
/// frame, the kernel's description of its fragments behind it, and its link header with a tag.
const fn longest_in_a_page(page: u32) -> u32 {
    page.saturating_sub(256 + 320 + 14 + 4)
}

/// Returns why the kernel has not attached the program, and what to do. `words` is the message of
/// the kernel or the driver, if there is one.
pub fn refusal(interface: &str, facts: &DeviceFacts, errno: i32, words: Option<&str>) -> String {
    let driver = facts.driver.as_deref().unwrap_or("unknown");
    let error = io::Error::from_raw_os_error(errno);
    let named = format!("{driver}: ");
    let cause = words.map_or_else(|| meaning(errno), |words| words.strip_prefix(&named).unwrap_or(words));
    let what_to_do = words.map_or_else(
        || "the kernel's log (dmesg) may tell more".to_owned(),
        |words| advice(interface, facts, words).unwrap_or_default(),
    );
    let separator = if what_to_do.is_empty() { "" } else { "; " };
    format!("the kernel refuses it, driver {driver}: {cause}: {error}{separator}{what_to_do}")
}

/// Returns the likely meaning of an error that came without a message. Drivers choose different
/// errors for the same cause.
const fn meaning(errno: i32) -> &'static str {
    match errno {
        libc::EOPNOTSUPP => "its driver has no XDP, or not with its settings",
        libc::EBUSY | libc::EEXIST => "another XDP program is attached to it",
        libc::EINVAL | libc::ERANGE => {
            "its driver has no XDP with its settings: see MTU, receive offloads and number of queues"
        }
        libc::ENOSPC | libc::ENOMEM => "the device has too few queues or too little memory for it",
        _ => "the kernel gives no reason",
    }
}

/// Returns what to do. `None` if the message says it by itself.
fn advice(interface: &str, facts: &DeviceFacts, words: &str) -> Option<String> {
    let speaks_of = |subjects: &[&str]| subjects.iter().any(|subject| words.contains(subject));
    let known =
        |number: Option<u32>| number.map_or_else(String::new, |number| format!(", {interface} has {number}"));
    if speaks_of(&["MTU", "umbo frame"]) {
        let longest = longest_in_a_page(facts.page);
        return Some(format!("lower that MTU: a page has room for {longest}{}", known(facts.mtu)));
    }
    speaks_of(&["queue", "channel", "rings"])
        .then(|| format!("ethtool -L changes their number{}", known(facts.queues)))
}

fn describe(driver: &str, facts: &DeviceFacts) -> String {
    let mut text = match facts.xdp {
        Some(_) => format!("its driver {driver} has XDP"),
        None => format!("its driver {driver} may have XDP, which kernels before 6.3 do not tell"),
    };
    let numbers = [(facts.mtu, "MTU"), (facts.queues, "queues")];
    let known = numbers.into_iter().filter_map(|(number, name)| Some(format!("{name} {}", number?)));
    for part in known {
        text.push_str(", ");
        text.push_str(&part);
    }
    text
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::node::Vlan;

    fn card() -> Interface {
        Interface::uplink(Device::Card)
    }

    fn with_vlans() -> Interface {
        Interface { has_vlans: true, ..card() }
    }

    fn vlan() -> Interface {
        Interface::uplink(Device::Vlan(Vlan { below: 2, protocol: 0x8100, id: 10 }))
    }

    /// Returns the facts of a driver that can do everything.
    fn able() -> DeviceFacts {
        DeviceFacts {
            driver: Some("ice".to_owned()),
            mtu: Some(1_500),
            queues: Some(8),
            xdp: Some(XdpFeatures(XdpFeatures::BASIC.0 | XdpFeatures::FRAGMENTS.0)),
            page: 4_096,
            ..DeviceFacts::default()
        }
    }

    fn with(offload: &str) -> DeviceFacts {
        DeviceFacts { offloads: [offload.to_owned()].into(), ..able() }
    }

    fn without_fragments(mtu: u32) -> DeviceFacts {
        DeviceFacts { mtu: Some(mtu), xdp: Some(XdpFeatures::BASIC), ..able() }
    }

    fn without_xdp() -> DeviceFacts {
        DeviceFacts { xdp: Some(XdpFeatures(0)), ..able() }
    }

    fn with_peer(peer: PeerChecksums) -> DeviceFacts {
        DeviceFacts { peer: Some(peer), ..able() }
    }

    fn strips_tags(switches: &str) -> Result<XdpMode, NoXdp> {
        Err(NoXdp::StripsTags { interface: "eth0".into(), switches: switches.into() })
    }

    const NATIVE: Result<XdpMode, NoXdp> = Ok(XdpMode::Native);
    const GENERIC: Result<XdpMode, NoXdp> = Ok(XdpMode::Generic);

    #[rstest]
    #[case::off(Xdp::Off, card(), able(), Err(NoXdp::Off))]
    #[case::card(Xdp::Auto, card(), able(), NATIVE)]
    #[case::card_of_an_old_kernel(Xdp::Auto, card(), DeviceFacts::default(), NATIVE)]
    #[case::device_of_the_kernel(
        Xdp::Auto,
        Interface::uplink(Device::Other),
        able(),
        Err(NoXdp::NoCard("ice".into()))
    )]
    #[case::any_driver(Xdp::Native, Interface::uplink(Device::Other), able(), NATIVE)]
    #[case::any_device(Xdp::Generic, Interface::uplink(Device::Other), without_xdp(), GENERIC)]
    #[case::tunnel(Xdp::Generic, Interface { ethernet: false, ..card() }, able(), Err(NoXdp::Bare))]
    #[case::driver_without_xdp(Xdp::Auto, card(), without_xdp(), Err(NoXdp::NoDriver("ice".into())))]
    #[case::vlan(Xdp::Native, vlan(), able(), Err(NoXdp::Vlan))]
    #[case::vlan_by_the_stack(Xdp::Generic, vlan(), able(), GENERIC)]
    #[case::bond(Xdp::Native, Interface::uplink(Device::Bond), able(), Err(NoXdp::Bond))]
    #[case::bond_by_the_stack(Xdp::Generic, Interface::uplink(Device::Bond), able(), GENERIC)]
    #[case::tags_stay(Xdp::Auto, with_vlans(), able(), NATIVE)]
    #[case::tags_are_stripped(
        Xdp::Auto,
        with_vlans(),
        with("rx-vlan-hw-parse"),
        strips_tags("rx-vlan-hw-parse off")
    )]
    #[case::tags_of_802_1ad_are_stripped(
        Xdp::Generic,
        with_vlans(),
        with("rx-vlan-stag-hw-parse"),
        strips_tags("rx-vlan-stag-hw-parse off")
    )]
    #[case::all_tags_are_stripped(
        Xdp::Auto,
        with_vlans(),
        DeviceFacts { offloads: ["rx-vlan-hw-parse".into(), "rx-vlan-stag-hw-parse".into()].into(), ..able() },
        strips_tags("rx-vlan-hw-parse off rx-vlan-stag-hw-parse off")
    )]
    #[case::tags_that_nobody_has_are_stripped(Xdp::Auto, card(), with("rx-vlan-hw-parse"), NATIVE)]
    #[case::packets_are_joined(
        Xdp::Native,
        card(),
        with("rx-lro"),
        Err(NoXdp::JoinsPackets("eth0".into()))
    )]
    #[case::longest_in_a_page(Xdp::Auto, card(), without_fragments(3_502), NATIVE)]
    #[case::longer_than_a_page(
        Xdp::Auto,
        card(),
        without_fragments(3_503),
        Err(NoXdp::LongFrames { interface: "eth0".into(), driver: "ice".into(), mtu: 3_503, longest: 3_502 })
    )]
    #[case::long_frames_in_fragments(
        Xdp::Auto,
        card(),
        DeviceFacts { mtu: Some(9_000), ..able() },
        NATIVE
    )]
    #[case::checksums_are_whole(
        Xdp::Native,
        Interface::uplink(Device::Other),
        with_peer(PeerChecksums::Whole),
        NATIVE
    )]
    #[case::checksums_are_left_to_the_device(
        Xdp::Native,
        Interface::uplink(Device::Other),
        with_peer(PeerChecksums::Partial("vethc1".into())),
        Err(NoXdp::PartialChecksums("vethc1".into()))
    )]
    #[case::nobody_knows_of_checksums(
        Xdp::Native,
        Interface::uplink(Device::Other),
        with_peer(PeerChecksums::OutOfSight),
        Err(NoXdp::UnknownChecksums)
    )]
    #[case::generic_by_choice(
        Xdp::Generic,
        Interface::uplink(Device::Other),
        with_peer(PeerChecksums::OutOfSight),
        GENERIC
    )]
    #[case::long_frames_in_larger_pages(
        Xdp::Auto,
        card(),
        DeviceFacts { page: 65_536, ..without_fragments(9_000) },
        NATIVE
    )]
    fn choices(
        #[case] configured: Xdp,
        #[case] interface: Interface,
        #[case] facts: DeviceFacts,
        #[case] expected: Result<XdpMode, NoXdp>,
    ) {
        assert_eq!(choose(configured, &interface, &facts).map(|(mode, _)| mode), expected);
    }

    /// The words are messages of real drivers. bnxt_en writes its message only to the kernel's log.
    #[rstest]
    #[case::mtu(
        libc::EINVAL,
        Some("virtio_net: MTU too large to enable XDP without frags"),
        "virtio_net: MTU too large to enable XDP without frags: Invalid argument (os error 22); lower that MTU: a page has room for 3502, eth0 has 9000"
    )]
    #[case::with_the_name_of_the_driver(
        libc::EOPNOTSUPP,
        Some("ice: XDP is in the way"),
        "XDP is in the way: Operation not supported (os error 95)"
    )]
    #[case::jumbo_frames(
        libc::EOPNOTSUPP,
        Some("Jumbo frames not supported"),
        "Jumbo frames not supported: Operation not supported (os error 95); lower that MTU: a page has room for 3502, eth0 has 9000"
    )]
    #[case::queues(
        libc::ENOSPC,
        Some("veth: XDP expects number of rx queues not less than peer tx queues"),
        "veth: XDP expects number of rx queues not less than peer tx queues: No space left on device (os error 28); ethtool -L changes their number, eth0 has 8"
    )]
    #[case::rings(
        libc::ENOMEM,
        Some("virtio_net: Too few free TX rings available"),
        "virtio_net: Too few free TX rings available: Cannot allocate memory (os error 12); ethtool -L changes their number, eth0 has 8"
    )]
    #[case::what_says_itself_what_to_do(
        libc::EOPNOTSUPP,
        Some("Can't set XDP while host is implementing GRO_HW/CSUM, disable GRO_HW/CSUM first"),
        "Can't set XDP while host is implementing GRO_HW/CSUM, disable GRO_HW/CSUM first: Operation not supported (os error 95)"
    )]
    #[case::no_words(
        libc::EOPNOTSUPP,
        None,
        "its driver has no XDP, or not with its settings: Operation not supported (os error 95); the kernel's log (dmesg) may tell more"
    )]
    #[case::no_words_for_too_few_queues(
        libc::ENOSPC,
        None,
        "the device has too few queues or too little memory for it: No space left on device (os error 28); the kernel's log (dmesg) may tell more"
    )]
    fn refusals_say_what_to_do(#[case] errno: i32, #[case] words: Option<&str>, #[case] expected: &str) {
        let facts = DeviceFacts { mtu: Some(9_000), ..able() };
        let expected = format!("the kernel refuses it, driver ice: {expected}");
        assert_eq!(refusal("eth0", &facts, errno, words), expected);
    }

    #[test]
    fn what_is_known_is_told() {
        let why = |facts| choose(Xdp::Auto, &card(), &facts).unwrap().1;
        assert_eq!(why(able()), "its driver ice has XDP, MTU 1500, queues 8");
        assert_eq!(
            why(DeviceFacts { page: 4_096, ..DeviceFacts::default() }),
            "its driver unknown may have XDP, which kernels before 6.3 do not tell"
        );
    }
}
