//! Where kube-apiserver, kube-proxy and etcd come from.
//!
//! 1. `KUBEBUILDER_ASSETS`, a folder that people who test controllers have;
//! 2. what an earlier run built, in the cache folder;
//! 3. PATH, if an etcd there is new enough;
//! 4. built from the Go module in `tests/kubernetes`: once, some minutes, with progress on stderr.

use std::{
    env, fs,
    io::{BufRead, BufReader, IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, anyhow, bail};
use nix::fcntl::{Flock, FlockArg};

/// A program of the control plane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    Etcd,
    KubeApiServer,
    KubeProxy,
}

impl Program {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiServer => "kube-apiserver",
            Self::KubeProxy => "kube-proxy",
        }
    }

    /// Finds the program, or builds it. The error says what is missing and where it was looked for.
    pub fn path(self) -> Result<PathBuf> {
        match self.installed() {
            Some(found) => Ok(found),
            None => self.build(),
        }
    }

    /// The program, if nothing has to be built for it.
    pub fn installed(self) -> Option<PathBuf> {
        let given = env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from).into_iter().chain(cache().ok());
        let given = given.map(|folder| folder.join(self.name())).find(|file| is_executable(file));
        given.or_else(|| {
            let path = env::var_os("PATH")?;
            env::split_paths(&path)
                .map(|folder| folder.join(self.name()))
                .find(|file| is_executable(file) && (self != Self::Etcd || streams_lists(file)))
        })
    }

    fn build(self) -> Result<PathBuf> {
        let name = self.name();
        let go = find_go().ok_or_else(|| {
            anyhow!(
                "{name} is neither in KUBEBUILDER_ASSETS nor on PATH, and there is no Go to build it with"
            )
        })?;
        let cache = cache()?;
        fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
        let lock = cache.join(format!("{name}.lock"));
        let lock = fs::File::create(&lock).with_context(|| format!("creating {}", lock.display()))?;
        let _building = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .with_context(|| format!("waiting for another build of {name}"))?;
        let target = cache.join(name);
        if is_executable(&target) {
            return Ok(target);
        }

        let module = module();
        let package = format!("./cmd/{name}");
        let version = version()?;
        let mut progress = Progress::new(name, dependencies(&go, &module, &package)?);
        // Complete or not there at all: an interrupted build must not look like a program.
        let partial = cache.join(format!("{name}.partial"));
        let mut child = Command::new(&go)
            .current_dir(&module)
            .env("CGO_ENABLED", "0")
            .args(["build", "-v", "-trimpath", "-ldflags", &linker_flags(&version), "-o"])
            .arg(&partial)
            .arg(&package)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", go.display()))?;
        let mut complaints = Vec::new();
        if let Some(stderr) = child.stderr.take() {
            for line in BufReader::new(stderr).lines() {
                let line = line.with_context(|| format!("reading what {} says", go.display()))?;
                // `-v` names each package once it is built; whatever has blanks is something to tell.
                if line.contains(' ') {
                    complaints.push(line);
                } else {
                    progress.step();
                }
            }
        }
        let status = child.wait().with_context(|| format!("waiting for {}", go.display()))?;
        progress.end();
        if !status.success() {
            bail!("building {name} failed ({status}):\n{}", complaints.join("\n"));
        }
        fs::rename(&partial, &target).with_context(|| format!("renaming {}", partial.display()))?;
        Ok(target)
    }
}

/// Whether an API server can stream lists with this etcd: it refuses to with one that is older.
fn streams_lists(etcd: &Path) -> bool {
    let Ok(output) = Command::new(etcd).arg("--version").stdin(Stdio::null()).output() else { return false };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("etcd Version: ")).is_some_and(is_recent)
}

fn is_recent(version: &str) -> bool {
    let numbers: Vec<u32> = version.trim().split('.').map_while(|number| number.parse().ok()).collect();
    match numbers.as_slice() {
        [3, 4, patch, ..] => *patch >= 31,
        [3, 5, patch, ..] => *patch >= 13,
        numbers => numbers >= &[3, 6][..],
    }
}

