//! The view of XDP: the uplinks on which it forwards packets, and the interfaces to which it sends
//! them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::table::table;
use crate::{
    config::{Keyword as _, Xdp},
    model::node::{Interface, NodeNetwork, Role},
    modes::ebpf::hooks::xdp::{
        choice::{choose, word},
        redirect::{ForwardedFrames, forwarded_frames},
    },
    process::record,
    sys::{
        bpf::XdpMode,
        net::device::{cpus, facts, facts_of_uplink},
    },
};

/// The state of XDP on one uplink.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct XdpView {
    pub(super) interface: String,
    /// The mode of XDP: `native`, `generic` or `no`.
    pub(super) xdp: &'static str,
    pub(super) reason: String,
    /// The frames from other uplinks that XDP sends by this one: `all`, `unfragmented` ones, or
    /// `no`.
    pub(super) forwarded: &'static str,
    /// The reason why it sends none.
    pub(super) not_forwarded: Option<String>,
}

const NO: &str = "no";
const NOT_ATTACHED_YET: &str = "the controller has not attached a program yet";

/// The number of workload interfaces, by whether XDP forwards packets to them.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkloadInterfaces {
    /// The number of interfaces to which XDP forwards packets of outside clients.
    pub(super) forwarded_to: usize,
    /// The number of interfaces to which it does not, by reason.
    pub(super) not_forwarded_to: BTreeMap<String, usize>,
}

impl WorkloadInterfaces {
    /// Counts the interfaces of pods. Returns `None` if the controller does not use XDP or there
    /// are none. `targets` are the interfaces to which the programs may send frames from other
    /// interfaces.
    pub(super) fn of(
        record: &record::Record,
        network: &NodeNetwork,
        targets: &BTreeSet<u32>,
    ) -> Option<Self> {
        let configured = configured(record)?;
        let mut pods = Self::default();
        for interface in network.interfaces.iter().filter(|of| has_role(record, of.index, "workload")) {
            if targets.contains(&interface.index) {
                pods.forwarded_to += 1;
                continue;
            }
            let pod = Interface { role: Role::Workload, ..interface.clone() };
            let facts = facts(pod.index, &pod.name);
            let why = forwarded_frames(configured, None, &pod, &facts, cpus()).err();
            let why = why.map_or_else(|| NOT_SENT_BY.to_owned(), |why| why.to_string());
            *pods.not_forwarded_to.entry(why).or_default() += 1;
        }
        Some(pods).filter(|pods| pods.forwarded_to > 0 || !pods.not_forwarded_to.is_empty())
    }

    pub(super) fn text(&self) -> String {
        let forwarded = (self.forwarded_to > 0).then(|| (self.forwarded_to, "yes".to_owned()));
        let not_forwarded = self.not_forwarded_to.iter().map(|(why, count)| (*count, format!("no: {why}")));
        let row = |(count, why): (usize, String)| [count.to_string(), why];
        table(
            ["WORKLOAD INTERFACES", "XDP FORWARDS TO THEM"],
            forwarded.into_iter().chain(not_forwarded).map(row),
        )
    }
}

fn has_role(record: &record::Record, index: u32, role: &str) -> bool {
    record.interfaces.iter().any(|known| known.index == index && known.role == role)
}

const NOT_SENT_BY: &str = "it can take frames, but XDP forwards none from other uplinks, has no room for more interfaces, or the controller has not checked it yet";

/// Returns how the controller uses XDP. `None` if it does not.
fn configured(record: &record::Record) -> Option<Xdp> {
    Xdp::of(&record.xdp).filter(|xdp| *xdp != Xdp::Off)
}

impl XdpView {
    /// Returns the state that an uplink should have. `attached` is the mode of the program that is
    /// there. If it is `None`, the mode that would be attached counts.
    fn expected(configured: Xdp, interface: &Interface, attached: Option<Option<XdpMode>>) -> Self {
        let facts = facts_of_uplink(interface.index, &interface.name);
        let choice = choose(configured, interface, &facts);
        let attached = attached.unwrap_or_else(|| choice.as_ref().ok().map(|(mode, _)| *mode));
        let (xdp, reason) =
            choice.map_or_else(|obstacle| (NO, obstacle.to_string()), |(mode, why)| (word(mode), why));
        let (forwarded, not_forwarded) =
            match forwarded_frames(configured, attached, interface, &facts, cpus()) {
                Ok(ForwardedFrames::All) => ("all", None),
                Ok(ForwardedFrames::Unfragmented) => ("unfragmented", None),
                Err(obstacle) => (NO, Some(obstacle.to_string())),
            };
        Self { interface: interface.name.clone(), xdp, reason, forwarded, not_forwarded }
    }

    /// Corrects the view if the program does not send frames from other uplinks by this one.
    /// `is_target` is true if it may.
    fn limited_to(self, is_target: bool) -> Self {
        if is_target || self.forwarded == NO {
            return self;
        }
        Self { forwarded: NO, not_forwarded: Some(NOT_SENT_BY.to_owned()), ..self }
    }

