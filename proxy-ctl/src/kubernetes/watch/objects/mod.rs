//! The objects of one kind that the receiver knows. Lists and changes go in, updates come out. The
//! only side effect is the log.

use std::{
    collections::{HashMap, HashSet},
    mem,
};

use rustc_hash::FxHashMap;
use tracing::warn;

use super::{parsed::ParsedObject, resource::Watched};
use crate::{
    kubernetes::{
        convert::invalid::InvalidField,
        failure::Failure,
        schema::ApiObject as _,
        wire::{Meta, Raw},
    },
    model::{NameInterner, Update, objects::ObjectName},
};

/// The result of parsing an object.
enum Content<P> {
    Served(P),
    /// The object belongs to another proxy, or has nothing that could be served.
    NotServed,
    /// The object cannot be parsed. Its last valid version stays in force.
    Unreadable,
}

/// An object of a list or of a watch, after parsing.
pub(crate) struct Received<P> {
    name: ObjectName,
    pub(crate) resource_version: String,
    content: Content<P>,
    invalid: Vec<InvalidField>,
}

impl<P: ParsedObject> Received<P> {
    /// Parses an object. Fails only if the object's name cannot be read.
    pub(crate) fn parse<W: Watched<Parsed = P>>(object: &Raw) -> Result<Self, Failure> {
        let (meta, content, invalid) = match object.object::<W::Object>() {
            Ok(object) => {
                let (parsed, invalid) = W::CONVERT(&object);
                let content = parsed.map_or(Content::NotServed, Content::Served);
                (Meta::take(object.into_metadata()), content, invalid)
            }
            Err(error) => {
                let meta = object.meta()?;
                let problem =
                    format!("cannot be parsed: {error}; the last valid version, if any, stays in force");
                let object = format!("{} {}", W::KIND.kind, meta.name());
                let field = InvalidField { object, field: "(object)".to_owned(), problem };
                (meta, Content::Unreadable, vec![field])
            }
        };
        Ok(Self { name: meta.name(), resource_version: meta.resource_version, content, invalid })
    }
}

/// A list that is not complete yet. It holds the parsed objects only, so that the rest of each
/// object does not take memory.
pub(crate) struct Listing<P> {
    parsed: Vec<P>,
    unreadable: Vec<ObjectName>,
    invalid: Vec<(ObjectName, Vec<InvalidField>)>,
    /// The number of objects received, including those that are not served.
    pub(crate) objects: usize,
    /// The index of each object in `parsed`. None until the first object is removed.
    indexes: Option<FxHashMap<ObjectName, usize>>,
    names: NameInterner,
}

impl<P> Default for Listing<P> {
    fn default() -> Self {
        Self {
            parsed: Vec::new(),
            unreadable: Vec::new(),
            invalid: Vec::new(),
            objects: 0,
            indexes: None,
            names: NameInterner::default(),
        }
    }
}

impl<P: ParsedObject> Listing<P> {
    pub(crate) fn add(&mut self, received: Received<P>) {
        let Received { name, content, invalid, .. } = received;
        self.objects += 1;
        if !invalid.is_empty() {
            self.invalid.push((name.clone(), invalid));
        }
        match content {
            Content::Served(mut parsed) => {
                parsed.intern(&mut self.names);
                if let Some(indexes) = &mut self.indexes {
                    indexes.insert(parsed.name(), self.parsed.len());
                }
                self.parsed.push(parsed);
            }
            Content::NotServed => {}
            Content::Unreadable => self.unreadable.push(name),
        }
    }

    /// Removes an object that was deleted, or that comes again, before the list was complete.
    pub(crate) fn remove(&mut self, name: &ObjectName) {
        self.objects = self.objects.saturating_sub(1);
        let parsed = &mut self.parsed;
        let indexes = self
            .indexes
            .get_or_insert_with(|| parsed.iter().zip(0..).map(|(one, index)| (one.name(), index)).collect());
        if let Some(index) = indexes.remove(name) {
            parsed.swap_remove(index);
            if let Some(moved) = parsed.get(index) {
                indexes.insert(moved.name(), index);
            }
        }
        self.unreadable.retain(|unreadable| unreadable != name);
        self.invalid.retain(|(invalid, _)| invalid != name);
    }

