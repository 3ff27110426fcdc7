//! Attaches XDP to uplinks, which forwards packets without the network stack: to backends on this
//! node and on others, and their answers.

use std::{cell::OnceCell, collections::BTreeMap, os::fd::BorrowedFd, path::PathBuf};

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use proxy_common::{
    inventory::program,
    layout::{IN_FRAGMENTS, LinkAddress, REDIRECTS, RedirectTarget, TO_POD, VlanTag},
};

use crate::{
    config::Xdp,
    model::node::{Device, Interface, Role, Vlan},
    modes::ebpf::{
        Error,
        hooks::{
            load::Programs,
            xdp::{
                choice::{choose, refusal, word},
                redirect::{ForwardedFrames, forwarded_frames, is_redirect_source},
            },
        },
        maps::{paths::Paths, pins::LinkPins},
    },
    sys::{
        bpf::{self, LinkTarget, XdpMode},
        net::{
            device::{self, DeviceFacts},
            link,
        },
    },
};

const MODES: [XdpMode; 2] = [XdpMode::Native, XdpMode::Generic];
/// The most keys of an interface in `redirect_targets`.
const KEYS_OF_TARGET: usize = 2;

/// Returns the best program that the kernel has the helpers for. With `xdp_forward_frags`,
/// drivers that deliver frames in fragments (Linux 5.18) take longer ones.
fn best_program() -> &'static str {
    // A process that may not ask may not load programs either.
    match is_helper_supported(ProgramType::Xdp, BpfHelper::BPF_FUNC_xdp_get_buff_len) {
        Ok(true) => program::xdp_forward_frags,
        Ok(false) | Err(_) => program::xdp_forward,
    }
}

/// Returns what the map `vlan_devices` must hold.
pub(crate) fn vlan_devices(interfaces: &[Interface]) -> BTreeMap<VlanTag, u32> {
    let device = |interface: &Interface| match (interface.role, interface.device) {
        // A packet with id 0 belongs to the interface below, because its tag is a priority only.
        (Role::Uplink, Device::Vlan(Vlan { below, protocol, id: id @ 1.. })) => {
            Some((VlanTag { interface: below, protocol, id }, interface.index))
        }
        (Role::Uplink | Role::Workload, _) => None,
    };
    interfaces.iter().filter_map(device).collect()
}

/// The desired contents of the maps `redirect_sources` and `redirect_targets`.
#[derive(Debug, Default, Eq, PartialEq)]
pub(crate) struct Redirects {
    pub(crate) sources: BTreeMap<u32, LinkAddress>,
    pub(crate) targets: BTreeMap<u32, RedirectTarget>,
}

/// The abilities of an interface for frames that leave by another interface than they came by.
#[derive(Debug)]
struct Redirection {
    /// The interface's own link address. XDP redirects frames to this address out by other
    /// interfaces, and leaves frames to other addresses alone. `None` if XDP may redirect none.
    source: Option<LinkAddress>,
    forwarded: Option<ForwardedFrames>,
    role: Role,
}

impl Redirection {
    fn of(configured: Xdp, attached: Option<XdpMode>, interface: &Interface, facts: &DeviceFacts) -> Self {
        let forwarded = forwarded_frames(configured, attached, interface, facts, device::cpus());
        let address = interface.link_address.map(|bytes| LinkAddress { bytes, _padding: [0; 2] });
        Self {
            source: address.filter(|_| attached.is_some_and(|mode| is_redirect_source(mode, facts))),
            forwarded: forwarded.ok(),
            role: interface.role,
        }
    }
}

/// The facts on which the kernel's message against a program depends.
#[derive(Debug, Eq, PartialEq)]
struct Cause {
    errno: i32,
    mtu: Option<u32>,
    queues: Option<u32>,
}

/// Returns the kernel's message against the program. If it cannot be read, the log says why.
fn words_against(program: BorrowedFd<'_>, interface: &Interface, mode: XdpMode) -> Option<String> {
    link::words_against_xdp(program, interface.index, mode).unwrap_or_else(|error| {
        tracing::warn!(interface = interface.name, %error, "the kernel was not asked why it refuses XDP");
        None
    })
}

/// The XDP programs of uplinks. TC programs take what they leave to the stack.
#[derive(Debug)]
pub(crate) struct XdpHooks {
    configured: Xdp,
    /// The program of this kernel. It is empty until an uplink is to have XDP.
    program: OnceCell<&'static str>,
    /// The uplinks that cannot have the program, each with the reported reason.
    refused: BTreeMap<u32, String>,
    /// The kernel's message against the program for each uplink, and the facts on which it depends.
    words: BTreeMap<u32, (Cause, Option<String>)>,
    /// The abilities of each interface, as it was when last checked.
    redirections: BTreeMap<u32, Redirection>,
}

impl XdpHooks {
    pub(crate) const fn new(configured: Xdp) -> Self {
        Self {
            configured,
            program: OnceCell::new(),
            refused: BTreeMap::new(),
            words: BTreeMap::new(),
            redirections: BTreeMap::new(),
        }
    }

