//! What a table holds, as plain data: chains with rules, sets with elements.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use sha2::{Digest as _, Sha256};

use crate::sys::nftables::{ElementData, Expression, SetDefinition, user_data};

/// Sets and maps.
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
    /// Slot → endpoint. The kernel looks at every element of a map when a rule begins to use it, and at every such rule when an
    /// element is added: so there are many maps, each for some service ports (6.18: with one map for 10,000 service ports of 10
    /// endpoints, 47 s; so, 0.7 s).
    Endpoints(u32),
    /// Of one service port.
    Own(Arc<str>),
}

impl Set {
    pub(super) fn own(name: String) -> Self {
        Self::Own(name.into())
    }

    /// Of a map of endpoints.
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

    /// Those that are always there.
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
    /// As the kernel takes it: each part padded to 4 bytes.
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

/// User data of a rule with its digest.
const DIGEST: u8 = 65;

/// What a rule says. The kernel never changes a rule, so this in its user data tells whether it is as it must be.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct RuleDigest([u8; 8]);

impl RuleDigest {
    /// Of a rule in the kernel; `None`: it is not of this proxy.
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

/// What belongs to one service port.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Objects {
    /// Of its own only.
    pub(super) sets: BTreeMap<Set, SetDefinition>,
    pub(super) chains: BTreeMap<String, Vec<Rule>>,
    pub(super) elements: BTreeMap<ElementId, ElementValue>,
    /// Elements without value that other service ports may need, too; each once.
    pub(super) shared: Vec<ElementId>,
}
