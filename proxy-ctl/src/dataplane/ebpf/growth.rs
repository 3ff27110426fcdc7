//! Tables of what is desired grow when it has no room in them, up to their limit.
//!
//! Larger maps are made beside those in use, get the same entries, and take their pins; then the programs are swapped for some that read
//! the larger maps. Nothing is written meanwhile, so both hold the same until all programs are swapped.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use proxy_common::{
    family::{V4, V6},
    inventory::Limit,
};
use rustc_hash::FxHashSet;

use super::{
    Error,
    attach::Hooks,
    family::TableFamily,
    kernel_log::KernelLog,
    layout::{self, Arrangement},
    load::{Programs, load},
    paths::Paths,
    resize::{Contents, contents, enlarge, remove_larger, rename},
    tables::{Shape, pinned_table},
    uses::backend_key,
    writer::{Common, FamilyWriter},
};
use crate::{
    config::Ebpf,
    model::{desired::DesiredPort, objects::Algorithm},
};

/// What has failed is tried again after this time: mostly, the kernel has no memory for larger maps.
const REST: Duration = Duration::from_secs(60);

/// How much room the tables of a limit need for what is served and what waits.
pub(super) type Demand = BTreeMap<Limit, u64>;

/// What is desired at the start takes three quarters of a table at most: a rolling update needs more for a while, and growth loads the
/// programs anew.
pub(super) const fn with_room_to_spare(entries: u64) -> u64 {
    entries + entries / 3
}

/// What has room to spare for all of `desired`, of the limits whose tables have not.
pub(super) fn ahead(
    desired: &[Arc<DesiredPort>],
    algorithm_of: impl Fn(&DesiredPort) -> Algorithm,
    shapes: &[Shape],
) -> Demand {
    let mut demand = Demand::new();
    // Id 0 is nobody's.
    let services = [(Limit::Services, desired.len() as u64 + 1)];
    let of_families = [needed::<V4>(desired, &algorithm_of), needed::<V6>(desired, &algorithm_of)];
    for (limit, entries) in services.into_iter().chain(of_families.into_iter().flatten()) {
        let needed = with_room_to_spare(entries);
        let is_short = |shape: &Shape| shape.limit == Some(limit) && u64::from(shape.entries) < needed;
        if shapes.iter().any(is_short) {
            let most: &mut u64 = demand.entry(limit).or_default();
            *most = needed.max(*most);
        }
    }
    demand
}

/// Entries in the tables of a family.
fn needed<F: TableFamily>(
    desired: &[Arc<DesiredPort>],
    algorithm_of: impl Fn(&DesiredPort) -> Algorithm,
) -> [(Limit, u64); 3] {
    let (mut frontends, mut slots) = (0, 0);
    let (mut backends, mut marks) = (FxHashSet::default(), FxHashSet::default());
    for port in desired.iter().filter(|port| port.name.family == F::FAMILY) {
        frontends += port.frontends.len();
        marks.extend(layout::cluster_ips::<F>(port));
        slots += u64::from(Arrangement::of(&port.endpoints, algorithm_of(port)).places());
        backends
            .extend(port.endpoints.all.iter().filter_map(|endpoint| backend_key::<F>(&port.name, endpoint)));
    }
    [
        (Limit::Frontends, (frontends + marks.len()) as u64),
        (Limit::Slots, slots),
        (Limit::Backends, backends.len() as u64),
    ]
}

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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        config::Limits,
        dataplane::ebpf::tables::shapes,
        model::{
            Model,
            test_support::{HERE, remote, service, slice},
        },
    };

    /// Each with the endpoints of its number: so many, beginning with this one.
    fn desired(services: &[(u32, u32)]) -> Vec<Arc<DesiredPort>> {
        let mut model = Model::new(HERE);
        for (number, (first, count)) in (1..).zip(services) {
            let name = format!("shop/s{number}");
            model.apply_service(service(&name, &[&format!("10.96.0.{number}")]));
            let address = |n: u32| remote(&std::net::Ipv4Addr::from(0x0a00_0000 + n).to_string());
            let endpoints = (*first..first + count).map(address).collect();
            model.apply_slice(slice(&format!("{name}-1"), &format!("s{number}"), endpoints));
        }
        model.take_changes().changed
    }

    #[rstest]
    #[case::three_quarters(&[(0, 9)], &[])]
    #[case::more(&[(0, 10)], &[(Limit::Backends, 13)])]
    #[case::of_two(&[(0, 6), (6, 6)], &[(Limit::Backends, 16)])]
    #[case::the_same_of_two(&[(0, 6), (0, 6)], &[])]
    #[case::slots_of_the_same(&[(0, 9), (0, 9), (0, 1)], &[(Limit::Slots, 25)])]
    fn tables_have_room_to_spare(#[case] services: &[(u32, u32)], #[case] expected: &[(Limit, u64)]) {
        let limits = Limits { backends: 12, slots: 24, ..Limits::default() };
        let demand = ahead(&desired(services), |_| Algorithm::Random, &shapes(&limits));
        assert_eq!(demand.into_iter().collect::<Vec<_>>(), expected);
    }

    #[rstest]
    #[case::frontends_and_marks(Limits { frontends: 5, ..Limits::default() }, &[], 2)]
    #[case::too_few_frontends(Limits { frontends: 7, ..Limits::default() }, &[(Limit::Frontends, 8)], 3)]
    #[case::services(Limits { services: 4, ..Limits::default() }, &[(Limit::Services, 5)], 3)]
    fn other_tables(#[case] limits: Limits, #[case] expected: &[(Limit, u64)], #[case] services: usize) {
        let desired = desired(&vec![(0, 1); services]);
        let demand = ahead(&desired, |_| Algorithm::Random, &shapes(&limits));
        assert_eq!(demand.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn tables_of_endpoint_sets_take_slots() {
        let limits = Limits { slots: 4, ..Limits::default() };
        let demand = |algorithm| ahead(&desired(&[(0, 3)]), |_| algorithm, &shapes(&limits));
        assert_eq!(demand(Algorithm::Random), Demand::new());
        assert_eq!(demand(Algorithm::Maglev), Demand::from([(Limit::Slots, 686)]));
    }
}