    /// Corrects the view by the program that is attached. `refusal` is the reason why the
    /// controller has attached none.
    fn attached(self, attached: Option<XdpMode>, refusal: Option<&str>) -> Self {
        match (attached, refusal) {
            (Some(mode), _) => Self { xdp: word(mode), ..self },
            (None, _) if self.xdp == NO => self,
            (None, Some(refusal)) => Self { xdp: NO, reason: refusal.to_owned(), ..self },
            (None, None) => {
                Self { xdp: NO, reason: format!("{}, but {NOT_ATTACHED_YET}", self.reason), ..self }
            }
        }
    }
}

pub(super) fn text(column: &str, uplinks: &[XdpView]) -> String {
    let frames = |of: &XdpView| match &of.not_forwarded {
        Some(why) => format!("{}: {why}", of.forwarded),
        None => of.forwarded.to_owned(),
    };
    let row = |of: &XdpView| [of.interface.clone(), of.xdp.to_owned(), of.reason.clone(), frames(of)];
    table(["UPLINK", column, "BECAUSE", "FORWARDS FRAMES OF OTHERS"], uplinks.iter().map(row))
}

/// Returns the state that uplinks would have. `record` is that of a controller, which may have met
/// a refusal of the kernel. Only the controller asks the kernel for a program, so only it can know
/// of one.
pub(super) fn of_uplinks(
    configured: Xdp,
    network: &NodeNetwork,
    record: Option<&record::Record>,
) -> Vec<XdpView> {
    let uplinks = network.interfaces.iter().filter(|interface| interface.role == Role::Uplink);
    let tried = record.filter(|record| record.is_alive() && self::configured(record) == Some(configured));
    let view = |uplink: &Interface| {
        let view = XdpView::expected(configured, uplink, None);
        match tried.and_then(|record| refusal(record, uplink.index)) {
            Some(refusal) => view.attached(None, Some(refusal)),
            None => view,
        }
    };
    uplinks.map(view).collect()
}

/// Returns why the controller of the record has attached no program to an interface.
fn refusal(record: &record::Record, index: u32) -> Option<&str> {
    record.interfaces.iter().find(|known| known.index == index)?.without_xdp.as_deref()
}

/// Returns the state of a controller's uplinks, or nothing if it does not use XDP. `attached`
/// returns the mode of the program on the interface with this index. `targets` are the interfaces
/// to which the programs may send frames from other interfaces.
pub(super) fn of_controller(
    record: &record::Record,
    network: &NodeNetwork,
    attached: impl Fn(u32) -> Option<XdpMode>,
    targets: &BTreeSet<u32>,
) -> Vec<XdpView> {
    let Some(configured) = configured(record) else { return Vec::new() };
    let uplinks = network.interfaces.iter().filter(|interface| has_role(record, interface.index, "uplink"));
    let view = |uplink: &Interface| {
        let attached = attached(uplink.index);
        let view = XdpView::expected(configured, uplink, Some(attached));
        view.attached(attached, refusal(record, uplink.index)).limited_to(targets.contains(&uplink.index))
    };
    uplinks.map(view).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn expected(xdp: &'static str) -> XdpView {
        XdpView {
            interface: "eth0".to_owned(),
            xdp,
            reason: "why".to_owned(),
            forwarded: "unfragmented",
            not_forwarded: None,
        }
    }

    const NOT_YET: &str = "why, but the controller has not attached a program yet";
    const REFUSAL: &str = "the kernel refuses it, driver veth: too few queues";

    #[rstest]
    #[case::as_expected("native", Some(XdpMode::Native), None, "native", "why")]
    #[case::attached_since_it_was_refused("native", Some(XdpMode::Native), Some(REFUSAL), "native", "why")]
    #[case::refused("native", None, Some(REFUSAL), "no", REFUSAL)]
    #[case::not_looked_at("native", None, None, "no", NOT_YET)]
    #[case::not_expected("no", None, None, "no", "why")]
    #[case::not_expected_since_it_was_refused("no", None, Some(REFUSAL), "no", "why")]
    #[case::of_a_former_configuration("no", Some(XdpMode::Generic), None, "generic", "why")]
    fn what_is_there_counts(
        #[case] wanted: &'static str,
        #[case] attached: Option<XdpMode>,
        #[case] refusal: Option<&str>,
        #[case] xdp: &str,
        #[case] reason: &str,
    ) {
        let found = expected(wanted).attached(attached, refusal).limited_to(true);
        assert_eq!((found.xdp, found.reason.as_str()), (xdp, reason));
        assert_eq!((found.forwarded, found.not_forwarded), ("unfragmented", None));
    }

    #[test]
    fn only_what_the_programs_know_is_sent_to() {
        let found = expected("native").limited_to(false);
        assert!(found.forwarded == NO && found.not_forwarded.is_some(), "{found:?}");
        let none = XdpView { forwarded: NO, not_forwarded: Some("why".to_owned()), ..expected("native") };
        assert_eq!(none.clone().limited_to(false), none);
    }
}
