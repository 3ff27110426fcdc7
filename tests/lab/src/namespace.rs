//! Network namespaces by name, and commands that configure them.

use std::{
    fs,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::sched::{CloneFlags, setns};

const NAMED: &str = "/run/netns";

pub fn path(name: &str) -> PathBuf {
    Path::new(NAMED).join(name)
}

/// Returns the names of all named namespaces that start with `prefix`.
pub fn with_prefix(prefix: &str) -> Vec<String> {
    let Ok(directory) = fs::read_dir(NAMED) else { return Vec::new() };
    directory
        .filter_map(|found| found.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(prefix))
        .collect()
}

/// Moves the calling thread into a namespace, which is the whole process if it has no other thread.
/// Unlike `ip netns exec`, this leaves the mounts alone, so cgroups and the bpffs stay in sight.
pub fn enter(namespace: &Path) -> Result<()> {
    let file = File::open(namespace).with_context(|| format!("opening {}", namespace.display()))?;
    setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("setns to {}", namespace.display()))
}

/// Runs `work` on a thread of its own in the namespace.
pub fn within<T: Send>(namespace: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    on_a_thread(Some(namespace), work)
}

/// Runs `work` on a thread of its own, in a namespace or (`None`) in that of the caller.
pub fn on_a_thread<T: Send>(namespace: Option<&str>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            namespace.map_or(Ok(()), |name| enter(&path(name)))?;
            work()
        });
        let name = namespace.unwrap_or("our own namespace");
        worker.join().map_err(|_| anyhow!("a thread in {name} panicked"))?
    })
}

/// Sets sysctls of a namespace. One with a `?` before its name is skipped if the kernel does not
/// have it.
pub fn sysctl(namespace: &str, settings: &[(&str, &str)]) -> Result<()> {
    within(namespace, || {
        for (name, value) in settings {
            let (name, optional) = name.strip_prefix('?').map_or((*name, false), |name| (name, true));
            let path = Path::new("/proc/sys").join(name);
            if optional && !path.exists() {
                continue;
            }
            fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))?;
        }
        Ok(())
    })
}

/// Runs `nft` in a namespace, and returns its output.
pub fn nft(namespace: &str, script: &str) -> Result<String> {
    run(namespace, "nft", &[script])
}

/// Adds a table as a network plugin has beside a proxy. It masquerades what `rules` match, in the
/// language of `nft`.
pub fn masquerade(namespace: &str, rules: &[String]) -> Result<()> {
    let chain =
        format!("chain postrouting {{ type nat hook postrouting priority 90; {}; }}", rules.join("; "));
    nft(namespace, &format!("table inet plugin {{ {chain}; }}")).map(drop)
}

/// Removes the table of [`masquerade`].
pub fn end_masquerade(namespace: &str) -> Result<()> {
    nft(namespace, "delete table inet plugin").map(drop)
}

/// Runs a program in a namespace, and returns its output.
pub fn run(namespace: &str, program: &str, arguments: &[&str]) -> Result<String> {
    let run = || {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).output().with_context(|| format!("starting {program}"))
    };
    let output = within(namespace, run)?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs lines of `ip`'s own language, in a namespace or (`None`) in that of the caller.
pub fn ip(namespace: Option<&str>, script: &str) -> Result<()> {
    let mut command = Command::new("ip");
    if let Some(namespace) = namespace {
        command.args(["-n", namespace]);
    }
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting ip (package iproute2)")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.as_bytes()).context("writing to ip")?;
    }
    let output = child.wait_with_output().context("waiting for ip")?;
    if !output.status.success() {
        bail!(
            "ip in {}: {}script was:\n{script}",
            namespace.unwrap_or("our own namespace"),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
