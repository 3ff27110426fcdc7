//! Reads and writes the kernel's virtual servers, sets and addresses.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use super::{
    Error,
    sets::Set,
    state::{Change, KernelObjects, Key, ProgrammedServer},
};
use crate::{
    dataplane::Applied,
    leftovers::names::IPVS_DEVICE,
    model::objects::IpFamily,
    sys::{
        CallError,
        ipset::{IpSets, MemberChange},
        ipvs::{Ipvs, ServerChange, VirtualServer, VirtualSocket},
        link::{self, AddressChange},
    },
};

pub(super) struct Kernel {
    ipvs: Ipvs,
    sets: IpSets,
    families: Vec<IpFamily>,
    /// Virtual servers for these addresses that no service port asks for are somebody else's.
    keeps: Vec<IpNet>,
}

/// What became of some writes.
#[derive(Default)]
pub(super) struct Written {
    pub(super) applied: Applied,
    pub(super) refused: Vec<(Key, CallError)>,
}

impl Kernel {
    /// Changes nothing; the kernel loads its modules.
    pub(super) fn open(families: Vec<IpFamily>, keeps: Vec<IpNet>) -> Result<Self, Error> {
        let ipvs = Ipvs::open()?.ok_or(Error::Missing("IPVS (CONFIG_IP_VS; module ip_vs)"))?;
        let sets = IpSets::load()?.ok_or(Error::Missing("ipset (CONFIG_IP_SET; module ip_set)"))?;
        Ok(Self { ipvs, sets, families, keeps })
    }

    pub(super) fn ipvs(&self) -> &Ipvs {
        &self.ipvs
    }

    /// Makes the device and the sets that are not there.
    pub(super) fn provide(&self) -> Result<(), Error> {
        link::create_dummy(IPVS_DEVICE)?;
        for set in self.families.iter().flat_map(|family| Set::all(*family)) {
            let name = set.name();
            self.sets
                .create(&name, set.role.kind(), set.family == IpFamily::Ipv4)
                .map_err(|source| Error::Set { name, source })?;
        }
        Ok(())
    }

    pub(super) fn read(&self) -> Result<KernelObjects, Error> {
        let mut programmed = KernelObjects {
            servers: self.servers()?,
            addresses: self.addresses()?,
            ..KernelObjects::default()
        };
        for set in self.families.iter().flat_map(|family| Set::all(*family)) {
            let members = self.sets.members(&set.name(), set.role.kind())?.unwrap_or_default();
            programmed.members.extend(members.into_iter().map(|member| (set, member)));
        }
        Ok(programmed)
    }

    fn servers(&self) -> Result<BTreeMap<VirtualSocket, ProgrammedServer>, Error> {
        let mut servers = BTreeMap::new();
        for VirtualServer { socket, balancing } in self.ipvs.servers()? {
            if self.families.contains(&IpFamily::of(socket.address.ip())) {
                let destinations = self.ipvs.destinations(socket)?;
                let destinations = destinations.into_iter().map(|one| (one.address, one.is_used)).collect();
                servers.insert(socket, ProgrammedServer { balancing, destinations });
            }
        }
        Ok(servers)
    }

    /// Whether it may be somebody else's: then only what is wanted of it is written.
    pub(super) fn keeps(&self, key: Key) -> bool {
        let Key::Server(socket) = key else { return false };
        self.keeps.iter().any(|network| network.contains(&socket.address.ip()))
    }

    fn addresses(&self) -> Result<BTreeMap<IpAddr, bool>, Error> {
        let Some(device) = link::index(IPVS_DEVICE)? else { return Ok(BTreeMap::new()) };
        let of_device = link::addresses()?.into_iter().filter(|one| one.interface == device);
        // The kernel gives one of these to a device that somebody has set up.
        let is_link_local = |address: &IpAddr| match address {
            IpAddr::V4(_) => false,
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let held = of_device.filter(|one| !is_link_local(&one.address));
        Ok(held.map(|one| (one.address, one.address.is_ipv4() || one.is_deprecated)).collect())
    }

    /// Writes in the order of `changes`, and takes what is done over into `programmed`. An error: nothing more is known of
    /// what is programmed.
    pub(super) fn write(
        &self,
        changes: Vec<Change>,
        programmed: &mut KernelObjects,
    ) -> Result<Written, Error> {
        let mut written = Written::default();
        for portion in changes.chunk_by(same_call) {
            let mut refused: BTreeMap<usize, CallError> = self.write_portion(portion)?.into_iter().collect();
            for (place, change) in portion.iter().enumerate() {
                if let Some(error) = refused.remove(&place) {
                    written.refused.push((change.key(), error));
                    continue;
                }
                let Applied { written, removed } = &mut written.applied;
                *(if change.removes() { removed } else { written }) += 1;
                programmed.record(change.clone());
            }
        }
        Ok(written)
    }

    /// Of one kind, as [`same_call`] says.
    fn write_portion(&self, portion: &[Change]) -> Result<Vec<(usize, CallError)>, CallError> {
        let Some(first) = portion.first() else { return Ok(Vec::new()) };
        match first {
            Change::Server(_) => {
                let changes: Vec<ServerChange> = portion.iter().filter_map(Change::of_server).collect();
                self.ipvs.write(&changes)
            }
            Change::Address(_) => {
                let changes: Vec<AddressChange> = portion.iter().filter_map(Change::of_address).collect();
                let device = link::index(IPVS_DEVICE)?.unwrap_or(0);
                link::change_addresses(device, &changes)
            }
            Change::Member(set, _) => {
                let changes: Vec<MemberChange> = portion.iter().filter_map(Change::of_member).collect();
                self.sets.write(&set.name(), set.role.kind(), &changes)
            }
        }
    }
}

fn same_call(one: &Change, other: &Change) -> bool {
    match (one, other) {
        (Change::Server(_), Change::Server(_)) | (Change::Address(_), Change::Address(_)) => true,
        (Change::Member(one, _), Change::Member(other, _)) => one == other,
        _ => false,
    }
}
