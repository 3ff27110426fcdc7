//! The programs of iptables: finds and runs them, and reads their error messages. They share a lock
//! with all other programs that write rules. With iptables-legacy, a writer without the lock undoes
//! what others write at the same time.

use std::{
    env,
    ffi::OsString,
    fmt,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use super::any_bytes::{decode, encode};
use crate::sys::nftables::TableFamily;

/// The number of seconds for which a tool waits for the lock.
const LOCK_SECONDS: &str = "5";
/// The exit code of the tools when they did not get the lock, or when the table was changed
/// meanwhile.
const RESOURCE_PROBLEM: i32 = 4;
const FOLDERS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The part of the kernel to which a tool writes its rules.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Backend {
    /// The kernel's interface from before nf_tables.
    Legacy,
    /// nf_tables.
    Nft,
}

impl Backend {
    pub const ALL: [Self; 2] = [Self::Legacy, Self::Nft];

    /// Returns the name of the backend in the names of the tools.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Nft => "nft",
        }
    }

    /// Returns the name of the backend in the output of `--version`.
    const fn in_version(self) -> &'static str {
        match self {
            Self::Legacy => "(legacy)",
            Self::Nft => "(nf_tables)",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error("{program} cannot be run: {source}")]
    Run { program: String, source: io::Error },
    #[error("{program} did not get the lock of iptables (/run/xtables.lock) in {LOCK_SECONDS} s: {said}")]
    Busy { program: String, said: String },
    #[error("{program}: {status}: {said}")]
    Failed { program: String, status: ExitStatus, said: String },
}

impl ToolError {
    /// Returns the line of the input that the tool could not carry out, counted from 1.
    pub fn line(&self) -> Option<usize> {
        match self {
            Self::Failed { said, .. } => named_line(said),
            Self::Run { .. } | Self::Busy { .. } => None,
        }
    }
}

/// Finds the number in messages such as `Error occurred at line: 7`, `line 7 failed` or
/// `line 7: RULE_APPEND failed (Invalid argument)`.
fn named_line(said: &str) -> Option<usize> {
    let number = |rest: &str| {
        let rest = rest.strip_prefix(':').unwrap_or(rest).trim_start();
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..digits].parse().ok()
    };
    said.match_indices("line").find_map(|(at, word)| number(&said[at + word.len()..]))
}

/// The tools of one family and one backend.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tools {
    pub backend: Backend,
    save: PathBuf,
    restore: PathBuf,
    version: Version,
}

/// A version of the tools, such as 1.8.9.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Version(u32, u32, u32);

impl Version {
    /// Parses text such as `iptables-save v1.8.9 (nf_tables)`.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(" v").nth(1)?.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some(Self(numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok().unwrap_or(0)))
    }
}

/// Returns the beginning of the names of a family's tools.
pub const fn program(family: TableFamily) -> &'static str {
    match family {
        TableFamily::Ipv4 => "iptables",
        TableFamily::Ipv6 => "ip6tables",
    }
}

impl Tools {
    /// Finds the tools on PATH: first `iptables-legacy-save` or `iptables-nft-save`, then an
    /// `iptables-save` of this backend.
    pub fn find(family: TableFamily, backend: Backend) -> Option<Self> {
        let program = program(family);
        let named = |name: &str| {
            let save = on_path(&format!("{name}-save"))?;
            let version = Command::new(&save).arg("--version").stdin(Stdio::null()).output().ok()?;
            let version = String::from_utf8_lossy(&version.stdout).into_owned();
            // Tools before 1.8 are always legacy, and their version does not say so.
            let is_of = version.contains(backend.in_version())
                || backend == Backend::Legacy && !version.contains('(');
            let version = Version::parse(&version).filter(|_| is_of)?;
            Some(Self { backend, save, restore: on_path(&format!("{name}-restore"))?, version })
        };
        named(&format!("{program}-{backend}")).or_else(|| named(program))
    }

    #[cfg(test)]
    pub(crate) fn of_programs(save: PathBuf, restore: PathBuf) -> Self {
        Self { backend: Backend::Nft, save, restore, version: Version(1, 8, 9) }
    }

    /// Returns the version for people to read.
    pub fn version(&self) -> String {
        let Version(major, minor, patch) = self.version;
        format!("{major}.{minor}.{patch} ({})", self.backend)
    }

    /// Returns true if MASQUERADE supports `--random-fully` (iptables 1.6.2, Linux 3.13).
    pub fn has_random_fully(&self) -> bool {
        self.version >= Version(1, 6, 2)
    }

