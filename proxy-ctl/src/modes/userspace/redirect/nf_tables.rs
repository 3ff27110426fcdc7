//! The table of nf_tables that is our own in each family. It has maps from frontends to listeners,
//! and in each chain two rules that use them. In the chain for packets that this node sends, a rule
//! before them passes what this process dials.

use std::{io, net::IpAddr};

use super::{DIALLING_GROUP, PortRedirects, RedirectError, RedirectRules, RedirectedFrontend, Wanted};
use crate::{
    model::{
        desired::FrontendKind,
        objects::{IpFamily, Protocol},
    },
    names::USERSPACE_TABLE as TABLE,
    sys::nftables::{
        BaseChain, Batch, ChainType, Comparison, Datum, ElementData, Expression, Header, Meta, NetfilterHook,
        NfTables, Register, SetDefinition, TableFamily, Values, Verdict,
    },
};

const COMMENT: &str = "proxy-ctl in mode userspace";
/// The priority before routing. It is as early as that of kube-proxy's other modes.
const PRIORITY: i32 = -100;

/// A map or set of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum RedirectSet {
    /// A map from address, protocol and port to a port of this process.
    Frontends,
    /// A map from protocol and port to a port of this process.
    NodePorts,
    NodeAddresses,
}

impl RedirectSet {
    const ALL: [Self; 3] = [Self::Frontends, Self::NodePorts, Self::NodeAddresses];

    const fn name(self) -> &'static str {
        match self {
            Self::Frontends => "frontends",
            Self::NodePorts => "node-ports",
            Self::NodeAddresses => "node-addresses",
        }
    }

    fn definition(self, family: IpFamily) -> SetDefinition {
        let port = Values::Of(&[Datum::Port]);
        match (self, family) {
            (Self::Frontends, IpFamily::Ipv4) => {
                SetDefinition::new(&[Datum::Ipv4Address, Datum::Protocol, Datum::Port], port)
            }
            (Self::Frontends, IpFamily::Ipv6) => {
                SetDefinition::new(&[Datum::Ipv6Address, Datum::Protocol, Datum::Port], port)
            }
            (Self::NodePorts, _) => SetDefinition::new(&[Datum::Protocol, Datum::Port], port),
            (Self::NodeAddresses, IpFamily::Ipv4) => SetDefinition::new(&[Datum::Ipv4Address], Values::None),
            (Self::NodeAddresses, IpFamily::Ipv6) => SetDefinition::new(&[Datum::Ipv6Address], Values::None),
        }
    }
}

/// Returns the nftables map of a frontend's element, and the element's key.
fn element(redirected: &RedirectedFrontend) -> (RedirectSet, Vec<u8>) {
    let protocol_and_port = protocol_and_port(redirected.protocol, redirected.frontend.port);
    match redirected.frontend.kind {
        FrontendKind::NodePort => (RedirectSet::NodePorts, protocol_and_port.to_vec()),
        FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
            let address = address_bytes(redirected.frontend.address);
            (RedirectSet::Frontends, [address.as_slice(), &protocol_and_port].concat())
        }
    }
}

fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn protocol_and_port(protocol: Protocol, port: u16) -> [u8; 8] {
    let [high, low] = port.to_be_bytes();
    [protocol.number(), 0, 0, 0, high, low, 0, 0]
}

/// Returns the keys of one nftables map in one IP family, each with the port of its listener.
fn elements_of(redirects: &PortRedirects, family: IpFamily, set: RedirectSet) -> Vec<(Vec<u8>, u16)> {
    let of_family = redirects.iter().filter(|(redirected, _)| redirected.family == family);
    let elements = of_family.map(|(redirected, port)| (element(redirected), *port));
    elements.filter(|((of, _), _)| *of == set).map(|((_, key), port)| (key, port)).collect()
}

fn add(batch: &mut Batch, family: IpFamily, redirects: &PortRedirects) {
    for set in [RedirectSet::Frontends, RedirectSet::NodePorts] {
        let data = |port: u16| ElementData::Value(port.to_be_bytes().to_vec());
        let elements = elements_of(redirects, family, set);
        let elements: Vec<_> = elements.into_iter().map(|(key, port)| (key, data(port))).collect();
        let members = elements.iter().map(|(key, data)| (key.as_slice(), data, [].as_slice()));
        batch.add_elements(family.into(), TABLE, set.name(), members);
    }
}

