//! Which service port serves a frontend that several of them claim.
//!
//! The answer depends on the claimants alone, not on the order in which they came.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use rustc_hash::FxHashMap;

use super::{
    desired::{Frontend, ServicePortName},
    objects::{IpFamily, ObjectName, Protocol},
};

/// A frontend of which only one service port can be the owner.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Claim {
    address: IpAddr,
    port: u16,
    protocol: Protocol,
}

impl Claim {
    pub(super) fn new(frontend: &Frontend, protocol: Protocol) -> Self {
        Self { address: frontend.address, port: frontend.port, protocol }
    }

    pub(super) fn family(self) -> IpFamily {
        IpFamily::of(self.address)
    }
}

/// A service port; the lesser one has precedence.
#[derive(Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Claimant {
    /// Seconds since the epoch.
    pub(super) created: i64,
    pub(super) service: ObjectName,
    pub(super) port: Arc<str>,
    pub(super) protocol: Protocol,
}

impl Claimant {
    fn name(&self, family: IpFamily) -> ServicePortName {
        ServicePortName {
            service: self.service.clone(),
            port: Arc::clone(&self.port),
            protocol: self.protocol,
            family,
        }
    }
}

/// A frontend that more than one service port claims.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Conflict {
    /// The unspecified address of the family for a node port.
    pub address: IpAddr,
    pub port: u16,
    pub protocol: Protocol,
    /// The one that is served there.
    pub winner: ServicePortName,
    /// Those that are not, the next in line first.
    pub losers: Vec<ServicePortName>,
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    owners: FxHashMap<Claim, Arc<Claimant>>,
    /// Claimants of frontends that another one owns; never an empty set.
    waiting: FxHashMap<Claim, BTreeSet<Arc<Claimant>>>,
}

impl Claims {
    /// Answers with the other claimants if the frontend has a new owner because of this one.
    pub(super) fn add(&mut self, claim: Claim, claimant: &Arc<Claimant>) -> Vec<Arc<Claimant>> {
        let Some(owner) = self.owners.get_mut(&claim) else {
            self.owners.insert(claim, Arc::clone(claimant));
            return Vec::new();
        };
        let waiting = self.waiting.entry(claim).or_default();
        if claimant < owner {
            waiting.insert(std::mem::replace(owner, Arc::clone(claimant)));
            waiting.iter().cloned().collect()
        } else {
            waiting.insert(Arc::clone(claimant));
            Vec::new()
        }
    }

    /// Answers with the other claimants if the frontend has a new owner because this one is gone.
    pub(super) fn withdraw(&mut self, claim: Claim, claimant: &Claimant) -> Vec<Arc<Claimant>> {
        let owned = self.owners.get(&claim).is_some_and(|owner| **owner == *claimant);
        let Some(waiting) = self.waiting.get_mut(&claim) else {
            if owned {
                self.owners.remove(&claim);
            }
            return Vec::new();
        };
        let mut concerned = Vec::new();
        if owned {
            concerned.extend(waiting.iter().cloned());
            if let Some(successor) = waiting.pop_first() {
                self.owners.insert(claim, successor);
            }
        } else {
            waiting.remove(claimant);
        }
        if waiting.is_empty() {
            self.waiting.remove(&claim);
        }
        concerned
    }

    /// Who has the frontend if it is not this service port.
    pub(super) fn other_owner(
        &self,
        claim: Claim,
        service: &ObjectName,
        port: &str,
    ) -> Option<ServicePortName> {
        let other = |owner: &&Arc<Claimant>| owner.service != *service || *owner.port != *port;
        Some(self.owners.get(&claim).filter(other)?.name(claim.family()))
    }

    /// In the order of address, port and protocol.
    pub(super) fn conflicts(&self) -> Vec<Conflict> {
        let mut contested: Vec<_> = self.waiting.iter().collect();
        contested.sort_unstable_by_key(|(claim, _)| **claim);
        contested
            .into_iter()
            .filter_map(|(claim, waiting)| {
                let family = claim.family();
                Some(Conflict {
                    address: claim.address,
                    port: claim.port,
                    protocol: claim.protocol,
                    winner: self.owners.get(claim)?.name(family),
                    losers: waiting.iter().map(|claimant| claimant.name(family)).collect(),
                })
            })
            .collect()
    }
}