    /// Gives each line of a table to `take`, without the line's end. There are no lines if the
    /// kernel does not have the table yet. Bytes that are not UTF-8 are encoded in a way that only
    /// [`Self::restore`] understands. Needs CAP_NET_ADMIN.
    pub fn save(&self, table: &str, mut take: impl FnMut(&str)) -> Result<(), ToolError> {
        let mut command = Command::new(&self.save);
        command.args(["-t", table]).stdin(Stdio::null());
        let mut child = spawn(&self.save, &mut command)?;
        let read = child.stdout.take().map_or(Ok(()), |stdout| {
            let (mut stdout, mut line) = (BufReader::with_capacity(1 << 16, stdout), Vec::new());
            while stdout.read_until(b'\n', &mut line)? > 0 {
                take(&decode(line.strip_suffix(b"\n").unwrap_or(&line)));
                line.clear();
            }
            Ok(())
        });
        finish(&self.save, child)?;
        read.map_err(|source| ToolError::Run { program: shown(&self.save), source })
    }

    /// Applies `input`, which has the format of iptables-save. Chains that it declares are emptied,
    /// and others are left alone. The lines between a `*table` and its `COMMIT` are applied wholly
    /// or not at all. Needs CAP_NET_ADMIN.
    pub fn restore(&self, input: &str) -> Result<(), ToolError> {
        let mut command = Command::new(&self.restore);
        command.args(["-w", LOCK_SECONDS, "--noflush", "--counters"]).stdin(Stdio::piped());
        let mut child = spawn(&self.restore, &mut command)?;
        // These tools print nothing before they have read all input, so that writing cannot block.
        let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(&encode(input)));
        finish(&self.restore, child)?;
        written.map_err(|source| ToolError::Run { program: shown(&self.restore), source })
    }
}

fn shown(program: &Path) -> String {
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

fn spawn(program: &Path, command: &mut Command) -> Result<Child, ToolError> {
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    spawned.map_err(|source| ToolError::Run { program: shown(program), source })
}

fn finish(program: &Path, child: Child) -> Result<(), ToolError> {
    let program = shown(program);
    let output = match child.wait_with_output() {
        Ok(output) => output,
        Err(source) => return Err(ToolError::Run { program, source }),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(if output.status.code() == Some(RESOURCE_PROBLEM) && !tells_of_the_kernel(&said) {
        ToolError::Busy { program, said }
    } else {
        ToolError::Failed { program, status: output.status, said }
    })
}

/// Returns true if the message is the kernel's answer. iptables-nft uses the exit code of a held
/// lock also if the kernel refuses a line, or if it has no nf_tables and therefore no rule set.
fn tells_of_the_kernel(said: &str) -> bool {
    named_line(said).is_some() || said.contains("rule set generation id")
}

fn on_path(name: &str) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    let folders = env::var_os("PATH").unwrap_or_else(|| OsString::from(FOLDERS));
    env::split_paths(&folders).map(|folder| folder.join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::unknown_word(
        "iptables-restore v1.8.9 (nf_tables): unknown option \"--x\"\nError occurred at line: 12",
        Some(12)
    )]
    #[case::refused_by_the_kernel(
        "iptables-nft-restore v1.8.9 (nf_tables): \nline 431: RULE_APPEND failed",
        Some(431)
    )]
    #[case::legacy("iptables-legacy-restore: line 7 failed", Some(7))]
    #[case::lock("Another app is currently holding the xtables lock; waited 5s", None)]
    fn lines_that_the_tools_name(#[case] said: &str, #[case] line: Option<usize>) {
        assert_eq!(named_line(said), line);
    }

    #[rstest]
    #[case::refused("iptables-restore v1.8.9 (nf_tables): \nline 431: RULE_APPEND failed", true)]
    #[case::no_nf_tables(
        "iptables-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: Invalid argument",
        true
    )]
    #[case::lock("Another app is currently holding the xtables lock; waited 5s", false)]
    #[case::no_memory("iptables-restore: Resource temporarily unavailable.", false)]
    fn what_is_an_answer_of_the_kernel(#[case] said: &str, #[case] expected: bool) {
        assert_eq!(tells_of_the_kernel(said), expected);
    }

    #[rstest]
    #[case("iptables-save v1.8.9 (nf_tables)", Some(Version(1, 8, 9)))]
    #[case("ip6tables-save v1.6.1\n", Some(Version(1, 6, 1)))]
    #[case("iptables-save v1.8 (legacy)", Some(Version(1, 8, 0)))]
    #[case("something else", None)]
    fn versions(#[case] text: &str, #[case] version: Option<Version>) {
        assert_eq!(Version::parse(text), version);
    }
}
