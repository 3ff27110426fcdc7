//! Lets the maps of desired state grow up to their limit, when what is desired has no room in them.
//!
//! Larger maps are made beside those in use, get the same entries, and take over their pins. Then
//! all programs are replaced by some that use the larger maps. Nothing is written meanwhile, so
//! both sets of maps stay equal until then.

use std::{collections::BTreeMap, sync::Arc};

use proxy_common::{
    family::{V4, V6},
    inventory::Limit,
};
use rustc_hash::FxHashSet;

use super::{
    Error,
    hooks::{
        attach::Hooks,
        load::{Programs, load},
        program_log::KernelLog,
    },
    maps::{
        family::MapFamily,
        handles::{Shape, pinned_map},
        paths::Paths,
        resize::{Contents, contents, enlarge, remove_larger, rename, with_room_to_spare},
    },
    services::{
        entries::{self, Arrangement},
        uses::backend_key,
        writer::{Common, FamilyWriter},
    },
};
use crate::{
    config::Ebpf,
    model::{desired::DesiredPort, objects::Algorithm},
};

/// Number of entries that the maps of each limit need for what is served and what waits.
pub(super) type Demand = BTreeMap<Limit, u64>;

/// Returns the limits whose maps are too small for all of `desired` with room to spare, each with
/// the size that has it.
pub(super) fn ahead(
    desired: &[Arc<DesiredPort>],
    algorithm_of: impl Fn(&DesiredPort) -> Algorithm,
    shapes: &[Shape],
) -> Demand {
    let mut demand = Demand::new();
    // Id 0 is given to no service, so one more entry is needed.
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

/// Returns how many entries `desired` needs in the maps of a family.
fn needed<F: MapFamily>(
    desired: &[Arc<DesiredPort>],
    algorithm_of: impl Fn(&DesiredPort) -> Algorithm,
) -> [(Limit, u64); 3] {
    let (mut frontends, mut slots) = (0, 0);
    let (mut backends, mut cluster_ips) = (FxHashSet::default(), FxHashSet::default());
    for port in desired.iter().filter(|port| port.name.family == F::FAMILY) {
        frontends += port.frontends.len();
        cluster_ips.extend(entries::cluster_ips::<F>(port));
        slots += u64::from(Arrangement::of(&port.endpoints, algorithm_of(port)).slot_count());
        backends
            .extend(port.endpoints.all.iter().filter_map(|endpoint| backend_key::<F>(&port.name, endpoint)));
    }
    [
        (Limit::Frontends, (frontends + cluster_ips.len()) as u64),
        (Limit::Slots, slots),
        (Limit::Backends, backends.len() as u64),
    ]
}

impl<F: MapFamily> FamilyWriter<F> {
    /// Adds the entries that are needed in maps that something waits for. It is an estimate,
    /// because how endpoint sets share slots is known only when they are placed.
    pub(super) fn demand(&self, shared: &Common, demand: &mut Demand) {
        let waiting = &self.entries.without_room;
        let mut need = |limit, entries: usize| {
            let most: &mut u64 = demand.entry(limit).or_default();
            *most = (*most).max(entries as u64);
        };
        let more = waiting.frontends.len() + self.entries.cluster_ips.missing();
        let frontends = self.entries.frontends.len() + more;
        if frontends > self.maps.frontends.map().capacity() as usize {
            need(Limit::Frontends, frontends);
        }
        let endpoints: usize = waiting.ports.values().map(|one| one.port.endpoints.all.len()).sum();
        let slot_count =
            |port: &DesiredPort| Arrangement::of(&port.endpoints, shared.algorithm_of(port)).slot_count();
        let slots: usize = waiting.ports.values().map(|one| slot_count(&one.port) as usize).sum();
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

/// The larger maps, with the programs and the log that use them.
#[derive(Debug)]
pub(super) struct Larger {
    pub(super) shapes: Vec<Shape>,
    pub(super) programs: Programs,
    pub(super) log: KernelLog,
}

/// Makes larger maps, at least twice as large if the limit allows it, and pins them in place of
/// those in use. The programs that run use the former maps until they are replaced.
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
    let grows = |shape: &&Shape| !shapes.contains(shape);
    let made = load_beside(paths, shapes, &new, config, hooks).and_then(|loaded| {
        new.iter().filter(grows).try_for_each(|shape| fill(paths, shape.name))?;
        Ok(loaded)
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
        tracing::info!(map = shape.name, entries = shape.entries, "the map has grown with the desired state");
    }
    Ok(Larger { shapes: new, programs, log })
}

/// Loads all programs that the hooks need, with the maps of `new`. Those that differ from the maps
/// in use are made in the folder `larger`.
pub(super) fn load_beside(
    paths: &Paths,
    in_use: &[Shape],
    new: &[Shape],
    config: &Ebpf,
    hooks: &Hooks,
) -> Result<(Programs, KernelLog), Error> {
    let pins = |shape: &Shape| if in_use.contains(shape) { paths.maps() } else { paths.larger() };
    let (mut programs, log) = load(new, pins, config, false)?;
    hooks.load(&mut programs)?;
    Ok((programs, log))
}

fn fill(paths: &Paths, name: &'static str) -> Result<(), Error> {
    let Some(Contents { transfer, .. }) = contents(name) else { return Ok(()) };
    let (from, to) = (pinned_map(&paths.maps(), name)?, pinned_map(&paths.larger(), name)?);
    transfer(name, &from, &to)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        config::Limits,
        model::{
            Model,
            test_support::{HERE, remote, service, slice},
        },
        modes::ebpf::maps::handles::shapes,
    };

    /// Returns service ports, each with `count` endpoints, of which the first has the number
    /// `first`.
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
    fn maps_have_room_to_spare(#[case] services: &[(u32, u32)], #[case] expected: &[(Limit, u64)]) {
        let limits = Limits { backends: 12, slots: 24, ..Limits::default() };
        let demand = ahead(&desired(services), |_| Algorithm::Random, &shapes(&limits));
        assert_eq!(demand.into_iter().collect::<Vec<_>>(), expected);
    }

    #[rstest]
    #[case::frontends_and_cluster_ip_entries(Limits { frontends: 5, ..Limits::default() }, &[], 2)]
    #[case::too_few_frontends(Limits { frontends: 7, ..Limits::default() }, &[(Limit::Frontends, 8)], 3)]
    #[case::services(Limits { services: 4, ..Limits::default() }, &[(Limit::Services, 5)], 3)]
    fn other_maps(#[case] limits: Limits, #[case] expected: &[(Limit, u64)], #[case] services: usize) {
        let desired = desired(&vec![(0, 1); services]);
        let demand = ahead(&desired, |_| Algorithm::Random, &shapes(&limits));
        assert_eq!(demand.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn lookup_tables_take_slots() {
        let limits = Limits { slots: 4, ..Limits::default() };
        let demand = |algorithm| ahead(&desired(&[(0, 3)]), |_| algorithm, &shapes(&limits));
        assert_eq!(demand(Algorithm::Random), Demand::new());
        assert_eq!(demand(Algorithm::Maglev), Demand::from([(Limit::Slots, 686)]));
    }
}
