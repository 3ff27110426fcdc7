//! The calls of this mode to the kernel.

use std::{collections::BTreeMap, net::IpAddr};

use super::{
    Error,
    sets::Set,
    state::{Change, KernelObjects, ProgrammedServer},
};
use crate::{
    model::objects::IpFamily,
    names::IPVS_DEVICE,
    sys::{
        CallError,
        net::{
            ipset::{IpSets, MemberChange},
            ipvs::{Destination, Ipvs, ServerChange, VirtualServer, VirtualSocket},
            link::{self, AddressChange},
        },
    },
};

pub(super) trait Calls: Send {
    /// Makes the device and the sets that do not exist.
    fn provide(&self) -> Result<(), Error>;

    /// Reads all objects, with the virtual servers of other programs.
    fn read(&self) -> Result<KernelObjects, Error>;

    fn destinations(&self, socket: VirtualSocket) -> Result<Vec<Destination>, CallError>;

    /// Writes everything that the kernel takes. Returns the refused changes, by index in `portion`.
    /// All changes of a portion are of one kind, and of one set.
    fn write(&self, portion: &[Change]) -> Result<Vec<(usize, CallError)>, CallError>;
}

/// The kernel of this thread's network namespace.
pub(super) struct System {
    pub(super) ipvs: Ipvs,
    sets: IpSets,
    families: Vec<IpFamily>,
}

impl System {
    /// Opens the kernel's interfaces. Nothing is changed, but the kernel loads its modules.
    pub(super) fn open(families: Vec<IpFamily>) -> Result<Self, Error> {
        let ipvs = Ipvs::open()?.ok_or(Error::Missing("IPVS (CONFIG_IP_VS; module ip_vs)"))?;
        let sets = IpSets::load()?.ok_or(Error::Missing("ipset (CONFIG_IP_SET; module ip_set)"))?;
        Ok(Self { ipvs, sets, families })
    }

    fn all_sets(&self) -> impl Iterator<Item = Set> {
        self.families.iter().flat_map(|family| Set::all(*family))
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
}

fn addresses() -> Result<BTreeMap<IpAddr, bool>, Error> {
    // The kernel gives a link-local address to a device that another program has set up.
    let is_link_local = |address: &IpAddr| match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let held = link::addresses_of(IPVS_DEVICE)?.into_iter().filter(|one| !is_link_local(&one.address));
    Ok(held.map(|one| (one.address, one.address.is_ipv4() || one.is_deprecated)).collect())
}

impl Calls for System {
    fn provide(&self) -> Result<(), Error> {
        link::create_dummy(IPVS_DEVICE)?;
        for set in self.all_sets() {
            let name = set.name();
            self.sets
                .create(&name, set.role.kind(), set.family == IpFamily::Ipv4)
                .map_err(|source| Error::Set { name, source })?;
        }
        Ok(())
    }

    fn read(&self) -> Result<KernelObjects, Error> {
        let mut programmed =
            KernelObjects { servers: self.servers()?, addresses: addresses()?, ..KernelObjects::default() };
        for set in self.all_sets() {
            let members = self.sets.members(&set.name(), set.role.kind())?.unwrap_or_default();
            programmed.members.extend(members.into_iter().map(|member| (set, member)));
        }
        Ok(programmed)
    }

    fn destinations(&self, socket: VirtualSocket) -> Result<Vec<Destination>, CallError> {
        self.ipvs.destinations(socket)
    }

    fn write(&self, portion: &[Change]) -> Result<Vec<(usize, CallError)>, CallError> {
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
