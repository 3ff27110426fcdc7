//! Mode ipvs: virtual servers, the sets that its rules use, and the device that has the addresses.
//!
//! Where the device is, kube-proxy was at work in mode ipvs, and has removed every virtual server that was not its own
//! but for those in ipvs.excludeCIDRs: what is there is kube-proxy's. Where it is not, nothing is. So the device goes
//! last.

use ipnet::IpNet;

use super::{Error, Extent, Kept, Part, Removed, What, names};
use crate::sys::{
    ipset::{Destroyed, IpSets},
    ipvs::{Ipvs, VirtualServer},
    link,
};

const SERVERS: &str = "ipvs";
const SETS: &str = "ipset";

fn own_servers(ipvs: &Ipvs, keeps: &[IpNet]) -> Result<Vec<VirtualServer>, Error> {
    let mut servers = ipvs.servers()?;
    servers.retain(|server| is_own(server, keeps));
    Ok(servers)
}

/// kube-proxy knows no virtual servers for marked packets.
fn is_own(server: &VirtualServer, keeps: &[IpNet]) -> bool {
    server.address.is_some_and(|address| !keeps.iter().any(|network| network.contains(&address)))
}

pub(super) fn find(keeps: &[IpNet]) -> Result<Vec<Part>, Error> {
    let mut parts = Vec::new();
    if link::exists(names::IPVS_DEVICE)? {
        if let Some(ipvs) = Ipvs::open()? {
            parts.push(Part::new(SERVERS.into(), What::VirtualServers, own_servers(&ipvs, keeps)?.len()));
        }
        parts.push(Part::new(names::IPVS_DEVICE.into(), What::Devices, 1));
    }
    if let Some(sets) = IpSets::open()? {
        let own = sets.names()?.iter().filter(|name| names::is_ip_set(name)).count();
        parts.push(Part::new(SETS.into(), What::IpSets, own));
    }
    parts.retain(|part| part.count > 0);
    Ok(parts)
}

/// Where others serve, a virtual server takes no new connections and stays until it has none.
pub(super) fn remove_servers(extent: Extent, keeps: &[IpNet], removed: &mut Removed) -> Result<(), Error> {
    if !link::exists(names::IPVS_DEVICE)? {
        return Ok(());
    }
    let Some(ipvs) = Ipvs::open()? else { return Ok(()) };
    let mut count = 0;
    for server in own_servers(&ipvs, keeps)? {
        if extent == Extent::Served && ipvs.quiesce(&server)? > 0 {
            removed.waiting += 1;
        } else {
            ipvs.remove(&server)?;
            count += 1;
        }
    }
    removed.part(SERVERS.into(), What::VirtualServers, count);
    Ok(())
}

/// After the rules that use them.
pub(super) fn remove_sets(removed: &mut Removed) -> Result<(), Error> {
    let Some(sets) = IpSets::open()? else { return Ok(()) };
    let mut count = 0;
    for name in sets.names()?.into_iter().filter(|name| names::is_ip_set(name)) {
        match sets.destroy(&name)? {
            Destroyed::Done => count += 1,
            Destroyed::InUse => {
                removed.kept.push(Kept::new(SETS.into(), name, "a rule or another set uses it".into()));
            }
        }
    }
    removed.part(SETS.into(), What::IpSets, count);
    Ok(())
}

/// After the virtual servers whose addresses it has.
pub(super) fn remove_device(removed: &mut Removed) -> Result<(), Error> {
    if removed.waiting == 0 && link::exists(names::IPVS_DEVICE)? {
        link::delete(names::IPVS_DEVICE)?;
        removed.part(names::IPVS_DEVICE.into(), What::Devices, 1);
    }
    Ok(())
}
