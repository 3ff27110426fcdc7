//! Holds the maps of each family with their known entries, and collects what one call of the
//! dataplane writes.

use std::{collections::BTreeSet, sync::Arc};

use proxy_common::layout::{FrontendKey, SERVICE_LEAST_CONNECTION, ServiceName, Settings};

use super::{
    allocate::{Range, Ranges},
    entries,
    programmed::{BackendKey, Entries, Wanted},
};
use crate::{
    model::{
        desired::DesiredPort,
        objects::{Algorithm, Forwarding, NodeForwarding},
    },
    modes::{
        Applied,
        ebpf::{
            Error,
            maps::{
                family::MapFamily,
                handles::{CommonMaps, FamilyMaps, SourceRangeKey},
            },
        },
    },
    sys::{bpf::grace::GracePeriod, net::socket_diag::Transport},
};

/// The number of backend ids that are reserved at once, with one write of `settings`.
const BACKEND_ID_BLOCK: u32 = 1_024;

/// The maps, ids and choices that both families share.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) maps: CommonMaps,
    /// The owners of the ids in `services`.
    pub(crate) ids: Ranges,
    pub(crate) next_backend: u32,
    /// The ids below this one are reserved in `settings.next_backend`.
    pub(crate) backends_set_aside: u32,
    pub(crate) grace: GracePeriod,
    /// True if changes since `settings.epoch` was last raised may have given a frontend other
    /// backends. The epoch is then raised again, so that flows are compared with the maps.
    pub(crate) is_epoch_over: bool,
    /// The algorithm of service ports that name none. The next field is the same for forwarding.
    pub(crate) algorithm: Algorithm,
    pub(crate) forwarding: NodeForwarding,
    /// The protocols whose sockets may have lost their backend since stale sockets were ended last.
    pub(crate) lost_backends: BTreeSet<Transport>,
}

impl Common {
    /// Writes the settings if `change` makes them different, and returns true if it did.
    pub(crate) fn write_settings(&self, change: impl FnOnce(&mut Settings)) -> Result<bool, Error> {
        let map = &self.maps.settings;
        let current = map.get(&0)?.unwrap_or_default();
        let mut wanted = current;
        wanted.probe_socket = 0;
        change(&mut wanted);
        if wanted != current {
            map.set(&0, &wanted)?;
        }
        Ok(wanted != current)
    }

    pub(crate) fn algorithm_of(&self, port: &DesiredPort) -> Algorithm {
        port.algorithm.unwrap_or(self.algorithm)
    }

    /// Returns true if one of the ports uses least connection.
    pub(crate) fn goes_by_connections(&self, ports: &[Arc<DesiredPort>]) -> bool {
        ports.iter().any(|port| self.algorithm_of(port) == Algorithm::LeastConnection)
    }

    /// Returns `Snat` or `Dsr`, which applies to the frontends of this service port.
    pub(super) fn forwarding_of(&self, port: &DesiredPort) -> Forwarding {
        entries::forwarding_of(port, self.forwarding)
    }

    /// Lets flows be compared with the maps once more, if any of them may be for another backend by
    /// now.
    pub(crate) fn raise_epoch(&mut self) -> Result<(), Error> {
        if !self.is_epoch_over {
            return Ok(());
        }
        let mut settings = self.maps.settings.get(&0)?.unwrap_or_default();
        settings.epoch = settings.epoch.wrapping_add(1);
        self.maps.settings.set(&0, &settings)?;
        self.is_epoch_over = false;
        Ok(())
    }

    /// Returns an id that no backend has ever had. That holds even if the controller is killed at
    /// this moment.
    pub(crate) fn backend_id(&mut self, applied: &mut Applied) -> Result<u32, Error> {
        let id = self.next_backend;
        let next = id.checked_add(1).ok_or(Error::BackendIdsExhausted)?;
        if next > self.backends_set_aside {
            let mut settings = self.maps.settings.get(&0)?.unwrap_or_default();
            settings.next_backend = id.saturating_add(BACKEND_ID_BLOCK);
            self.maps.settings.set(&0, &settings)?;
            applied.written += 1;
            self.backends_set_aside = settings.next_backend;
        }
        self.next_backend = next;
        Ok(id)
    }
}

/// The maps of one family, and their known entries.
#[derive(Debug)]
pub(crate) struct FamilyWriter<F: MapFamily> {
    pub(crate) maps: FamilyMaps<F>,
    pub(crate) entries: Entries<F>,
}

impl<F: MapFamily> FamilyWriter<F> {
    /// Returns true if a service port that is served or waits for room uses least connection.
    pub(crate) fn goes_by_connections(&self, shared: &Common) -> bool {
        let Entries { services, without_room, .. } = &self.entries;
        let flags = |id: u32| shared.maps.services.get(id as usize).unwrap_or_default().flags;
        services.values().any(|published| flags(published.id) & SERVICE_LEAST_CONNECTION != 0)
            || without_room
                .ports
                .values()
                .any(|waiting| shared.algorithm_of(&waiting.port) == Algorithm::LeastConnection)
    }
}

/// The writes of one call of the dataplane to one family, those done and those to be done.
#[derive(Debug)]
pub(crate) struct Writes<F: MapFamily> {
    pub(crate) applied: Applied,
    pub(crate) failures: Failures,
    pub(crate) names: Vec<(u32, ServiceName)>,
    pub(crate) frontends: Vec<Wanted<F>>,
    /// The frontends to remove, each with the id of the service that had it.
    pub(super) stale_frontends: Vec<(FrontendKey<F::Address>, u32)>,
    pub(super) stale_source_ranges: Vec<SourceRangeKey<F>>,
    pub(crate) gone: Vec<(u32, Option<Range>)>,
    pub(crate) touched: Vec<BackendKey<F::Address>>,
    /// True if an address may be served by another service than before.
    pub(super) has_new_frontends: bool,
    /// The protocols of frontends and backends that were taken away from connected sockets.
    pub(crate) lost: BTreeSet<Transport>,
    /// The backends that were inserted for the ports that are being published. No slot in use can
    /// refer to them yet.
    pub(super) inserted: Vec<BackendKey<F::Address>>,
}

impl<F: MapFamily> Default for Writes<F> {
    fn default() -> Self {
        Self {
            applied: Applied::default(),
            failures: Failures::default(),
            names: Vec::new(),
            frontends: Vec::new(),
            stale_frontends: Vec::new(),
            stale_source_ranges: Vec::new(),
            gone: Vec::new(),
            touched: Vec::new(),
            has_new_frontends: false,
            lost: BTreeSet::new(),
            inserted: Vec::new(),
        }
    }
}

/// The number of writes that failed, and the first error.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    count: usize,
    first: Option<(String, Error)>,
}

impl Failures {
    pub(crate) fn add(&mut self, what: impl ToString, error: Error) {
        self.count += 1;
        self.first.get_or_insert_with(|| (what.to_string(), error));
    }

    /// Adds the error of one thing, if it has failed.
    pub(crate) fn see(&mut self, what: impl ToString, result: Result<(), Error>) {
        if let Err(error) = result {
            self.add(what, error);
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.count += other.count;
        if self.first.is_none() {
            self.first = other.first;
        }
    }

    pub(crate) fn into_result(self) -> Result<(), Error> {
        match self.first {
            None => Ok(()),
            Some((what, source)) => {
                Err(Error::Incomplete { failed: self.count, what, source: Box::new(source) })
            }
        }
    }
}
