//! helm and promtool: from PATH, else built from the Go module beside this crate, once, and kept in the cache.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tool {
    Helm,
    Promtool,
}

/// Where the custom resources of prometheus-operator are defined.
const OPERATOR: &str = "github.com/prometheus-operator/prometheus-operator@v0.94.1";

impl Tool {
    const fn name(self) -> &'static str {
        match self {
            Self::Helm => "helm",
            Self::Promtool => "promtool",
        }
    }

    /// Package and build tags.
    const fn source(self) -> (&'static str, &'static str) {
        match self {
            Self::Helm => ("helm.sh/helm/v4/cmd/helm", ""),
            // Without the clients of every cloud.
            Self::Promtool => ("github.com/prometheus/prometheus/cmd/promtool", "remove_all_sd"),
        }
    }

    /// An error if it is not there and cannot be built.
    pub fn path(self) -> Result<PathBuf> {
        if let Some(found) = on_path(self.name()) {
            return Ok(found);
        }
        let cache = cache()?;
        let target = cache.join(self.name());
        if target.is_file() {
            return Ok(target);
        }
        let go = go().with_context(|| format!("{} is not on PATH", self.name()))?;
        fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
        let lock = fs::File::create(cache.join("lock")).context("creating the lock of the cache")?;
        let _building = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .context("waiting for another build")?;
        if target.is_file() {
            return Ok(target);
        }
        eprintln!("building {}, once, some minutes", self.name());
        let (package, tags) = self.source();
        // Complete or not there at all: an interrupted build must not look like a program.
        let partial = cache.join(format!("{}.partial", self.name()));
        let output = Command::new(go)
            .current_dir(module())
            .env("CGO_ENABLED", "0")
            .args(["build", "-trimpath", "-tags", tags, "-ldflags", "-s -w", "-o"])
            .arg(&partial)
            .arg(package)
            .stdin(Stdio::null())
            .output()
            .context("starting go")?;
        if !output.status.success() {
            bail!("building {package}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        fs::rename(&partial, &target).with_context(|| format!("renaming {}", partial.display()))?;
        Ok(target)
    }
}

/// Definitions of prometheus-operator's custom resources, as it publishes them. An error without Go or network.
pub fn operator_definitions() -> Result<Vec<Value>> {
    let mut command = Command::new(go()?);
    command.current_dir(module()).args(["mod", "download", "-json", OPERATOR]);
    let output = command.stdin(Stdio::null()).output().context("starting go")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        bail!("go mod download {OPERATOR}: {}", text.trim());
    }
    let answer: Value = serde_json::from_slice(&output.stdout).context("the answer of go mod download")?;
    let folder = answer["Dir"].as_str().context("go mod download does not tell where")?;
    let folder = Path::new(folder).join("example/prometheus-operator-crd");
    let mut definitions = Vec::new();
    for kind in ["podmonitors", "prometheusrules"] {
        let file = folder.join(format!("monitoring.coreos.com_{kind}.yaml"));
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        definitions.extend(super::files::documents(&text)?);
    }
    Ok(definitions)
}

/// The folder of a module that tests/kubernetes requires, such as `k8s.io/kubernetes`.
pub fn kubernetes_module(name: &str) -> Result<PathBuf> {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kubernetes");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(go()?);
        let output = command.current_dir(&module).args(arguments).stdin(Stdio::null()).output();
        let output = output.context("starting go")?;
        if !output.status.success() {
            bail!("go {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    run(&["mod", "download", name])?;
    Ok(PathBuf::from(run(&["list", "-m", "-f", "{{.Dir}}", name])?))
}

fn module() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tools")
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// From PATH, else from where it says itself that it is, else from where https://go.dev/doc/install puts it: into a
/// folder that is on no PATH before somebody adds it.
fn go() -> Result<PathBuf> {
    let root = env::var_os("GOROOT").map(PathBuf::from);
    let installed = root.into_iter().chain([PathBuf::from("/usr/local/go")]);
    on_path("go")
        .or_else(|| installed.map(|root| root.join("bin/go")).find(|go| go.is_file()))
        .context("there is no Go on PATH, in GOROOT or in /usr/local/go")
}

/// Other versions of the tools are another folder.
fn cache() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => {
            Path::new(&env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    let go_mod = module().join("go.mod");
    let text = fs::read(&go_mod).with_context(|| format!("reading {}", go_mod.display()))?;
    // FNV-1a: std's hasher may change with the compiler, and with it the name of the folder.
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Ok(base.join("proxy-ctl").join(format!("deploy-tools-{hash:016x}")))
}