/// The Go module with the real programs.
fn module() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kubernetes")
}

/// `$XDG_CACHE_HOME/proxy-ctl/kube-<hash of go.mod>`: another version of Kubernetes is another folder.
fn cache() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => {
            Path::new(&env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    let go_mod = module().join("go.mod");
    let text = fs::read(&go_mod).with_context(|| format!("reading {}", go_mod.display()))?;
    Ok(base.join("proxy-ctl").join(format!("kube-{:016x}", fnv1a(&text))))
}

/// FNV-1a: std's hasher may change with the compiler, and with it the name of the folder.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Version of k8s.io/kubernetes that go.mod requires, such as `v1.36.1`.
fn version() -> Result<String> {
    let go_mod = module().join("go.mod");
    let text = fs::read_to_string(&go_mod).with_context(|| format!("reading {}", go_mod.display()))?;
    text.lines()
        .find_map(|line| line.trim().trim_start_matches("require ").strip_prefix("k8s.io/kubernetes "))
        .map(|version| version.trim().to_owned())
        .with_context(|| format!("{} does not require k8s.io/kubernetes", go_mod.display()))
}

/// A Kubernetes program without a version refuses to emulate one, and does not start.
fn linker_flags(version: &str) -> String {
    let mut numbers = version.trim_start_matches('v').split('.');
    let major = numbers.next().unwrap_or_default();
    let minor = numbers.next().unwrap_or_default();
    let prefix = "k8s.io/component-base/version";
    format!(
        "-s -w -X {prefix}.gitVersion={version} -X {prefix}.gitMajor={major} -X {prefix}.gitMinor={minor}"
    )
}

fn find_go() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/local/go/bin")])
        .map(|folder| folder.join("go"))
        .find(|file| is_executable(file))
}

/// How many packages a build consists of. Downloads the modules, if need be.
fn dependencies(go: &Path, module: &Path, package: &str) -> Result<usize> {
    let output = Command::new(go)
        .current_dir(module)
        .env("CGO_ENABLED", "0")
        .args(["list", "-deps", package])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", go.display()))?;
    if !output.status.success() {
        bail!("go list {package}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count())
}

fn is_executable(file: &Path) -> bool {
    file.is_file() && nix::unistd::access(file, nix::unistd::AccessFlags::X_OK).is_ok()
}

/// On a terminal one line that is overwritten; in a log a line for each tenth.
struct Progress {
    program: &'static str,
    done: usize,
    total: usize,
    terminal: bool,
}

impl Progress {
    fn new(program: &'static str, total: usize) -> Self {
        eprintln!("building {program}: {total} packages, once, some minutes");
        Self { program, done: 0, total: total.max(1), terminal: std::io::stderr().is_terminal() }
    }

    fn step(&mut self) {
        self.done += 1;
        let (program, done, total) = (self.program, self.done, self.total);
        if self.terminal {
            let mut stderr = std::io::stderr();
            // A progress line that cannot be written is no reason to stop building.
            let _ = write!(stderr, "\r{program}: {done} of {total} packages ").and_then(|()| stderr.flush());
        } else if done % (total / 10).max(1) == 0 {
            eprintln!("{program}: {done} of {total} packages");
        }
    }

    /// Not every package is named: those of an earlier build are taken from Go's own cache.
    fn end(&self) {
        if self.terminal {
            eprintln!();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_go_mod_and_goes_into_the_program() {
        let version = version().unwrap();
        assert!(version.starts_with("v1."), "{version}");
        let flags = linker_flags("v1.36.1");
        for flag in ["gitVersion=v1.36.1", "gitMajor=1 ", "gitMinor=36"] {
            assert!(flags.contains(flag), "{flags}");
        }
    }

    #[test]
    fn an_old_etcd_is_not_used() {
        for (version, recent) in [
            ("3.4.23", false),
            ("3.4.31", true),
            ("3.5.12", false),
            ("3.5.13", true),
            ("3.6.8", true),
            ("4.0", true),
        ] {
            assert_eq!(is_recent(version), recent, "{version}");
        }
    }

    #[test]
    fn the_hash_is_fnv1a() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
