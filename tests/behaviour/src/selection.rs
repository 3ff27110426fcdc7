//! What is said to programs that run many proxies.

use clap::Args;

use crate::setting::{OURS, ProxyKind};

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
}
