//! The kinds of object that are watched, and the verbs that RBAC may deny for them.

use std::fmt;

/// A kind of object that is watched.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum ResourceKind {
    Services,
    EndpointSlices,
    Nodes,
    /// ServiceCIDRs, which older API servers do not have.
    ServiceCidrs,
}

impl ResourceKind {
    pub const ALL: [Self; 4] = [Self::Services, Self::EndpointSlices, Self::Nodes, Self::ServiceCidrs];

    /// Returns the plural as in `kubectl get …`, in a ClusterRole's `resources` and in metrics.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Services => "services",
            Self::EndpointSlices => "endpointslices",
            Self::Nodes => "nodes",
            Self::ServiceCidrs => "servicecidrs",
        }
    }

    /// Returns the group as in a ClusterRole's `apiGroups`. It is empty for the core group.
    pub const fn group(self) -> &'static str {
        match self {
            Self::Services | Self::Nodes => "",
            Self::EndpointSlices => "discovery.k8s.io",
            Self::ServiceCidrs => "networking.k8s.io",
        }
    }

    /// Returns true if it matters little that the kind cannot be listed.
    pub const fn is_optional(self) -> bool {
        match self {
            Self::ServiceCidrs => true,
            Self::Services | Self::EndpointSlices | Self::Nodes => false,
        }
    }

    /// Returns the consequence of not watching the kind, for messages.
    pub(crate) const fn without(self) -> &'static str {
        match self {
            Self::ServiceCidrs => {
                "packets to service addresses that no Service has are not dropped, everything else works"
            }
            Self::Nodes => {
                "after 30 s the proxy starts without its Node: Services are served, zone and addresses of the node are \
                 not known, /healthz answers 503"
            }
            Self::Services | Self::EndpointSlices => {
                "nothing is written before it has been listed, what is programmed stays"
            }
        }
    }
}

/// A verb that RBAC allows or denies.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Verb {
    List,
    Watch,
}

impl Verb {
    pub const ALL: [Self; 2] = [Self::List, Self::Watch];

    /// Returns the verb as in a ClusterRole's `verbs`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

impl fmt::Display for ResourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.plural())
    }
}
