//! Writes cluster-IP entries: they say which addresses of `frontends4/6` are ClusterIPs, so that
//! clients of their other ports are refused.
//!
//! No port of such an address is left to a former proxy or to another mode. So its entry comes
//! after the frontends of all service ports that have the address, and not while a service port
//! waits for room. When no service port has the address any more, the entry goes before the first
//! of these frontends. Cluster-IP entries get the room that frontends leave.

use proxy_common::layout::{Frontend, FrontendKey};

use crate::modes::ebpf::{
    maps::family::MapFamily,
    services::{
        programmed::ClusterIps,
        writer::{FamilyWriter, Writes},
    },
};

impl<F: MapFamily> FamilyWriter<F> {
    fn has_cluster_ip_entry(&self, address: F::Address) -> bool {
        self.entries.frontends.get(&FrontendKey::of_cluster_ip(address)) == Some(&Frontend::NONE)
    }

    /// Notes that a service port is published with these addresses.
    pub(crate) fn use_cluster_ips(&mut self, addresses: &[F::Address]) {
        for address in addresses {
            let has_cluster_ip_entry = self.has_cluster_ip_entry(*address);
            let ClusterIps { users, missing, gone } = &mut self.entries.cluster_ips;
            *users.entry(*address).or_default() += 1;
            if has_cluster_ip_entry {
                gone.remove(address);
            } else {
                missing.insert(*address);
            }
        }
    }

    /// Notes that a service port with these addresses is gone.
    pub(crate) fn release_cluster_ips(&mut self, addresses: &[F::Address]) {
        for address in addresses {
            let has_cluster_ip_entry = self.has_cluster_ip_entry(*address);
            let ClusterIps { users, missing, gone } = &mut self.entries.cluster_ips;
            let Some(count) = users.get_mut(address) else { continue };
            *count -= 1;
            if *count > 0 {
                continue;
            }
            users.remove(address);
            missing.remove(address);
            if has_cluster_ip_entry {
                gone.insert(*address);
            }
        }
    }

    /// Lists for removal the cluster-IP entries that no service port uses. It is called after
    /// adopting, when everything desired is published.
    pub(crate) fn release_stray_cluster_ip_entries(&mut self) {
        let ClusterIps { users, gone, .. } = &mut self.entries.cluster_ips;
        let with_entry =
            self.entries.frontends.keys().filter(|key| key.is_cluster_ip()).map(|key| key.address);
        gone.extend(with_entry.filter(|address| !users.contains_key(address)));
    }

    /// Removes the cluster-IP entries whose address no service port has any more. It is called
    /// before frontends are removed.
    pub(crate) fn remove_gone_cluster_ip_entries(&mut self, writes: &mut Writes<F>) {
        for address in std::mem::take(&mut self.entries.cluster_ips.gone) {
            if !self.remove_cluster_ip_entry(address, writes) {
                self.entries.cluster_ips.gone.insert(address);
            }
        }
    }

    /// Removes up to `frontends` cluster-IP entries to make room for as many frontends. Returns how
    /// many were removed.
    pub(crate) fn evict_cluster_ip_entries(&mut self, frontends: usize, writes: &mut Writes<F>) -> usize {
        if frontends == 0 {
            return 0;
        }
        let users = self.entries.cluster_ips.users.keys().copied();
        let with_entry: Vec<_> =
            users.filter(|address| self.has_cluster_ip_entry(*address)).take(frontends).collect();
        let mut removed = 0;
        for address in with_entry {
            if self.remove_cluster_ip_entry(address, writes) {
                self.entries.cluster_ips.missing.insert(address);
                removed += 1;
            }
        }
        removed
    }

    fn remove_cluster_ip_entry(&mut self, address: F::Address, writes: &mut Writes<F>) -> bool {
        let key = FrontendKey::of_cluster_ip(address);
        match self.maps.frontends.remove(&key) {
            Ok(found) => {
                writes.applied.removed += u64::from(found);
                self.entries.frontends.remove(&key);
                true
            }
            Err(error) => {
                writes.failures.add(F::ip(address), error);
                false
            }
        }
    }

    /// Returns true if no frontend of any service port waits for room.
    pub(super) fn has_room_for_all(&self) -> bool {
        let waiting = &self.entries.without_room;
        waiting.frontends.is_empty()
            && waiting.ports.keys().all(|name| self.entries.services.contains_key(name))
    }

    /// Writes the cluster-IP entries that are missing. It is called after frontends are written.
    pub(crate) fn write_cluster_ip_entries(&mut self, writes: &mut Writes<F>) {
        if self.entries.cluster_ips.missing.is_empty()
            || !writes.failures.is_empty()
            || !self.has_room_for_all()
        {
            return;
        }
        let free =
            (self.maps.frontends.map().capacity() as usize).saturating_sub(self.entries.frontends.len());
        let addresses: Vec<_> = self.entries.cluster_ips.missing.iter().copied().take(free).collect();
        let keys: Vec<_> = addresses.iter().map(|address| FrontendKey::of_cluster_ip(*address)).collect();
        let done = match self.maps.frontends.set_all(&keys, &vec![Frontend::NONE; keys.len()]) {
            Ok(()) => keys.len(),
            Err((done, error)) => {
                writes.failures.add("ClusterIPs", error);
                done
            }
        };
        for (address, key) in addresses.iter().zip(keys).take(done) {
            self.entries.frontends.insert(key, Frontend::NONE);
            self.entries.cluster_ips.missing.remove(address);
        }
        writes.applied.written += done as u64;
    }
}
