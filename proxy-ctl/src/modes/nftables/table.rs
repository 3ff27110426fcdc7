//! The table of one IP family: what is programmed, and the transactions that change it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
};

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    affinity,
    contents::{self, Contents, Found},
    error::{Error, RefusedPorts},
    frame::{self, COMMENT, Context},
    language::Language,
    names::{PortChain, PortNames},
    objects::{ElementId, ElementValue, Set},
    plan::{Existing, Steps, Unused, deletion, endpoint_map},
    render::{Allocation, render, room},
    slots::{Blocks, Slots},
};
use crate::{
    model::{
        desired::{DesiredPort, ServicePortName},
        objects::IpFamily,
    },
    modes::Applied,
    names::NFTABLES_TABLE as TABLE,
    sys::{net::netlink::Refused, nftables::NfTables},
};

/// The number of attempts at a transaction. Each leaves out the service ports that the kernel has
/// refused.
const TRIES: usize = 8;

#[derive(Debug)]
struct ProgrammedPort {
    port: Arc<DesiredPort>,
    allocation: Allocation,
}

/// The state of a table after the last transaction.
#[derive(Debug)]
pub(super) struct FamilyTable {
    language: Language,
    /// The node's settings with which the last transaction was made.
    context: Context,
    /// True once `resync` has succeeded.
    known: bool,
    /// True if the last change of `context` could not be written, or not for every service port.
    is_context_stale: bool,
    ports: FxHashMap<ServicePortName, ProgrammedPort>,
    /// The number of service ports that need each shared element.
    needs: FxHashMap<ElementId, u32>,
    blocks: Blocks,
    /// The numbers of the maps of endpoints.
    maps: BTreeSet<u32>,
    /// Unused objects, each with the number of garbage collections before it became unused.
    unused: BTreeMap<Unused, u64>,
    /// Slots whose elements are unused, each with the number of garbage collections before that.
    unused_slots: Vec<(Slots, u64)>,
    collections: u64,
}

/// A transaction, and the state after it.
struct Plan {
    steps: Steps,
    /// The service ports of the transaction. `None`: the service port is removed.
    programmed: Vec<(ServicePortName, Option<ProgrammedPort>)>,
    /// Slots that were allocated for the transaction.
    allocated: Vec<Slots>,
    /// Slots that are no longer used after the transaction.
    left: Vec<Slots>,
    /// The new state, if `programmed` lists everything and nothing else is left.
    fresh: Option<Fresh>,
}

impl Plan {
    fn new(language: Language) -> Self {
        let steps = Steps::new(language, TABLE);
        Self { steps, programmed: Vec::new(), allocated: Vec::new(), left: Vec::new(), fresh: None }
    }

    /// Returns the service ports with session affinity whose rules to balance are written anew, and
    /// whose set of remembered clients exists already.
    fn rebalanced(&self) -> Vec<Arc<DesiredPort>> {
        let Steps { sets, revived, .. } = &self.steps;
        let is_revived =
            |set: &Set| revived.iter().any(|one| matches!(one, Unused::Set(name) if name == set));
        let is_new = |owner: usize| {
            let mut own = sets.iter().filter(|(of, ..)| *of == Some(owner));
            own.any(|(_, set, _)| matches!(set, Set::Own(_)) && !is_revived(set))
        };
        let written: BTreeSet<usize> = self.steps.rewritten().collect();
        let programmed =
            written.into_iter().filter_map(|owner| Some((owner, self.programmed.get(owner)?.1.as_ref()?)));
        let ports = programmed
            .filter(|(owner, programmed)| programmed.port.affinity_seconds.is_some() && !is_new(*owner));
        ports.map(|(_, programmed)| Arc::clone(&programmed.port)).collect()
    }
}

/// The state that a plan of everything builds anew.
struct Fresh {
    blocks: Blocks,
    maps: BTreeSet<u32>,
    unused: BTreeMap<Unused, u64>,
    unused_slots: Vec<(Slots, u64)>,
}

