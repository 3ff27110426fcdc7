//! iptables: its tools, their output, and the backend that a node uses.
//!
//! This file reads chains of iptables-legacy by the kernel's interface from before nf_tables. It
//! never writes by it: that interface can only replace a whole table, and would undo what others
//! change at the same time. Only the tools write, because they share a lock.

use std::{
    fs, io,
    net::UdpSocket,
    os::fd::{AsRawFd, OwnedFd},
};

use super::{
    CallError,
    net::netlink::{half, text, word},
    nftables::TableFamily,
};

mod any_bytes;
mod backend;
pub mod saved;
mod tools;

pub use backend::{BackendError, ChosenBackend, choose};
pub use tools::{Backend, ToolError, Tools, program};

const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
const NAME: usize = 32;
/// The length of `ipt_getinfo`: name, valid hooks, 5 entry points, 5 underflows, number of rules,
/// their size.
const INFO: usize = NAME + 4 + 20 + 20 + 4 + 4;
const INFO_SIZE: usize = INFO - 4;
/// The offset of the rules in `ipt_get_entries`, behind name and size, rounded up to a multiple of
/// 8.
const ENTRIES: usize = NAME + 8;
/// The length of the header of `xt_entry_target`: size, name, revision.
const TARGET_HEADER: usize = 32;
/// The number of attempts to read a table, which may grow between the two calls.
const TRIES: usize = 8;

/// The differences between `ipt_entry` and `ip6t_entry`.
struct Layout {
    level: libc::c_int,
    /// The position of the offset of the target. The offset of the next rule follows it.
    target_offset: usize,
    tables: &'static str,
    any: &'static str,
    socket: &'static str,
}

fn layout(family: TableFamily) -> Layout {
    match family {
        TableFamily::Ipv4 => Layout {
            level: libc::SOL_IP,
            target_offset: 88,
            tables: "/proc/thread-self/net/ip_tables_names",
            any: "0.0.0.0:0",
            socket: "socket(AF_INET)",
        },
        TableFamily::Ipv6 => Layout {
            level: libc::SOL_IPV6,
            target_offset: 140,
            tables: "/proc/thread-self/net/ip6_tables_names",
            any: "[::]:0",
            socket: "socket(AF_INET6)",
        },
    }
}

