//! Rules of iptables that modes iptables and ipvs both write, as iptables-save prints them. Pure.

use crate::model::{
    node::{Host, LocalTraffic},
    objects::IpFamily,
};

/// Returns the fwmark of packets that are to be masqueraded.
fn fwmark(host: &Host) -> String {
    format!("{:#x}", 1_u64 << host.masquerade_bit)
}

/// Returns the rule that gives packets the fwmark.
pub(in crate::modes) fn set_fwmark(host: &Host) -> String {
    let fwmark = fwmark(host);
    format!("-j MARK --set-xmark {fwmark}/{fwmark}")
}

/// Returns the rules that masquerade packets with the fwmark, and no others. The arguments are
/// those of [`masquerade`].
pub(in crate::modes) fn masquerade_by_fwmark(host: &Host, matches: &str, option: &str) -> Vec<String> {
    let fwmark = fwmark(host);
    let mut rules = vec![
        format!("-m mark ! --mark {fwmark}/{fwmark} -j RETURN"),
        // Otherwise a packet that comes by again, through a tunnel, would be masqueraded again.
        format!("-j MARK --set-xmark {fwmark}/0x0"),
    ];
    rules.extend(masquerade(host, matches, option));
    rules
}

/// Returns rules that masquerade packets to the ports of the configuration. `matches` is empty or
/// ends with a space. `option` is an option of MASQUERADE.
pub(in crate::modes) fn masquerade(host: &Host, matches: &str, option: &str) -> Vec<String> {
    let Some(ports) = host.masquerade_ports else { return vec![format!("{matches}-j MASQUERADE{option}")] };
    // MASQUERADE takes ports only in rules that name the protocol.
    let rule = |protocol| format!("-p {protocol} {matches}-j MASQUERADE --to-ports {ports}{option}");
    ["tcp", "udp", "sctp"].map(rule).into()
}

/// Returns the rules that let the node forward packets with the fwmark, and those of connections
/// that conntrack knows. Each comment is empty or ends with a space.
pub(in crate::modes) fn forward(host: &Host, [by_fwmark, known]: [&str; 2]) -> [String; 2] {
    let fwmark = fwmark(host);
    [
        format!("{by_fwmark}-m mark --mark {fwmark}/{fwmark} -j ACCEPT"),
        format!("{known}-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
    ]
}

/// Returns a match for packets of pods. `None`: pods cannot be told from others in this family.
pub(in crate::modes) fn from_pods(host: &Host, family: IpFamily) -> Option<String> {
    match &host.local_traffic {
        LocalTraffic::FromCidrs(cidrs) => {
            let own = cidrs.iter().find(|cidr| IpFamily::of(cidr.addr()) == family);
            own.map(|cidr| format!("-s {}", cidr.trunc()))
        }
        LocalTraffic::FromBridge(name) => Some(format!("-i {name}")),
        LocalTraffic::FromInterfacePrefix(prefix) => Some(format!("-i {prefix}+")),
    }
}

/// Returns the ICMP message with which clients are refused.
pub(in crate::modes) const fn port_unreachable(family: IpFamily) -> &'static str {
    match family {
        IpFamily::Ipv4 => "icmp-port-unreachable",
        IpFamily::Ipv6 => "icmp6-port-unreachable",
    }
}
