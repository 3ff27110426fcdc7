//! Plans one transaction that turns the kernel's state into the desired state. This module has no
//! side effects.
//!
//! Two kinds of objects must not be deleted in the transaction that replaces them. A packet between
//! two steps of a rule would no longer find the endpoint that the first step has chosen. And before
//! Linux 6.2 the kernel takes the chain of a deleted map element for one in use. Such objects are
//! unused at first: a later transaction deletes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use rustc_hash::FxHashMap;

use super::{
    frame::definition,
    language::Language,
    objects::{ElementId, ElementValue, Objects, Rule, RuleDigest, Set},
};
use crate::{
    modes::Applied,
    names::NFTABLES_TABLE as TABLE,
    sys::nftables::{BaseChain, Batch, SetDefinition},
};

/// The index of the service port that a message of a transaction belongs to. `None`: it belongs to
/// all of them.
pub(super) type Owner = Option<usize>;

/// An object that nothing refers to any more, and that is deleted later.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Unused {
    /// An element of a map of endpoints.
    Element(ElementId),
    /// A chain, which has no rules any more.
    Chain(String),
    Set(Set),
}

/// The objects of a service port that are in the kernel.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Existing {
    pub(super) sets: BTreeSet<Set>,
    /// The digests of each chain's rules. `None` for a rule that is not of this proxy.
    pub(super) chains: BTreeMap<String, Vec<Option<RuleDigest>>>,
    pub(super) elements: BTreeMap<ElementId, ElementValue>,
    pub(super) shared: Vec<ElementId>,
}

impl From<Objects> for Existing {
    fn from(objects: Objects) -> Self {
        let digests = |rules: Vec<Rule>| rules.iter().map(|rule| Some(rule.digest())).collect();
        Self {
            sets: objects.sets.into_keys().collect(),
            chains: objects.chains.into_iter().map(|(name, rules)| (name, digests(rules))).collect(),
            elements: objects.elements,
            shared: objects.shared,
        }
    }
}

/// The steps of a transaction. Rules and elements of service ports are kept as netlink messages: as
/// objects, those of thousands of service ports would take several times that memory.
#[derive(Debug)]
pub(super) struct Steps {
    language: Language,
    table: &'static str,
    /// True if the table is deleted with everything in it, before anything else.
    pub(super) replaces: bool,
    /// The comment of the table, if the transaction makes the table.
    pub(super) creates: Option<&'static str>,
    pub(super) sets: Vec<(Owner, Set, SetDefinition)>,
    pub(super) chains: Vec<(Owner, String, Option<BaseChain>)>,
    pub(super) removed: Vec<(Owner, ElementId)>,
    rules: Section,
    elements: Section,
    /// Elements that do not belong to one service port alone.
    pub(super) shared: Vec<(ElementId, ElementValue)>,
    pub(super) unused: Vec<Unused>,
    /// Unused objects that are needed again.
    pub(super) revived: Vec<Unused>,
    /// The change of the number of service ports that need each shared element.
    pub(super) needs: FxHashMap<ElementId, i64>,
}

/// Messages of one kind.
#[derive(Debug)]
struct Section {
    messages: Batch,
    /// Owners, each with the index of its first message in `messages`.
    owners: Vec<(u32, Owner)>,
    /// The number of objects that the messages add.
    objects: usize,
}

impl Section {
    fn new() -> Self {
        Self { messages: Batch::part(), owners: Vec::new(), objects: 0 }
    }

    /// Begins a run of messages of this owner.
    fn of(&mut self, owner: Owner) -> &mut Batch {
        self.owners.push((self.messages.next(), owner));
        &mut self.messages
    }

    fn move_to(self, batch: &mut Batch, owners: &mut Vec<(u32, Owner)>) {
        let before = batch.next();
        owners.extend(self.owners.into_iter().map(|(first, owner)| (before + first, owner)));
        batch.append(self.messages);
    }
}

impl Steps {
    pub(super) fn new(language: Language, table: &'static str) -> Self {
        Self {
            language,
            table,
            replaces: false,
            creates: None,
            sets: Vec::new(),
            chains: Vec::new(),
            removed: Vec::new(),
            rules: Section::new(),
            elements: Section::new(),
            shared: Vec::new(),
            unused: Vec::new(),
            revived: Vec::new(),
            needs: FxHashMap::default(),
        }
    }

