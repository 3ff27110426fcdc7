//! Switches that are made, and the failures that each may cause.

use std::net::SocketAddr;

use behaviour::{
    fixtures::PORT,
    setting::{Datapath, ProxyKind},
};

use crate::load_balancer;

/// Client that is the node itself.
pub(crate) const NODE: &str = "node1";

const PODS: [&str; 2] = ["client-1", "client-2"];

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum By {
    /// A changed file, which the running process follows.
    File,
    /// Another process, which starts after the first one was told to end.
    Process,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Switch {
    pub(crate) from: ProxyKind,
    pub(crate) to: ProxyKind,
    pub(crate) by: By,
}

impl Switch {
    /// Returns true if kube-proxy removes the rules of another mode before it writes its own.
    /// Packets are not translated meanwhile, and an untranslated answer resets its connection. The
    /// programs of mode ebpf go on translating.
    pub(crate) fn has_gap(self) -> bool {
        let serves_on = self.from.datapath() == Datapath::Ebpf;
        self.to.is_kube_proxy() && self.to.datapath() != self.from.datapath() && !serves_on
    }

    /// Returns true if the process that carries connections ends. They end with it, and nobody
    /// serves until the next process does.
    pub(crate) fn ends_connections(self) -> bool {
        self.by == By::Process && self.from.datapath().is_a_process()
    }

    /// Returns true if UDP sockets of this client stay without answers after a switch from mode
    /// userspace. See docs/differences.md.
    ///
    /// Mode ebpf translates for the node itself only when a socket connects. A socket that was
    /// connected before depends on what the kernel still translates. After a process that carried
    /// datagrams, that is nothing.
    ///
    /// What is sent while nobody serves gets an entry of connection tracking without a masquerade.
    /// kube-proxy in mode ipvs removes it only at its next sync. Pods need no masquerade.
    ///
    /// After mode ipvs such sockets are ended, and clients open them anew.
    pub(crate) fn strands(self, client: &str) -> bool {
        let stays_untranslated = self.to.datapath() == Datapath::Ebpf && client == NODE;
        let stays_unmasqueraded = self.to == ProxyKind::KubeProxyIpvs && !PODS.contains(&client);
        self.from.datapath().is_a_process() && (stays_untranslated || stays_unmasqueraded)
    }

    /// Returns true if packets of a connection with these ends are dropped until `cleanup`. Mode
    /// ipvs sends all packets to the chain of the source ranges, as kube-proxy's does. There, rules
    /// of mode iptables drop what was not translated before. See docs/life-cycle.md.
    pub(crate) fn drops(self, ends: &str) -> bool {
        let kind = (self.from, self.to);
        kind == (ProxyKind::Ipvs, ProxyKind::KubeProxyIptables)
            && load_balancer()
                .both()
                .into_iter()
                .any(|address| ends.ends_with(&SocketAddr::new(address, PORT).to_string()))
    }

    /// Returns how many of `held` connections may be lost. IPVS takes packets of other connections
    /// for its own if they have the same client, port and endpoint. When these end, IPVS forgets
    /// its own connection too. kube-proxy in mode iptables reaches its endpoints without IPVS.
    pub(crate) fn mistaken(self, held: usize) -> usize {
        if (self.from, self.to) == (ProxyKind::Ipvs, ProxyKind::KubeProxyIptables) { held / 20 } else { 0 }
    }
}

impl std::fmt::Display for Switch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by = match self.by {
            By::File => "by a changed file",
            By::Process => "by another process",
        };
        write!(formatter, "{} to {}, {by}", self.from, self.to)
    }
}

/// Returns the switches between proxy-ctl's modes, ordered so that each begins where the one before
/// has ended. A lean run leaves and enters each mode once, and goes the other way round by another
/// process.
pub(crate) fn ours(modes: &[ProxyKind], lean: bool) -> Vec<Switch> {
    let each_pair = || {
        let with_later = |(number, first): (usize, &ProxyKind)| {
            let first = *first;
            modes.iter().skip(number + 1).flat_map(move |second| [first, *second])
        };
        modes.iter().enumerate().flat_map(with_later).collect()
    };
    let (live, by_process) = match lean {
        true => {
            let back = modes.iter().take(1).chain(modes.iter().skip(1).rev());
            (modes.to_vec(), back.copied().collect())
        }
        false => (each_pair(), each_pair()),
    };
    let along = |order: Vec<ProxyKind>, by: By| {
        let next = order.clone().into_iter().cycle().skip(1);
        let pairs = order.into_iter().zip(next).filter(|(from, to)| from != to);
        pairs.map(move |(from, to)| Switch { from, to, by })
    };
    along(live, By::File).chain(along(by_process, By::Process)).collect()
}

/// Returns the switches from and to the real kube-proxy. A lean run has one of proxy-ctl's modes
/// and one of kube-proxy's.
pub(crate) fn with_the_real_one(real: &[ProxyKind], modes: &[ProxyKind], lean: bool) -> Vec<Switch> {
    let of_each = if lean { 1 } else { usize::MAX };
    let ours = || modes.iter().take(of_each);
    let pairs = real.iter().take(of_each).flat_map(|real| ours().map(move |ours| (*real, *ours)));
    let there_and_back = |(real, ours)| {
        [Switch { from: real, to: ours, by: By::Process }, Switch { from: ours, to: real, by: By::Process }]
    };
    pairs.flat_map(there_and_back).collect()
}
