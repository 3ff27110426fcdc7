//! The kernel parameters that this mode needs, as kube-proxy sets them. They are written only where
//! they differ. They are left in place, as by kube-proxy, because other programs on the node ask
//! for the same.

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
};

use super::Error;

/// The first kernel in which a connection from a reused port is a new one without delay. From this
/// one on the kernel's default is right.
const REUSE_MODE_FIXED: (u32, u32) = (5, 9);

/// Returns the parameters: the path below /proc/sys, and the value. `release` is that of the
/// kernel.
pub(super) fn wanted(strict_arp: bool, release: &str) -> Vec<(&'static str, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    let version = (numbers.next().unwrap_or(u32::MAX), numbers.next().unwrap_or(0));
    // Without conntrack, the rules for masquerading do not see the packets of IPVS.
    let mut wanted = vec![("net/ipv4/vs/conntrack", 1)];
    if version < REUSE_MODE_FIXED {
        wanted.push(("net/ipv4/vs/conn_reuse_mode", 0));
    }
    wanted.extend([
        // A connection whose destination is gone ends with its next packet.
        ("net/ipv4/vs/expire_nodest_conn", 1),
        // A client's affinity to such a destination ends too.
        ("net/ipv4/vs/expire_quiescent_template", 1),
        ("net/ipv4/ip_forward", 1),
    ]);
    if strict_arp {
        // An interface answers ARP only for its own addresses. So none answers for the addresses of
        // the device.
        wanted.extend([("net/ipv4/conf/all/arp_ignore", 1), ("net/ipv4/conf/all/arp_announce", 2)]);
    }
    wanted
}

pub(super) fn set(root: &Path, wanted: &[(&'static str, u32)]) -> Result<(), Error> {
    for (parameter, value) in wanted {
        let path: PathBuf = Path::new("proc/sys").join(parameter);
        let set = set_one(&root.join(&path), *value);
        if set.map_err(|source| Error::Parameter { path, value: *value, source })? {
            tracing::info!(parameter, value, "Set sysctl");
        }
    }
    Ok(())
}

/// Sets one parameter. Returns true if it had another value.
fn set_one(path: &Path, value: u32) -> io::Result<bool> {
    let is_set = fs::read_to_string(path)?.trim() == value.to_string();
    if !is_set {
        // Opening it in this way never creates a file.
        let mut file = fs::OpenOptions::new().write(true).truncate(true).open(path)?;
        file.write_all(value.to_string().as_bytes())?;
    }
    Ok(!is_set)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::old("5.8.0-63-generic", false, &["conntrack", "conn_reuse_mode", "expire_nodest_conn", "expire_quiescent_template", "ip_forward"])]
    #[case::fixed("5.9.0", false, &["conntrack", "expire_nodest_conn", "expire_quiescent_template", "ip_forward"])]
    #[case::strict_arp("6.1.0-9-amd64", true, &["conntrack", "expire_nodest_conn", "expire_quiescent_template", "ip_forward", "arp_ignore", "arp_announce"])]
    #[case::unknown_release("next", false, &["conntrack", "expire_nodest_conn", "expire_quiescent_template", "ip_forward"])]
    fn as_kube_proxy(#[case] release: &str, #[case] strict_arp: bool, #[case] expected: &[&str]) {
        let names: Vec<_> =
            wanted(strict_arp, release).iter().map(|(path, _)| path.rsplit('/').next().unwrap()).collect();
        assert_eq!(names, expected);
    }

    #[test]
    fn only_what_differs_is_written() {
        let root = tempfile::TempDir::new().unwrap();
        let at = |name: &str| root.path().join("proc/sys").join(name);
        fs::create_dir_all(at("")).unwrap();
        fs::write(at("one"), "1\n").unwrap();
        fs::write(at("other"), "0\n").unwrap();
        set(root.path(), &[("one", 1), ("other", 1)]).unwrap();
        assert_eq!(fs::read_to_string(at("one")).unwrap(), "1\n");
        assert_eq!(fs::read_to_string(at("other")).unwrap(), "1");
        let error = set(root.path(), &[("third", 2)]).unwrap_err().to_string();
        assert!(error.starts_with("setting /proc/sys/third to 2 for mode ipvs:"), "{error}");
    }
}
