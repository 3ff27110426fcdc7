//! Reads what nf_tables contains.

use super::{
    NfTables, TableFamily,
    attributes::*,
    sets::{Element, Set, SetShape, VERDICT, read_element},
    user_data,
};
use crate::sys::{
    CallError,
    net::netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP},
};

const POLICY_DROP: [u8; 4] = 0_u32.to_be_bytes();
/// `NF_DROP` as a verdict.
const VERDICT_DROP: [u8; 4] = 0_u32.to_be_bytes();

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Table {
    pub name: String,
    /// The comment, which kernels before 5.10 do not keep.
    pub comment: Option<String>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Chain {
    pub table: String,
    pub name: String,
    /// True if the kernel calls the chain itself. Other chains are only jumped to.
    pub base: bool,
    /// True if packets that reach its end are dropped.
    pub drops: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    pub handle: u64,
    /// The comment of the match `comment` or of the rule itself.
    pub comment: Option<String>,
    /// The chains that the rule jumps or goes to. Targets in maps are not included.
    pub targets: Vec<String>,
    /// True if the rule drops or rejects packets.
    pub drops: bool,
}

/// A rule with the user data that its writer has added.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NotedRule {
    pub chain: String,
    pub user_data: Vec<u8>,
    /// The first random number and how many there are, if the rule draws one.
    pub random: Option<(u32, u32)>,
}

impl NfTables {
    /// Returns the names of all tables. The list is empty if the kernel has no nf_tables.
    pub fn tables(&self, family: TableFamily) -> Result<Vec<String>, CallError> {
        Ok(self.commented_tables(family)?.into_iter().map(|table| table.name).collect())
    }

    /// Returns all tables. The list is empty if the kernel has no nf_tables.
    pub fn commented_tables(&self, family: TableFamily) -> Result<Vec<Table>, CallError> {
        let mut request = Messages::default();
        request.begin(GETTABLE, NLM_F_DUMP, &family.header());
        let parse = |_, body: &[u8]| {
            let table = of_family(family, body)?;
            let comment = table.get(TABLE_USERDATA).and_then(user_data::comment).map(str::to_owned);
            Some(Table { name: table.text(TABLE_NAME)?.to_owned(), comment })
        };
        match self.0.dump_of_part(&request, parse) {
            // nfnetlink returns these for a subsystem that does not exist.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                Ok(Vec::new())
            }
            tables => tables.map_err(CallError::of("netlink NFT_MSG_GETTABLE")),
        }
    }

    /// Returns the chains of every table.
    pub fn chains(&self, family: TableFamily) -> Result<Vec<Chain>, CallError> {
        let mut request = Messages::default();
        request.begin(GETCHAIN, NLM_F_DUMP, &family.header());
        let parse = |_, body: &[u8]| chain(of_family(family, body)?);
        self.0.dump_of_part(&request, parse).map_err(CallError::of("netlink NFT_MSG_GETCHAIN"))
    }

    /// Returns true if a chain exists. The time does not depend on the number of chains.
    pub fn has_chain(&self, family: TableFamily, table: &str, chain: &str) -> Result<bool, CallError> {
        let mut request = Messages::default();
        request.begin(GETCHAIN, NLM_F_ACK, &family.header()).text(CHAIN_TABLE, table).text(CHAIN_NAME, chain);
        match self.0.request(&request, |_, _| ()) {
            // nfnetlink returns the last two for a subsystem that does not exist.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP)) =>
            {
                Ok(false)
            }
            found => found.map(|()| true).map_err(CallError::of("netlink NFT_MSG_GETCHAIN")),
        }
    }

    pub fn rules(&self, family: TableFamily, table: &str, chain: &str) -> Result<Vec<Rule>, CallError> {
        let mut request = Messages::default();
        request.begin(GETRULE, NLM_F_DUMP, &family.header()).text(RULE_TABLE, table).text(RULE_CHAIN, chain);
        // Kernels before 4.12 list the rules of all chains.
        let is_asked_for = |rule: &Attributes<'_>| {
            rule.text(RULE_TABLE) == Some(table) && rule.text(RULE_CHAIN) == Some(chain)
        };
        let parse = |_, body: &[u8]| rule(of_family(family, body).filter(is_asked_for)?);
        or_gone(self.0.dump_of_part(&request, parse)).map_err(CallError::of("netlink NFT_MSG_GETRULE"))
    }

    /// Returns the rules of all chains of the table. Those of one chain are in their order.
    pub fn noted_rules(&self, family: TableFamily, table: &str) -> Result<Vec<NotedRule>, CallError> {
        let mut request = Messages::default();
        request.begin(GETRULE, NLM_F_DUMP, &family.header()).text(RULE_TABLE, table);
        let parse = |_, body: &[u8]| {
            let rule = of_family(family, body).filter(|rule| rule.text(RULE_TABLE) == Some(table))?;
            let user_data = rule.get(RULE_USERDATA).unwrap_or_default().to_vec();
            Some(NotedRule { chain: rule.text(RULE_CHAIN)?.to_owned(), user_data, random: random(rule) })
        };
        or_gone(self.0.dump_of_part(&request, parse)).map_err(CallError::of("netlink NFT_MSG_GETRULE"))
    }

    /// Returns the sets of a table that have a name of their own.
    pub fn sets(&self, family: TableFamily, table: &str) -> Result<Vec<Set>, CallError> {
        let mut request = Messages::default();
        request.begin(GETSET, NLM_F_DUMP, &family.header()).text(SET_TABLE, table);
        let parse = |_, body: &[u8]| {
            let set = of_family(family, body).filter(|set| set.text(SET_TABLE) == Some(table))?;
            let number = |kind| number(set.get(kind)?);
            let length = number(SET_DATA_LENGTH).unwrap_or(0);
            let shape = SetShape {
                flags: number(SET_FLAGS).unwrap_or(0),
                key_length: number(SET_KEY_LENGTH).unwrap_or(0),
                data_length: if number(SET_DATA_TYPE) == Some(VERDICT) { 0 } else { length },
            };
            Some(Set { name: set.text(SET_NAME)?.to_owned(), shape })
        };
        or_gone(self.0.dump_of_part(&request, parse)).map_err(CallError::of("netlink NFT_MSG_GETSET"))
    }

    /// Returns the elements that this module could make, in no particular order.
    pub fn elements(&self, family: TableFamily, table: &str, set: &str) -> Result<Vec<Element>, CallError> {
        let mut request = Messages::default();
        request
            .begin(GETSETELEM, NLM_F_DUMP, &family.header())
            .text(ELEMENTS_TABLE, table)
            .text(ELEMENTS_SET, set);
        let parse = |_, body: &[u8]| {
            let list = of_family(family, body)?.nested(ELEMENTS_LIST)?;
            Some(list.filter_map(|(_, element)| read_element(Attributes(element))).collect::<Vec<_>>())
        };
        let messages = or_gone(self.0.dump_of_part(&request, parse))
            .map_err(CallError::of("netlink NFT_MSG_GETSETELEM"))?;
        Ok(messages.into_iter().flatten().collect())
    }
}

