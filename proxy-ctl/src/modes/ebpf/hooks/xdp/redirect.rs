//! Decides to which interfaces XDP may send frames that came in by uplinks, and why not to the
//! rest. This module has no side effects.

use crate::{
    config::Xdp,
    model::node::{Device, Interface, Role},
    sys::{
        bpf::XdpMode,
        net::device::{DeviceFacts, XdpFeatures},
    },
};

/// The frames from other interfaces that an interface can send.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ForwardedFrames {
    /// Frames in one piece.
    Unfragmented,
    /// Frames in one piece and frames in fragments.
    All,
}

/// The reason why frames from other interfaces do not leave by an interface.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NotForwarded {
    #[error("its packets have no Ethernet header")]
    Bare,
    #[error("it is a VLAN, and frames would leave without their tag")]
    Vlan,
    #[error("it is a bond, and only the stack chooses its port")]
    Bond,
    #[error("it is not a hardware device (driver {0}); ebpf.xdp native tries it")]
    NoCard(String),
    #[error("generic XDP is no faster to it than the stack")]
    Generic,
    #[error("it is a port of the bridge {0}, through which routes lead to the pod")]
    Port(String),
    #[error("frames would bypass its queueing discipline ({0})")]
    Queueing(String),
    #[error(
        "frames would bypass programs or filters of others on it, or the kernel does not tell whether there are any (Linux 6.6 does)"
    )]
    Filters,
    #[error(
        "its driver {0} takes no such frames, or not with its settings: most drivers need an XDP program on the device, and a veth needs one or GRO at its other end"
    )]
    NoDriver(String),
    #[error("kernels before 6.3 do not tell whether its driver {0} takes such frames")]
    NotTold(String),
    #[error("no XDP program is on it, which its driver needs before Linux 6.3")]
    NoProgram,
    #[error(
        "it has {queues} queues for {cpus} CPUs, and its driver {driver} may drop what the other CPUs send: run ethtool -L {interface} combined {cpus}"
    )]
    FewQueues { interface: String, driver: String, queues: u32, cpus: u32 },
}

/// Drivers that have sent frames of other devices since before Linux 5.10, if an XDP program is on
/// the device itself. They also let programs redirect frames to other devices.
const OF_OLD: [&str; 5] = ["bnxt_en", "i40e", "ice", "ixgbe", "mlx5_core"];

/// Drivers whose CPUs share queues if there are fewer queues than CPUs, in every kernel that
/// reports the features of drivers. With other drivers a CPU sends by the queue with its own
/// number, or not at all.
const SHARE_QUEUES: [&str; 7] = ["bnxt_en", "ena", "ice", "ixgbe", "tun", "veth", "virtio_net"];

/// Returns which frames XDP forwards to an interface where the programs run as `configured`.
/// `attached` is how the program on the interface itself runs.
pub fn forwarded_frames(
    configured: Xdp,
    attached: Option<XdpMode>,
    interface: &Interface,
    facts: &DeviceFacts,
    cpus: u32,
) -> Result<ForwardedFrames, NotForwarded> {
    let driver = facts.driver.clone().unwrap_or_else(|| "unknown".to_owned());
    if !interface.ethernet {
        return Err(NotForwarded::Bare);
    }
    match (configured, interface.device, interface.role) {
        (_, Device::Vlan(_), _) => return Err(NotForwarded::Vlan),
        (_, Device::Bond, _) => return Err(NotForwarded::Bond),
        // The stack sends these frames.
        (Xdp::Generic, _, Role::Uplink) => return Ok(ForwardedFrames::Unfragmented),
        (Xdp::Generic, _, Role::Workload) => return Err(NotForwarded::Generic),
        (_, _, Role::Workload) => nothing_acts_on_pods_packets(interface, facts)?,
        (Xdp::Auto, Device::Other, Role::Uplink) => return Err(NotForwarded::NoCard(driver)),
        (Xdp::Auto | Xdp::Native | Xdp::Off, Device::Card | Device::Other, _) => {}
    }
    let forwarded = match facts.xdp {
        Some(features) if features.has(XdpFeatures::SENDS_FRAGMENTS) => ForwardedFrames::All,
        Some(features) if features.has(XdpFeatures::SENDS) => ForwardedFrames::Unfragmented,
        Some(_) => return Err(NotForwarded::NoDriver(driver)),
        None if !OF_OLD.contains(&driver.as_str()) => return Err(NotForwarded::NotTold(driver)),
        None if attached != Some(XdpMode::Native) => return Err(NotForwarded::NoProgram),
        None => ForwardedFrames::Unfragmented,
    };
    let shares = facts.xdp.is_some() && SHARE_QUEUES.contains(&driver.as_str());
    match facts.queues {
        Some(queues) if queues < cpus && !shares => {
            Err(NotForwarded::FewQueues { interface: interface.name.clone(), driver, queues, cpus })
        }
        Some(_) | None => Ok(forwarded),
    }
}

