//! A test table that uses everything that this mode needs. The kernel only checks it, and nothing
//! on the node is changed.

use std::io;

use super::{
    error::Error,
    frame::{self, Context},
    objects::Set,
    plan::Steps,
    render::{Allocation, render},
    slots::Blocks,
};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, Endpoints, Frontend, FrontendKind, ServicePortName},
        mode::Requirement,
        node::{Host, LocalTraffic},
        objects::{IpFamily, ObjectName, Protocol, TrafficPolicy},
    },
    sys::{CallError, has_ipv6, net::netlink::Refused, nftables::NfTables},
};

#[derive(Debug)]
enum NfTablesFact {
    /// The kernel accepts the test table in these IP families.
    Usable(Vec<IpFamily>),
    NoNetlink,
    Refused(i32),
    Failed(CallError),
}

fn gather() -> NfTablesFact {
    let nftables = match NfTables::load() {
        Ok(Some(nftables)) => nftables,
        Ok(None) => return NfTablesFact::NoNetlink,
        Err(error) => return NfTablesFact::Failed(error),
    };
    match refusals(&nftables, IpFamily::Ipv4).map(|refused| refused.first().copied()) {
        Ok(None) => {}
        Ok(Some(refused)) => return NfTablesFact::Refused(refused.errno),
        Err(Error::Call(error)) => return NfTablesFact::Failed(error),
        Err(_) => return NfTablesFact::NoNetlink,
    }
    let ipv6 = has_ipv6() && refusals(&nftables, IpFamily::Ipv6).is_ok_and(|refused| refused.is_empty());
    NfTablesFact::Usable(if ipv6 { IpFamily::ALL.to_vec() } else { vec![IpFamily::Ipv4] })
}

/// Asks the kernel what it would refuse of this mode's table.
pub(super) fn requirement() -> Requirement {
    answer(gather())
}

fn answer(nftables: NfTablesFact) -> Requirement {
    let mut families = Requirement::new("nftables", "nf_tables", serde_json::Value::Null);
    match nftables {
        NfTablesFact::Usable(usable) => {
            families.found = usable.iter().map(|family| family.name()).collect::<Vec<_>>().join(", ").into();
        }
        NfTablesFact::NoNetlink => {
            families.missing.push("the kernel has no nf_tables (CONFIG_NF_TABLES)".to_owned());
        }
        NfTablesFact::Refused(errno) => families.missing.push(format!(
            "the kernel refuses the table: {}; it needs nf_tables with the expressions nat, masq, fib, numgen, ct and reject",
            io::Error::from_raw_os_error(errno)
        )),
        NfTablesFact::Failed(error) => families.missing.push(format!("nf_tables cannot be asked: {error}")),
    }
    families
}

/// Returns what the kernel would refuse of a table with a service port that uses everything. The
/// table has another name.
pub(super) fn refusals(nftables: &NfTables, family: IpFamily) -> Result<Vec<Refused>, Error> {
    let (batch, _) = sample(family).take_batch();
    Ok(nftables.check(batch)?)
}

/// The name of the test table, which the kernel never creates.
const TRIAL: &str = "proxy-ctl-probe";

fn sample(family: IpFamily) -> Steps {
    let address = match family {
        IpFamily::Ipv4 => [192, 0, 2, 1].into(),
        IpFamily::Ipv6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(),
    };
    let host = Host {
        node_ports_everywhere: true,
        local_traffic: LocalTraffic::FromBridge("probe0".to_owned()),
        masquerade_bit: 14,
        ..Host::default()
    };
    let context = Context::new(family, &host);
    let service = ObjectName::new("probe", "probe");
    let port = DesiredPort {
        name: ServicePortName { service, port: "".into(), protocol: Protocol::Tcp, family },
        frontends: vec![Frontend { kind: FrontendKind::LoadBalancer, address, port: 80 }],
        unserved: Box::default(),
        endpoints: Endpoints {
            all: vec![Endpoint { address, port: 80, local: true, terminating: false, weight: 1 }],
            cluster: [0].into(),
            internal: [0].into(),
            external: [0].into(),
            any: true,
            need_snat: false,
            unused: Box::default(),
        },
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Local,
        health_check_node_port: None,
        affinity_seconds: Some(10_800),
        source_ranges: vec![address.into()],
        algorithm: None,
        forwarding: None,
    };
    let mut blocks = Blocks::default();
    let allocation = Allocation { cluster: blocks.allocate(1), local: blocks.allocate(1) };
    let mut steps = Steps::new(context.language, TRIAL);
    steps.creates = Some(frame::COMMENT);
    let unused = std::collections::BTreeMap::<_, ()>::new();
    for set in Set::FIXED.into_iter().chain([Set::Endpoints(0)]) {
        let definition = frame::definition(&set, context.language);
        steps.sets.push((None, set, definition));
    }
    for chain in frame::chains(&context) {
        steps.chain(None, chain.name.to_owned(), chain.base, None, chain.rules, &unused);
    }
    steps.compare(None, Default::default(), render(&port, &context, allocation), &unused);
    steps.share(&Default::default());
    steps
}