/// Returns an empty list for an object that is gone since it was listed.
fn or_gone<T>(list: std::io::Result<Vec<T>>) -> std::io::Result<Vec<T>> {
    match list {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Vec::new()),
        list => list,
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.first_chunk()?))
}

/// Returns the attributes of an answer about this family.
fn of_family(family: TableFamily, body: &[u8]) -> Option<Attributes<'_>> {
    (body.first() == Some(&family.number())).then_some(Attributes(body.get(4..)?))
}

fn chain(chain: Attributes<'_>) -> Option<Chain> {
    Some(Chain {
        table: chain.text(CHAIN_TABLE)?.to_owned(),
        name: chain.text(CHAIN_NAME)?.to_owned(),
        base: chain.get(CHAIN_HOOK).is_some(),
        drops: chain.get(CHAIN_POLICY) == Some(&POLICY_DROP),
    })
}

/// Returns the names and contents of a rule's expressions.
fn expressions(rule: Attributes<'_>) -> impl Iterator<Item = (&str, Attributes<'_>)> {
    rule.nested(RULE_EXPRESSIONS).into_iter().flatten().filter_map(|(_, expression)| {
        let expression = Attributes(expression);
        Some((expression.text(EXPRESSION_NAME)?, expression.nested(EXPRESSION_DATA)?))
    })
}

fn random(rule: Attributes<'_>) -> Option<(u32, u32)> {
    let (_, numgen) = expressions(rule).find(|(name, _)| *name == "numgen")?;
    Some((number(numgen.get(NUMGEN_OFFSET)?)?, number(numgen.get(NUMGEN_MODULUS)?)?))
}