/// Checks that nothing acts on a pod's packets at the host's end of its interface. Packets that XDP
/// sends to a pod, and their answers, would bypass it.
fn nothing_acts_on_pods_packets(interface: &Interface, facts: &DeviceFacts) -> Result<(), NotForwarded> {
    /// Our programs: one for each direction.
    const OURS: usize = 2;
    match (&interface.bridge, &facts.discipline) {
        (Some(bridge), _) => Err(NotForwarded::Port(bridge.clone())),
        (None, Some(discipline)) => Err(NotForwarded::Queueing(discipline.clone())),
        (None, None) if facts.filters != Some(false) || facts.programs.is_none_or(|count| count > OURS) => {
            Err(NotForwarded::Filters)
        }
        (None, None) => Ok(()),
    }
}

/// Returns true if frames that came in by an uplink may leave by other interfaces. `attached` is
/// how the program runs on the uplink.
pub fn is_redirect_source(attached: XdpMode, facts: &DeviceFacts) -> bool {
    match (attached, facts.xdp) {
        (XdpMode::Generic, _) => true,
        (XdpMode::Native, Some(features)) => features.has(XdpFeatures::REDIRECTS),
        (XdpMode::Native, None) => facts.driver.as_deref().is_some_and(|driver| OF_OLD.contains(&driver)),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::node::Vlan;

    const SENDS: u64 = XdpFeatures::SENDS.0;
    const CPUS: u32 = 4;

    fn device(driver: &str, xdp: Option<u64>) -> DeviceFacts {
        let (driver, xdp) = (Some(driver.to_owned()), xdp.map(XdpFeatures));
        let (programs, filters) = (Some(2), Some(false));
        DeviceFacts { driver, xdp, queues: Some(CPUS), programs, filters, ..DeviceFacts::default() }
    }

    fn with_queues(queues: Option<u32>, facts: DeviceFacts) -> DeviceFacts {
        DeviceFacts { queues, ..facts }
    }

    fn card() -> Interface {
        Interface::uplink(Device::Card)
    }

    fn pod() -> Interface {
        Interface { role: Role::Workload, ..Interface::uplink(Device::Other) }
    }

    fn few(driver: &str) -> Result<ForwardedFrames, NotForwarded> {
        let (interface, driver) = ("eth0".to_owned(), driver.to_owned());
        Err(NotForwarded::FewQueues { interface, driver, queues: 3, cpus: CPUS })
    }

    const VLAN: Device = Device::Vlan(Vlan { below: 3, protocol: 0x8100, id: 10 });
    const NATIVE: Option<XdpMode> = Some(XdpMode::Native);
    const UNFRAGMENTED: Result<ForwardedFrames, NotForwarded> = Ok(ForwardedFrames::Unfragmented);

    #[rstest]
    #[case::that_sends_any(Xdp::Auto, NATIVE, card(), device("i40e", Some(SENDS)), UNFRAGMENTED)]
    #[case::that_sends_fragments(
        Xdp::Auto,
        NATIVE,
        card(),
        device("i40e", Some(SENDS | XdpFeatures::SENDS_FRAGMENTS.0)),
        Ok(ForwardedFrames::All)
    )]
    #[case::without_a_program(Xdp::Auto, None, card(), device("some", Some(SENDS)), UNFRAGMENTED)]
    #[case::that_sends_none(
        Xdp::Native,
        NATIVE,
        card(),
        device("veth", Some(XdpFeatures::BASIC.0)),
        Err(NotForwarded::NoDriver("veth".into()))
    )]
    #[case::of_an_old_kernel(Xdp::Auto, NATIVE, card(), device("i40e", None), UNFRAGMENTED)]
    #[case::of_an_old_kernel_without_a_program(
        Xdp::Auto,
        None,
        card(),
        device("i40e", None),
        Err(NotForwarded::NoProgram)
    )]
    #[case::of_an_old_kernel_and_not_known(
        Xdp::Native,
        NATIVE,
        card(),
        device("veth", None),
        Err(NotForwarded::NotTold("veth".into()))
    )]
    #[case::few_queues(
        Xdp::Auto,
        NATIVE,
        card(),
        with_queues(Some(3), device("i40e", Some(SENDS))),
        few("i40e")
    )]
    #[case::few_queues_that_are_shared(
        Xdp::Auto,
        NATIVE,
        card(),
        with_queues(Some(3), device("ice", Some(SENDS))),
        UNFRAGMENTED
    )]
    #[case::few_queues_of_an_old_kernel(
        Xdp::Auto,
        NATIVE,
        card(),
        with_queues(Some(3), device("ice", None)),
        few("ice")
    )]
    #[case::queues_that_nobody_tells(
        Xdp::Auto,
        NATIVE,
        card(),
        with_queues(None, device("i40e", Some(SENDS))),
        UNFRAGMENTED
    )]
    #[case::bare(
        Xdp::Generic,
        None,
        Interface { ethernet: false, ..card() },
        device("ipip", None),
        Err(NotForwarded::Bare)
    )]
    #[case::vlan(Xdp::Generic, None, Interface::uplink(VLAN), device("vlan", None), Err(NotForwarded::Vlan))]
    #[case::bond(
        Xdp::Native,
        NATIVE,
        Interface::uplink(Device::Bond),
        device("bond", Some(SENDS)),
        Err(NotForwarded::Bond)
    )]
    #[case::by_the_stack(
        Xdp::Generic,
        None,
        Interface::uplink(Device::Other),
        device("bridge", Some(0)),
        UNFRAGMENTED
    )]
    #[case::device_of_the_kernel(
        Xdp::Auto,
        NATIVE,
        Interface::uplink(Device::Other),
        device("veth", Some(SENDS)),
        Err(NotForwarded::NoCard("veth".into()))
    )]
    #[case::of_a_pod(Xdp::Auto, None, pod(), device("veth", Some(SENDS)), UNFRAGMENTED)]
    #[case::of_a_pod_without_gro(
        Xdp::Native,
        None,
        pod(),
        device("veth", Some(0)),
        Err(NotForwarded::NoDriver("veth".into()))
    )]
    #[case::of_a_pod_on_a_bridge(
        Xdp::Native,
        None,
        Interface { bridge: Some("cni0".into()), ..pod() },
        device("veth", Some(SENDS)),
        Err(NotForwarded::Port("cni0".into()))
    )]
    #[case::of_a_pod_whose_rate_is_limited(
        Xdp::Native,
        None,
        pod(),
        DeviceFacts { discipline: Some("tbf".into()), ..device("veth", Some(SENDS)) },
        Err(NotForwarded::Queueing("tbf".into()))
    )]
    #[case::of_a_pod_that_another_program_looks_at(
        Xdp::Native,
        None,
        pod(),
        DeviceFacts { programs: Some(3), ..device("veth", Some(SENDS)) },
        Err(NotForwarded::Filters)
    )]
    #[case::of_a_pod_before_tcx(
        Xdp::Native,
        None,
        pod(),
        DeviceFacts { programs: None, ..device("veth", Some(SENDS)) },
        Err(NotForwarded::Filters)
    )]
    #[case::of_a_pod_with_filters(
        Xdp::Native,
        None,
        pod(),
        DeviceFacts { filters: Some(true), ..device("veth", Some(SENDS)) },
        Err(NotForwarded::Filters)
    )]
    #[case::of_a_pod_by_the_stack(
        Xdp::Generic,
        None,
        pod(),
        device("veth", Some(SENDS)),
        Err(NotForwarded::Generic)
    )]
    #[case::any_driver(
        Xdp::Native,
        NATIVE,
        Interface::uplink(Device::Other),
        device("veth", Some(SENDS)),
        UNFRAGMENTED
    )]
    fn what_uplinks_take(
        #[case] configured: Xdp,
        #[case] attached: Option<XdpMode>,
        #[case] interface: Interface,
        #[case] facts: DeviceFacts,
        #[case] expected: Result<ForwardedFrames, NotForwarded>,
    ) {
        assert_eq!(forwarded_frames(configured, attached, &interface, &facts, CPUS), expected);
    }

    #[rstest]
    #[case::told(XdpMode::Native, device("some", Some(XdpFeatures::REDIRECTS.0)), true)]
    #[case::not_told(XdpMode::Native, device("i40e", Some(XdpFeatures::BASIC.0)), false)]
    #[case::of_an_old_kernel(XdpMode::Native, device("i40e", None), true)]
    #[case::of_an_old_kernel_and_not_known(XdpMode::Native, device("some", None), false)]
    #[case::by_the_stack(XdpMode::Generic, device("some", Some(0)), true)]
    fn whose_frames_leave_by_others(
        #[case] attached: XdpMode,
        #[case] facts: DeviceFacts,
        #[case] expected: bool,
    ) {
        assert_eq!(is_redirect_source(attached, &facts), expected);
    }
}
