//! The files of a layer: where they stand in the image, and where they come from.

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use super::programs;
use crate::programs::Program;

/// Programs that tests call in containers, and their names there.
const TOOLS: [(&str, &str); 24] = [
    ("bash", "bash"),
    ("conntrack", "conntrack"),
    ("curl", "curl"),
    ("date", "date"),
    ("dig", "dig"),
    ("getent", "getent"),
    ("grep", "grep"),
    ("host", "host"),
    ("hostname", "hostname"),
    ("ip", "ip"),
    ("ip6tables", "ip6tables"),
    ("ipcs", "ipcs"),
    ("iptables", "iptables"),
    ("iptables-save", "iptables-save"),
    ("nc.openbsd", "nc"),
    ("nft", "nft"),
    ("nslookup", "nslookup"),
    ("ping", "ping"),
    ("seq", "seq"),
    ("ss", "ss"),
    ("sysctl", "sysctl"),
    ("tcpdump", "tcpdump"),
    ("timeout", "timeout"),
    ("wget", "wget"),
];
const BUSYBOX: &str = "busybox";
/// Shell of containers. The shell of Debian's busybox prefers its own applets to the programs in
/// the path.
const SHELL: &str = "dash";
/// Applet that is left out, because it is worse than the program that a test means.
const NOT_THIS_APPLET: &str = "nslookup";

const FOLDERS: [&str; 10] =
    ["dev", "etc", "proc", "root", "run", "sys", "uploads", "usr/bin", "var/log", "www"];
const TEXTS: [(&str, &str); 3] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n",
    ),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\nuser:x:1000:\n"),
    ("etc/nsswitch.conf", "hosts: files dns\n"),
];

/// File of an image.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Content {
    Folder {
        mode: u32,
    },
    Text(&'static str),
    Link(String),
    /// Copy of a file of this machine, with its size and the time of its last change.
    Copy {
        from: PathBuf,
        size: u64,
        changed: i64,
    },
}

/// Files of a layer by their paths, which begin without a slash.
#[derive(Debug, Default)]
pub(super) struct Files(pub(super) BTreeMap<String, Content>);

/// Returns a program that images are made of, and that is not installed here.
pub fn missing_tool() -> Option<&'static str> {
    let names = TOOLS.iter().map(|(program, _)| *program).chain([BUSYBOX, SHELL]);
    names.into_iter().find(|program| find(program).is_none())
}

impl Files {
    pub(super) fn of_pause() -> Result<Self> {
        let mut files = Self::default();
        files.copy("pause", &Program::Pause.path()?)?;
        Ok(files)
    }

    pub(super) fn of_tools() -> Result<Self> {
        let mut files = Self::default();
        for folder in FOLDERS {
            files.0.insert(format!("{folder}/"), Content::Folder { mode: 0o755 });
        }
        files.0.insert("tmp/".into(), Content::Folder { mode: 0o1777 });
        for (path, text) in TEXTS {
            files.0.insert(path.into(), Content::Text(text));
        }
        for (program, name) in TOOLS {
            files.program(&format!("usr/bin/{name}"), program)?;
        }
        files.program("bin/sh", SHELL)?;
        files.applets()?;
        files.extensions_of_iptables()?;
        files.copy("agnhost", &Program::Agnhost.path()?)?;
        files.0.insert("agnhost-2".into(), Content::Link("agnhost".into()));
        files.copy("regression-issue-74839", &Program::Regression74839.path()?)?;
        let certificates = programs::kubernetes_sources()?.join("test/images/agnhost/porter");
        for name in ["localhost.crt", "localhost.key"] {
            files.copy(name, &certificates.join(name))?;
        }
        Ok(files)
    }

    /// Adds busybox, and links to it by the names of programs that are not there otherwise.
    fn applets(&mut self) -> Result<()> {
        self.program("bin/busybox", BUSYBOX)?;
        let list = output(Command::new(find(BUSYBOX).context("busybox is not installed")?).arg("--list"))?;
        for applet in list.lines().filter(|applet| *applet != NOT_THIS_APPLET) {
            let at = format!("bin/{applet}");
            if !self.0.contains_key(&at) && !self.0.contains_key(&format!("usr/bin/{applet}")) {
                self.0.insert(at, Content::Link(BUSYBOX.into()));
            }
        }
        Ok(())
    }

    /// Adds the matches and targets that iptables loads.
    fn extensions_of_iptables(&mut self) -> Result<()> {
        let program = find("iptables").context("iptables is not installed")?;
        let library =
            libraries(&program)?.into_iter().find(|path| path.to_string_lossy().contains("libxtables"));
        let library = library.context("iptables does not use libxtables")?;
        // A link in /lib may name the library, and /lib may be a link itself.
        let library = library.canonicalize().context("resolving libxtables")?;
        let folder = library.parent().context("libxtables is in no folder")?.join("xtables");
        for found in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let path = found.with_context(|| format!("reading {}", folder.display()))?.path();
            self.copy(&inside(&path), &path)?;
        }
        Ok(())
    }

    /// Adds a program of this machine and the libraries that it needs.
    fn program(&mut self, at: &str, name: &str) -> Result<()> {
        let program = find(name).with_context(|| format!("{name} is not installed"))?;
        self.copy(at, &program)?;
        for library in libraries(&program)? {
            self.copy(&inside(&library), &library)?;
        }
        Ok(())
    }

    fn copy(&mut self, at: &str, from: &Path) -> Result<()> {
        let found = fs::metadata(from).with_context(|| format!("looking at {}", from.display()))?;
        let content = Content::Copy { from: from.to_owned(), size: found.len(), changed: found.mtime() };
        self.0.insert(at.to_owned(), content);
        Ok(())
    }
}

/// Returns the path as it stands in an image.
fn inside(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

/// Finds a program, also in the administrator's folders.
fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(administrators)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Returns the libraries of a program, and the program that loads them. A static program has none.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let told = Command::new("ldd").arg(program).stdin(Stdio::null()).output().context("starting ldd")?;
    Ok(libraries_in(&String::from_utf8_lossy(&told.stdout)))
}

/// Returns the paths in lines such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f…)`.
fn libraries_in(told: &str) -> Vec<PathBuf> {
    told.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_that_ldd_tells() {
        let told = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld.so.2 (0x3)\n";
        assert_eq!(libraries_in(told), ["/lib/x/libc.so.6", "/lib64/ld.so.2"].map(PathBuf::from));
        assert!(libraries_in("\tnot a dynamic executable\n").is_empty());
    }
}
