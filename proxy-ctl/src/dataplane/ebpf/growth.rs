//! Tables of what is desired grow when it has no room in them, up to their limit.
//!
//! Larger maps are made beside those in use, get the same entries, and take their pins; then the programs are swapped for some that read
//! the larger maps. Nothing is written meanwhile, so both hold the same until all programs are swapped.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proxy_common::inventory::Limit;

use super::{
    Error,
    attach::Hooks,
    family::TableFamily,
    kernel_log::KernelLog,
    layout::Arrangement,
    load::{Programs, load},
    paths::Paths,
    resize::{Contents, contents, enlarge, remove_larger, rename},
    tables::{Shape, pinned_table},
    writer::{Common, FamilyWriter},
};
use crate::{config::Ebpf, model::desired::DesiredPort};

/// What has failed is tried again after this time: mostly, the kernel has no memory for larger maps.
const REST: Duration = Duration::from_secs(60);

/// How much room the tables of a limit need for what is served and what waits.
pub(super) type Demand = BTreeMap<Limit, u64>;

/// Whether tables may grow now.
#[derive(Debug, Default)]
pub(super) struct Growth {
    rests_until: Option<Instant>,
}

impl Growth {
    /// The limits that the tables are below.
    pub(super) fn may_grow(&self, shapes: &[Shape]) -> Vec<Limit> {
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return Vec::new();
        }
        shapes.iter().filter(|shape| shape.entries < shape.most).filter_map(|shape| shape.limit).collect()
    }

    pub(super) fn rest(&mut self) {
        self.rests_until = Some(Instant::now() + REST);
    }
}

impl<F: TableFamily> FamilyWriter<F> {
    /// Of the tables that something waits for. An estimate: how endpoint sets share slots shows when they are placed.
    pub(super) fn demand(&self, shared: &Common, demand: &mut Demand) {
        let waiting = &self.entries.without_room;
        let mut need = |limit, entries: usize| {
            let most: &mut u64 = demand.entry(limit).or_default();
            *most = (*most).max(entries as u64);
        };
        let more = waiting.frontends.len() + self.entries.cluster_ips.unmarked();
        let frontends = self.entries.frontends.len() + more;
        if frontends > self.tables.frontends.map().capacity() as usize {
            need(Limit::Frontends, frontends);
        }
        let endpoints: usize = waiting.ports.values().map(|one| one.port.endpoints.all.len()).sum();
        let places =
            |port: &DesiredPort| Arrangement::of(&port.endpoints, shared.algorithm_of(port)).places();
        let slots: usize = waiting.ports.values().map(|one| places(&one.port) as usize).sum();
        for one in waiting.ports.values() {
            let limit = one.full.limit;
            let entries = if limit == Limit::Services {
                shared.ids.used() as usize + waiting.ports.len()
            } else if limit == Limit::Slots {
                self.entries.slots.used() as usize + slots
            } else {
                self.entries.backends.len() + endpoints
            };
            need(limit, entries);
        }
    }
}

/// What reads and writes the larger tables.
#[derive(Debug)]
pub(super) struct Larger {
    pub(super) shapes: Vec<Shape>,
    pub(super) programs: Programs,
    pub(super) log: KernelLog,
}

/// Pins larger tables in the places of those in use, at least twice as large where the limit allows it. The programs in use read the
/// former ones until they are swapped for the new.
pub(super) fn make_larger(
    paths: &Paths,
    shapes: &[Shape],
    demand: &Demand,
    config: &Ebpf,
    hooks: &Hooks,
) -> Result<Larger, Error> {
    remove_larger(paths)?;
    let mut new = shapes.to_vec();
    for (limit, needed) in demand {
        let entries =
            shapes.iter().find(|shape| shape.limit == Some(*limit)).map_or(0, |shape| shape.entries);
        let needed = u32::try_from(*needed).unwrap_or(u32::MAX);
        enlarge(&mut new, *limit, needed.max(entries.saturating_add(1)));
    }
    let grows = |shape: &&Shape| shape.limit.is_some_and(|limit| demand.contains_key(&limit));
    let pins = |shape: &Shape| if grows(&shape) { paths.larger() } else { paths.maps() };
    let made = load(paths, &new, pins, config, false).and_then(|(mut programs, log)| {
        hooks.load(&mut programs)?;
        new.iter().filter(grows).try_for_each(|shape| fill(paths, shape.name))?;
        Ok((programs, log))
    });
    let (programs, log) = match made {
        Ok(loaded) => loaded,
        Err(error) => {
            remove_larger(paths)?;
            return Err(error);
        }
    };
    for shape in new.iter().filter(grows) {
        rename(&paths.larger().join(shape.name), &paths.maps().join(shape.name))?;
        tracing::info!(
            table = shape.name,
            entries = shape.entries,
            "the table has grown with what is desired"
        );
    }
    Ok(Larger { shapes: new, programs, log })
}

fn fill(paths: &Paths, table: &'static str) -> Result<(), Error> {
    let Some(Contents { transfer, .. }) = contents(table) else { return Ok(()) };
    let (from, to) = (pinned_table(&paths.maps(), table)?, pinned_table(&paths.larger(), table)?);
    transfer(table, &from, &to).map(drop)
}
