//! Tests that the modules `model` and `mode` have no effects: they use neither clients, kernels,
//! files nor clocks.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use proc_macro2::{TokenStream, TokenTree};

/// Paths that no pure module may use, with everything below them.
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

/// Collects every path, with `{…}` of imports spelled out. Comments are no tokens, and a string
/// literal is a token that is no path.
fn paths(tokens: TokenStream, prefix: &str, found: &mut BTreeSet<String>) {
    let mut path = String::new();
    let mut end = |path: &mut String| {
        let whole = std::mem::take(path);
        if !whole.is_empty() {
            found.insert(format!("{prefix}{}", whole.trim_end_matches(':')));
        }
    };
    let mut groups = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                if !path.ends_with("::") {
                    end(&mut path);
                }
                path.push_str(&word.to_string());
            }
            TokenTree::Punct(mark) if mark.as_char() == ':' => path.push(':'),
            TokenTree::Group(group) if path.ends_with("::") => {
                groups.push((group, format!("{prefix}{}", std::mem::take(&mut path))));
            }
            TokenTree::Group(group) => {
                end(&mut path);
                groups.push((group, String::new()));
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => end(&mut path),
        }
    }
    end(&mut path);
    groups.into_iter().for_each(|(group, prefix)| paths(group.stream(), &prefix, found));
}

fn forbidden(source: &str) -> Vec<String> {
    let mut used = BTreeSet::new();
    paths(source.parse().unwrap_or_else(|error| panic!("{error}")), "", &mut used);
    let is_forbidden = |path: &String| {
        let mut below = FORBIDDEN.iter().filter_map(|forbidden| path.strip_prefix(forbidden));
        below.any(|below| below.is_empty() || below.starts_with("::"))
    };
    used.into_iter().filter(is_forbidden).collect()
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

/// Returns the files of a module, which is a folder or one file.
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
