//! Who is measured.

use std::fmt;

use behaviour::setting::{PathKind, ProxyKind};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Contender {
    pub name: &'static str,
    pub kind: Kind,
    /// Devices are like network cards to XDP programs. That costs all traffic on them.
    pub cards: bool,
    pub is_lean: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Nobody: clients dial endpoints, the node only forwards.
    Direct,
    /// A device that drops each packet: what making the packets costs.
    Dropped,
    /// One DNAT rule of iptables for the Service that is dialled.
    OneRule,
    Proxy {
        proxy: ProxyKind,
        /// Of mode ebpf.
        path: PathKind,
        /// `proxy-ctl monitor` shows each event.
        monitored: bool,
    },
}

/// In the order in which they are measured.
pub const CONTENDERS: [Contender; 15] = [
    Contender::of("dropped", Kind::Dropped),
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

    /// An XDP program of the proxy sends packets on.
    pub fn uses_xdp(self) -> bool {
        self.cards && matches!(self.kind, Kind::Proxy { .. })
    }

    /// Those of the packet path that differ from one of the same mode only on their way from outside.
    pub fn is_for_outside_only(self) -> bool {
        self.uses_xdp()
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
