//! Tests that the module `model` has no effects: it uses neither clients, kernels, files nor
//! clocks.

use std::collections::BTreeSet;

use crate::{paths::paths, tree};

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
    "crate::cleanup",
    "crate::cli",
    "crate::controller",
    "crate::events",
    "crate::http",
    "crate::kubernetes",
    "crate::manifests",
    "crate::modes",
    "crate::node",
    "crate::process",
    "crate::sys",
];

fn forbidden(source: &str) -> Vec<String> {
    let mut used = BTreeSet::new();
    paths(source.parse().unwrap_or_else(|error| panic!("{error}")), "", &mut used);
    let is_forbidden = |path: &String| {
        let mut below = FORBIDDEN.iter().filter_map(|forbidden| path.strip_prefix(forbidden));
        below.any(|below| below.is_empty() || below.starts_with("::"))
    };
    used.into_iter().filter(is_forbidden).collect()
}

#[test]
fn the_model_is_pure() {
    let mut violations = Vec::new();
    for file in tree::files("proxy-ctl/src/model", &[".rs"]) {
        let used = forbidden(&file.text).into_iter();
        violations.extend(used.map(|path| format!("{}: {path}", file.path)));
    }
    assert_eq!(violations, [""; 0]);
}

#[test]
fn the_search_finds_what_it_looks_for() {
    let source = r#"
        use std::{fmt, fs::File, net::{IpAddr, TcpStream}, sync::{Arc, mpsc}};
        use kube::{Api, runtime::watcher};
        use super::{tokio_like, kubernetes};
        use crate::{
            model::Model,
            kubernetes::InvalidField,
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
            "crate::kubernetes::InvalidField",
            "kube::Api",
            "kube::runtime::watcher",
            "std::fs::File",
            "std::net::TcpStream",
            "std::time::Instant::now",
            "tokio::spawn",
        ]
    );
}
