//! What is changed in one step.

use std::ops::Range;

use super::{
    TableFamily,
    attributes::*,
    expressions::{Comparison, Conntrack, Expression, ORIGINAL, Register},
    sets::{ElementData, SetDefinition, write_element, write_key},
    user_data,
};
use crate::sys::netlink::{Messages, NLM_F_APPEND, NLM_F_CREATE};

/// Elements that one message has room for, in bytes: attributes are shorter than 64 KiB.
const MOST_ELEMENTS: usize = 48 << 10;

/// Where packets meet a chain.
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

/// Where and when the kernel calls a chain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BaseChain {
    pub kind: ChainType,
    pub hook: NetfilterHook,
    pub priority: i32,
}

/// Where source addresses are translated.
const HOLDER: BaseChain = BaseChain { kind: ChainType::Nat, hook: NetfilterHook::Postrouting, priority: 100 };

/// What is done in one step: all of it, or nothing.
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
    /// Without a beginning, for [`Self::append`].
    pub fn part() -> Self {
        Self(Messages::default())
    }

    /// Does also what `part` does, after the rest.
    pub fn append(&mut self, part: Self) {
        self.0.append(part.0);
    }

    /// Place of the message that comes next, as
    /// [`Refused::message`](super::super::netlink::Refused) names it.
    pub fn next(&self) -> u32 {
        self.0.count()
    }

    /// Nothing is done.
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

    /// With everything in it.
    pub fn delete_table(&mut self, family: TableFamily, table: &str) {
        self.0.begin(DELTABLE, 0, &family.header()).text(TABLE_NAME, table);
    }

    /// Unless it is there. Kernels before 5.10 forget the comment.
    pub fn add_table(&mut self, family: TableFamily, table: &str, comment: &str) {
        let mut noted = Vec::new();
        user_data::add_comment(&mut noted, comment);
        self.0
            .begin(NEWTABLE, NLM_F_CREATE, &family.header())
            .text(TABLE_NAME, table)
            .attribute(TABLE_USERDATA, &noted);
    }

    /// Unless it is there. `base`: the kernel calls it; else it is jumped to.
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
                .nested(CHAIN_HOOK, |place| {
                    place
                        .attribute(HOOK_NUMBER, &hook.number().to_be_bytes())
                        .attribute(HOOK_PRIORITY, &priority.to_be_bytes());
                })
                .text(CHAIN_TYPE, kind);
        }
    }

    /// After the chain's other rules.
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

    /// Unless it is there.
    pub fn add_set(&mut self, family: TableFamily, table: &str, set: &str, definition: &SetDefinition) {
        let id = self.next();
        self.0.begin(NEWSET, NLM_F_CREATE, &family.header()).text(SET_TABLE, table).text(SET_NAME, set);
        definition.write(&mut self.0, id);
    }

    /// No rule may use it any more.
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

    /// All of them must be there.
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

    /// Makes a table that does nothing with any packet, but has the kernel go on translating the
    /// connections that it knows: it does so only while there is a chain of type nat, of any hook,
    /// and a rule that asks conntrack. The table must not be there, or be deleted before in this
    /// batch.
    ///
    /// Answers with the places of its messages. A kernel that cannot make it refuses the first of
    /// them that it knows nothing of, with ENOENT, where it has no chains of type nat
    /// (nft_chain_nat) or no expression ct (nft_ct).
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