fn delete(batch: &mut Batch, family: IpFamily, redirects: &PortRedirects) {
    for set in [RedirectSet::Frontends, RedirectSet::NodePorts] {
        let elements = elements_of(redirects, family, set);
        let keys = elements.iter().map(|(key, _)| key.as_slice());
        batch.delete_elements(family.into(), TABLE, set.name(), keys);
    }
}

/// Makes the table with its chains, sets and rules, without elements. `own` is an address of this
/// node.
fn make_table(batch: &mut Batch, family: IpFamily, own: Option<IpAddr>) {
    let table_family = TableFamily::from(family);
    batch.add_table(table_family, TABLE, COMMENT);
    for set in RedirectSet::ALL {
        batch.add_set(table_family, TABLE, set.name(), &set.definition(family));
    }
    let (address_offset, address_length) = match family {
        IpFamily::Ipv4 => (16, 4),
        IpFamily::Ipv6 => (24, 16),
    };
    let address = Expression::Payload {
        header: Header::Network,
        offset: address_offset,
        length: address_length,
        to: Register::new(0),
    };
    // The protocol's register follows that of the address, and the port's follows the protocol's.
    let load_protocol_and_port = |first: u32| {
        let port = Register::new(first + 1);
        [
            Expression::Meta { key: Meta::Protocol, to: Register::new(first) },
            Expression::Payload { header: Header::Transport, offset: 2, length: 2, to: port },
        ]
    };
    let port = Register::new(8);
    let find = |set: RedirectSet| Expression::Lookup {
        set: set.name().to_owned(),
        key: Register::new(0),
        to: Some(port),
    };
    let is_node = Expression::Lookup {
        set: RedirectSet::NodeAddresses.name().to_owned(),
        key: Register::new(0),
        to: None,
    };
    let redirect = vec![Expression::Redirect { port }];
    // REDIRECT would take an address of the interface, and an interface that leads to a pod may
    // have none.
    let translate = own.map(|own| {
        let address = Register::new(12);
        let own = Expression::Immediate { value: address_bytes(own), to: address };
        vec![own, Expression::DestinationNat { family: table_family, address, port }]
    });
    let arriving = translate.unwrap_or_else(|| redirect.clone());
    for (chain, hook, then) in
        [("prerouting", NetfilterHook::Prerouting, &arriving), ("output", NetfilterHook::Output, &redirect)]
    {
        let base = BaseChain { kind: ChainType::Nat, hook, priority: PRIORITY };
        batch.add_chain(table_family, TABLE, chain, Some(base));
        if hook == NetfilterHook::Output {
            batch.add_rule(table_family, TABLE, chain, &accept_own_dials(), &[]);
        }
        let mut frontends = vec![address.clone()];
        frontends.extend(load_protocol_and_port(address_length / 4));
        frontends.push(find(RedirectSet::Frontends));
        let mut node_ports = vec![address.clone(), is_node.clone()];
        node_ports.extend(load_protocol_and_port(0));
        node_ports.push(find(RedirectSet::NodePorts));
        for keys in [frontends, node_ports] {
            batch.add_rule(table_family, TABLE, chain, &[keys.as_slice(), then].concat(), &[]);
        }
    }
}

/// Returns the rule that ends the chain for packets of the thread that dials endpoints.
fn accept_own_dials() -> [Expression; 3] {
    let group = Register::new(0);
    [
        Expression::Meta { key: Meta::SocketGroup, to: group },
        Expression::Compare {
            register: group,
            comparison: Comparison::Equal,
            value: DIALLING_GROUP.to_ne_bytes().to_vec(),
        },
        Expression::Verdict(Verdict::Accept),
    ]
}

pub(super) struct Tables {
    kernel: NfTables,
    families: Vec<IpFamily>,
}

impl Tables {
    /// Makes the tables anew, without elements. Needs CAP_NET_ADMIN. `None`: the kernel cannot do
    /// it, or this process may not.
    pub(super) fn open() -> Option<Self> {
        let kernel = match NfTables::load() {
            Ok(kernel) => kernel?,
            Err(error) => {
                tracing::debug!(%error, "no rules of nf_tables");
                return None;
            }
        };
        let mut families = Vec::new();
        for family in IpFamily::ALL {
            match rebuild(&kernel, family, &Wanted::default()) {
                Ok(()) => families.push(family),
                Err(error) => tracing::debug!(%error, family = family.name(), "no rules of nf_tables"),
            }
        }
        (!families.is_empty()).then_some(Self { kernel, families })
    }
}

