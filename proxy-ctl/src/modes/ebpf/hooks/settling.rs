//! Decides for how long a new workload interface gets no filters, on kernels without tcx.
//!
//! An interface can have one ingress qdisc, which handles what it receives. Our filters need
//! `clsact`, and CNI's bandwidth plugin adds `ingress`. Whoever comes second fails. If the plugin
//! fails, the pod does not start.
//!
//! The plugin runs once, at the end of the calls by which the container runtime makes the pod's
//! network, and the pod's processes start after it. So our filters wait until no more calls are to
//! be expected.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use crate::{
    config::SocketLoadBalancing,
    model::node::{Interface, Role},
};

/// The pause after the last change of an interface on a node that has not shown the plugin. The
/// programs of a chain of plugins follow each other within a tenth of a second on an idle machine.
/// A busy one gets thirty times as long.
const PAUSE: Duration = Duration::from_secs(3);
/// The pause on a node where the plugin is in use. Such a node gains more by waiting. If its socket
/// hooks do not serve pods, the secondary mode does.
const PAUSE_BESIDE_PLUGIN: Duration = Duration::from_secs(10);

/// Returns for how long a new interface is left alone after its last change.
///
/// Pods that no socket hook serves would reach no Service meanwhile. So on a node that has not
/// shown the plugin, their interfaces are not left alone. There, the first pod with a bandwidth
/// limit fails to start once. The plugin has shown itself then, and the container runtime tries
/// again.
pub(crate) const fn pause(sockets: SocketLoadBalancing, plugin_is_in_use: bool) -> Duration {
    match (plugin_is_in_use, sockets) {
        (true, _) => PAUSE_BESIDE_PLUGIN,
        (false, SocketLoadBalancing::All) => PAUSE,
        (false, SocketLoadBalancing::Host | SocketLoadBalancing::Off) => Duration::ZERO,
    }
}

/// The interfaces that their makers may still change.
#[derive(Debug, Default)]
pub(crate) struct Settling {
    /// True if interfaces were seen before, so that an unknown one is new.
    has_begun: bool,
    seen: BTreeMap<u32, Seen>,
}

#[derive(Debug)]
struct Seen {
    interface: Interface,
    /// The time of its last change; `None` if it is settled.
    changed: Option<Instant>,
}

impl Settling {
    /// Takes in the interfaces of the node. Those of the first call are settled.
    pub(crate) fn see(&mut self, interfaces: &[Interface], now: Instant) {
        let there: BTreeSet<u32> = interfaces.iter().map(|interface| interface.index).collect();
        self.seen.retain(|index, _| there.contains(index));
        let changed = std::mem::replace(&mut self.has_begun, true).then_some(now);
        for interface in interfaces {
            let seen = self
                .seen
                .entry(interface.index)
                .or_insert_with(|| Seen { interface: interface.clone(), changed });
            if seen.interface != *interface {
                seen.interface.clone_from(interface);
                seen.changed = seen.changed.map(|_| now);
            }
        }
    }

    /// Returns true if nobody is expected to change the interface any more. It stays so.
    pub(crate) fn is_settled(&mut self, interface: &Interface, pause: Duration) -> bool {
        let Some(seen) = self.seen.get_mut(&interface.index) else { return true };
        if interface.role == Role::Uplink || pause.is_zero() {
            seen.changed = None;
        }
        seen.changed.is_none()
    }

    /// Ends the wait for an interface that nobody has changed for as long as the pause.
    pub(super) fn settle_after(&mut self, interface: &Interface, now: Instant, pause: Duration) {
        let Some(seen) = self.seen.get_mut(&interface.index) else { return };
        seen.changed =
            seen.changed.filter(|changed| !interface.is_up || now.duration_since(*changed) < pause);
    }

    /// Ends the wait for an interface that has another ingress qdisc, because nothing is left to
    /// wait for.
    pub(super) fn settle(&mut self, index: u32) {
        if let Some(seen) = self.seen.get_mut(&index) {
            seen.changed = None;
        }
    }

