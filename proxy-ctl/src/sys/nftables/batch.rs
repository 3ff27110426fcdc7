//! Changes of nf_tables that are made in one step.

use std::ops::Range;

use super::{
    TableFamily,
    attributes::*,
    expressions::{Comparison, Conntrack, Expression, ORIGINAL, Register},
    sets::{ElementData, SetDefinition, write_element, write_key},
    user_data,
};
use crate::sys::net::netlink::{Messages, NLM_F_APPEND, NLM_F_CREATE};

/// The bytes of elements that are put into one message. An attribute must be shorter than 64 KiB.
const MOST_ELEMENTS: usize = 48 << 10;

/// The point at which packets meet a chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NetfilterHook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

impl NetfilterHook {
    const fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
            Self::Postrouting => 4,
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ChainType {
    Filter,
    Nat,
}

impl ChainType {
    const fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
        }
    }
}

/// The hook and the priority at which the kernel calls a chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BaseChain {
    pub kind: ChainType,
    pub hook: NetfilterHook,
    pub priority: i32,
}

/// The point at which source addresses are translated.
const HOLDER: BaseChain = BaseChain { kind: ChainType::Nat, hook: NetfilterHook::Postrouting, priority: 100 };

/// A sequence of changes of which the kernel makes all or none.
#[derive(Debug)]
pub struct Batch(pub(super) Messages);

impl Default for Batch {
    fn default() -> Self {
        let mut messages = Messages::default();
        messages.begin(BATCH_BEGIN, 0, &batch_header());
        Self(messages)
    }
}

pub(super) fn batch_header() -> [u8; 4] {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    [0, 0, high, low]
}

impl Batch {
    /// Returns a batch without its first message, for [`Self::append`].
    pub fn part() -> Self {
        Self(Messages::default())
    }

    /// Adds the changes of `part` behind those of this batch.
    pub fn append(&mut self, part: Self) {
        self.0.append(part.0);
    }

    /// Returns the index of the next message, as
    /// [`Refused::message`](super::super::net::netlink::Refused) counts them.
    pub fn next(&self) -> u32 {
        self.0.count()
    }

    /// Returns true if the batch changes nothing.
    pub fn is_empty(&self) -> bool {
        self.next() == 1
    }

    pub fn delete_rule(&mut self, family: TableFamily, table: &str, chain: &str, handle: u64) {
        self.0
            .begin(DELRULE, 0, &family.header())
            .text(RULE_TABLE, table)
            .text(RULE_CHAIN, chain)
            .attribute(RULE_HANDLE, &handle.to_be_bytes());
    }

    /// Removes every rule of a chain.
    pub fn flush_chain(&mut self, family: TableFamily, table: &str, chain: &str) {
        self.0.begin(DELRULE, 0, &family.header()).text(RULE_TABLE, table).text(RULE_CHAIN, chain);
    }

    pub fn delete_chain(&mut self, family: TableFamily, table: &str, chain: &str) {
        self.0.begin(DELCHAIN, 0, &family.header()).text(CHAIN_TABLE, table).text(CHAIN_NAME, chain);
    }

    /// Deletes a table with everything in it.
    pub fn delete_table(&mut self, family: TableFamily, table: &str) {
        self.0.begin(DELTABLE, 0, &family.header()).text(TABLE_NAME, table);
    }

    /// Adds a table unless it exists. Kernels before 5.10 do not keep the comment.
    pub fn add_table(&mut self, family: TableFamily, table: &str, comment: &str) {
        let mut noted = Vec::new();
        user_data::add_comment(&mut noted, comment);
        self.0
            .begin(NEWTABLE, NLM_F_CREATE, &family.header())
            .text(TABLE_NAME, table)
            .attribute(TABLE_USERDATA, &noted);
    }

    /// Adds a chain unless it exists. With `base`, the kernel calls the chain. Without it, rules
    /// jump to it.
    pub fn add_chain(&mut self, family: TableFamily, table: &str, chain: &str, base: Option<BaseChain>) {
        self.add_chain_of(family, table, chain, base.map(|base| (base, base.kind.name())));
    }

    fn add_chain_of(
        &mut self,
        family: TableFamily,
        table: &str,
        chain: &str,
        base: Option<(BaseChain, &str)>,
    ) {
        let message = self.0.begin(NEWCHAIN, NLM_F_CREATE, &family.header());
        message.text(CHAIN_TABLE, table).text(CHAIN_NAME, chain);
        if let Some((BaseChain { hook, priority, .. }, kind)) = base {
            message
                .nested(CHAIN_HOOK, |nested| {
                    nested
                        .attribute(HOOK_NUMBER, &hook.number().to_be_bytes())
                        .attribute(HOOK_PRIORITY, &priority.to_be_bytes());
                })
                .text(CHAIN_TYPE, kind);
        }
    }

