//! The pages that are generated from the lists which kernel programs and controller share.

use std::fmt::Write as _;

use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use proxy_common::{
    inventory::{Limit, program},
    layout::*,
    maps, packet_programs,
    reason::{REASONS, Reason, Verdict},
    socket_programs,
};

use crate::tree;

/// The most bytes of a page, so that it is read at once.
const BYTES: usize = 8_192;
const END: &str = "
## How this page is made

    cargo test -p xtask --test rules -- --ignored write_pages
";

struct Map {
    name: &'static str,
    kind: String,
    key: String,
    value: String,
    entries: String,
    documentation: &'static str,
}

fn maps() -> Vec<Map> {
    macro_rules! entries {
        ([$limit:ident]) => {
            format!("`{}`", Limit::$limit.name())
        };
        (0) => {
            "one a socket".to_owned()
        };
        ($entries:tt) => {
            grouped(u64::try_from($entries).unwrap())
        };
    }
    macro_rules! listed {
        ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => {
            vec![$(Map {
                name: stringify!($name),
                kind: stringify!($kind).replace('_', " "),
                key: stringify!($key).replace(' ', ""),
                value: stringify!($value).replace(' ', ""),
                entries: entries!($entries),
                documentation: concat!($($doc),*),
            },)+]
        };
    }
    maps!(listed)
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

/// Returns the text about a map of IPv4 as that of the maps of both families. Types of one family
/// end with its digit too.
fn of_both(text: &str) -> String {
    let text = text.replace("A4", "A").replace("Slot4", "Slot4/6");
    let words = text.split_inclusive(['_', '`', ' ']).map(|word| {
        let (word, end) = word.split_at(word.trim_end_matches(['_', '`', ' ']).len());
        if word.starts_with(char::is_lowercase) && word.ends_with('4') && word != "u64" {
            format!("{word}/6{end}")
        } else {
            format!("{word}{end}")
        }
    });
    words.collect()
}

fn map_page() -> String {
    let mut page = "\
# The list of maps

This page lists the pinned maps of mode ebpf, as `proxy-common/src/inventory.rs` has them. [maps.md](maps.md) explains
how they are written. Types are those of `layout/`, with `A` for an address. A name with `4/6` stands for two maps, of
IPv4 and of IPv6.

- `shared array`: user space has it in its memory (BPF_F_MMAPABLE).
- `hash`: not preallocated, except for `preallocated hash`.
- `maps of`: an array of two maps, whose inner type is given.
- `lpm trie`: the key has the length of a prefix before it.

A number of entries in backticks is a field of `ebpf.limits`, with the values of the second table. A ring has bytes in
place of entries.

| map | kind | key → value | entries | what it holds |
|---|---|---|---|---|
"
    .to_owned();
    let mut maps = maps().into_iter().peekable();
    while let Some(map) = maps.next() {
        let twin = maps.next_if(|next| next.name != map.name && next.name == map.name.replace('4', "6"));
        let shown = |text: &str| if twin.is_some() { of_both(text) } else { text.to_owned() };
        let Map { name, kind, key, value, entries, documentation } = &map;
        assert!(!documentation.is_empty(), "the map {name} has no documentation in inventory.rs");
        writeln!(
            page,
            "| `{}` | {kind} | `{}` → `{}` | {entries} |{} |",
            shown(name),
            shown(key),
            shown(value),
            shown(documentation)
        )
        .unwrap();
    }
    page += "\n| limit | entries by default | entries at first |\n|---|---|---|\n";
    for limit in Limit::ALL {
        let entries = limit.default_entries();
        let first = limit.first_entries(entries);
        writeln!(page, "| `{}` | {} | {} |", limit.name(), grouped(entries.into()), grouped(first.into()))
            .unwrap();
    }
    page + END
}

/// Returns the section of each program in the compiled object.
fn section_of(program: &str) -> String {
    let bytes = std::fs::read(tree::root().join("proxy-ebpf/object/proxy-ebpf.o")).unwrap();
    let object = object::File::parse(&*bytes).unwrap();
    let symbol = object.symbols().find(|symbol| symbol.name() == Ok(program) && symbol.is_definition());
    let section = symbol.and_then(|symbol| symbol.section_index()).unwrap();
    object.section_by_index(section).unwrap().name().unwrap().to_owned()
}

fn program_page() -> String {
    let mut page = "\
# The list of programs

This page lists the kernel programs of mode ebpf, as `proxy-common/src/inventory.rs` has them, and their sections in the
object file. [hooks.md](hooks.md) explains where and how they are attached. They need Linux 5.10, the oldest kernel that
is supported, if nothing else is said.

## On the cgroup

| program | section | attach type |
|---|---|---|
"
    .to_owned();
    macro_rules! socket_rows {
        ($($name:ident: $hook:ident;)+) => { [$((stringify!($name), stringify!($hook)),)+] };
    }
    for (name, hook) in socket_programs!(socket_rows) {
        writeln!(page, "| `{name}` | `{}` | {hook} |", section_of(name)).unwrap();
    }
    page += "
## On interfaces

They are attached by tcx, and before Linux 6.6 as filters of a clsact qdisc. The role is that of the interface.

| program | section | role | direction | Ethernet header |
|---|---|---|---|---|
";
    macro_rules! packet_rows {
        ($($name:ident: ($role:ident, $direction:ident, $ethernet:literal);)+) => {
            [$((stringify!($name), stringify!($role), stringify!($direction), $ethernet),)+]
        };
    }
    for (name, role, direction, ethernet) in packet_programs!(packet_rows) {
        let (role, direction) = (role.to_lowercase(), direction.to_lowercase());
        let ethernet = if ethernet { "yes" } else { "no" };
        writeln!(page, "| `{name}` | `{}` | {role} | {direction} | {ethernet} |", section_of(name)).unwrap();
    }
    page += "\n## Others\n\n| program | section | what it is |\n|---|---|---|\n";
    for (name, documentation) in program::FURTHER {
        writeln!(page, "| `{name}` | `{}` |{documentation} |", section_of(name)).unwrap();
    }
    page + END
}

fn reason_page() -> String {
    let mut page = format!(
        "\
# The list of reasons

This page lists the reasons for decisions of the kernel programs, as `proxy-common/src/reason.rs` has them. The number
is the index into the map `counters`, which has room for {REASONS}, and stays that of its reason for ever.
[../metrics.md](../metrics.md#reasons) says what each means for the people who run a node.

| number | reason | verdict | when |
|---|---|---|---|
"
    );
    let mut reasons = Reason::ALL.to_vec();
    reasons.sort_by_key(|reason| *reason as u32);
    for reason in reasons {
        let verdict = match reason.verdict() {
            Verdict::Pass => "pass",
            Verdict::Refuse => "refuse",
            Verdict::Drop => "drop",
        };
        let (number, name, when) = (reason as u32, reason.name(), reason.explanation());
        writeln!(page, "| {number} | `{name}` | {verdict} | {when} |").unwrap();
    }
    page + END
}

fn pages() -> [(&'static str, String); 3] {
    [
        ("docs/design/map-list.md", map_page()),
        ("docs/design/program-list.md", program_page()),
        ("docs/design/reason-list.md", reason_page()),
    ]
}

#[test]
fn generated_pages_are_current() {
    for (path, page) in pages() {
        assert!(page.len() <= BYTES, "{path} has {} bytes", page.len());
        assert!(tree::read(path) == page, "{path} is out of date: run the command at its end");
    }
}

#[test]
#[ignore = "writes generated pages of docs/design"]
fn write_pages() {
    for (path, page) in pages() {
        std::fs::write(tree::root().join(path), page).unwrap();
    }
}
