//! The real kube-proxy, with its rules and those of other programs.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use control_plane::binaries::Program;
use nix::sys::signal::Signal;
use scenario::Outcome;
use serde_json::json;

use super::{CLUSTER_IP, ENDPOINT};
use crate::{
    node::Node,
    proxy::{Proxy, metric},
    until::until,
};

/// Rules of other programs, in tables of their own and in those that kube-proxy uses too.
const TABLE_OF_OTHERS: &str = "table inet mine { chain input { type filter hook input priority 5; \
                             tcp dport 9 counter drop comment \"KUBE-SERVICES\"; }; }";
const RULES_OF_OTHERS: [&str; 6] = [
    "-t nat -N MINE",
    "-t nat -A PREROUTING -m comment --comment mine -j MINE",
    "-t nat -A MINE -p tcp --dport 81 -j REDIRECT --to-ports 82",
    "-t filter -N KUBE-ROUTER-FORWARD",
    "-t filter -A FORWARD -j KUBE-ROUTER-FORWARD",
    "-t mangle -N KUBE-KUBELET-CANARY",
];

/// Kernel interface that has kube-proxy's rules.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RuleApi {
    /// Rules of mode nftables, or of mode iptables with iptables-nft.
    Nft(&'static str),
    /// Rules of mode iptables with iptables-legacy.
    Legacy,
}

impl RuleApi {
    pub(super) fn mode(self) -> &'static str {
        match self {
            Self::Nft(mode) => mode,
            Self::Legacy => "iptables",
        }
    }

    pub(super) fn variant(self) -> &'static str {
        match self {
            Self::Nft(_) => "nft",
            Self::Legacy => "legacy",
        }
    }

    /// Returns all rules, sorted by the names of their chains, because kube-proxy makes chains in
    /// any order. Counters are left out, because they differ from one run to the next.
    pub(super) fn dump(self) -> Result<String> {
        let text = match self {
            Self::Nft(_) => run("nft", &["list", "ruleset"])?,
            Self::Legacy => {
                run("iptables-legacy-save", &[])?
                    + &run("ip6tables-legacy-save", &[])?.replace("\n*", "\n*IPv6 ")
            }
        };
        let (mut table, mut chain, mut lines) = (String::new(), String::new(), Vec::new());
        for line in text.lines().map(|line| without_counts(line.trim())) {
            if line.starts_with("table ") || line.starts_with('*') {
                (table, chain) = (line.clone(), String::new());
            } else if line.starts_with("chain ") || line.starts_with(':') {
                chain = line.trim_start_matches(':').to_owned();
            } else if let Some((of, _)) = line.strip_prefix("-A ").and_then(|rule| rule.split_once(' ')) {
                chain = of.to_owned();
            }
            if !line.is_empty() && !line.starts_with('#') && line != "}" && line != "COMMIT" {
                lines.push((table.clone(), chain.clone(), line));
            }
        }
        lines.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
        Ok(lines.into_iter().map(|(table, _, line)| format!("{table} {line}\n")).collect())
    }

    /// Returns true if the rules of both families are there, with everything that kube-proxy makes
    /// at its start.
    fn are_complete(self, dump: &str, own: &Node) -> bool {
        let synced = |family: &str| {
            let name = format!("kubeproxy_sync_proxy_rules_last_timestamp_seconds{{ip_family=\"{family}\"}}");
            metric(&own.metrics(), &name).is_ok_and(|time| time > 0.0)
        };
        let canaries = dump.lines().filter(|line| line.contains("KUBE-PROXY-CANARY")).count();
        dump.contains(CLUSTER_IP)
            && dump.contains(ENDPOINT)
            && (self.mode() != "iptables" || canaries == 6)
            && ["IPv4", "IPv6"].into_iter().all(synced)
    }
}

/// Returns the line with zero for `packets 5 bytes 300`, and without counts like `[5:300]`.
fn without_counts(line: &str) -> String {
    let mut words: Vec<&str> = line.split(' ').collect();
    for at in 1..words.len() {
        if matches!(words[at - 1], "packets" | "bytes") {
            words[at] = "0";
        }
    }
    let line = words.join(" ");
    match line.split_once(" [") {
        Some((chain, _)) if line.starts_with(':') => chain.to_owned(),
        _ => line,
    }
}

