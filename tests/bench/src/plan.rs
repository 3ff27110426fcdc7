//! Cells of a run. Each is one measure of one contender at one size, and has a name by which it can
//! be chosen.

use std::fmt;

use behaviour::setting::ProxyKind;
use serde::{Deserialize, Serialize};

use crate::contender::{Contender, Kind};

#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Time from the start of the process to the first connection through it.
    Start,
    /// Time from the listed caches until everything is programmed, as the proxy reports it.
    FirstSync,
    /// Rate of connections with one request each.
    Connect,
    /// Rate of requests on an open connection.
    Request,
    /// Rate of mebibytes on an open connection.
    Bulk,
    /// Rate of datagrams that are answered, each from a new socket.
    Datagram,
    /// Processor time of the whole machine for a connection.
    Cpu,
    /// Rate as of `Connect`, while SYNs from forged addresses come to another Service.
    Flood,
    /// Rate of packets that one core forwards.
    Forward,
    /// Time from the API server's acknowledgement of a change to the first connection that follows
    /// it.
    Change,
    /// Processor time of the proxy for changes.
    ChangesCpu,
    /// Processor time of the proxy while nothing changes.
    Rest,
    /// Highest resident memory of the proxy.
    Memory,
    /// Kernel memory of the proxy's BPF maps.
    MapMemory,
    /// Delay of a change after a Service with many endpoints has replaced them one by one.
    Rollout,
    /// Number of entries that a process writes when it starts after kill -9 and nothing has
    /// changed.
    Restart,
    CleanUp,
}

pub const EXERCISES: [Measure; 4] = [Measure::Connect, Measure::Request, Measure::Bulk, Measure::Datagram];

impl fmt::Display for Measure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Start => "start",
            Self::FirstSync => "first-sync",
            Self::Connect => "connect",
            Self::Request => "request",
            Self::Bulk => "bulk",
            Self::Datagram => "datagram",
            Self::Cpu => "cpu",
            Self::Flood => "flood",
            Self::Forward => "forward",
            Self::Change => "change",
            Self::ChangesCpu => "changes-cpu",
            Self::Rest => "rest",
            Self::Memory => "memory",
            Self::MapMemory => "map-memory",
            Self::Rollout => "rollout",
            Self::Restart => "restart",
            Self::CleanUp => "clean-up",
        })
    }
}

/// Way of a connection, from the client to the endpoints.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// The way from a pod to the cluster IP of endpoints on its node.
    ClusterIp,
    /// The way from outside to the node port of endpoints on that node.
    NodePortLocal,
    /// The way from outside to the node port of endpoints on the other node.
    NodePortRemote,
}

pub const ROUTES: [Route; 3] = [Route::ClusterIp, Route::NodePortLocal, Route::NodePortRemote];

pub const OUTSIDE: &[Route] = &[Route::NodePortLocal, Route::NodePortRemote];

impl Route {
    pub const fn describe(self) -> &'static str {
        match self {
            Self::ClusterIp => "pod to ClusterIP",
            Self::NodePortLocal => "outside to NodePort, endpoints on that node",
            Self::NodePortRemote => "outside to NodePort, endpoints on another node",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::ClusterIp => "cluster-ip",
            Self::NodePortLocal => "node-port-local",
            Self::NodePortRemote => "node-port-remote",
        })
    }
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct CellName {
    pub measure: Measure,
    #[serde(rename = "path", skip_serializing_if = "Option::is_none")]
    pub route: Option<Route>,
    pub contender: String,
    /// Number of Services in the cluster. It is 0 if none of them matters.
    pub services: usize,
}

impl fmt::Display for CellName {
    /// Writes a name such as `connect/node-port-local/ebpf-xdp/1000`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/", self.measure)?;
        if let Some(route) = self.route {
            write!(formatter, "{route}/")?;
        }
        write!(formatter, "{}/{}", self.contender, self.services)
    }
}

/// Returns the contender's cells at one size whose names contain every text of `filter`, in the
/// order in which they are measured.
pub fn cells(contender: Contender, services: usize, is_first_size: bool, filter: &[String]) -> Vec<CellName> {
    let services = match contender.kind {
        Kind::Proxy { .. } => services,
        Kind::Direct | Kind::Dropped | Kind::SentBack | Kind::OneRule if is_first_size => 0,
        Kind::Direct | Kind::Dropped | Kind::SentBack | Kind::OneRule => return Vec::new(),
    };
    let name = |(measure, route)| CellName { measure, route, contender: contender.name.to_owned(), services };
    let all = measures(contender).into_iter().map(name);
    all.filter(|cell| filter.iter().all(|text| cell.to_string().contains(text))).collect()
}

