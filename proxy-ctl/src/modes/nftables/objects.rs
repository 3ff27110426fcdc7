//! The contents of a table as plain data: chains with rules, sets with elements.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use sha2::{Digest as _, Sha256};

use crate::sys::nftables::{ElementData, Expression, SetDefinition, user_data};

/// The sets and nftables maps of a table.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Set {
    ClusterIps,
    NodePortIps,
    HairpinConnections,
    ServiceIps,
    ServiceNodePorts,
    FirewallIps,
    NoEndpointServices,
    NoEndpointNodePorts,
    /// A map from slots to endpoints, for some of the service ports.
    ///
    /// The kernel visits every element of a map when a rule begins to use it, and every such rule
    /// when an element is added. With Linux 6.18, 10,000 service ports of 10 endpoints took 47 s
    /// with one map, and 0.7 s with several.
    Endpoints(u32),
    /// A set of one service port. The value is the whole name of the set.
    Own(Arc<str>),
}

impl Set {
    pub(super) fn own(name: String) -> Self {
        Self::Own(name.into())
    }

    /// Returns the number of a map of endpoints. `None` for every other set.
    pub(super) fn endpoints_number(&self) -> Option<u32> {
        if let Self::Endpoints(number) = self { Some(*number) } else { None }
    }

    pub(super) fn name(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            Self::ClusterIps => "cluster-ips",
            Self::NodePortIps => "nodeport-ips",
            Self::HairpinConnections => "hairpin-connections",
            Self::ServiceIps => "service-ips",
            Self::ServiceNodePorts => "service-nodeports",
            Self::FirewallIps => "firewall-ips",
            Self::NoEndpointServices => "no-endpoint-services",
            Self::NoEndpointNodePorts => "no-endpoint-nodeports",
            Self::Endpoints(number) => return Cow::Owned(format!("{ENDPOINTS}{number}")),
            Self::Own(name) => name,
        })
    }

    pub(super) fn of_name(name: &str) -> Self {
        let endpoints = name.strip_prefix(ENDPOINTS).and_then(|number| number.parse().ok());
        let fixed = Self::FIXED.into_iter().find(|set| set.name() == name);
        fixed.or(endpoints.map(Self::Endpoints)).unwrap_or_else(|| Self::Own(name.into()))
    }

    /// The sets that are always there.
    pub(super) const FIXED: [Self; 8] = [
        Self::ClusterIps,
        Self::NodePortIps,
        Self::HairpinConnections,
        Self::ServiceIps,
        Self::ServiceNodePorts,
        Self::FirewallIps,
        Self::NoEndpointServices,
        Self::NoEndpointNodePorts,
    ];
}

const ENDPOINTS: &str = "endpoints-";

#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct ElementId {
    pub(super) set: Set,
    /// The key as the kernel takes it, with each field padded to 4 bytes.
    pub(super) key: Vec<u8>,
}

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct ElementValue {
    pub(super) data: ElementData,
    pub(super) user_data: Vec<u8>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Rule {
    pub(super) expressions: Vec<Expression>,
    pub(super) comment: Option<&'static str>,
}

/// The type of the user data that holds a rule's digest.
const DIGEST: u8 = 65;

/// A digest of what a rule says. The kernel never changes a rule, so the digest in its user data
/// shows whether the rule is as desired.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct RuleDigest([u8; 8]);

impl RuleDigest {
    /// Returns the digest of a rule in the kernel. `None`: the rule is not of this proxy.
    pub(super) fn noted(user_data: &[u8]) -> Option<Self> {
        Some(Self(user_data::get(user_data, DIGEST)?.try_into().ok()?))
    }
}

impl Rule {
    pub(super) fn new(expressions: Vec<Expression>) -> Self {
        Self { expressions, comment: None }
    }

    pub(super) fn comment(self, comment: &'static str) -> Self {
        Self { comment: Some(comment), ..self }
    }

    pub(super) fn digest(&self) -> RuleDigest {
        let mut sum = Sha256::new();
        sum.update(Expression::encode(&self.expressions));
        sum.update(self.comment.unwrap_or_default());
        let bytes = sum.finalize();
        let mut digest = [0; 8];
        digest.copy_from_slice(&bytes[..8]);
        RuleDigest(digest)
    }

    pub(super) fn user_data(&self) -> Vec<u8> {
        let mut list = Vec::new();
        if let Some(comment) = self.comment {
            user_data::add_comment(&mut list, comment);
        }
        user_data::add(&mut list, DIGEST, &self.digest().0);
        list
    }
}

/// The objects of one service port.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Objects {
    /// The sets that belong to this service port alone.
    pub(super) sets: BTreeMap<Set, SetDefinition>,
    pub(super) chains: BTreeMap<String, Vec<Rule>>,
    pub(super) elements: BTreeMap<ElementId, ElementValue>,
    /// Elements without value that other service ports may need too. Each is listed once.
    pub(super) shared: Vec<ElementId>,
}