impl RedirectRules for Tables {
    fn by(&self) -> String {
        "nf_tables".to_owned()
    }

    fn families(&self) -> Vec<IpFamily> {
        self.families.clone()
    }

    fn change(
        &mut self,
        wanted: &Wanted,
        go: &PortRedirects,
        come: &PortRedirects,
    ) -> Result<(), RedirectError> {
        let mut batch = Batch::default();
        self.families.iter().for_each(|family| delete(&mut batch, *family, go));
        self.families.iter().for_each(|family| add(&mut batch, *family, come));
        if !batch.is_empty() && commit(&self.kernel, batch, "ip, ip6").is_err() {
            // Another program may have changed the table, so it is made anew in one step.
            self.rewrite(wanted)?;
        }
        Ok(())
    }

    fn rewrite(&mut self, wanted: &Wanted) -> Result<(), RedirectError> {
        self.families.iter().try_for_each(|family| rebuild(&self.kernel, *family, wanted))
    }

    fn restore(&mut self, wanted: &Wanted) -> Result<bool, RedirectError> {
        for family in &self.families {
            if !self.kernel.tables((*family).into())?.iter().any(|table| table == TABLE) {
                self.rewrite(wanted)?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Replaces the table in one step.
fn rebuild(kernel: &NfTables, family: IpFamily, wanted: &Wanted) -> Result<(), RedirectError> {
    let table_family = TableFamily::from(family);
    let mut batch = Batch::default();
    // The table is added first, because a table that does not exist cannot be deleted.
    batch.add_table(table_family, TABLE, COMMENT);
    batch.delete_table(table_family, TABLE);
    make_table(&mut batch, family, wanted.own(family));
    add(&mut batch, family, &wanted.redirects());
    let addresses: Vec<_> = wanted.node_addresses(family).map(address_bytes).collect();
    let members = addresses.iter().map(|address| (address.as_slice(), &ElementData::None, [].as_slice()));
    batch.add_elements(table_family, TABLE, RedirectSet::NodeAddresses.name(), members);
    commit(kernel, batch, table_family.name())
}

fn commit(kernel: &NfTables, batch: Batch, family: &'static str) -> Result<(), RedirectError> {
    match kernel.commit(batch)?.first() {
        None => Ok(()),
        Some(refused) => {
            let source = io::Error::from_raw_os_error(refused.errno);
            Err(RedirectError::Refused { family, message: refused.message, source })
        }
    }
}

pub(in crate::modes::userspace) fn is_there() -> Result<bool, RedirectError> {
    let Some(kernel) = NfTables::open()? else { return Ok(false) };
    for family in TableFamily::ALL {
        if kernel.tables(family)?.iter().any(|table| table == TABLE) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Removes the tables. Returns those that were there, for people.
pub(in crate::modes::userspace) fn remove() -> Result<Vec<String>, RedirectError> {
    let Some(kernel) = NfTables::open()? else { return Ok(Vec::new()) };
    let mut removed = Vec::new();
    for family in TableFamily::ALL {
        if kernel.tables(family)?.iter().any(|table| table == TABLE) {
            let mut batch = Batch::default();
            batch.delete_table(family, TABLE);
            commit(&kernel, batch, family.name())?;
            removed.push(format!("nftables {} {TABLE}", family.name()));
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::desired::Frontend;

    #[rstest]
    #[case::cluster_ip(FrontendKind::ClusterIp, 80, RedirectSet::Frontends, &[10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0])]
    #[case::node_port(FrontendKind::NodePort, 30_080, RedirectSet::NodePorts, &[6, 0, 0, 0, 117, 128, 0, 0])]
    fn keys_of_elements(
        #[case] kind: FrontendKind,
        #[case] port: u16,
        #[case] set: RedirectSet,
        #[case] key: &[u8],
    ) {
        let frontend = Frontend { kind, address: "10.96.0.1".parse().unwrap(), port };
        let redirected = RedirectedFrontend { family: IpFamily::Ipv4, protocol: Protocol::Tcp, frontend };
        assert_eq!(element(&redirected), (set, key.to_vec()));
        let redirects = PortRedirects::from([(redirected, 40_000)]);
        assert_eq!(elements_of(&redirects, IpFamily::Ipv4, set), [(key.to_vec(), 40_000)]);
        assert_eq!(elements_of(&redirects, IpFamily::Ipv6, set), []);
    }
}
