//! The frame of a table, which is there whatever the service ports are: base chains at the hooks
//! and priorities that other programs rely on, and the nftables maps that their rules use. This
//! module has no side effects.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::{
    language::{
        FIRST, Language, SECOND, address_bytes, change_fwmark, from_interface, from_interface_prefix, goto,
        has_fwmark, is_new, is_translated, jump, rule,
    },
    objects::{ElementId, Rule, Set},
};
use crate::{
    model::{
        node::{Host, LocalTraffic, PortRange},
        objects::IpFamily,
    },
    sys::nftables::{
        BaseChain, ChainType, Comparison, Datum, Expression, NetfilterHook, Register, SetDefinition, Side,
        Values, Verdict, user_data,
    },
};

/// The table's comment, which names its layout. Another layout must have another number, so that
/// the table is replaced in one transaction.
pub(super) const COMMENT: &str = "rules of proxy-ctl for Services, layout 1";
pub(super) const REJECT: &str = "reject-chain";
const SERVICES: &str = "services";
const MASQUERADING: &str = "masquerading";
const FIREWALL_CHECK: &str = "firewall-check";
const SERVICE_ENDPOINTS_CHECK: &str = "service-endpoints-check";
const NODE_PORT_ENDPOINTS_CHECK: &str = "nodeport-endpoints-check";
const CLUSTER_IPS_CHECK: &str = "cluster-ips-check";
const MASQUERADE_CLUSTER_IPS: &str = "masquerade-cluster-ips";

/// The settings of the node that decide what is written for one IP family, whatever the Services
/// are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Context {
    pub(super) language: Language,
    /// The host, without everything that does not matter here.
    pub(super) host: Host,
}

impl Context {
    pub(super) fn new(family: IpFamily, host: &Host) -> Self {
        let of_family = |address: &std::net::IpAddr| IpFamily::of(*address) == family;
        let served =
            host.node_port_addresses.iter().filter(|address| of_family(address) && !address.is_loopback());
        let node_port_addresses =
            if host.node_ports_everywhere { BTreeSet::new() } else { served.copied().collect() };
        let host = Host {
            node_port_addresses,
            node_ports_everywhere: host.node_ports_everywhere,
            masquerade_addresses: host.masquerade_addresses.iter().copied().filter(of_family).collect(),
            local_traffic: host.local_traffic.clone(),
            masquerade_all: host.masquerade_all,
            masquerade_bit: host.masquerade_bit,
            masquerade_ports: host.masquerade_ports,
            shares_addresses: host.shares_addresses,
            service_cidrs: host
                .service_cidrs
                .as_ref()
                .map(|all| all.iter().copied().filter(|cidr| of_family(&cidr.addr())).collect()),
            ..Host::default()
        };
        Self { language: Language { family }, host }
    }

    pub(super) fn fwmark(&self) -> u32 {
        1_u32.checked_shl(self.host.masquerade_bit.into()).unwrap_or(1)
    }

