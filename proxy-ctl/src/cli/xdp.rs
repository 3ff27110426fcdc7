//! Which way packets take that leave by the uplink that they have come by.

use serde::Serialize;

use super::table::table;
use crate::{
    config::{Keyword as _, Xdp},
    dataplane::{
        Interface, NodeNetwork, Role,
        xdp::{choose, word},
    },
    process::record,
    sys::device::facts,
};

/// Of one uplink.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(super) struct XdpView {
    pub(super) interface: String,
    /// `native`, `generic` or `no`.
    pub(super) xdp: &'static str,
    pub(super) reason: String,
}

const NO: &str = "no";

impl XdpView {
    fn expected(configured: Xdp, interface: &Interface) -> Self {
        let choice = choose(configured, interface, &facts(interface.index, &interface.name));
        let (xdp, reason) =
            choice.map_or_else(|obstacle| (NO, obstacle.to_string()), |(mode, why)| (word(mode), why));
        Self { interface: interface.name.clone(), xdp, reason }
    }

    /// `attached`: the mode of the program that is there.
    fn found(self, attached: Option<&str>) -> Self {
        match attached {
            Some("native") => Self { xdp: "native", ..self },
            Some(_) => Self { xdp: "generic", ..self },
            None if self.xdp == NO => self,
            None => Self {
                xdp: NO,
                reason: format!("{}, but no program is attached: the controller's log says why", self.reason),
                ..self
            },
        }
    }
}

pub(super) fn text(column: &str, uplinks: &[XdpView]) -> String {
    let rows = uplinks.iter().map(|of| [of.interface.clone(), of.xdp.to_owned(), of.reason.clone()]);
    table(["UPLINK", column, "BECAUSE"], rows)
}

/// What uplinks would have.
pub(super) fn of_uplinks(configured: Xdp, network: &NodeNetwork) -> Vec<XdpView> {
    let uplinks = network.interfaces.iter().filter(|interface| interface.role == Role::Uplink);
    uplinks.map(|uplink| XdpView::expected(configured, uplink)).collect()
}

/// What those of a controller have, where it is to use XDP. `attached`: the mode of the program on the interface with this index.
pub(super) fn of_controller<'a>(
    record: &record::Record,
    network: &NodeNetwork,
    attached: impl Fn(u32) -> Option<&'a str>,
) -> Vec<XdpView> {
    let Some(configured) = Xdp::of(&record.xdp).filter(|xdp| *xdp != Xdp::Off) else { return Vec::new() };
    let is_uplink =
        |index: u32| record.interfaces.iter().any(|known| known.index == index && known.role == "uplink");
    let uplinks = network.interfaces.iter().filter(|interface| is_uplink(interface.index));
    uplinks.map(|uplink| XdpView::expected(configured, uplink).found(attached(uplink.index))).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn expected(xdp: &'static str) -> XdpView {
        XdpView { interface: "eth0".to_owned(), xdp, reason: "why".to_owned() }
    }

    const NOT_ATTACHED: &str = "why, but no program is attached: the controller's log says why";

    #[rstest]
    #[case::as_expected("native", Some("native"), "native", "why")]
    #[case::refused("native", None, "no", NOT_ATTACHED)]
    #[case::not_expected("no", None, "no", "why")]
    #[case::of_a_former_configuration("no", Some("generic"), "generic", "why")]
    fn what_is_there_counts(
        #[case] wanted: &'static str,
        #[case] attached: Option<&str>,
        #[case] xdp: &str,
        #[case] reason: &str,
    ) {
        let found = expected(wanted).found(attached);
        assert_eq!((found.xdp, found.reason.as_str()), (xdp, reason));
    }
}
