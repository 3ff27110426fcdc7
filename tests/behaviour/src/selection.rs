//! What is said to programs that run many proxies.

use clap::Args;

use crate::setting::{OURS, PathKind, ProxyKind, REAL, Setting};

#[derive(Args)]
pub struct Selection {
    #[command(flatten)]
    pub harness: scenario::Arguments,
    /// Modes of proxy-ctl [default: all]
    #[arg(long, value_enum)]
    proxy: Vec<ProxyKind>,
    /// Also the real kube-proxy, in its modes iptables and nftables
    #[arg(long)]
    pub kube_proxy: bool,
    /// A part that takes a few minutes
    #[arg(long)]
    pub lean: bool,
}

impl Selection {
    pub fn ours(&self) -> Vec<ProxyKind> {
        if self.proxy.is_empty() { OURS.to_vec() } else { self.proxy.clone() }
    }

    /// With the real one, if it is asked for.
    pub fn settings(&self, paths: &Paths) -> Vec<Setting> {
        let mut proxies = self.ours();
        if self.kube_proxy {
            proxies.extend(REAL);
        }
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
