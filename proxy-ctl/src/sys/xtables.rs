//! iptables: its tools, what they print, and which backend a node uses.
//!
//! Here are chains of iptables-legacy by the kernel's own interface of before nf_tables, read only.
//! It can but replace a whole table, and would undo changes that others make at the same time: only
//! its tools write, which share a lock.

use std::{
    fs, io,
    net::UdpSocket,
    os::fd::{AsRawFd, OwnedFd},
};

use super::{
    CallError,
    netlink::{half, text, word},
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
/// `ipt_getinfo`: name, valid hooks, 5 entry points, 5 underflows, number of rules, their size.
const INFO: usize = NAME + 4 + 20 + 20 + 4 + 4;
const INFO_SIZE: usize = INFO - 4;
/// `ipt_get_entries`: name, size, and the rules at an address that is a multiple of 8.
const ENTRIES: usize = NAME + 8;
/// Of `xt_entry_target`: size, name, revision.
const TARGET_HEADER: usize = 32;
/// A table may grow between the two calls.
const TRIES: usize = 8;

/// What differs between `ipt_entry` and `ip6t_entry`.
struct Layout {
    level: libc::c_int,
    /// Where the offset of the target is; that of the next rule follows.
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

/// Tables that are there; to ask for another one would make it. None where the kernel has no
/// iptables-legacy.
pub fn tables(family: TableFamily) -> Result<Vec<String>, CallError> {
    match fs::read_to_string(layout(family).tables) {
        Ok(names) => Ok(names.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(CallError::new("read(ip_tables_names)", error)),
    }
}

/// What the kernel tells of a table without its rules: how many they are, their size, and where
/// those of each chain of its own begin and end. A change that leaves all of that as it was cannot
/// be seen by it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Outline(Vec<u8>);

/// Takes no time, however long the table is. `None`: no packet of this family comes. Needs
/// CAP_NET_ADMIN.
pub fn outline(family: TableFamily, table: &str) -> Result<Option<Outline>, CallError> {
    let Some(socket) = socket(family)? else { return Ok(None) };
    read_outline(&socket, family, table).map(Some)
}

/// Names of the user-defined chains of `table`. Takes memory and time as the table does: 150 MB for
/// 310,000 rules. `None`: no packet of this family comes. Needs CAP_NET_ADMIN.
pub fn chains(family: TableFamily, table: &str) -> Result<Option<(Outline, Vec<String>)>, CallError> {
    let names = |entries: &[u8]| chain_names(entries, layout(family).target_offset);
    Ok(entries(family, table)?.map(|(outline, entries)| (outline, names(&entries[ENTRIES..]))))
}

/// Whether a rule of `table` has this comment. `None`: the table has no such chain. Costs as
/// [`chains`] does. Needs CAP_NET_ADMIN.
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

/// The rules of `table` as the kernel has them, after [`ENTRIES`] bytes.
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

/// `None`: the kernel has no such family.
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
    // One byte stays zero.
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

/// A user-defined chain begins with a rule whose target is ERROR, with its name; so does the
/// table's end.
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

/// A match is its size (16 bits), its name with the revision in the last byte (30), and its data:
/// with `comment` a text that ends with 0. Offsets are multiples of 8 (`XT_ALIGN`).
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
