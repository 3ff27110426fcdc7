//! The own Node, as the source lists it.

use std::net::IpAddr;

use crate::model::objects::Node;

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum OwnNode {
    #[default]
    NotListed,
    /// There is no such Node, or it may not be read.
    Absent,
    Present(Node),
}

impl OwnNode {
    pub fn is_listed(&self) -> bool {
        *self != Self::NotListed
    }

    pub fn node(&self) -> Option<&Node> {
        match self {
            Self::Present(node) => Some(node),
            Self::NotListed | Self::Absent => None,
        }
    }

    /// Returns the Node's addresses in order of preference. The list is empty as long as they are
    /// not known.
    pub fn addresses(&self) -> &[IpAddr] {
        self.node().map(|node| node.addresses.as_slice()).unwrap_or_default()
    }
}
