//! Tests of service ports whose rules the tools refuse. The tools are scripts that note how often
//! they are called.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use super::*;
use crate::{modes::iptables::writer::Writer, sys::xtables::Tools};

fn program(folder: &Path, name: &str, script: &str) -> std::path::PathBuf {
    let path = folder.join(name);
    fs::write(&path, format!("#!/bin/sh\ncd {}\n{script}\n", folder.display())).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Reading the tables takes longer than everything else if they are long.
#[test]
#[ignore = "needs root"]
fn as_root_many_refused_ports_do_not_cost_a_reading_each() {
    const REFUSED: usize = 10;
    let folder = tempfile::tempdir().unwrap();
    let save = program(folder.path(), "iptables-save", "echo \"$@\" >> readings");
    let restore = program(
        folder.path(),
        "iptables-restore",
        "cat > input; line=$(grep -n -m 1 fd00::1 input | cut -d : -f 1); [ -z \"$line\" ] || \
         { echo \"iptables-restore: line $line failed\" >&2; exit 1; }",
    );
    let mut writer = Writer::new(IpFamily::Ipv4, Tools::of_programs(save, restore), ABLE);
    writer.set_host(&host()).unwrap();
    let services =
        (0..REFUSED + 2).map(|number| named(&format!("ns/svc{number}"), &format!("172.30.0.{number}")));
    let slices = (0..REFUSED + 2).map(|number| endpoints(&format!("ns/svc{number}"), &["10.0.0.1"]));
    let mut ports = desired(services.collect(), slices.collect());
    for port in ports.iter_mut().take(REFUSED) {
        Arc::make_mut(port).frontends[0].address = ip("fd00::1");
    }
    let error = writer.resync(&ports).unwrap_err().to_string();
    assert!(error.contains(&REFUSED.to_string()), "{error}");
    let readings = fs::read_to_string(folder.path().join("readings")).unwrap();
    let of_nat = readings.lines().filter(|line| line.contains("nat")).count();
    assert_eq!(of_nat, 2, "before and after: {readings}");
}