impl FamilyTable {
    pub(super) fn new(family: IpFamily) -> Self {
        Self {
            language: Language { family },
            context: Context::new(family, &crate::model::node::Host::default()),
            known: false,
            is_context_stale: false,
            ports: FxHashMap::default(),
            needs: FxHashMap::default(),
            blocks: Blocks::default(),
            maps: BTreeSet::new(),
            unused: BTreeMap::new(),
            unused_slots: Vec::new(),
            collections: 0,
        }
    }

    pub(super) fn family(&self) -> IpFamily {
        self.language.family
    }

    pub(super) fn ports(&self) -> usize {
        self.ports.len()
    }

    /// Returns the number of elements that endpoints have.
    pub(super) fn endpoints(&self) -> usize {
        let room = |programmed: &ProgrammedPort| room(&programmed.port, &self.context);
        self.ports.values().map(room).map(|room| room.cluster + room.local).sum()
    }

    pub(super) fn set_context(&mut self, nftables: &NfTables, context: Context) -> Result<Applied, Error> {
        if !self.known {
            self.context = context;
            return Ok(Applied::default());
        }
        if self.context == context && !self.is_context_stale {
            return Ok(Applied::default());
        }
        let ports: Vec<_> = self.ports.values().map(|programmed| Arc::clone(&programmed.port)).collect();
        let result = if self.is_context_stale {
            self.compare(nftables, &context, &ports)
        } else {
            let all: Vec<_> = ports.into_iter().map(|port| (port.name.clone(), Some(port))).collect();
            let plan = |table: &mut Self, refused: &_| Ok(table.plan_changes(&all, &context, refused));
            self.transact(nftables, &context, plan)
        };
        self.is_context_stale = result.is_err();
        result
    }

    pub(super) fn apply(
        &mut self,
        nftables: &NfTables,
        changes: &[(ServicePortName, Option<Arc<DesiredPort>>)],
    ) -> Result<Applied, Error> {
        let context = self.context.clone();
        self.transact(nftables, &context, |table, refused| Ok(table.plan_changes(changes, &context, refused)))
    }

    pub(super) fn resync(
        &mut self,
        nftables: &NfTables,
        desired: &[Arc<DesiredPort>],
    ) -> Result<Applied, Error> {
        let context = self.context.clone();
        let applied = self.compare(nftables, &context, desired)?;
        self.known = true;
        self.is_context_stale = false;
        Ok(applied)
    }

    fn compare(
        &mut self,
        nftables: &NfTables,
        context: &Context,
        desired: &[Arc<DesiredPort>],
    ) -> Result<Applied, Error> {
        self.transact(nftables, context, |table, refused| {
            table.plan_everything(nftables, desired, context, refused)
        })
    }

    /// Deletes objects that became unused before the previous garbage collection. No packet is on
    /// its way to them any more.
    pub(super) fn collect(&mut self, nftables: &NfTables) -> Result<(), Error> {
        self.collections += 1;
        let now = self.collections;
        let is_due = |at: u64| at + 1 < now;
        if !self.unused.values().any(|at| is_due(*at)) {
            return Ok(());
        }
        let due = self.unused.iter().filter(|(_, at)| is_due(**at)).map(|(unused, _)| unused);
        let refused = nftables.commit(deletion(self.language, due))?;
        // A refused object was deleted by another program, or another program uses it. The next
        // resync finds what is left.
        self.unused.retain(|_, at| !is_due(*at));
        let (due, later): (Vec<_>, Vec<_>) = self.unused_slots.iter().partition(|(_, at)| is_due(*at));
        self.unused_slots = later;
        due.into_iter().for_each(|(slots, _)| self.blocks.release(slots));
        match refused.first() {
            None => Ok(()),
            Some(refused) => Err(Error::Deletion(io::Error::from_raw_os_error(refused.errno))),
        }
    }

