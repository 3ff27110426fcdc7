//! The command `cleanup`, and the flag `--cleanup`, which kube-proxy has too.

use std::{io::Write as _, path::Path};

use anyhow::Context as _;
use ipnet::IpNet;
use nix::sys::signal::{SigSet, Signal};
use serde_json::json;

use super::{args::CleanupArgs, show::print, table::table};
use crate::{
    cleanup::{self, PendingRemoval, Purpose},
    modes::{self, Removed},
    process::Record,
    sys::proc::filesystem,
};

/// Cleans up with the `ipvs.excludeCIDRs` of the controller that runs or ran here.
pub(super) fn of_record(args: &CleanupArgs, bpffs: &Path) -> anyhow::Result<()> {
    let record = Record::read(bpffs)?;
    cleanup(args, bpffs, &record.map(|record| record.keeps()).unwrap_or_default())
}

/// Removes what this proxy has programmed, and a former kube-proxy's rules if `args` ask for that.
/// If one thing cannot be removed, the others still are. The error is then the one that kube-proxy
/// gives. `keeps` is `ipvs.excludeCIDRs`.
pub(super) fn cleanup(args: &CleanupArgs, bpffs: &Path, keeps: &[IpNet]) -> anyhow::Result<()> {
    if !args.stay {
        return remove(args, bpffs, keeps);
    }
    let ends: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    ends.thread_block().context("blocking SIGTERM")?;
    remove(args, bpffs, keeps)?;
    ends.wait().context("waiting for SIGTERM")?;
    Ok(())
}

fn remove(args: &CleanupArgs, bpffs: &Path, keeps: &[IpNet]) -> anyhow::Result<()> {
    let own = cleanup_own(bpffs, keeps);
    if !args.kube_proxy {
        // The error of our own cleanup is returned, because it says more than kube-proxy's.
        return show(args, bpffs, &own?, None, &[]);
    }
    let former = cleanup::remove(Purpose::Cleanup, keeps, &PendingRemoval::everything());
    let (own, failure) = match own {
        Ok(own) => (own, None),
        Err(error) => (Removed::default(), Some(format!("{error:#}"))),
    };
    let problems: Vec<String> =
        failure.into_iter().chain(former.problems.iter().map(ToString::to_string)).collect();
    show(args, bpffs, &own, Some(&former), &problems)?;
    if problems.is_empty() {
        return Ok(());
    }
    for problem in &problems {
        // A closed stderr cannot be reported.
        let _ = writeln!(std::io::stderr(), "error: {problem}");
    }
    anyhow::bail!("encountered an error while tearing down rules")
}

/// Removes maps, programs, and what was mounted or written beside them.
fn cleanup_own(bpffs: &Path, keeps: &[IpNet]) -> anyhow::Result<Removed> {
    let removed = modes::cleanup(bpffs, keeps)?;
    Record::remove(bpffs);
    filesystem::remove_own_cgroup2().context("unmounting cgroup v2 from /run/proxy-ctl/cgroup")?;
    Ok(removed)
}

fn show(
    args: &CleanupArgs,
    bpffs: &Path,
    own: &Removed,
    former: Option<&cleanup::Removal>,
    problems: &[String],
) -> anyhow::Result<()> {
    let Removed { links, filters, objects } = own;
    let mut view = json!({
        "removed": { "links": links, "filters": filters, "objects": objects },
        "problems": problems,
    });
    if let Some(former) = former {
        view["kubeProxy"] = json!({ "removed": former.parts, "kept": former.retained });
    }
    print(args.output, &view, || in_words(bpffs, own, former))
}

fn in_words(bpffs: &Path, own: &Removed, former: Option<&cleanup::Removal>) -> String {
    let path = bpffs.display();
    let Some(former) = former else {
        if own.is_empty() {
            return format!("Nothing of proxy-ctl is in {path}.\n");
        }
        let (links, filters, objects) = (own.links.len(), own.filters, own.objects.len());
        return format!(
            "proxy-ctl has removed {links} links, {filters} filters, and {objects} maps and tables from {path}.\n"
        );
    };
    let ours = [("links", own.links.len()), ("filters", own.filters), ("maps and tables", own.objects.len())];
    let ours = ours.into_iter().filter(|(_, count)| *count > 0);
    let ours =
        ours.map(|(what, count)| ["proxy-ctl".into(), path.to_string(), what.into(), count.to_string()]);
    let theirs = former.parts.iter().map(|part| {
        ["kube-proxy".into(), part.location.clone(), part.what.name().into(), part.count.to_string()]
    });
    let removed: Vec<_> = ours.chain(theirs).collect();
    let mut text = if removed.is_empty() {
        format!("Nothing of proxy-ctl is in {path}, and nothing was removed of another kube-proxy.\n")
    } else {
        table(["OWNER", "WHERE", "REMOVED", "NUMBER"], removed)
    };
    if !former.retained.is_empty() {
        let kept = former
            .retained
            .iter()
            .map(|kept| [kept.location.clone(), kept.name.clone(), kept.reason.clone()]);
        text.push('\n');
        text.push_str(&table(["WHERE", "STAYS", "WHY"], kept));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cleanup::{Part, PartKind, Retained};

    #[test]
    fn what_was_removed_and_what_stays_is_told() {
        let own = Removed { links: vec!["cgroup_connect4".into()], filters: 0, objects: Vec::new() };
        let location = "nftables ip nat".to_owned();
        let former = cleanup::Removal {
            parts: vec![Part { location: location.clone(), what: PartKind::Chains, count: 12 }],
            retained: vec![Retained { location, name: "KUBE-SVC-A".into(), reason: "emptied".into() }],
            ..cleanup::Removal::default()
        };
        let text = in_words(Path::new("/sys/fs/bpf"), &own, Some(&former));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1], ["proxy-ctl", "/sys/fs/bpf", "links", "1"]);
        assert_eq!(words[2], ["kube-proxy", "nftables", "ip", "nat", "chains", "12"]);
        assert_eq!(words[5], ["nftables", "ip", "nat", "KUBE-SVC-A", "emptied"]);
        let nothing = in_words(Path::new("/x"), &Removed::default(), Some(&cleanup::Removal::default()));
        assert!(nothing.starts_with("Nothing of proxy-ctl"), "{nothing}");
    }
}
