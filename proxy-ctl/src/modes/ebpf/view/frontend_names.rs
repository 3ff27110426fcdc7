//! Finds the service port of a frontend in the maps.

use std::{collections::HashMap, sync::Arc};

use proxy_common::{
    family::Destination,
    layout::NO_SERVICE,
    select::{self, Origin},
};

use crate::{
    model::desired::ServicePortName,
    modes::ebpf::{
        Error,
        maps::{
            family::MapFamily,
            handles::{CommonMaps, FamilyMaps},
            lookups::Lookups,
        },
        services::entries,
    },
};

/// Returns the service port of a frontend and its id, or `None` if no known service port has it.
fn service_port<F: MapFamily>(
    common: &CommonMaps,
    maps: &FamilyMaps<F>,
    frontend: Destination<F::Address>,
) -> Result<Option<(u32, ServicePortName)>, Error> {
    // The origin is the host, because only processes of the node can dial node ports on loopback
    // addresses.
    let found = Lookups::new(common, maps).ask(|maps| select::find(maps, &frontend, Origin::Host))?;
    let Some(id) = found.map(|frontend| frontend.service) else { return Ok(None) };
    Ok(common.names.get(&id)?.as_ref().and_then(entries::port_name).map(|name| (id, name)))
}

/// A service port and its id.
type Known = (u32, Arc<ServicePortName>);

/// The service ports of frontends, each looked up once. An id is given to another service port when
/// its own is gone, so a flow counts as a service port's only as long as its frontend does.
pub(crate) struct FrontendNames<'a, F: MapFamily> {
    common: &'a CommonMaps,
    maps: &'a FamilyMaps<F>,
    known: HashMap<Destination<F::Address>, Option<Known>>,
}

impl<'a, F: MapFamily> FrontendNames<'a, F> {
    pub(crate) fn new(common: &'a CommonMaps, maps: &'a FamilyMaps<F>) -> Self {
        Self { common, maps, known: HashMap::new() }
    }

    /// Returns the service port of a flow to this frontend that was opened for the service with
    /// this id.
    pub(super) fn of_flow(
        &mut self,
        frontend: Destination<F::Address>,
        service: u32,
    ) -> Result<Option<Arc<ServicePortName>>, Error> {
        if service == NO_SERVICE {
            return Ok(None);
        }
        let found = self.known(frontend)?;
        Ok(found.filter(|(id, _)| *id == service).map(|(_, name)| name))
    }

    /// Returns the service port that the frontend has now.
    pub(super) fn of_frontend(
        &mut self,
        frontend: Destination<F::Address>,
    ) -> Result<Option<Arc<ServicePortName>>, Error> {
        Ok(self.known(frontend)?.map(|(_, name)| name))
    }

    fn known(&mut self, frontend: Destination<F::Address>) -> Result<Option<Known>, Error> {
        if let Some(found) = self.known.get(&frontend) {
            return Ok(found.clone());
        }
        let found = service_port(self.common, self.maps, frontend)?;
        let found = found.map(|(id, name)| (id, Arc::new(name)));
        self.known.insert(frontend, found.clone());
        Ok(found)
    }
}
