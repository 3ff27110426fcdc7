//! Tables, chains and rules of nf_tables, which iptables-nft uses too: listed, and removed in one step. What is made is a
//! table that keeps connections translated.

use std::{fs, io, ops::Range, path::Path};

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{setsockopt, sockopt::SndBufForce};

use super::{
    CallError,
    netlink::{
        Attributes, Messages, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, NetlinkSocket, Refused, text,
    },
};

const SUBSYSTEM: u16 = 10;
const NEWTABLE: u16 = SUBSYSTEM << 8;
const GETTABLE: u16 = SUBSYSTEM << 8 | 1;
const DELTABLE: u16 = SUBSYSTEM << 8 | 2;
const NEWCHAIN: u16 = SUBSYSTEM << 8 | 3;
const GETCHAIN: u16 = SUBSYSTEM << 8 | 4;
const DELCHAIN: u16 = SUBSYSTEM << 8 | 5;
const NEWRULE: u16 = SUBSYSTEM << 8 | 6;
const GETRULE: u16 = SUBSYSTEM << 8 | 7;
const DELRULE: u16 = SUBSYSTEM << 8 | 8;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_USERDATA: u16 = 7;
const LIST_MEMBER: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const IMMEDIATE_DATA: u16 = 2;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
const TARGET_NAME: u16 = 1;
const MATCH_NAME: u16 = 1;
const MATCH_INFO: u16 = 3;
const CT_REGISTER: u16 = 1;
const CT_KEY: u16 = 2;
const COMPARE_REGISTER: u16 = 1;
const COMPARE_OPERATION: u16 = 2;
const COMPARE_DATA: u16 = 3;
const DATA_VALUE: u16 = 1;
const USERDATA_COMMENT: u8 = 0;

const POSTROUTING: u32 = 4;
/// Where source addresses are translated.
const PRIORITY: u32 = 100;
const REGISTER: u32 = 1;
const CT_DIRECTION: u32 = 1;
const EQUAL: u32 = 0;
const ORIGINAL: u8 = 0;

/// `NF_DROP`, as a verdict.
const VERDICT_DROP: [u8; 4] = 0_u32.to_be_bytes();
const POLICY_DROP: [u8; 4] = 0_u32.to_be_bytes();

/// The address family of a table.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum TableFamily {
    Ipv4,
    Ipv6,
}