    /// Returns the indexes of the interfaces that are not settled.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = u32> + '_ {
        self.seen.iter().filter(|(_, seen)| seen.changed.is_some()).map(|(index, _)| *index)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::node::Device;

    const SECOND: Duration = Duration::from_secs(1);

    fn is_settled(settling: &mut Settling, interface: &Interface, now: Instant, pause: Duration) -> bool {
        settling.settle_after(interface, now, pause);
        settling.is_settled(interface, pause)
    }

    fn pod(index: u32) -> Interface {
        Interface { index, role: Role::Workload, ..Interface::uplink(Device::Other) }
    }

    #[rstest]
    #[case::sockets_serve_pods(SocketLoadBalancing::All, false, 3)]
    #[case::sockets_serve_no_pod(SocketLoadBalancing::Host, false, 0)]
    #[case::no_sockets(SocketLoadBalancing::Off, false, 0)]
    #[case::plugin(SocketLoadBalancing::All, true, 10)]
    #[case::plugin_without_sockets(SocketLoadBalancing::Off, true, 10)]
    fn pauses(#[case] sockets: SocketLoadBalancing, #[case] plugin: bool, #[case] seconds: u64) {
        assert_eq!(pause(sockets, plugin), SECOND * seconds as u32);
    }

    /// Interface 7 comes at second 10, as the case makes it, and interface 6 was there before.
    #[rstest]
    #[case::new_pod(|_: &mut Interface| (), &[12], 13)]
    #[case::uplink(|pod: &mut Interface| pod.role = Role::Uplink, &[], 10)]
    #[case::pod_that_is_down(|pod: &mut Interface| pod.is_up = false, &[13, 1_000], u32::MAX)]
    fn a_new_interface_is_settled_after_the_pause(
        #[case] change: fn(&mut Interface),
        #[case] waits: &[u32],
        #[case] settled: u32,
    ) {
        let start = Instant::now();
        let at = |second: u32| start + SECOND * second;
        let mut new = pod(7);
        change(&mut new);
        let mut settling = Settling::default();
        settling.see(&[pod(6)], at(0));
        settling.see(&[pod(6), new.clone()], at(10));
        assert!(is_settled(&mut settling, &pod(6), at(10), PAUSE), "it was there");
        for second in waits {
            assert!(!is_settled(&mut settling, &new, at(*second), PAUSE), "{second}");
            assert_eq!(Vec::from_iter(settling.waiting()), [7]);
        }
        if settled < u32::MAX {
            assert!(is_settled(&mut settling, &new, at(settled), PAUSE));
            assert_eq!(settling.waiting().count(), 0);
            assert!(is_settled(&mut settling, &new, at(settled), PAUSE * 9), "it stays so");
        }
    }

    #[test]
    fn each_change_of_a_new_interface_begins_the_pause_anew() {
        let start = Instant::now();
        let at = |second: u32| start + SECOND * second;
        let mut settling = Settling::default();
        settling.see(&[], at(0));
        let down = Interface { is_up: false, ..pod(7) };
        settling.see(&[down], at(1));
        settling.see(&[pod(7)], at(3));
        settling.see(&[pod(7)], at(5));
        assert!(!is_settled(&mut settling, &pod(7), at(5), PAUSE));
        assert!(is_settled(&mut settling, &pod(7), at(6), PAUSE));
        let renamed = Interface { name: "cali7".to_owned(), ..pod(7) };
        settling.see(std::slice::from_ref(&renamed), at(7));
        assert!(is_settled(&mut settling, &renamed, at(7), PAUSE), "it was settled before");
    }

    #[test]
    fn an_index_that_comes_again_is_a_new_interface() {
        let start = Instant::now();
        let mut settling = Settling::default();
        settling.see(&[pod(7)], start);
        settling.see(&[], start);
        settling.see(&[pod(7)], start);
        assert!(!is_settled(&mut settling, &pod(7), start, PAUSE));
        settling.settle(7);
        assert!(is_settled(&mut settling, &pod(7), start, PAUSE), "its qdisc is there");
    }
}