    fn path(paths: &Paths, index: u32, mode: XdpMode) -> PathBuf {
        paths.links().join(format!("{index}_xdp_{}", word(mode)))
    }

    /// Returns the program that uplinks have besides those of TC, if one of them is to have it.
    pub(crate) fn program(&self) -> Option<&'static str> {
        self.program.get().copied()
    }

    /// Returns why uplinks have no program, by their index.
    pub(crate) const fn refusals(&self) -> &BTreeMap<u32, String> {
        &self.refused
    }

    /// Returns what the interfaces that were attached to may do.
    pub(crate) fn redirects(&self) -> Redirects {
        let mut redirects = Redirects::default();
        // Only half of the map is used, because during a change it holds new entries beside old
        // ones.
        let room = REDIRECTS as usize / KEYS_OF_TARGET / 2;
        let (uplinks, pods): (Vec<_>, Vec<_>) =
            self.redirections.iter().partition(|(_, redirection)| redirection.role == Role::Uplink);
        let pods = pods.into_iter().filter(|(_, pod)| pod.forwarded.is_some());
        for (&interface, redirection) in uplinks.into_iter().chain(pods).take(room) {
            redirects.sources.extend(redirection.source.map(|address| (interface, address)));
            let key = if redirection.role == Role::Workload { interface | TO_POD } else { interface };
            let keys: &[u32] = match redirection.forwarded {
                None => &[],
                Some(ForwardedFrames::Unfragmented) => &[key],
                Some(ForwardedFrames::All) => &[key, key | IN_FRAGMENTS],
            };
            let target = RedirectTarget { interface, program: 0 };
            redirects.targets.extend(keys.iter().map(|key| (*key, target)));
        }
        let Redirects { sources, targets } = &redirects;
        let has_other = |source| targets.values().any(|target| target.interface != source);
        if sources.keys().any(|source| has_other(*source)) { redirects } else { Redirects::default() }
    }

    /// Attaches to the interface, and returns true if anything had to be done. An uplink that
    /// cannot have the program is served by TC alone, which the log says.
    pub(crate) fn attach(
        &mut self,
        paths: &Paths,
        programs: &mut Programs,
        links: &mut LinkPins,
        interface: &Interface,
    ) -> Result<bool, Error> {
        if self.configured == Xdp::Off {
            self.redirections.remove(&interface.index);
            return Self::remove_links(paths, links, interface.index, &MODES);
        }
        if interface.role == Role::Workload {
            self.look_at_pod(interface);
            return Self::remove_links(paths, links, interface.index, &MODES);
        }
        let mut facts = device::facts_of_uplink(interface.index, &interface.name);
        let choice = choose(self.configured, interface, &facts);
        let wanted = choice.as_ref().ok().map(|(mode, _)| *mode);
        let others: Vec<_> = MODES.into_iter().filter(|mode| Some(*mode) != wanted).collect();
        let mut changed = Self::remove_links(paths, links, interface.index, &others)?;
        let mut attached = None;
        match choice {
            Ok((mode, _)) => {
                let (is_attached, is_new) = self.link(paths, programs, links, interface, mode, &facts)?;
                attached = is_attached.then_some(mode);
                changed |= is_new;
            }
            Err(obstacle) => self.refuse(interface, obstacle.to_string()),
        }
        if changed {
            // Some drivers take frames of other interfaces only with a program.
            facts = device::facts(interface.index, &interface.name);
        }
        let redirection = Redirection::of(self.configured, attached, interface, &facts);
        self.redirections.insert(interface.index, redirection);
        Ok(changed)
    }

    fn look_at_pod(&mut self, interface: &Interface) {
        // If this is false, the pod can take no frames, and the kernel is not asked in vain.
        let is_possible = self.configured != Xdp::Generic
            && interface.bridge.is_none()
            && self.redirections.values().any(|uplink| uplink.source.is_some());
        // Most pods take no frames.
        if !is_possible || !device::takes_frames(interface.index, &interface.name) {
            self.redirections.remove(&interface.index);
            return;
        }
        let facts = device::facts(interface.index, &interface.name);
        let redirection = Redirection::of(self.configured, None, interface, &facts);
        self.redirections.insert(interface.index, redirection);
    }

    /// Returns whether the program is attached, and whether anything had to be done.
    fn link(
        &mut self,
        paths: &Paths,
        programs: &mut Programs,
        links: &mut LinkPins,
        interface: &Interface,
        mode: XdpMode,
        facts: &DeviceFacts,
    ) -> Result<(bool, bool), Error> {
        let path = Self::path(paths, interface.index, mode);
        let name = *self.program.get_or_init(best_program);
        let reason = match programs.get(name) {
            Ok(program) => {
                let is_target = |target| target == LinkTarget::Xdp(interface.index);
                let create = || bpf::link_xdp(program, interface.index, mode);
                match links.ensure(&path, program, is_target, create) {
                    Ok(ensured) => {
                        self.refused.remove(&interface.index);
                        self.words.remove(&interface.index);
                        return Ok((true, ensured.is_change()));
                    }
                    // The interface has vanished.
                    Err(error) if error.errno() == libc::ENODEV => return Ok((false, false)),
                    Err(error) if error.call == bpf::LINK_CREATE => {
                        let cause = Cause { errno: error.errno(), mtu: facts.mtu, queues: facts.queues };
                        // The kernel is asked only once for each cause, because a driver may stop
                        // its queues each time.
                        let known = self.words.get(&interface.index).filter(|(of, _)| *of == cause);
                        let words = known.map(|(_, words)| words.clone());
                        let words = words.unwrap_or_else(|| words_against(program, interface, mode));
                        let reason = refusal(&interface.name, facts, cause.errno, words.as_deref());
                        self.words.insert(interface.index, (cause, words));
                        reason
                    }
                    Err(error) => error.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        self.refuse(interface, reason);
        // A former program would go on with maps that nobody writes any more.
        Ok((false, links.remove(&path)?))
    }

    fn remove_links(
        paths: &Paths,
        links: &mut LinkPins,
        index: u32,
        modes: &[XdpMode],
    ) -> Result<bool, Error> {
        modes
            .iter()
            .try_fold(false, |changed, mode| Ok(changed | links.remove(&Self::path(paths, index, *mode))?))
    }

    /// Notes why the uplink has no program, and logs each reason once.
    fn refuse(&mut self, interface: &Interface, reason: String) {
        if self.refused.get(&interface.index) != Some(&reason) {
            tracing::info!(
                interface = interface.name,
                reason,
                "no XDP program is attached to the uplink: its packets go through the stack"
            );
            self.refused.insert(interface.index, reason);
        }
    }

    pub(crate) fn detach(&mut self, paths: &Paths, links: &mut LinkPins, index: u32) -> Result<(), Error> {
        self.refused.remove(&index);
        self.words.remove(&index);
        self.redirections.remove(&index);
        Self::remove_links(paths, links, index, &MODES).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::layout::TAG_CUSTOMER;

    use super::*;

    #[test]
    fn tags_are_of_uplinks() {
        let vlan = |index, role, id| {
            let tag = Vlan { below: 2, protocol: TAG_CUSTOMER, id };
            Interface { index, role, ..Interface::uplink(Device::Vlan(tag)) }
        };
        let card = Interface::uplink(Device::Card);
        let interfaces =
            [card, vlan(3, Role::Uplink, 10), vlan(4, Role::Workload, 20), vlan(5, Role::Uplink, 0)];
        let tag = VlanTag { interface: 2, protocol: TAG_CUSTOMER, id: 10 };
        assert_eq!(vlan_devices(&interfaces), BTreeMap::from([(tag, 3)]));
    }

    #[test]
    fn frames_leave_by_other_interfaces() {
        /// The index of the first interface of a pod.
        const PODS: u32 = 1_000;
        const OWN: LinkAddress = LinkAddress { bytes: [2, 0, 0, 0, 0, 1], _padding: [0; 2] };
        let of = |redirections: Vec<(u32, Option<LinkAddress>, Option<ForwardedFrames>)>| {
            let redirections = redirections
                .into_iter()
                .map(|(interface, source, forwarded)| {
                    let role = if interface < PODS { Role::Uplink } else { Role::Workload };
                    (interface, Redirection { source, forwarded, role })
                })
                .collect();
            XdpHooks { redirections, ..XdpHooks::new(Xdp::Native) }.redirects()
        };
        let target = |interface| RedirectTarget { interface, program: 0 };
        let without_other = vec![(2, Some(OWN), Some(ForwardedFrames::All)), (3, None, None)];
        assert_eq!(of(without_other), Redirects::default());
        let found = of(vec![
            (2, Some(OWN), None),
            (3, None, Some(ForwardedFrames::All)),
            (4, Some(OWN), Some(ForwardedFrames::Unfragmented)),
        ]);
        let expected = Redirects {
            sources: [(2, OWN), (4, OWN)].into(),
            targets: [(3, target(3)), (3 | IN_FRAGMENTS, target(3)), (4, target(4))].into(),
        };
        assert_eq!(found, expected);
        let with_pod = of(vec![
            (2, Some(OWN), None),
            (PODS, None, Some(ForwardedFrames::Unfragmented)),
            (PODS + 1, None, None),
        ]);
        assert_eq!(with_pod.targets, [(PODS | TO_POD, target(PODS))].into());
        let many_pods = (PODS..).take(REDIRECTS as usize).map(|pod| (pod, None, Some(ForwardedFrames::All)));
        let with_many = of(many_pods.chain([(2, Some(OWN), Some(ForwardedFrames::Unfragmented))]).collect());
        assert!(with_many.targets.contains_key(&2), "uplinks come first");
        let many = of((1..=REDIRECTS).map(|index| (index, Some(OWN), Some(ForwardedFrames::All))).collect());
        assert_eq!(many.targets.len(), REDIRECTS as usize / 2, "no more than there is room for");
    }
}
