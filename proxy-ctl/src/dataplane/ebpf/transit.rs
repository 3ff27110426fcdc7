//! Where packets are sent on before the stack has them: to backends on other nodes, and their answers, by XDP on uplinks.

use std::{cell::OnceCell, collections::BTreeMap, path::PathBuf};

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use proxy_common::{inventory::program, layout::VlanTag};

use super::{Error, load::Programs, paths::Paths, pins::LinkPins};
use crate::{
    config::Xdp,
    dataplane::{
        Device, Interface, Role, Vlan,
        xdp::{NoXdp, choose, word},
    },
    sys::{
        bpf::{self, LinkTarget, XdpMode},
        device::facts,
    },
};

const MODES: [XdpMode; 2] = [XdpMode::Native, XdpMode::Generic];

/// The one that the kernel has the helpers for. Drivers that hand over frames in fragments (5.18) take longer ones with it.
fn best_program() -> &'static str {
    // Who may not ask may not load programs either.
    match is_helper_supported(ProgramType::Xdp, BpfHelper::BPF_FUNC_xdp_get_buff_len) {
        Ok(true) => program::uplink_transit_frags,
        Ok(false) | Err(_) => program::uplink_transit,
    }
}

/// What the kernel's answer means.
fn hint(errno: i32) -> &'static str {
    match errno {
        libc::EOPNOTSUPP => "its driver has no XDP, or not with its settings",
        libc::EBUSY | libc::EEXIST => "another XDP program is attached to it",
        libc::EINVAL | libc::ERANGE => {
            "its driver has no XDP with its settings: see MTU, receive offloads and number of queues"
        }
        _ => "the kernel refused it",
    }
}

/// What the table of that name must hold.
pub(super) fn vlan_devices(interfaces: &[Interface]) -> BTreeMap<VlanTag, u32> {
    let device = |interface: &Interface| match (interface.role, interface.device) {
        // A packet with id 0 is that of the interface below: the tag is a priority only.
        (Role::Uplink, Device::Vlan(Vlan { below, protocol, id: id @ 1.. })) => {
            Some((VlanTag { interface: below, protocol, id }, interface.index))
        }
        (Role::Uplink | Role::Workload, _) => None,
    };
    interfaces.iter().filter_map(device).collect()
}

/// Beside the programs of TC, which take what this one leaves to the stack.
#[derive(Debug)]
pub(super) struct Transit {
    configured: Xdp,
    /// Asked for where XDP is.
    program: OnceCell<&'static str>,
    /// Uplinks that cannot have it, and what was said of them.
    refused: BTreeMap<u32, String>,
}

impl Transit {
    pub(super) const fn new(configured: Xdp) -> Self {
        Self { configured, program: OnceCell::new(), refused: BTreeMap::new() }
    }

    fn path(paths: &Paths, index: u32, mode: XdpMode) -> PathBuf {
        paths.links().join(format!("{index}_xdp_{}", word(mode)))
    }

    /// The program that the interface needs besides those of TC.
    pub(super) fn program(&self, interface: &Interface) -> Option<&'static str> {
        self.choose(interface).and_then(Result::ok).map(|_| self.best_program())
    }

    fn best_program(&self) -> &'static str {
        self.program.get_or_init(best_program)
    }

    /// `None`: it is no uplink, or none is asked for.
    fn choose(&self, interface: &Interface) -> Option<Result<(XdpMode, String), NoXdp>> {
        let is_asked_for = self.configured != Xdp::Off && interface.role == Role::Uplink;
        is_asked_for.then(|| choose(self.configured, interface, &facts(interface.index, &interface.name)))
    }

    /// Answers whether anything had to be done. An uplink that cannot have the program is served by TC alone, which the log says.
    pub(super) fn attach(
        &mut self,
        paths: &Paths,
        programs: &mut Programs,
        links: &mut LinkPins,
        interface: &Interface,
    ) -> Result<bool, Error> {
        let choice = self.choose(interface);
        let wanted = choice.as_ref().and_then(|choice| Some(choice.as_ref().ok()?.0));
        let mut changed = false;
        for other in MODES.into_iter().filter(|mode| Some(*mode) != wanted) {
            changed |= links.remove(&Self::path(paths, interface.index, other))?;
        }
        let (mode, why) = match choice {
            None => return Ok(changed),
            Some(Ok(chosen)) => chosen,
            Some(Err(obstacle)) => {
                self.refuse(interface, obstacle.to_string());
                return Ok(changed);
            }
        };
        let path = Self::path(paths, interface.index, mode);
        let refusal = match programs.get(self.best_program()) {
            Ok(program) => {
                let is_target = |target| target == LinkTarget::Xdp(interface.index);
                let create = || bpf::link_xdp(program, interface.index, mode);
                match links.ensure(&path, program, is_target, create) {
                    Ok(linked) => {
                        self.refused.remove(&interface.index);
                        return Ok(changed | linked);
                    }
                    Err(error) if error.errno() == libc::ENODEV => return Ok(changed),
                    Err(error) => format!("{}, though {why}: {error}", hint(error.errno())),
                }
            }
            Err(error) => error.to_string(),
        };
        self.refuse(interface, refusal);
        // A former program would go on with tables that nobody writes any more.
        Ok(changed | links.remove(&path)?)
    }

    /// Says so, once.
    fn refuse(&mut self, interface: &Interface, reason: String) {
        if self.refused.get(&interface.index) != Some(&reason) {
            tracing::info!(
                interface = interface.name,
                reason,
                "no XDP program on the uplink: packets to backends on other nodes take the way through the stack"
            );
            self.refused.insert(interface.index, reason);
        }
    }

    pub(super) fn detach(&mut self, paths: &Paths, links: &mut LinkPins, index: u32) -> Result<(), Error> {
        self.refused.remove(&index);
        for mode in MODES {
            links.remove(&Self::path(paths, index, mode))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::layout::TAG_CUSTOMER;

    use super::*;
    use crate::dataplane::RoleReason;

    const fn interface(role: Role, device: Device) -> Interface {
        Interface {
            index: 2,
            name: String::new(),
            role,
            reason: RoleReason::DefaultRoute,
            ethernet: true,
            device,
            has_vlans: false,
            bridge: None,
            masquerade_addresses: Vec::new(),
        }
    }

    #[test]
    fn tags_are_of_uplinks() {
        let vlan = |index, role, id| {
            let tag = Vlan { below: 2, protocol: TAG_CUSTOMER, id };
            Interface { index, ..interface(role, Device::Vlan(tag)) }
        };
        let card = interface(Role::Uplink, Device::Card);
        let interfaces =
            [card, vlan(3, Role::Uplink, 10), vlan(4, Role::Workload, 20), vlan(5, Role::Uplink, 0)];
        let tag = VlanTag { interface: 2, protocol: TAG_CUSTOMER, id: 10 };
        assert_eq!(vlan_devices(&interfaces), BTreeMap::from([(tag, 3)]));
    }
}