/// Returns the tables that exist. Asking the kernel for another one would create it. The list is
/// empty if the kernel has no iptables-legacy.
pub fn tables(family: TableFamily) -> Result<Vec<String>, CallError> {
    match fs::read_to_string(layout(family).tables) {
        Ok(names) => Ok(names.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(CallError::new("read(ip_tables_names)", error)),
    }
}

/// A summary of a table that the kernel gives without its rules: their number, their size, and
/// where each built-in chain begins and ends. A change that alters none of that cannot be seen.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Outline(Vec<u8>);

/// Returns the outline of a table, in a time that does not depend on its length. Returns `None` if
/// the kernel does not have this family. Needs CAP_NET_ADMIN.
pub fn outline(family: TableFamily, table: &str) -> Result<Option<Outline>, CallError> {
    let Some(socket) = socket(family)? else { return Ok(None) };
    read_outline(&socket, family, table).map(Some)
}

/// Returns the names of the user-defined chains of `table`. Memory and time grow with the table:
/// 150 MB for 310,000 rules. Returns `None` if the kernel does not have this family. Needs
/// CAP_NET_ADMIN.
pub fn chains(family: TableFamily, table: &str) -> Result<Option<(Outline, Vec<String>)>, CallError> {
    let names = |entries: &[u8]| chain_names(entries, layout(family).target_offset);
    Ok(entries(family, table)?.map(|(outline, entries)| (outline, names(&entries[ENTRIES..]))))
}

/// Returns true if a rule of `table` has this comment, or `None` if the table has no such chain.
/// This costs as much as [`chains`]. Needs CAP_NET_ADMIN.
pub fn has_comment(
    family: TableFamily,
    table: &str,
    chain: &str,
    comment: &str,
) -> Result<Option<bool>, CallError> {
    let Some((_, entries)) = entries(family, table)? else { return Ok(None) };
    let entries = &entries[ENTRIES..];
    let is_there = chain_names(entries, layout(family).target_offset).iter().any(|name| name == chain);
    Ok(is_there.then(|| contains_comment(entries, comment)))
}

/// Returns the rules of `table` in the kernel's format, behind [`ENTRIES`] bytes.
fn entries(family: TableFamily, table: &str) -> Result<Option<(Outline, Vec<u8>)>, CallError> {
    let layout = layout(family);
    let Some(socket) = socket(family)? else { return Ok(None) };
    for _ in 0..TRIES {
        let outline = read_outline(&socket, family, table)?;
        let size = word(&outline.0, INFO_SIZE).unwrap_or(0);
        let mut entries = vec![0; ENTRIES + size as usize];
        named(&mut entries, table);
        entries[NAME..NAME + 4].copy_from_slice(&size.to_ne_bytes());
        match get(&socket, layout.level, GET_ENTRIES, &mut entries, "getsockopt(IPT_SO_GET_ENTRIES)") {
            Err(error) if error.errno() == libc::EAGAIN => {}
            done => return done.map(|()| Some((outline, entries))),
        }
    }
    Err(CallError::new("getsockopt(IPT_SO_GET_ENTRIES)", io::ErrorKind::ResourceBusy.into()))
}

/// Returns a socket of this family, or `None` if the kernel does not have the family.
fn socket(family: TableFamily) -> Result<Option<OwnedFd>, CallError> {
    let layout = layout(family);
    match UdpSocket::bind(layout.any) {
        Ok(socket) => Ok(Some(socket.into())),
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(None),
        Err(error) => Err(CallError::new(layout.socket, error)),
    }
}

fn read_outline(socket: &OwnedFd, family: TableFamily, table: &str) -> Result<Outline, CallError> {
    let mut info = vec![0; INFO];
    named(&mut info, table);
    get(socket, layout(family).level, GET_INFO, &mut info, "getsockopt(IPT_SO_GET_INFO)")?;
    Ok(Outline(info))
}

fn named(buffer: &mut [u8], table: &str) {
    // The last byte stays zero.
    let length = table.len().min(NAME - 1);
    buffer[..length].copy_from_slice(&table.as_bytes()[..length]);
}

fn get(
    socket: &OwnedFd,
    level: libc::c_int,
    option: libc::c_int,
    buffer: &mut [u8],
    call: &'static str,
) -> Result<(), CallError> {
    let mut length = buffer.len() as libc::socklen_t;
    let (target, length_target): (*mut u8, *mut libc::socklen_t) = (buffer.as_mut_ptr(), &mut length);
    // SAFETY: the kernel reads and writes at most `length` bytes at `target`.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, target.cast(), length_target) };
    if result == 0 { Ok(()) } else { Err(CallError::last(call)) }
}

/// Returns the names of user-defined chains. Each begins with a rule whose target is ERROR with the
/// name of the chain. The end of the table has such a rule too.
fn chain_names(mut rules: &[u8], target_offset: usize) -> Vec<String> {
    let mut names = Vec::new();
    while let (Some(target), Some(next)) = (half(rules, target_offset), half(rules, target_offset + 2)) {
        let (target, next) = (usize::from(target), usize::from(next));
        let name = |at: usize| rules.get(at..).and_then(text);
        if name(target + 2) == Some("ERROR") {
            names.extend(name(target + TARGET_HEADER).filter(|name| *name != "ERROR").map(str::to_owned));
        }
        if next == 0 {
            break;
        }
        rules = rules.get(next..).unwrap_or_default();
    }
    names
}

/// Returns true if a rule has this comment. A match consists of its size (16 bits), its name with
/// the revision in the last byte (30 bytes), and its data. The data of the match `comment` are a
/// text that ends with 0. Offsets are multiples of 8 (`XT_ALIGN`).
fn contains_comment(rules: &[u8], comment: &str) -> bool {
    const MATCH_NAME: &[u8] = b"comment\0";
    let is_comment = |at: usize| {
        let name = rules.get(at + 2..).is_some_and(|name| name.starts_with(MATCH_NAME));
        name && rules.get(at + TARGET_HEADER..).and_then(text) == Some(comment)
    };
    (0..rules.len()).step_by(8).any(is_comment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(target_offset: usize, target: &str, data: &str) -> Vec<u8> {
        let target_at = target_offset + 24;
        let mut rule = vec![0; target_at + 64];
        let length = rule.len() as u16;
        rule[target_offset..target_offset + 2].copy_from_slice(&(target_at as u16).to_ne_bytes());
        rule[target_offset + 2..target_offset + 4].copy_from_slice(&length.to_ne_bytes());
        rule[target_at + 2..target_at + 2 + target.len()].copy_from_slice(target.as_bytes());
        let data_at = target_at + TARGET_HEADER;
        rule[data_at..data_at + data.len()].copy_from_slice(data.as_bytes());
        rule
    }

    #[test]
    fn chains_are_found_by_their_heads() {
        for offset in [88, 140] {
            let table: Vec<u8> = [
                ("", ""),
                ("ERROR", "KUBE-SERVICES"),
                ("DNAT", "KUBE"),
                ("ERROR", "mine"),
                ("ERROR", "ERROR"),
            ]
            .into_iter()
            .flat_map(|(target, data)| rule(offset, target, data))
            .collect();
            assert_eq!(chain_names(&table, offset), ["KUBE-SERVICES", "mine"]);
            assert_eq!(chain_names(&table[..rule(offset, "", "").len() + 10], offset), [""; 0]);
        }
    }

    #[test]
    fn a_comment_is_found_in_its_match_only() {
        let rule = |name: &str, data: &str| {
            let mut rule = vec![0; 112 + 32 + 256];
            rule[114..114 + name.len()].copy_from_slice(name.as_bytes());
            rule[144..144 + data.len()].copy_from_slice(data.as_bytes());
            rule
        };
        let table = |name, data| [rule("comment", "others"), rule(name, data)].concat();
        assert!(contains_comment(&table("comment", "mine"), "mine"));
        assert!(!contains_comment(&table("comment", "mine too"), "mine"));
        assert!(!contains_comment(&table("string", "mine"), "mine"));
        assert!(!contains_comment(&[], "mine"));
    }
}
