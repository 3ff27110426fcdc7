//! Our place among the programs of an interface: first on ingress, last on egress, so that others' programs see backends. Another
//! program that wants the same place gets it after a few times, or both would change places for ever.

use std::collections::BTreeMap;

use crate::{
    dataplane::Interface,
    sys::tc::{Direction, tcx_programs},
};

/// How often the order of a hook is mended while the process lives.
const MOST_MENDS: u8 = 3;

/// A hook where ours is not where it belongs.
#[derive(Clone, Debug)]
pub(super) struct Misplaced {
    pub(super) interface: Interface,
    pub(super) direction: Direction,
}

/// How often each hook was found in another order, by index of the interface.
#[derive(Debug, Default)]
pub(super) struct HookOrder {
    found: BTreeMap<(u32, &'static str), u8>,
}

impl HookOrder {
    /// Is `program`, which is ours, not where it belongs, and not for so many times that it stays there?
    pub(super) fn is_to_be_mended(
        &mut self,
        interface: &Interface,
        direction: Direction,
        program: u32,
    ) -> bool {
        let Some(programs) = tcx_programs(interface.index, direction) else { return false };
        if is_in_place(&programs, direction, program) {
            return false;
        }
        let found = self.found.entry((interface.index, direction.name())).or_default();
        *found = found.saturating_add(1);
        if *found == MOST_MENDS + 1 {
            tracing::warn!(
                interface = interface.name,
                hook = direction.name(),
                "another program takes the proxy's place again and again; it is left there, and may see packets before they are translated"
            );
        }
        *found <= MOST_MENDS
    }

    pub(super) fn forget(&mut self, index: u32) {
        self.found.retain(|(of, _), _| *of != index);
    }
}

/// Where ours is not among them, it is not attached, which is no matter of order.
fn is_in_place(programs: &[u32], direction: Direction, ours: u32) -> bool {
    let end = match direction {
        Direction::Ingress => programs.first(),
        Direction::Egress => programs.last(),
    };
    end == Some(&ours) || !programs.contains(&ours)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::alone(&[7], true, true)]
    #[case::first_of_two(&[7, 8], true, false)]
    #[case::last_of_two(&[8, 7], false, true)]
    #[case::between(&[8, 7, 9], false, false)]
    #[case::not_attached(&[8, 9], true, true)]
    #[case::nobody(&[], true, true)]
    fn places(#[case] programs: &[u32], #[case] on_ingress: bool, #[case] on_egress: bool) {
        assert_eq!(is_in_place(programs, Direction::Ingress, 7), on_ingress);
        assert_eq!(is_in_place(programs, Direction::Egress, 7), on_egress);
    }
}
