//! The rooms that decide have no effects: `model` and `mode` know neither clients, kernels, files nor clocks.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

/// Paths that no pure room may use, and what is below them.
const FORBIDDEN: &[&str] = &[
    "aya",
    "aya_obj",
    "k8s_openapi",
    "kube",
    "libc",
    "netlink_sys",
    "nix",
    "rtnetlink",
    "tokio",
    "tokio_util",
    "std::env",
    "std::fs",
    "std::io",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::os",
    "std::process",
    "std::thread",
    "std::time",
    "crate::cli",
    "crate::dataplane",
    "crate::node",
    "crate::process",
    "crate::report",
    "crate::serve",
    "crate::source",
    "crate::sys",
];

/// Everything outside comments and text.
fn code(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if first == '"' {
            let escaped = rest[1..].char_indices().scan(false, |escaped, (index, char)| {
                let ends = char == '"' && !*escaped;
                *escaped = char == '\\' && !*escaped;
                Some((index, ends))
            });
            escaped.into_iter().find(|(_, ends)| *ends).map_or(rest.len(), |(index, _)| index + 2)
        } else {
            code.push(first);
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    code
}

/// Every path in the code, with `{…}` of imports spelled out.
fn paths(source: &str) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    // The path before each open brace; None where the brace does not belong to a path.
    let mut prefixes: Vec<Option<String>> = Vec::new();
    let mut path = String::new();
    let mut word = String::new();
    let code = code(source);
    let mut chars = code.chars().peekable();
    while let Some(char) = chars.next() {
        if char.is_alphanumeric() || char == '_' {
            if word.is_empty() && !path.ends_with("::") {
                path.clear();
            }
            word.push(char);
            continue;
        }
        path.push_str(&std::mem::take(&mut word));
        if char == ':' && chars.peek() == Some(&':') {
            chars.next();
            path.push_str("::");
            continue;
        }
        let open = path.ends_with("::");
        if char.is_whitespace() && (open || matches!(chars.peek(), Some(':' | '{') | None)) {
            continue;
        }
        match char {
            '{' => prefixes.push(open.then(|| full(&prefixes, &path))),
            _ if !path.is_empty() => {
                paths.insert(full(&prefixes, path.trim_end_matches("::")));
            }
            _ => {}
        }
        path.clear();
        if char == '}' {
            prefixes.pop();
        }
    }
    paths
}

fn full(prefixes: &[Option<String>], path: &str) -> String {
    match prefixes.last() {
        Some(Some(prefix)) => format!("{prefix}{path}"),
        _ => path.to_owned(),
    }
}

fn forbidden(source: &str) -> Vec<String> {
    let used = paths(source).into_iter();
    used.filter(|path| {
        FORBIDDEN.iter().any(|forbidden| {
            let below = path.strip_prefix(forbidden);
            below.is_some_and(|below| below.is_empty() || below.starts_with("::"))
        })
    })
    .collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// The room's files: its folder, or the one file that it is.
fn room(name: &str) -> io::Result<Vec<PathBuf>> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    if source.join(name).is_dir() {
        files(&source.join(name), &mut found)?;
    }
    found.extend(Some(source.join(format!("{name}.rs"))).filter(|file| file.is_file()));
    Ok(found)
}

#[test]
fn model_and_mode_are_pure() {
    let mut violations = Vec::new();
    for name in ["model", "mode"] {
        for file in room(name).unwrap() {
            let source = fs::read_to_string(&file).unwrap();
            violations
                .extend(forbidden(&source).into_iter().map(|path| format!("{}: {path}", file.display())));
        }
    }
    assert_eq!(violations, [""; 0]);
    assert!(!room("model").unwrap().is_empty(), "the room has moved: name it here");
}

#[test]
fn the_search_finds_what_it_looks_for() {
    let source = r#"
        use std::{fmt, fs::File, net::{IpAddr, TcpStream}, sync::{Arc, mpsc}};
        use kube::{Api, runtime::watcher};
        use super::{tokio_like, kubernetes};
        use crate::{
            model::Model,
            source::InvalidField,
        };
        // use aya::Ebpf;
        /* libc::c_int */
        fn now() -> u64 { let text = "tokio::spawn \" nix::unistd"; std::time::Instant::now(); tokio :: spawn(async {}); 0 }
        use aya as bpf;
    "#;
    assert_eq!(
        forbidden(source),
        [
            "aya",
            "crate::source::InvalidField",
            "kube::Api",
            "kube::runtime::watcher",
            "std::fs::File",
            "std::net::TcpStream",
            "std::time::Instant::now",
            "tokio::spawn",
        ]
    );
}