    pub(super) fn applied(&self) -> Applied {
        let elements = self.elements.objects + self.shared.len();
        let written = self.sets.len() + self.chains.len() + self.rules.objects + elements;
        Applied { written: written as u64, removed: (self.removed.len() + self.unused.len()) as u64 }
    }

    /// Returns the service ports whose rules are written anew.
    pub(super) fn rewritten(&self) -> impl Iterator<Item = usize> {
        self.rules.owners.iter().filter_map(|(_, owner)| *owner)
    }

    /// Adds the steps from the existing to the new objects of a service port. `unused` lists the
    /// unused objects that are still in the kernel.
    pub(super) fn compare<T>(
        &mut self,
        owner: Owner,
        mut old: Existing,
        new: Objects,
        unused: &BTreeMap<Unused, T>,
    ) {
        for (set, definition) in new.sets {
            if !old.sets.remove(&set) {
                self.revive(Unused::Set(set.clone()), unused);
                self.sets.push((owner, set, definition));
            }
        }
        for (chain, rules) in new.chains {
            let before = old.chains.remove(&chain);
            self.chain(owner, chain, None, before, rules, unused);
        }
        let mut added = Vec::with_capacity(new.elements.len());
        for (id, value) in new.elements {
            match old.elements.remove(&id) {
                Some(before) if before == value => continue,
                Some(_) => self.removed.push((owner, id.clone())),
                None => {
                    if self.revive(Unused::Element(id.clone()), unused) {
                        self.removed.push((owner, id.clone()));
                    }
                }
            }
            added.push((id, value));
        }
        self.add_elements(owner, &added);
        self.remove(owner, old.elements.into_keys(), old.chains, old.sets);
        old.shared.into_iter().for_each(|id| *self.needs.entry(id).or_default() -= 1);
        new.shared.into_iter().for_each(|id| *self.needs.entry(id).or_default() += 1);
    }

    fn add_elements(&mut self, owner: Owner, elements: &[(ElementId, ElementValue)]) {
        self.elements.objects += elements.len();
        for group in elements.chunk_by(|(x, _), (y, _)| x.set == y.set) {
            if let Some((ElementId { set, .. }, _)) = group.first() {
                let elements = group
                    .iter()
                    .map(|(id, value)| (id.key.as_slice(), &value.data, value.user_data.as_slice()));
                let family = self.language.table_family();
                self.elements.of(owner).add_elements(family, self.table, &set.name(), elements);
            }
        }
    }

    /// Adds rules to a chain. With `flush` they replace the rules that the chain has.
    fn add_rules(&mut self, owner: Owner, chain: &str, flush: bool, rules: &[Rule]) {
        self.rules.objects += rules.len();
        let (family, batch) = (self.language.table_family(), self.rules.of(owner));
        if flush {
            batch.flush_chain(family, self.table, chain);
        }
        for rule in rules {
            batch.add_rule(family, self.table, chain, &rule.expressions, &rule.user_data());
        }
    }

    /// Adds the steps for one chain. `before` are the digests of its rules. `None`: the chain does
    /// not exist.
    pub(super) fn chain<T>(
        &mut self,
        owner: Owner,
        chain: String,
        base: Option<BaseChain>,
        before: Option<Vec<Option<RuleDigest>>>,
        rules: Vec<Rule>,
        unused: &BTreeMap<Unused, T>,
    ) {
        if before.is_none() {
            self.revive(Unused::Chain(chain.clone()), unused);
            self.chains.push((owner, chain.clone(), base));
        }
        let before = before.unwrap_or_default();
        if !before.iter().copied().eq(rules.iter().map(|rule| Some(rule.digest()))) {
            self.add_rules(owner, &chain, !before.is_empty(), &rules);
        }
    }