    /// Plans and commits a transaction, and plans it again without what the kernel refuses.
    fn transact(
        &mut self,
        nftables: &NfTables,
        context: &Context,
        plan: impl Fn(&mut Self, &FxHashMap<ServicePortName, i32>) -> Result<Plan, Error>,
    ) -> Result<Applied, Error> {
        let mut refused_ports: FxHashMap<ServicePortName, i32> = FxHashMap::default();
        for _ in 0..TRIES {
            let mut plan = plan(self, &refused_ports)?;
            let (applied, rebalanced) = (plan.steps.applied(), plan.rebalanced());
            let (batch, owners) = plan.steps.take_batch();
            let refused = if batch.is_empty() { Vec::new() } else { nftables.commit(batch)? };
            if refused.is_empty() {
                self.took_effect(plan);
                self.context.clone_from(context);
                for port in rebalanced {
                    affinity::forget_others(nftables, &port, context)?;
                }
                return match refused_ports.len() {
                    0 => Ok(applied),
                    _ => Err(Error::Ports(RefusedPorts(refused_ports.into_iter().collect()))),
                };
            }
            plan.allocated.iter().for_each(|slots| self.blocks.release(*slots));
            for Refused { message, errno } in refused {
                let index = owners.partition_point(|(first, _)| *first <= message);
                let owner = index.checked_sub(1).and_then(|index| owners[index].1);
                let Some((name, _)) = owner.and_then(|owner| plan.programmed.get(owner)) else {
                    let table = format!("{} {TABLE}", self.language.table_family().name());
                    return Err(Error::Table { table, source: io::Error::from_raw_os_error(errno) });
                };
                refused_ports.insert(name.clone(), errno);
            }
        }
        Err(Error::Ports(RefusedPorts(refused_ports.into_iter().collect())))
    }

    fn took_effect(&mut self, plan: Plan) {
        let Plan { steps, programmed, left, fresh, .. } = plan;
        if let Some(Fresh { blocks, maps, unused, unused_slots }) = fresh {
            let names: FxHashSet<&ServicePortName> = programmed.iter().map(|(name, _)| name).collect();
            self.ports.retain(|name, _| names.contains(name));
            self.needs.clear();
            (self.blocks, self.maps) = (blocks, maps);
            (self.unused, self.unused_slots) = (unused, unused_slots);
        }
        let collections = self.collections;
        for revived in &steps.revived {
            self.unused.remove(revived);
        }
        self.unused.extend(steps.unused.into_iter().map(|unused| (unused, collections)));
        self.unused_slots.extend(left.into_iter().map(|slots| (slots, collections)));
        for (id, change) in steps.needs {
            let count = i64::from(self.needs.get(&id).copied().unwrap_or(0)) + change;
            match u32::try_from(count) {
                Ok(count @ 1..) => self.needs.insert(id, count),
                Ok(0) | Err(_) => self.needs.remove(&id),
            };
        }
        for (name, programmed) in programmed {
            match programmed {
                Some(programmed) => self.ports.insert(name, programmed),
                None => self.ports.remove(&name),
            };
        }
        self.maps.extend(steps.sets.iter().filter_map(|(_, set, _)| set.endpoints_number()));
    }