fn measures(contender: Contender) -> Vec<(Measure, Option<Route>)> {
    let on = |measures: &[Measure], routes: &[Route]| {
        let each =
            |measure: &Measure| routes.iter().map(|route| (*measure, Some(*route))).collect::<Vec<_>>();
        measures.iter().flat_map(each).collect::<Vec<_>>()
    };
    let routes = contender.routes();
    let outside: Vec<Route> = OUTSIDE.iter().copied().filter(|route| routes.contains(route)).collect();
    let forward = on(&[Measure::Forward], &outside);
    match contender.kind {
        Kind::Dropped | Kind::SentBack => on(&[Measure::Forward], &[Route::NodePortRemote]),
        Kind::OneRule => forward,
        Kind::Direct if contender.cards => on(&[Measure::Cpu], routes),
        Kind::Direct => [on(&[Measure::Cpu], routes), forward].concat(),
        Kind::Proxy { monitored: true, .. } => on(&[Measure::Connect, Measure::Cpu], routes),
        Kind::Proxy { proxy, .. } => {
            let is_its = |measure: &Measure| {
                let only_ours = matches!(measure, Measure::FirstSync | Measure::Restart);
                (!only_ours || !proxy.is_kube_proxy())
                    && (*measure != Measure::MapMemory || proxy == ProxyKind::Ebpf)
            };
            let without = |measures: &[Measure]| -> Vec<_> {
                let its = measures.iter().copied().filter(is_its);
                its.map(|measure| (measure, None)).collect()
            };
            let forwards = !proxy.datapath().is_a_process();
            let floods = forwards && outside.contains(&Route::NodePortLocal);
            [
                without(&[Measure::Start, Measure::FirstSync]),
                on(&EXERCISES, routes),
                on(&[Measure::Cpu], routes),
                if floods { on(&[Measure::Flood], &[Route::NodePortLocal]) } else { Vec::new() },
                if forwards { forward } else { Vec::new() },
                without(&[Measure::Change, Measure::ChangesCpu, Measure::Rest, Measure::Memory]),
                without(&[Measure::Rollout, Measure::MapMemory, Measure::Restart, Measure::CleanUp]),
            ]
            .concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::contender::CONTENDERS;

    fn names(contender: &str, is_first_size: bool, filter: &[&str]) -> Vec<String> {
        let filter = Vec::from_iter(filter.iter().map(|text| (*text).to_owned()));
        let contender = Contender::by_name(contender).unwrap();
        let cells = cells(contender, 1_000, is_first_size, &filter);
        cells.iter().map(CellName::to_string).collect()
    }

    #[rstest]
    #[case::a_proxy_at_each_size("nftables", false, &["connect", "cluster"], &["connect/cluster-ip/nftables/1000"])]
    #[case::xdp_from_outside_only("ebpf-xdp", true, &["bulk"],
        &["bulk/node-port-local/ebpf-xdp/1000", "bulk/node-port-remote/ebpf-xdp/1000"])]
    #[case::sockets_of_pods_only("ebpf-sockets", true, &["connect"], &["connect/cluster-ip/ebpf-sockets/1000"])]
    #[case::without_services_once("direct", true, &["forward"],
        &["forward/node-port-local/direct/0", "forward/node-port-remote/direct/0"])]
    #[case::and_not_again("direct", false, &[], &[])]
    #[case::nothing_is_restarted_of_others("kube-proxy-nftables", true, &["restart"], &[])]
    #[case::maps_of_mode_ebpf("ebpf-packets", false, &["map-memory"], &["map-memory/ebpf-packets/1000"])]
    #[case::and_no_other("nftables", false, &["map-memory"], &[])]
    #[case::a_process_forwards_no_packets("userspace", true, &["forward"], &[])]
    #[case::floods_come_from_outside("ebpf-xdp", true, &["flood"], &["flood/node-port-local/ebpf-xdp/1000"])]
    #[case::and_not_to_pods("ebpf-sockets", true, &["flood"], &[])]
    fn chosen(
        #[case] contender: &str,
        #[case] is_first_size: bool,
        #[case] filter: &[&str],
        #[case] expected: &[&str],
    ) {
        assert_eq!(names(contender, is_first_size, filter), expected);
    }

    #[test]
    fn names_are_distinct() {
        let all = CONTENDERS.iter().flat_map(|contender| names(contender.name, true, &[]));
        let all = Vec::from_iter(all);
        let distinct: std::collections::BTreeSet<&String> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