    /// Adds a rule behind the chain's other rules.
    pub fn add_rule(
        &mut self,
        family: TableFamily,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        user_data: &[u8],
    ) {
        self.0
            .begin(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, &family.header())
            .text(RULE_TABLE, table)
            .text(RULE_CHAIN, chain)
            .nested(RULE_EXPRESSIONS, |list| {
                expressions.iter().for_each(|expression| expression.write(list));
            })
            .attribute(RULE_USERDATA, user_data);
    }

    /// Adds a set unless it exists.
    pub fn add_set(&mut self, family: TableFamily, table: &str, set: &str, definition: &SetDefinition) {
        let id = self.next();
        self.0.begin(NEWSET, NLM_F_CREATE, &family.header()).text(SET_TABLE, table).text(SET_NAME, set);
        definition.write(&mut self.0, id);
    }

    /// Deletes a set, which no rule may use any more.
    pub fn delete_set(&mut self, family: TableFamily, table: &str, set: &str) {
        self.0.begin(DELSET, 0, &family.header()).text(SET_TABLE, table).text(SET_NAME, set);
    }

    pub fn add_elements<'a>(
        &mut self,
        family: TableFamily,
        table: &str,
        set: &str,
        elements: impl IntoIterator<Item = (&'a [u8], &'a ElementData, &'a [u8])>,
    ) {
        let write = |list: &mut Messages, (key, data, noted): (&[u8], &ElementData, &[u8])| {
            write_element(list, key, data, noted);
        };
        self.elements((NEWSETELEM, NLM_F_CREATE), (family, table, set), elements, write);
    }

    /// Deletes elements, all of which must exist.
    pub fn delete_elements<'a>(
        &mut self,
        family: TableFamily,
        table: &str,
        set: &str,
        keys: impl IntoIterator<Item = &'a [u8]>,
    ) {
        self.elements((DELSETELEM, 0), (family, table, set), keys, write_key);
    }

    fn elements<T>(
        &mut self,
        (kind, flags): (u16, u16),
        (family, table, set): (TableFamily, &str, &str),
        elements: impl IntoIterator<Item = T>,
        write: impl Fn(&mut Messages, T),
    ) {
        let mut elements = elements.into_iter().peekable();
        while elements.peek().is_some() {
            self.0.begin(kind, flags, &family.header()).text(ELEMENTS_TABLE, table).text(ELEMENTS_SET, set);
            self.0.nested(ELEMENTS_LIST, |list| {
                let start = list.bytes().len();
                while list.bytes().len() - start < MOST_ELEMENTS
                    && let Some(element) = elements.next()
                {
                    write(list, element);
                }
            });
        }
    }

    /// Makes a table that does nothing with any packet, but makes the kernel keep translating the
    /// connections that it knows. The kernel does so only while there is a chain of type nat, at
    /// any hook, and a rule that uses conntrack. The table must not exist, or must be deleted
    /// earlier in this batch.
    ///
    /// Returns the indices of its messages. A kernel that cannot make the table refuses the first
    /// message that it does not understand with ENOENT. That happens if it has no chains of type
    /// nat (nft_chain_nat) or no expression ct (nft_ct).
    pub fn make_holder(
        &mut self,
        family: TableFamily,
        table: &str,
        chain: &str,
        comment: &str,
    ) -> Range<u32> {
        self.make_holder_of(family, table, (chain, HOLDER.kind.name()), comment)
    }

    pub(super) fn make_holder_of(
        &mut self,
        family: TableFamily,
        table: &str,
        (chain, kind): (&str, &str),
        comment: &str,
    ) -> Range<u32> {
        let first = self.next();
        self.0.begin(NEWTABLE, NLM_F_CREATE, &family.header()).text(TABLE_NAME, table);
        self.add_chain_of(family, table, chain, Some((HOLDER, kind)));
        let mut noted = Vec::new();
        user_data::add_comment(&mut noted, comment);
        let register = Register::new(0);
        let asks_conntrack = [
            Expression::Conntrack { key: Conntrack::Direction, to: register },
            Expression::Compare { register, comparison: Comparison::Equal, value: vec![ORIGINAL] },
        ];
        self.add_rule(family, table, chain, &asks_conntrack, &noted);
        first..self.next()
    }
}