    /// Plans the steps from the remembered state to the new state of some service ports.
    fn plan_changes(
        &mut self,
        changes: &[(ServicePortName, Option<Arc<DesiredPort>>)],
        context: &Context,
        refused: &FxHashMap<ServicePortName, i32>,
    ) -> Plan {
        let mut plan = Plan::new(self.language);
        if *context != self.context {
            self.plan_frame(&mut plan.steps, context);
        }
        let mut new_maps = BTreeSet::new();
        for (name, port) in changes.iter().filter(|(name, _)| !refused.contains_key(name)) {
            let before = self.ports.get(name);
            let old = before.map(|programmed| render(&programmed.port, &self.context, programmed.allocation));
            let held = before.map(|programmed| programmed.allocation).unwrap_or_default();
            let mut new = None;
            if let Some(port) = port {
                let wanted = room(port, context);
                let mut allocate = |held: Option<Slots>, count: usize| {
                    let slots = (count > 0).then(|| match held {
                        Some(slots) if slots.hold(count) => Some(slots),
                        _ => self.blocks.allocate(count).inspect(|slots| plan.allocated.push(*slots)),
                    });
                    plan.left.extend(held.filter(|held| slots.flatten() != Some(*held)));
                    slots.flatten()
                };
                let (cluster, local) =
                    (allocate(held.cluster, wanted.cluster), allocate(held.local, wanted.local));
                new = Some(ProgrammedPort {
                    port: Arc::clone(port),
                    allocation: Allocation { cluster, local },
                });
            } else {
                plan.left.extend([held.cluster, held.local].into_iter().flatten());
            }
            let objects = new.as_ref().map(|new| {
                let slots = [new.allocation.cluster, new.allocation.local];
                new_maps.extend(slots.into_iter().flatten().map(Slots::map));
                render(&new.port, context, new.allocation)
            });
            let owner = Some(plan.programmed.len());
            let old = old.map(Existing::from).unwrap_or_default();
            plan.steps.compare(owner, old, objects.unwrap_or_default(), &self.unused);
            plan.programmed.push((name.clone(), new));
        }
        for number in new_maps.difference(&self.maps) {
            endpoint_map(&mut plan.steps, *number, self.language);
        }
        plan.steps.share(&self.needs);
        plan
    }

    /// Plans the steps of the frame from one state of the node to another.
    fn plan_frame(&self, steps: &mut Steps, context: &Context) {
        let old: Vec<_> = frame::chains(&self.context);
        for chain in frame::chains(context) {
            let before = old.iter().find(|old| old.name == chain.name);
            let digests = before.map(|old| old.rules.iter().map(|rule| Some(rule.digest())).collect());
            steps.chain(None, chain.name.to_owned(), chain.base, digests, chain.rules, &self.unused);
        }
        let (old, new) = (frame::elements(&self.context), frame::elements(context));
        steps.removed.extend(old.iter().filter(|id| !new.contains(id)).map(|id| (None, id.clone())));
        let added = new.into_iter().filter(|id| !old.contains(id));
        steps.shared.extend(added.map(|id| (id, ElementValue::default())));
    }