impl TableFamily {
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    /// As nft writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "ip",
            Self::Ipv6 => "ip6",
        }
    }

    const fn number(self) -> u8 {
        match self {
            Self::Ipv4 => 2,
            Self::Ipv6 => 10,
        }
    }

    /// `nfgenmsg`: family, version, resource.
    const fn header(self) -> [u8; 4] {
        [self.number(), 0, 0, 0]
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Chain {
    pub table: String,
    pub name: String,
    /// The kernel calls it: it is not only jumped to.
    pub base: bool,
    /// What reaches its end is dropped.
    pub drops: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    pub handle: u64,
    /// Of the match `comment` or of the rule itself.
    pub comment: Option<String>,
    /// The chains that it jumps or goes to; those in maps are not known.
    pub targets: Vec<String>,
    /// It drops or rejects packets.
    pub drops: bool,
}

/// What is done in one step: all of it, or nothing.
#[derive(Debug)]
pub struct Batch(Messages);

impl Default for Batch {
    fn default() -> Self {
        let mut messages = Messages::default();
        messages.begin(BATCH_BEGIN, 0, &batch_header());
        Self(messages)
    }
}

fn batch_header() -> [u8; 4] {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    [0, 0, high, low]
}

impl Batch {
    /// Place of the message that comes next, as [`Refused::message`] names it.
    pub fn next(&self) -> u32 {
        self.0.count()
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

    /// Makes a table that does nothing with any packet, but has the kernel go on translating the connections that it
    /// knows: it does so only while there is a chain of type nat, of any hook, and a rule that asks conntrack. The table
    /// must not be there, or be deleted before in this batch.
    ///
    /// Answers with the places of its messages. A kernel that cannot make it refuses the first of them that it knows
    /// nothing of, with ENOENT, where it has no chains of type nat (nft_chain_nat) or no expression ct (nft_ct).
    pub fn make_holder(
        &mut self,
        family: TableFamily,
        table: &str,
        chain: &str,
        comment: &str,
    ) -> Range<u32> {
        self.make_holder_of(family, table, (chain, "nat"), comment)
    }

    fn make_holder_of(
        &mut self,
        family: TableFamily,
        table: &str,
        (chain, chain_type): (&str, &str),
        comment: &str,
    ) -> Range<u32> {
        let first = self.next();
        let header = family.header();
        self.0.begin(NEWTABLE, NLM_F_CREATE, &header).text(TABLE_NAME, table);
        self.0
            .begin(NEWCHAIN, NLM_F_CREATE, &header)
            .text(CHAIN_TABLE, table)
            .text(CHAIN_NAME, chain)
            .nested(CHAIN_HOOK, |hook| {
                hook.attribute(HOOK_NUMBER, &POSTROUTING.to_be_bytes())
                    .attribute(HOOK_PRIORITY, &PRIORITY.to_be_bytes());
            })
            .text(CHAIN_TYPE, chain_type);
        self.0
            .begin(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, &header)
            .text(RULE_TABLE, table)
            .text(RULE_CHAIN, chain)
            .nested(RULE_EXPRESSIONS, |list| {
                expression(list, "ct", |ct| {
                    ct.attribute(CT_REGISTER, &REGISTER.to_be_bytes())
                        .attribute(CT_KEY, &CT_DIRECTION.to_be_bytes());
                });
                expression(list, "cmp", |compare| {
                    compare
                        .attribute(COMPARE_REGISTER, &REGISTER.to_be_bytes())
                        .attribute(COMPARE_OPERATION, &EQUAL.to_be_bytes())
                        .nested(COMPARE_DATA, |data| {
                            data.attribute(DATA_VALUE, &[ORIGINAL]);
                        });
                });
            })
            .attribute(RULE_USERDATA, &user_data(comment));
        first..self.next()
    }
}

fn expression(list: &mut Messages, name: &str, fill: impl FnOnce(&mut Messages)) {
    list.nested(LIST_MEMBER, |expression| {
        expression.text(EXPRESSION_NAME, name).nested(EXPRESSION_DATA, fill);
    });
}

/// As nft writes a comment. It has room for 254 bytes.
fn user_data(comment: &str) -> Vec<u8> {
    let text = &comment.as_bytes()[..comment.len().min(254)];
    let mut bytes = vec![USERDATA_COMMENT, text.len() as u8 + 1];
    bytes.extend(text);
    bytes.push(0);
    bytes
}

/// A connection to nf_tables of this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct NfTables(NetlinkSocket);

impl NfTables {
    /// `None`: the kernel has no nf_tables, or its module is not loaded: then nothing is in it.
    pub fn open() -> Result<Option<Self>, CallError> {
        if !is_loaded() {
            return Ok(None);
        }
        Self::load()
    }

    /// The first use has the kernel load what it has as modules. `None`: it has no netfilter netlink.
    pub fn load() -> Result<Option<Self>, CallError> {
        match NetlinkSocket::open(NETLINK_NETFILTER) {
            Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(None),
            connection => connection
                .map(|kernel| Some(Self(kernel)))
                .map_err(CallError::of("socket(NETLINK_NETFILTER)")),
        }
    }

    /// None where the kernel has no nf_tables.
    pub fn tables(&self, family: TableFamily) -> Result<Vec<String>, CallError> {
        let mut request = Messages::default();
        request.begin(GETTABLE, NLM_F_DUMP, &family.header());
        let parse = |_, body: &[u8]| Some(of_family(family, body)?.text(TABLE_NAME)?.to_owned());
        match self.0.dump(&request, parse) {
            // What nfnetlink says of a subsystem that is not there.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                Ok(Vec::new())
            }
            tables => tables.map_err(CallError::of("netlink NFT_MSG_GETTABLE")),
        }
    }

    /// Of every table.
    pub fn chains(&self, family: TableFamily) -> Result<Vec<Chain>, CallError> {
        let mut request = Messages::default();
        request.begin(GETCHAIN, NLM_F_DUMP, &family.header());
        let parse = |_, body: &[u8]| chain(of_family(family, body)?);
        self.0.dump(&request, parse).map_err(CallError::of("netlink NFT_MSG_GETCHAIN"))
    }

    /// Takes no time, however many chains there are.
    pub fn has_chain(&self, family: TableFamily, table: &str, chain: &str) -> Result<bool, CallError> {
        let mut request = Messages::default();
        request.begin(GETCHAIN, NLM_F_ACK, &family.header()).text(CHAIN_TABLE, table).text(CHAIN_NAME, chain);
        match self.0.request(&request, |_, _| ()) {
            // What nfnetlink says of a subsystem that is not there.
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
        match self.0.dump(&request, parse) {
            // Gone since it was listed.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Vec::new()),
            rules => rules.map_err(CallError::of("netlink NFT_MSG_GETRULE")),
        }
    }

    /// Does all of it, or, if anything is refused, nothing.
    pub fn commit(&self, batch: Batch) -> Result<Vec<Refused>, CallError> {
        let mut messages = batch.0;
        messages.begin(BATCH_END, 0, &batch_header());
        let length = messages.bytes().len();
        self.0
            .send_at_once(&messages, |socket| make_room(socket, length))
            .map_err(CallError::of("netlink batch of nf_tables"))
    }
}

/// A request to the kernel would load the module. If it is unknown whether it is built in, it counts as built in.
fn is_loaded() -> bool {
    let sockets = fs::read_to_string("/proc/thread-self/net/netlink");
    if sockets.is_ok_and(|sockets| !has_netfilter(&sockets)) {
        return false;
    }
    if Path::new("/sys/module/nf_tables").exists() {
        return true;
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let built_in = fs::read_to_string(format!("/lib/modules/{}/modules.builtin", release.trim()));
    built_in.map_or(true, |modules| modules.lines().any(|module| module.ends_with("/nf_tables.ko")))
}

/// `sockets`: the kernel's list of netlink sockets, its own ones among them, with the protocol in the second column.
fn has_netfilter(sockets: &str) -> bool {
    let protocol = NETLINK_NETFILTER.to_string();
    sockets.lines().any(|socket| socket.split_whitespace().nth(1) == Some(protocol.as_str()))
}

/// A batch is one message of the socket, however long it is.
fn make_room(socket: &Socket, length: usize) -> io::Result<()> {
    const LEAST: usize = 256 * 1024;
    Ok(setsockopt(socket, SndBufForce, &(length * 2).max(LEAST))?)
}

/// Attributes of an answer about this family.
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

fn rule(rule: Attributes<'_>) -> Option<Rule> {
    let handle = u64::from_be_bytes(*rule.get(RULE_HANDLE)?.first_chunk()?);
    let mut comment = rule.get(RULE_USERDATA).and_then(comment_in);
    let (mut targets, mut drops) = (Vec::new(), false);
    for (_, expression) in rule.nested(RULE_EXPRESSIONS).into_iter().flatten() {
        let expression = Attributes(expression);
        let Some(data) = expression.nested(EXPRESSION_DATA) else { continue };
        match expression.text(EXPRESSION_NAME) {
            Some("immediate") => {
                let verdict = data.nested(IMMEDIATE_DATA).and_then(|data| data.nested(DATA_VERDICT));
                drops |= verdict.and_then(|verdict| verdict.get(VERDICT_CODE)) == Some(&VERDICT_DROP);
                targets.extend(verdict.and_then(|verdict| verdict.text(VERDICT_CHAIN)).map(str::to_owned));
            }
            Some("match") if data.text(MATCH_NAME) == Some("comment") => {
                comment = data.text(MATCH_INFO).map(str::to_owned).or(comment);
            }
            Some("reject") => drops = true,
            Some("target") => drops |= matches!(data.text(TARGET_NAME), Some("DROP" | "REJECT")),
            Some(_) | None => {}
        }
    }
    Some(Rule { handle, comment, targets, drops })
}

/// User data is a list of type, length and value, a byte each for the first two.
fn comment_in(mut bytes: &[u8]) -> Option<String> {
    loop {
        let [kind, length, rest @ ..] = bytes else { return None };
        let (value, after) = rest.split_at_checked(usize::from(*length))?;
        if *kind == USERDATA_COMMENT {
            return text(value).map(str::to_owned);
        }
        bytes = after;
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn netfilter_is_found_among_the_kernels_sockets() {
        let none = "sk               Eth Pid        Groups   Rmem\n\
                    00000000d2a1c8f1 0   12         00000551 0\n00000000a75c2d1e 15  0          00000000 0\n";
        assert!(!has_netfilter(none));
        assert!(has_netfilter(&format!("{none}000000003c5e5b0f 12  0          00000000 0\n")));
    }

    #[test]
    fn a_rule_tells_where_it_leads_and_whether_it_drops() {
        let read = |fill: &dyn Fn(&mut Messages)| {
            let mut message = Messages::default();
            message
                .begin(NEWRULE, 0, &[])
                .attribute(RULE_HANDLE, &7_u64.to_be_bytes())
                .nested(RULE_EXPRESSIONS, |list| fill(list))
                .attribute(RULE_USERDATA, &user_data("mine"));
            let rule = rule(Attributes(&message.bytes()[16..])).unwrap();
            assert_eq!((rule.handle, rule.comment.as_deref()), (7, Some("mine")));
            (rule.targets, rule.drops)
        };
        let verdict = |list: &mut Messages, code: i32, chain: Option<&str>| {
            expression(list, "immediate", |data| {
                data.nested(IMMEDIATE_DATA, |data| {
                    data.nested(DATA_VERDICT, |verdict| {
                        verdict.attribute(VERDICT_CODE, &code.to_be_bytes());
                        chain.map(|chain| verdict.text(VERDICT_CHAIN, chain).count());
                    });
                });
            });
        };
        assert_eq!(read(&|list| verdict(list, libc::NF_DROP, None)), (vec![], true));
        assert_eq!(read(&|list| verdict(list, libc::NF_ACCEPT, None)), (vec![], false));
        assert_eq!(read(&|list| verdict(list, -3, Some("MINE"))), (vec!["MINE".to_owned()], false));
        assert_eq!(read(&|list| expression(list, "reject", |_| ())), (vec![], true));
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

    /// Of a network namespace that ends with the test, as its thread does. `None`: says that the test is skipped.
    fn of_own_namespace() -> Option<NfTables> {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let nftables = NfTables::load().unwrap();
        if nftables.is_none() {
            println!("skipped: the kernel has no netfilter netlink (CONFIG_NETFILTER_NETLINK)");
        }
        nftables
    }

    /// As one without chains of type nat.
    #[test]
    #[ignore = "needs root"]
    fn as_root_a_kernel_that_can_make_no_holder_says_enoent() {
        let Some(nftables) = of_own_namespace() else { return };
        for family in TableFamily::ALL {
            let mut batch = Batch::default();
            let messages = batch.make_holder_of(family, "held", ("chain", "unheard-of"), "why");
            assert_eq!(messages, 1..4);
            // The rule's chain is not there.
            let refused = [2, 3].map(|message| Refused { message, errno: libc::ENOENT });
            assert_eq!(nftables.commit(batch).unwrap(), refused);
            assert_eq!(nftables.tables(family).unwrap(), [""; 0]);
        }
    }
}