    /// Removes objects that are no longer desired. Objects that must not be deleted in this
    /// transaction are unused at first: a later transaction deletes them.
    pub(super) fn remove(
        &mut self,
        owner: Owner,
        elements: impl IntoIterator<Item = ElementId>,
        chains: BTreeMap<String, Vec<Option<RuleDigest>>>,
        sets: BTreeSet<Set>,
    ) {
        for id in elements {
            if id.set.endpoints_number().is_some() {
                self.unused.push(Unused::Element(id));
            } else {
                self.removed.push((owner, id));
            }
        }
        for (chain, rules) in chains {
            if !rules.is_empty() {
                self.add_rules(owner, &chain, true, &[]);
            }
            self.unused.push(Unused::Chain(chain));
        }
        self.unused.extend(sets.into_iter().map(Unused::Set));
    }

    fn revive<T>(&mut self, object: Unused, unused: &BTreeMap<Unused, T>) -> bool {
        let was_unused = unused.contains_key(&object);
        if was_unused {
            self.revived.push(object);
        }
        was_unused
    }

    /// Adds and removes elements that several service ports need. `counts` says how many needed
    /// each before. It must be called last.
    pub(super) fn share(&mut self, counts: &FxHashMap<ElementId, u32>) {
        for (id, change) in &self.needs {
            let before = i64::from(counts.get(id).copied().unwrap_or(0));
            match (before, before + change) {
                (0, 1..) => self.shared.push((id.clone(), ElementValue::default())),
                (1.., ..=0) => self.removed.push((None, id.clone())),
                _ => {}
            }
        }
    }

    /// Returns the messages of the transaction, and the owners, each with the index of its first
    /// message.
    pub(super) fn take_batch(&mut self) -> (Batch, Vec<(u32, Owner)>) {
        let shared = mem::take(&mut self.shared);
        self.add_elements(None, &shared);
        let (family, table) = (self.language.table_family(), self.table);
        let (mut batch, mut owners) = (Batch::default(), vec![(0, None)]);
        let mut own = |batch: &Batch, owner: &Owner| owners.push((batch.next(), *owner));
        if self.replaces {
            batch.delete_table(family, table);
        }
        if let Some(comment) = self.creates {
            batch.add_table(family, table, comment);
        }
        for (owner, set, definition) in &self.sets {
            own(&batch, owner);
            batch.add_set(family, table, &set.name(), definition);
        }
        for (owner, chain, base) in &self.chains {
            own(&batch, owner);
            batch.add_chain(family, table, chain, *base);
        }
        for group in self.removed.chunk_by(|(a, x), (b, y)| a == b && x.set == y.set) {
            if let Some((owner, ElementId { set, .. })) = group.first() {
                own(&batch, owner);
                let keys = group.iter().map(|(_, id)| id.key.as_slice());
                batch.delete_elements(family, table, &set.name(), keys);
            }
        }
        for section in [&mut self.rules, &mut self.elements] {
            mem::replace(section, Section::new()).move_to(&mut batch, &mut owners);
        }
        (batch, owners)
    }
}

/// Returns the transaction that deletes unused objects.
pub(super) fn deletion<'a>(language: Language, unused: impl IntoIterator<Item = &'a Unused>) -> Batch {
    let (family, mut batch) = (language.table_family(), Batch::default());
    let (mut elements, mut others) = (Vec::new(), Vec::new());
    for one in unused {
        match one {
            Unused::Element(id) => elements.push(id),
            Unused::Chain(_) | Unused::Set(_) => others.push(one),
        }
    }
    for group in elements.chunk_by(|a, b| a.set == b.set) {
        if let Some(first) = group.first() {
            let keys = group.iter().map(|id| id.key.as_slice());
            batch.delete_elements(family, TABLE, &first.set.name(), keys);
        }
    }
    for one in others {
        match one {
            Unused::Element(_) => {}
            Unused::Chain(chain) => batch.delete_chain(family, TABLE, chain),
            Unused::Set(set) => batch.delete_set(family, TABLE, &set.name()),
        }
    }
    batch
}

/// Adds a map of endpoints that does not exist yet.
pub(super) fn endpoint_map(steps: &mut Steps, number: u32, language: Language) {
    let set = Set::Endpoints(number);
    let definition = definition(&set, language);
    steps.sets.push((None, set, definition));
}