    /// Plans the steps from the kernel's state to everything that is desired.
    fn plan_everything(
        &mut self,
        nftables: &NfTables,
        desired: &[Arc<DesiredPort>],
        context: &Context,
        refused: &FxHashMap<ServicePortName, i32>,
    ) -> Result<Plan, Error> {
        let mut plan = Plan::new(self.language);
        let found = contents::read(nftables, self.language)?;
        let mut contents = match found {
            Found::Own(contents) => contents,
            Found::Nothing | Found::Unusable => {
                plan.steps.replaces = matches!(found, Found::Unusable);
                plan.steps.creates = Some(COMMENT);
                Contents::default()
            }
        };
        let replaced = plan.steps.creates.is_some();
        let mut fresh = Fresh {
            blocks: Blocks::default(),
            maps: BTreeSet::new(),
            unused: BTreeMap::new(),
            unused_slots: Vec::new(),
        };
        if !replaced {
            for number in contents.sets.iter().filter_map(Set::endpoints_number) {
                fresh.maps.insert(number);
            }
            contents.sets.retain(|set| set.endpoints_number().is_none());
            self.keep_unused(&mut contents, &mut fresh);
        }
        plan_fixed(&mut plan.steps, context, &mut contents, &fresh.unused);

        let held = |contents: &Contents, fresh: &mut Fresh, names: &PortNames, chain, count: usize| {
            let (first, old) = contents.slots_of(names, chain)?;
            fresh.blocks.claim(first, old.max(u32::try_from(count).ok()?)).filter(|slots| slots.hold(count))
        };
        let allocations: Vec<_> = desired
            .iter()
            .map(|port| {
                let (names, wanted) = (PortNames::new(&port.name), room(port, context));
                let mut held = |chain, count| held(&contents, &mut fresh, &names, chain, count);
                (held(PortChain::Service, wanted.cluster), held(PortChain::Local, wanted.local), wanted)
            })
            .collect();
        let (mut new_maps, mut needed_by_refused) = (BTreeSet::new(), Vec::new());
        for (port, (cluster, local, wanted)) in desired.iter().zip(allocations) {
            if refused.contains_key(&port.name) {
                needed_by_refused.extend(contents.take_all(&port.name));
                continue;
            }
            let mut allocate = |held: Option<Slots>, count: usize| {
                (count > 0).then(|| held.or_else(|| fresh.blocks.allocate(count))).flatten()
            };
            let allocation = Allocation {
                cluster: allocate(cluster, wanted.cluster),
                local: allocate(local, wanted.local),
            };
            let slots = [allocation.cluster, allocation.local];
            new_maps.extend(slots.into_iter().flatten().map(Slots::map));
            let objects = render(port, context, allocation);
            let existing = contents.take(&objects);
            plan.steps.compare(Some(plan.programmed.len()), existing, objects, &fresh.unused);
            plan.programmed
                .push((port.name.clone(), Some(ProgrammedPort { port: Arc::clone(port), allocation })));
        }
        for number in new_maps.difference(&fresh.maps) {
            endpoint_map(&mut plan.steps, *number, self.language);
        }
        plan.steps.share(&FxHashMap::default());
        // Some of these elements are in the kernel already.
        plan.steps.shared.retain(|(id, _)| contents.elements.remove(id).is_none());
        for id in &needed_by_refused {
            contents.elements.remove(id);
        }
        let Contents { chains, sets, elements } = contents;
        let chains = chains.into_iter().map(|(name, chain)| (name, chain.rules)).collect();
        plan.steps.remove(None, elements.into_ids(), chains, sets);
        plan.fresh = Some(fresh);
        Ok(plan)
    }

    /// Takes unused objects out of `contents`, so that they do not count as strays, and keeps
    /// their slots taken.
    fn keep_unused(&self, contents: &mut Contents, fresh: &mut Fresh) {
        for (unused, at) in &self.unused {
            let is_there = match unused {
                Unused::Element(id) => contents.elements.remove(id).is_some(),
                Unused::Chain(chain) => {
                    let is_empty = contents.chains.get(chain).is_some_and(|chain| chain.rules.is_empty());
                    is_empty && contents.chains.remove(chain).is_some()
                }
                Unused::Set(set) => contents.sets.remove(set),
            };
            if is_there {
                fresh.unused.insert(unused.clone(), *at);
            }
        }
        for (slots, at) in &self.unused_slots {
            if fresh.blocks.claim_all(*slots) {
                fresh.unused_slots.push((*slots, *at));
            }
        }
    }
}

/// Plans the objects that are there whatever the service ports are.
fn plan_fixed(steps: &mut Steps, context: &Context, contents: &mut Contents, unused: &BTreeMap<Unused, u64>) {
    for set in Set::FIXED {
        if !contents.sets.remove(&set) {
            let definition = frame::definition(&set, context.language);
            steps.sets.push((None, set, definition));
        }
    }
    for chain in frame::chains(context) {
        let before = contents.chains.remove(chain.name).map(|before| before.rules);
        steps.chain(None, chain.name.to_owned(), chain.base, before, chain.rules, unused);
    }
    let mut added = frame::elements(context);
    added.retain(|id| contents.elements.remove(id).is_none());
    steps.shared.extend(added.into_iter().map(|id| (id, ElementValue::default())));
}
