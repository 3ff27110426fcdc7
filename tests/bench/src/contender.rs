//! The contenders that are measured.

use std::fmt;

use behaviour::setting::{PathKind, ProxyKind};

use crate::plan::{OUTSIDE, ROUTES, Route};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Contender {
    pub name: &'static str,
    pub kind: Kind,
    /// True if devices behave like network cards for XDP programs. That costs all traffic on them.
    pub cards: bool,
    pub is_lean: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// There is no proxy: clients dial endpoints, and the node only forwards.
    Direct,
    /// A device drops each packet. This shows the cost of making packets.
    Dropped,
    /// A device sends each packet back unchanged. This is the least that XDP can take to forward
    /// one.
    SentBack,
    /// One DNAT rule of iptables serves the Service that is dialled.
    OneRule,
    Proxy {
        proxy: ProxyKind,
        /// Path of mode ebpf.
        path: PathKind,
        /// True if `proxy-ctl monitor` shows each event.
        monitored: bool,
    },
}

/// The contenders in the order in which they are measured.
pub const CONTENDERS: [Contender; 16] = [
    Contender::of("dropped", Kind::Dropped),
    Contender::of("sent-back", Kind::SentBack),
    Contender::of("direct", Kind::Direct).lean(),
    Contender::of("direct-cards", Kind::Direct).with_cards(),
    Contender::of("one-iptables-rule", Kind::OneRule),
    ebpf("ebpf-sockets", PathKind::Sockets).lean(),
    ebpf("ebpf-packets", PathKind::Packets).lean(),
    Contender::of(
        "ebpf-monitored",
        Kind::Proxy { proxy: ProxyKind::Ebpf, path: PathKind::Packets, monitored: true },
    ),
    ebpf("ebpf-xdp", PathKind::Packets).with_cards().lean(),
    proxy("nftables", ProxyKind::Nftables),
    proxy("iptables", ProxyKind::Iptables),
    proxy("ipvs", ProxyKind::Ipvs),
    proxy("kube-proxy-nftables", ProxyKind::KubeProxyNftables).lean(),
    proxy("kube-proxy-iptables", ProxyKind::KubeProxyIptables),
    proxy("kube-proxy-ipvs", ProxyKind::KubeProxyIpvs),
    proxy("userspace", ProxyKind::Userspace),
];

const fn proxy(name: &'static str, proxy: ProxyKind) -> Contender {
    Contender::of(name, Kind::Proxy { proxy, path: PathKind::Packets, monitored: false })
}

const fn ebpf(name: &'static str, path: PathKind) -> Contender {
    Contender::of(name, Kind::Proxy { proxy: ProxyKind::Ebpf, path, monitored: false })
}

impl Contender {
    const fn of(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, cards: false, is_lean: false }
    }

    const fn with_cards(mut self) -> Self {
        self.cards = true;
        self
    }

    const fn lean(mut self) -> Self {
        self.is_lean = true;
        self
    }

    /// Returns true if an XDP program of the proxy forwards packets.
    pub fn uses_xdp(self) -> bool {
        self.cards && matches!(self.kind, Kind::Proxy { .. })
    }

    pub fn is_monitored(self) -> bool {
        matches!(self.kind, Kind::Proxy { monitored: true, .. })
    }

    /// Returns the routes on which the contender differs from another one of the same mode.
    pub fn routes(self) -> &'static [Route] {
        let by_sockets =
            matches!(self.kind, Kind::Proxy { proxy: ProxyKind::Ebpf, path: PathKind::Sockets, .. });
        match (by_sockets, self.cards) {
            (true, _) => &[Route::ClusterIp],
            (false, true) => OUTSIDE,
            (false, false) => &ROUTES,
        }
    }

    pub fn by_name(name: &str) -> Option<Self> {
        CONTENDERS.into_iter().find(|contender| contender.name == name)
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name)
    }
}
