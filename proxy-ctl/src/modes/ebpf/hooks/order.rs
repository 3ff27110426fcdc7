//! Keeps our program the first of an interface's programs, on ingress and on egress.
//!
//! A program that answers TC_ACT_OK ends the chain, as those of Cilium and of AWS's network-policy
//! agent do, and a program behind it never runs. So ours comes first and lets the next one run.
//!
//! On egress, other programs see what kube-proxy would show them, because netfilter translates
//! before TC. On ingress they see backends, as they do for sockets that connect to a Service.
//!
//! A program that moves itself before ours again and again keeps the first position. Otherwise the
//! two would move before each other for ever.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::{
    model::node::Interface,
    sys::net::tc::{Direction, tcx_program_ids},
};

/// The number of times that the order of a hook is repaired while the process lives.
const MOST_REPAIRS: u8 = 3;
/// The least time between two repairs of a hook.
const PAUSE: Duration = Duration::from_secs(60);

/// A hook at which our program is not the first.
#[derive(Clone, Debug)]
pub(crate) struct OutOfOrder {
    pub(crate) interface: Interface,
    pub(crate) direction: Direction,
}

/// The record of how often each hook was repaired.
#[derive(Debug, Default)]
pub(crate) struct HookOrder {
    repaired: BTreeMap<(u32, &'static str), Repairs>,
}

/// The number of times that one hook was repaired, and the time of the last.
#[derive(Clone, Copy, Debug)]
struct Repairs {
    count: u8,
    last: Instant,
}

impl HookOrder {
    /// Returns true if our program `program` is to be moved to the first position.
    pub(super) fn is_to_be_repaired(
        &mut self,
        interface: &Interface,
        direction: Direction,
        program: u32,
    ) -> bool {
        let Some(programs) = tcx_program_ids(interface.index, direction) else { return false };
        !is_in_order(&programs, program) && self.may_repair(interface, direction, Instant::now())
    }

    /// Counts one more repair and returns true, unless the hook is to be left as it is.
    fn may_repair(&mut self, interface: &Interface, direction: Direction, now: Instant) -> bool {
        let hook = (interface.index, direction.name());
        let Some(repairs) = self.repaired.get_mut(&hook) else {
            self.repaired.insert(hook, Repairs { count: 1, last: now });
            return true;
        };
        if repairs.count > MOST_REPAIRS || now.duration_since(repairs.last) < PAUSE {
            return false;
        }
        *repairs = Repairs { count: repairs.count + 1, last: now };
        if repairs.count > MOST_REPAIRS {
            tracing::warn!(
                interface = interface.name,
                hook = direction.name(),
                "another program comes before the proxy's again and again, and stays there. If it ends the \
                 chain, packets are not translated here; `proxy-ctl status` names it"
            );
        }
        repairs.count <= MOST_REPAIRS
    }

    pub(crate) fn forget(&mut self, index: u32) {
        self.repaired.retain(|(of, _), _| *of != index);
    }
}

/// Returns true if our program is the first, or if it is not there. A missing program is no matter
/// of order.
fn is_in_order(programs: &[u32], ours: u32) -> bool {
    programs.first().is_none_or(|first| *first == ours) || !programs.contains(&ours)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::node::Device;

    #[rstest]
    #[case::alone(&[7], true)]
    #[case::first_of_two(&[7, 8], true)]
    #[case::last_of_two(&[8, 7], false)]
    #[case::between(&[8, 7, 9], false)]
    #[case::not_attached(&[8, 9], true)]
    #[case::nobody(&[], true)]
    fn order(#[case] programs: &[u32], #[case] expected: bool) {
        assert_eq!(is_in_order(programs, 7), expected);
    }

    #[test]
    fn a_hook_is_repaired_once_a_minute_and_three_times() {
        let began = Instant::now();
        let interface = Interface::uplink(Device::Other);
        let mut order = HookOrder::default();
        let mut may = |seconds, direction| {
            order.may_repair(&interface, direction, began + Duration::from_secs(seconds))
        };
        let seconds = [0, 59, 60, 119, 120, 180, 240, 3_600];
        let repaired = seconds.map(|seconds| may(seconds, Direction::Egress));
        assert_eq!(repaired, [true, false, true, false, true, false, false, false]);
        assert!(may(3_600, Direction::Ingress), "each hook counts for itself");
    }
}