    pub(super) fn exchange(&mut self, received: Received<P>) {
        self.remove(&received.name);
        self.add(received);
    }
}

/// The objects that the receiver of the updates has, and the invalid fields that were logged.
pub(crate) struct Tracked<P> {
    served: HashSet<ObjectName>,
    /// The logged fields of each object that is invalid now.
    invalid: HashMap<ObjectName, Vec<InvalidField>>,
    /// The object that was sent last, for kinds with a single object.
    last: Option<P>,
}

impl<P> Default for Tracked<P> {
    fn default() -> Self {
        Self { served: HashSet::new(), invalid: HashMap::new(), last: None }
    }
}

impl<P: ParsedObject> Tracked<P> {
    /// Returns the updates for a complete list, and how many invalid fields are new.
    pub(crate) fn replace(&mut self, listing: Listing<P>) -> (Vec<Update>, usize) {
        let Listing { parsed, mut unreadable, invalid, .. } = listing;
        let mut logged = mem::take(&mut self.invalid);
        let mut new = 0;
        for (name, fields) in invalid {
            self.invalid.extend(logged.remove_entry(&name));
            new += self.log_invalid(name, fields);
        }
        unreadable.retain(|name| self.served.contains(name));
        let keeps = !unreadable.is_empty();
        let now = parsed.iter().map(P::name).chain(unreadable).collect();
        let before = mem::replace(&mut self.served, now);
        if !keeps {
            if P::SINGLE {
                self.last = parsed.last().cloned();
            }
            return (vec![P::REPLACE(parsed)], new);
        }
        // A replacement would remove the last valid version of the unreadable objects. New objects
        // are applied before others are deleted: a new object may replace a deleted one, and the
        // receiver may write at any moment in between.
        let gone = before.into_iter().filter(|name| !self.served.contains(name)).map(P::DELETE);
        (parsed.into_iter().map(P::APPLY).chain(gone).collect(), new)
    }

    /// Returns the update for an object that was added or has changed, and how many invalid fields
    /// are new.
    pub(crate) fn change(&mut self, received: Received<P>) -> (Option<Update>, usize) {
        let Received { name, content, invalid, .. } = received;
        let new = self.log_invalid(name.clone(), invalid);
        let parsed = match content {
            Content::Served(parsed) => Some(parsed),
            Content::NotServed => None,
            Content::Unreadable => return (None, new),
        };
        if P::SINGLE && self.last == parsed {
            return (None, new);
        }
        if P::SINGLE {
            self.last.clone_from(&parsed);
        }
        let update = match parsed {
            Some(parsed) => {
                self.served.insert(parsed.name());
                P::APPLY(parsed)
            }
            // The object may have been served until now.
            None => {
                self.served.remove(&name);
                P::DELETE(name)
            }
        };
        (Some(update), new)
    }

    pub(crate) fn delete(&mut self, name: ObjectName) -> Update {
        self.invalid.remove(&name);
        self.served.remove(&name);
        self.last = None;
        P::DELETE(name)
    }

    /// Logs the invalid fields of an object, unless the same were logged before. Returns how many
    /// were logged.
    fn log_invalid(&mut self, name: ObjectName, invalid: Vec<InvalidField>) -> usize {
        if invalid.is_empty() && self.invalid.is_empty() {
            return 0;
        }
        let is_known = self.invalid.remove(&name).unwrap_or_default() == invalid;
        let new = if is_known { 0 } else { invalid.len() };
        for InvalidField { object, field, problem } in invalid.iter().take(new) {
            warn!(object, field, "{problem}");
        }
        if !invalid.is_empty() {
            self.invalid.insert(name, invalid);
        }
        new
    }
}

#[cfg(test)]
mod tests;