pub(super) fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {}: {said}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Real kube-proxy with one kind of iptables. Its rules are removed when this is dropped.
pub(super) struct OldProxy {
    program: PathBuf,
    pub(super) tables: RuleApi,
    /// PATH that begins with a folder of links to iptables and its like, by the names that
    /// kube-proxy calls.
    path: String,
}

impl OldProxy {
    /// Finds the programs. The inner error is the reason why kube-proxy cannot be tried here.
    pub(super) fn new(own: &Node, tables: RuleApi) -> Result<Result<Self, String>> {
        let program = match Program::KubeProxy.path() {
            Ok(program) => program,
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        let multi = format!("xtables-{}-multi", tables.variant());
        let found = env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .map(|folder| folder.join(&multi))
            .find(|path| path.exists());
        let Some(multi) = found else {
            return Ok(Err(format!("{multi} is not installed")));
        };
        let folder = own.config_file().with_file_name(format!("iptables-{}", tables.variant()));
        fs::create_dir_all(&folder)?;
        for name in ["iptables", "ip6tables"] {
            for command in ["", "-save", "-restore"] {
                let link = folder.join(format!("{name}{command}"));
                if !link.exists() {
                    symlink(&multi, link)?;
                }
            }
        }
        let path = format!("PATH={}:{}", folder.display(), env::var("PATH").unwrap_or_default());
        let former = Self { program, tables, path };
        former.reset()?;
        Ok(Ok(former))
    }

    pub(super) fn reset(&self) -> Result<()> {
        run("nft", &["flush", "ruleset"])?;
        if self.tables == RuleApi::Legacy {
            for program in ["iptables-legacy", "ip6tables-legacy"] {
                for table in ["nat", "filter", "mangle"] {
                    run(program, &["-t", table, "-F"])?;
                    run(program, &["-t", table, "-X"])?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn add_rules_of_others(&self) -> Result<()> {
        run("nft", &[TABLE_OF_OTHERS])?;
        for family in ["iptables", "ip6tables"] {
            for rule in RULES_OF_OTHERS {
                let arguments: Vec<&str> = rule.split(' ').collect();
                run(&format!("{family}-{}", self.tables.variant()), &arguments)?;
            }
        }
        Ok(())
    }

    pub(super) fn start(&self, own: &Node) -> Result<Proxy> {
        own.write_configuration(&json!({"mode": self.tables.mode()}))?;
        let (program, file) = (self.program.display().to_string(), own.config_file().display().to_string());
        let proxy = Proxy::start(Path::new("env"), &[&self.path, &program, "--config", &file])?;
        let complete = || Ok(self.tables.are_complete(&self.tables.dump()?, own).then_some(()));
        let state = || format!("{}\n{}", proxy.log(), self.tables.dump().unwrap_or_default());
        until("kube-proxy's rules", complete, state)?;
        Ok(proxy)
    }

    /// Lets kube-proxy program everything and end.
    pub(super) fn leave_rules(&self, own: &Node) -> Result<()> {
        let mut proxy = self.start(own)?;
        proxy.send(Signal::SIGTERM)?;
        proxy.ends()?;
        Ok(())
    }

    pub(super) fn clean_up(&self) -> Result<()> {
        run("env", &[&self.path, &self.program.display().to_string(), "--cleanup"]).map(drop)
    }
}

impl Drop for OldProxy {
    fn drop(&mut self) {
        // The next scenario resets them too.
        let _ = self.reset();
    }
}

/// Plays a scene with kube-proxy's rules of each kind. The outcome names the kinds that could not
/// be tried.
pub(super) fn with_each(
    own: &Node,
    kinds: &[RuleApi],
    mut scene: impl FnMut(&OldProxy) -> Result<()>,
) -> Result<Outcome> {
    let mut skipped = Vec::new();
    for tables in kinds {
        match OldProxy::new(own, *tables)? {
            Ok(former) => scene(&former).with_context(|| format!("{tables:?}"))?,
            Err(reason) => skipped.push(format!("{tables:?}: {reason}")),
        }
    }
    Ok(if skipped.is_empty() { Outcome::Passed } else { Outcome::Skipped(skipped.join("; ")) })
}