fn rule(rule: Attributes<'_>) -> Option<Rule> {
    let handle = u64::from_be_bytes(*rule.get(RULE_HANDLE)?.first_chunk()?);
    let mut comment = rule.get(RULE_USERDATA).and_then(user_data::comment).map(str::to_owned);
    let (mut targets, mut drops) = (Vec::new(), false);
    for (name, data) in expressions(rule) {
        match name {
            "immediate" => {
                let verdict = data.nested(IMMEDIATE_DATA).and_then(|data| data.nested(DATA_VERDICT));
                drops |= verdict.and_then(|verdict| verdict.get(VERDICT_CODE)) == Some(&VERDICT_DROP);
                targets.extend(verdict.and_then(|verdict| verdict.text(VERDICT_CHAIN)).map(str::to_owned));
            }
            "match" if data.text(MATCH_NAME) == Some("comment") => {
                comment = data.text(MATCH_INFO).map(str::to_owned).or(comment);
            }
            "reject" => drops = true,
            "target" => drops |= matches!(data.text(TARGET_NAME), Some("DROP" | "REJECT")),
            _ => {}
        }
    }
    Some(Rule { handle, comment, targets, drops })
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::{
        super::{
            Batch,
            expressions::{Expression, Verdict, expression},
        },
        *,
    };

    /// The kernel reports a list of rules as interrupted if anybody has committed something
    /// meanwhile.
    #[test]
    #[ignore = "needs root"]
    fn as_root_a_table_is_read_while_another_one_is_changed() {
        const RULES: usize = 20_000;
        const FAMILY: TableFamily = TableFamily::Ipv4;
        // The thread ends with the test, and its network namespace with it.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let kernel = NfTables::load().unwrap().unwrap();
        let mut batch = Batch::default();
        batch.add_table(FAMILY, "mine", "");
        batch.add_chain(FAMILY, "mine", "all", None);
        for _ in 0..RULES {
            batch.add_rule(FAMILY, "mine", "all", &[Expression::Verdict(Verdict::Accept)], &[]);
        }
        assert_eq!(kernel.commit(batch).unwrap(), []);
        let is_over = AtomicBool::new(false);
        let found: Vec<_> = thread::scope(|scope| {
            scope.spawn(|| {
                let kernel = NfTables::load().unwrap().unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    let mut batch = Batch::default();
                    batch.add_table(FAMILY, "other", "");
                    batch.delete_table(FAMILY, "other");
                    kernel.commit(batch).unwrap();
                }
            });
            let read = || kernel.noted_rules(FAMILY, "mine").map(|rules| rules.len());
            let found = (0..5).map(|_| read().map_err(|error| error.to_string())).collect();
            is_over.store(true, Ordering::Relaxed);
            found
        });
        assert_eq!(found, vec![Ok(RULES); 5]);
    }

    #[test]
    fn a_rule_tells_where_it_leads_and_whether_it_drops() {
        let read = |fill: &dyn Fn(&mut Messages)| {
            let mut message = Messages::default();
            let mut noted = Vec::new();
            user_data::add_comment(&mut noted, "mine");
            message
                .begin(NEWRULE, 0, &[])
                .attribute(RULE_HANDLE, &7_u64.to_be_bytes())
                .nested(RULE_EXPRESSIONS, |list| fill(list))
                .attribute(RULE_USERDATA, &noted);
            let rule = rule(Attributes(&message.bytes()[16..])).unwrap();
            assert_eq!((rule.handle, rule.comment.as_deref()), (7, Some("mine")));
            (rule.targets, rule.drops)
        };
        let verdict =
            |verdict: Verdict| move |list: &mut Messages| Expression::Verdict(verdict.clone()).write(list);
        assert_eq!(read(&verdict(Verdict::Drop)), (vec![], true));
        assert_eq!(read(&verdict(Verdict::Accept)), (vec![], false));
        assert_eq!(read(&verdict(Verdict::Jump("MINE".into()))), (vec!["MINE".to_owned()], false));
        assert_eq!(
            read(&|list| Expression::Reject { family: TableFamily::Ipv4 }.write(list)),
            (vec![], true)
        );
        let target = |name: &'static str| {
            move |list: &mut Messages| {
                expression(list, "target", |data| {
                    data.text(TARGET_NAME, name);
                });
            }
        };
        assert_eq!(read(&target("REJECT")), (vec![], true));
        assert_eq!(read(&target("MASQUERADE")), (vec![], false));
    }
}