    /// Returns one condition for each way in which a packet shows that it comes from a pod.
    pub(super) fn conditions_of_pods(&self) -> Vec<Vec<Expression>> {
        match &self.host.local_traffic {
            LocalTraffic::FromCidrs(cidrs) => {
                let own = cidrs.iter().filter(|cidr| IpFamily::of(cidr.addr()) == self.language.family);
                own.map(|cidr| self.language.is_in(Side::Source, *cidr)).collect()
            }
            LocalTraffic::FromBridge(name) => vec![from_interface(name)],
            LocalTraffic::FromInterfacePrefix(prefix) => vec![from_interface_prefix(prefix)],
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct FrameChain {
    pub(super) name: &'static str,
    pub(super) base: Option<BaseChain>,
    pub(super) rules: Vec<Rule>,
}

/// The most clients that are remembered for one service port.
const MOST_CLIENTS: u32 = 1 << 20;

pub(super) fn definition(set: &Set, language: Language) -> SetDefinition {
    match set {
        Set::ClusterIps | Set::NodePortIps => SetDefinition::new(language.address(), Values::None),
        Set::HairpinConnections => SetDefinition::new(language.hairpin(), Values::None),
        Set::ServiceIps | Set::FirewallIps | Set::NoEndpointServices => {
            SetDefinition::new(language.frontend(), Values::Verdict)
        }
        Set::ServiceNodePorts | Set::NoEndpointNodePorts => {
            SetDefinition::new(&[Datum::Protocol, Datum::Port], Values::Verdict)
        }
        Set::Endpoints(_) => SetDefinition {
            user_data: slot_type(language),
            ..SetDefinition::new(&[Datum::Number], Values::Of(language.endpoint()))
        },
        Set::Own(_) => SetDefinition {
            dynamic: Some(MOST_CLIENTS),
            ..SetDefinition::new(language.affinity(), Values::None)
        },
    }
}

/// Returns the type `typeof numgen random mod 65536 : ip daddr . tcp dport`, as nft notes it. With
/// it, nft lists the map in a form that it reads again.
fn slot_type(language: Language) -> Vec<u8> {
    const PAYLOAD: u32 = 7;
    const CONCATENATION: u32 = 13;
    const NUMGEN: u32 = 23;
    const TCP: (u32, u32) = (8, 2);
    let address = match language.family {
        IpFamily::Ipv4 => (12, 12),
        IpFamily::Ipv6 => (13, 9),
    };
    let list = |parts: &[(u8, &[u8])]| {
        let mut list = Vec::new();
        parts.iter().for_each(|(kind, value)| user_data::add(&mut list, *kind, value));
        list
    };
    let typed = |kind: u32, of: &[u8]| list(&[(0, &kind.to_ne_bytes()), (1, of)]);
    let field = |(header, field): (u32, u32)| {
        typed(PAYLOAD, &list(&[(0, &header.to_ne_bytes()), (1, &field.to_ne_bytes())]))
    };
    let random = [(0, 1_u32), (1, 65_536), (2, 0)].map(|(kind, value)| (kind, value.to_ne_bytes()));
    let random: Vec<(u8, &[u8])> = random.iter().map(|(kind, value)| (*kind, value.as_slice())).collect();
    let endpoint = list(&[(0, &field(address)), (1, &field(TCP))]);
    const HOST_ORDER: [u8; 4] = 1_u32.to_ne_bytes();
    list(&[
        (0, &HOST_ORDER),
        (1, &[0; 4]),
        (3, &typed(NUMGEN, &list(&random))),
        (4, &typed(CONCATENATION, &endpoint)),
        (6, &[0; 4]),
    ])
}

pub(super) fn elements(context: &Context) -> Vec<ElementId> {
    let addresses = context.host.node_port_addresses.iter();
    addresses.map(|address| ElementId { set: Set::NodePortIps, key: address_bytes(*address) }).collect()
}

pub(super) fn chains(context: &Context) -> Vec<FrameChain> {
    let language = context.language;
    let inner = |name, rules| FrameChain { name, base: None, rules };
    let base = |name, kind, hook, priority, rules| FrameChain {
        name,
        base: Some(BaseChain { kind, hook, priority }),
        rules,
    };
    let (filter, nat) = (ChainType::Filter, ChainType::Nat);
    let new_to = |chain: &str| rule([is_new(), vec![jump(chain)]]);
    let all_to = |chain: &str| rule([vec![jump(chain)]]);
    let verdict_of = |set: Set| rule([language.verdict_of_frontend(&set.name())]);
    let verdict_of_node_port =
        |set: Set| rule([is_node_port_address(context), Language::verdict_of_port(&set.name())]);
    let reject = || vec![Expression::Reject { family: language.table_family() }];
    let is_cluster_ip = || language.destination_in(&Set::ClusterIps.name());
    vec![
        inner(REJECT, vec![rule([reject()])]),
        inner(MASQUERADE_CLUSTER_IPS, masquerade_cluster_ips(context)),
        inner(
            SERVICES,
            vec![
                rule([is_cluster_ip(), vec![jump(MASQUERADE_CLUSTER_IPS)]]),
                verdict_of(Set::ServiceIps),
                verdict_of_node_port(Set::ServiceNodePorts),
            ],
        ),
        inner(
            MASQUERADING,
            vec![
                rule([
                    has_fwmark(context.fwmark()),
                    change_fwmark(context.fwmark(), false),
                    masquerade(context),
                ]),
                rule([
                    is_translated(),
                    language.load_hairpin(),
                    vec![Expression::Lookup {
                        set: Set::HairpinConnections.name().into_owned(),
                        key: FIRST,
                        to: None,
                    }],
                    masquerade(context),
                ]),
            ],
        ),
        inner(FIREWALL_CHECK, vec![verdict_of(Set::FirewallIps)]),
        inner(SERVICE_ENDPOINTS_CHECK, vec![verdict_of(Set::NoEndpointServices)]),
        inner(NODE_PORT_ENDPOINTS_CHECK, vec![verdict_of_node_port(Set::NoEndpointNodePorts)]),
        inner(CLUSTER_IPS_CHECK, unserved_cluster_ips(context)),
        base(
            "filter-prerouting-pre-dnat",
            filter,
            NetfilterHook::Prerouting,
            -110,
            vec![new_to(FIREWALL_CHECK)],
        ),
        base("filter-output-pre-dnat", filter, NetfilterHook::Output, -110, vec![new_to(FIREWALL_CHECK)]),
        base(
            "filter-input",
            filter,
            NetfilterHook::Input,
            0,
            vec![new_to(NODE_PORT_ENDPOINTS_CHECK), new_to(SERVICE_ENDPOINTS_CHECK)],
        ),
        base(
            "filter-forward",
            filter,
            NetfilterHook::Forward,
            0,
            vec![new_to(SERVICE_ENDPOINTS_CHECK), new_to(CLUSTER_IPS_CHECK)],
        ),
        base(
            "filter-output",
            filter,
            NetfilterHook::Output,
            0,
            vec![new_to(SERVICE_ENDPOINTS_CHECK), new_to(CLUSTER_IPS_CHECK)],
        ),
        base("nat-prerouting", nat, NetfilterHook::Prerouting, -100, vec![all_to(SERVICES)]),
        base("nat-output", nat, NetfilterHook::Output, -100, vec![all_to(SERVICES)]),
        base("nat-postrouting", nat, NetfilterHook::Postrouting, 100, vec![all_to(MASQUERADING)]),
    ]
}

fn masquerade(context: &Context) -> Vec<Expression> {
    let Some(PortRange { first, last }) = context.host.masquerade_ports else {
        return vec![Expression::Masquerade { ports: None }];
    };
    let load = |port: u16, to| Expression::Immediate { value: port.to_be_bytes().to_vec(), to };
    let ports = [FIRST, SECOND];
    vec![load(first, FIRST), load(last, SECOND), Expression::Masquerade { ports: Some(ports) }]
}

/// Returns the rules for packets to ClusterIPs that were not translated. There are none if another
/// mode serves other ports of the same addresses.
fn unserved_cluster_ips(context: &Context) -> Vec<Rule> {
    if context.host.shares_addresses {
        return Vec::new();
    }
    let language = context.language;
    let reject = [language.destination_in(&Set::ClusterIps.name()), vec![goto(REJECT)]];
    let drop_all_of = |cidr: &IpNet| {
        let drop = vec![Expression::Verdict(Verdict::Drop)];
        rule([language.is_in(Side::Destination, *cidr), drop]).comment("addresses that no Service has")
    };
    let mut rules = vec![rule(reject).comment("ports that no Service has")];
    rules.extend(context.host.service_cidrs.iter().flatten().map(drop_all_of));
    rules
}

/// Returns the rules that set the fwmark of clients of ClusterIPs, so that they are masqueraded.
///
/// With `masquerade_all` these are all clients. Otherwise they are those that are no pods, and
/// nobody if pods cannot be distinguished from other clients.
fn masquerade_cluster_ips(context: &Context) -> Vec<Rule> {
    let set_fwmark = rule([change_fwmark(context.fwmark(), true)]);
    if context.host.masquerade_all {
        return vec![set_fwmark];
    }
    if !context.host.local_traffic.detects_pods(context.language.family) {
        return Vec::new();
    }
    let pods = context.conditions_of_pods().into_iter();
    let stay = pods.map(|condition| rule([condition, vec![Expression::Verdict(Verdict::Return)]]));
    stay.chain([set_fwmark]).collect()
}

fn is_node_port_address(context: &Context) -> Vec<Expression> {
    if !context.host.node_ports_everywhere {
        return context.language.destination_in(&Set::NodePortIps.name());
    }
    let mut condition = Language::is_local(Side::Destination);
    condition.extend(is_no_loopback(context.language));
    condition
}

fn is_no_loopback(language: Language) -> Vec<Expression> {
    let differs = |value| Expression::Compare { register: FIRST, comparison: Comparison::NotEqual, value };
    match language.family {
        IpFamily::Ipv4 => {
            let first_byte = language.load_address(Side::Destination, FIRST);
            vec![first_byte, masked(FIRST, vec![255, 0, 0, 0]), differs(vec![127, 0, 0, 0])]
        }
        IpFamily::Ipv6 => {
            let loopback = std::net::Ipv6Addr::LOCALHOST.octets().to_vec();
            vec![language.load_address(Side::Destination, FIRST), differs(loopback)]
        }
    }
}

fn masked(register: Register, mask: Vec<u8>) -> Expression {
    let xor = vec![0; mask.len()];
    Expression::Bitwise { register, mask, xor }
}
