//! Decides which service port serves a frontend that several of them claim.
//!
//! The decision depends on the claimants alone, not on the order in which they came.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use rustc_hash::FxHashMap;

use super::{
    desired::{Frontend, FrontendKind, ServicePortName},
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

/// The kind of frontend that a claimant claims. The lesser one has precedence, because the API
/// server gives out ClusterIPs and node ports. The others are whatever somebody writes into a
/// Service.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Rank {
    ClusterIp,
    NodePort,
    External,
}

impl Rank {
    pub(super) fn of(kind: FrontendKind) -> Self {
        match kind {
            FrontendKind::ClusterIp => Self::ClusterIp,
            FrontendKind::NodePort => Self::NodePort,
            FrontendKind::ExternalIp | FrontendKind::LoadBalancer => Self::External,
        }
    }
}

/// A claimant with the rank of its claim. The lesser one has precedence.
type Bid = (Rank, Arc<Claimant>);

/// A service port that claims frontends. Of two with the same rank, the lesser one has precedence.
#[derive(Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Claimant {
    /// The creation of the Service, in seconds since the epoch.
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
    /// The service port that is served there.
    pub winner: ServicePortName,
    /// The service ports that are not served there, the next in line first.
    pub losers: Vec<ServicePortName>,
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    owners: FxHashMap<Claim, Bid>,
    /// Claimants of frontends that another one owns. No set is empty.
    waiting: FxHashMap<Claim, BTreeSet<Bid>>,
    /// The conflicts of frontends that changed and are or were contested, as they were at the last
    /// [`Claims::take_new_conflicts`].
    changed: FxHashMap<Claim, Option<Conflict>>,
    conflicts_computed: u64,
}

impl Claims {
    /// Adds a claim. If it gives the frontend a new owner, returns the other claimants.
    pub(super) fn add(&mut self, claim: Claim, rank: Rank, claimant: &Arc<Claimant>) -> Vec<Arc<Claimant>> {
        let bid = (rank, Arc::clone(claimant));
        if self.owners.contains_key(&claim) {
            self.note_change(claim);
        }
        let Some(owner) = self.owners.get_mut(&claim) else {
            self.owners.insert(claim, bid);
            return Vec::new();
        };
        let waiting = self.waiting.entry(claim).or_default();
        if bid < *owner {
            waiting.insert(std::mem::replace(owner, bid));
            waiting.iter().map(|(_, claimant)| Arc::clone(claimant)).collect()
        } else {
            waiting.insert(bid);
            Vec::new()
        }
    }

    /// Withdraws a claim. If that gives the frontend a new owner, returns the other claimants.
    pub(super) fn withdraw(
        &mut self,
        claim: Claim,
        rank: Rank,
        claimant: &Arc<Claimant>,
    ) -> Vec<Arc<Claimant>> {
        let bid = (rank, Arc::clone(claimant));
        let owned = self.owners.get(&claim) == Some(&bid);
        if self.waiting.contains_key(&claim) {
            self.note_change(claim);
        }
        let Some(waiting) = self.waiting.get_mut(&claim) else {
            if owned {
                self.owners.remove(&claim);
            }
            return Vec::new();
        };
        let mut concerned = Vec::new();
        if owned {
            concerned.extend(waiting.iter().map(|(_, claimant)| Arc::clone(claimant)));
            if let Some(successor) = waiting.pop_first() {
                self.owners.insert(claim, successor);
            }
        } else {
            waiting.remove(&bid);
        }
        if waiting.is_empty() {
            self.waiting.remove(&claim);
        }
        concerned
    }

    /// Returns who has the frontend if it is not this service port.
    pub(super) fn other_owner(
        &self,
        claim: Claim,
        service: &ObjectName,
        port: &str,
    ) -> Option<ServicePortName> {
        let (_, owner) = self.owners.get(&claim)?;
        let is_other = owner.service != *service || *owner.port != *port;
        is_other.then(|| owner.name(claim.family()))
    }

    /// Returns the conflicts in the order of address, port and protocol.
    pub(super) fn conflicts(&self) -> Vec<Conflict> {
        let mut contested: Vec<_> = self.waiting.iter().collect();
        contested.sort_unstable_by_key(|(claim, _)| **claim);
        contested.into_iter().filter_map(|(claim, waiting)| self.conflict(*claim, waiting)).collect()
    }

    /// Returns how many frontends have become contested since the last call, or have other
    /// claimants.
    pub(super) fn take_new_conflicts(&mut self) -> usize {
        let changed = std::mem::take(&mut self.changed);
        self.conflicts_computed += changed.len() as u64;
        let is_new = |(claim, before): &(Claim, Option<Conflict>)| {
            let now = self.waiting.get(claim).and_then(|waiting| self.conflict(*claim, waiting));
            now.is_some() && now != *before
        };
        changed.into_iter().filter(is_new).count()
    }

    /// Returns how many conflicts were computed for [`Claims::take_new_conflicts`].
    pub(super) fn conflicts_computed(&self) -> u64 {
        self.conflicts_computed
    }

    fn note_change(&mut self, claim: Claim) {
        if !self.changed.contains_key(&claim) {
            let before = self.waiting.get(&claim).and_then(|waiting| self.conflict(claim, waiting));
            self.changed.insert(claim, before);
        }
    }

    fn conflict(&self, claim: Claim, waiting: &BTreeSet<Bid>) -> Option<Conflict> {
        let family = claim.family();
        Some(Conflict {
            address: claim.address,
            port: claim.port,
            protocol: claim.protocol,
            winner: self.owners.get(&claim)?.1.name(family),
            losers: waiting.iter().map(|(_, claimant)| claimant.name(family)).collect(),
        })
    }
}
