//! Command line of programs that run many proxies.

use clap::Args;

use crate::setting::{OURS, PathKind, ProxyKind, REAL, Setting};

#[derive(Args)]
pub struct Selection {
    #[command(flatten)]
    pub harness: scenario::Arguments,
    /// Proxies and modes to run [default: all modes of proxy-ctl]
    #[arg(long, value_enum)]
    proxy: Vec<ProxyKind>,
    /// Run also the real kube-proxy, in its modes iptables and nftables
    #[arg(long)]
    pub kube_proxy: bool,
    /// Run only a part that takes a few minutes
    #[arg(long)]
    pub lean: bool,
}

impl Selection {
    /// Returns the modes of proxy-ctl that are asked for, or all of them.
    pub fn ours(&self) -> Vec<ProxyKind> {
        if self.proxy.is_empty() { OURS.to_vec() } else { self.asked_for(false) }
    }

    /// Returns the modes of the real kube-proxy that are asked for.
    pub fn real(&self) -> Vec<ProxyKind> {
        let further: &[_] = if self.kube_proxy { &REAL } else { &[] };
        [further, &self.asked_for(true)].concat()
    }

    fn asked_for(&self, of_kube_proxy: bool) -> Vec<ProxyKind> {
        self.proxy.iter().copied().filter(|proxy| proxy.is_kube_proxy() == of_kube_proxy).collect()
    }

    pub fn settings(&self, paths: &Paths) -> Vec<Setting> {
        let proxies = [self.ours(), self.real()].concat();
        let paths = if paths.path.is_empty() { &[PathKind::Sockets] } else { paths.path.as_slice() };
        Setting::matching(&proxies, paths)
    }
}

#[derive(Args)]
pub struct Paths {
    /// Paths of mode ebpf [default: sockets]
    #[arg(long, value_enum)]
    path: Vec<PathKind>,
}
