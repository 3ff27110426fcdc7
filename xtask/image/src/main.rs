//! The command `cargo xtask image`. It writes an OCI archive with one static binary and the tools
//! that it runs, without a container engine.

mod archive;
mod components;
mod iptables;

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum as _};
use xtask::{
    command::{output, target, workspace},
    cross::{self, Architecture, Profile, Toolchain},
    image::IMPOSSIBLE,
    setup,
};

use self::{
    archive::{Content, File, Image, Program},
    iptables::Tools,
};

#[derive(Parser)]
#[command(
    name = "cargo xtask image",
    bin_name = "cargo xtask image",
    about = "Writes a container image, without a container engine"
)]
struct Arguments {
    /// The architectures of the image, such as amd64,arm64 [default: that of this machine]
    #[arg(long, value_enum, value_delimiter = ',')]
    arch: Vec<Architecture>,
    /// The archive [default: target/image/proxy-ctl-<version>-<arch>.oci.tar; <arch> is all for
    /// several]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The name that the image has once it is loaded [default: localhost/proxy-ctl:<version>]
    #[arg(long)]
    name: Option<String>,
    /// The profile of the build; dev builds faster, but its binary is larger and slower
    #[arg(long, value_enum, default_value_t = Profile::Release)]
    profile: Profile,
    /// Write the image that the tests use: not optimised, and without a program for other machines
    #[arg(long, hide = true, requires = "output")]
    for_tests: bool,
    /// With --for-tests, use this program, which is linked with libraries of this machine, instead
    /// of a static one
    #[arg(long, hide = true, requires = "for_tests", value_name = "FILE")]
    program: Option<PathBuf>,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match &arguments.output {
        Some(file) if arguments.for_tests => for_tests(file, arguments.program.as_deref()),
        _ => run(&arguments),
    };
    done.unwrap_or_else(|error| {
        eprintln!("image: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    setup::for_building()?;
    let mut architectures = arguments.arch.clone();
    architectures.sort_unstable();
    architectures.dedup();
    if architectures.is_empty() {
        architectures.push(Architecture::of_this_machine()?);
    }
    let names: Vec<_> = architectures.iter().map(|architecture| architecture.name()).collect();
    let file = arguments.output.clone().unwrap_or_else(|| {
        let suffix = if let [name] = names[..] { name } else { "all" };
        target().join("image").join(format!("proxy-ctl-{VERSION}-{suffix}.oci.tar"))
    });
    let toolchains: Vec<_> = architectures.into_iter().map(Toolchain::install).collect::<Result<_>>()?;
    let name = arguments.name.clone().unwrap_or_else(|| format!("localhost/proxy-ctl:{VERSION}"));
    let with_tools = |toolchain: &Toolchain| {
        let tools = Tools::fetch(toolchain.architecture())?;
        Ok((static_program(toolchain, &tools, arguments.profile)?, tools))
    };
    let programs: Vec<_> = toolchains.iter().map(with_tools).collect::<Result<_>>()?;
    let (programs, tools): (Vec<_>, Vec<_>) = programs.into_iter().unzip();
    let targets: Vec<_> = toolchains.iter().map(|toolchain| toolchain.target().to_owned()).collect();
    let digest = write(&toolchains, &targets, &tools, &programs, &name, &file)?;
    println!("{} holds {name} for {}, {digest}", file.display(), names.join(" and "));
    println!("{}, and in the image with NOTICES: what it is made of", bill_beside(&file).display());
    println!("load it by: ctr -n k8s.io images import FILE, podman load -i FILE, docker load -i FILE");
    Ok(ExitCode::SUCCESS)
}

/// Writes the image for tests. For this machine's architecture it has `program`, or a static
/// program that is not optimised. For the other architecture it has no program, but everything else
/// that an image of several has. An error means that it cannot be built from these sources.
fn for_tests(file: &Path, program: Option<&Path>) -> Result<ExitCode> {
    let ready = || {
        let architecture = Architecture::of_this_machine()?;
        Ok((Toolchain::install(architecture)?, Tools::fetch(architecture)?))
    };
    let (toolchain, tools) = match ready() {
        Ok(ready) => ready,
        Err::<_, anyhow::Error>(error) => {
            eprintln!("{error:#}");
            return Ok(ExitCode::from(IMPOSSIBLE));
        }
    };
    let (program, target) = match program {
        Some(path) => (linked_program(&toolchain, &tools, path)?, host()?),
        None => (static_program(&toolchain, &tools, Profile::Dev)?, toolchain.target().to_owned()),
    };
    let mut programs = vec![program];
    let other = Architecture::value_variants().iter().find(|other| **other != toolchain.architecture());
    programs.extend(other.map(|other| Program {
        architecture: other.name(),
        binary: b"not for tests".to_vec(),
        files: Vec::new(),
    }));
    write(&[toolchain], &[target], &[tools], &programs, &format!("localhost/proxy-ctl:{VERSION}"), file)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the target that cargo compiles for if none is named.
fn host() -> Result<String> {
    let version = output(Command::new("rustc").arg("-vV").current_dir(workspace()))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// Returns a program of this machine with its libraries, which replace Debian's of the same names.
fn linked_program(toolchain: &Toolchain, tools: &Tools, path: &Path) -> Result<Program> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("reading {}", path.display()));
    let mut files: BTreeMap<String, File> =
        tools.files()?.into_iter().map(|file| (file.path.clone(), file)).collect();
    for library in libraries(&output(Command::new("ldd").arg(path))?) {
        let path = library.trim_start_matches('/').to_owned();
        files.insert(path.clone(), File { path, content: Content::Program(read(Path::new(library))?) });
    }
    Ok(Program {
        architecture: toolchain.architecture().name(),
        binary: read(path)?,
        files: files.into_values().collect(),
    })
}

/// Returns the paths in what ldd prints, such as `libc.so.6 => /lib/libc.so.6 (0x00)` or
/// `/lib64/ld-linux.so.2 (0x00)`.
fn libraries(ldd: &str) -> Vec<&str> {
    ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))).collect()
}

fn static_program(toolchain: &Toolchain, tools: &Tools, profile: Profile) -> Result<Program> {
    let binary = cross::build(toolchain, profile)?;
    let binary = fs::read(&binary).with_context(|| format!("reading {}", binary.display()))?;
    Ok(Program { architecture: toolchain.architecture().name(), binary, files: tools.files()? })
}

fn bill_beside(archive: &Path) -> PathBuf {
    archive.with_extension("").with_extension("cdx.json")
}

/// Writes the archive, and the bill of materials beside it. Returns the digest of the image. The
/// programs were compiled for `targets`.
fn write(
    toolchains: &[Toolchain],
    targets: &[String],
    tools: &[Tools],
    programs: &[Program],
    name: &str,
    file: &Path,
) -> Result<String> {
    let created = created()?;
    let mut components = components::linked(toolchains, targets)?;
    for tools in tools {
        components.extend(tools.components()?);
    }
    let bill = serde_json::to_vec_pretty(&components::bill_of_materials(&components, created)?)?;
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let beside = bill_beside(file);
    fs::write(&beside, &bill).with_context(|| format!("writing {}", beside.display()))?;
    let documents = [
        ("LICENSE", fs::read(workspace().join("LICENSE")).context("reading LICENSE")?),
        ("NOTICES", components::notices(&components).into_bytes()),
        ("sbom.cdx.json", bill),
    ];
    let image = Image { name, created, labels: labels(), programs, documents: &documents };
    let archive = fs::File::create(file).with_context(|| format!("creating {}", file.display()))?;
    let mut archive = BufWriter::new(archive);
    let digest = image.write(&mut archive)?;
    archive.flush().with_context(|| format!("writing {}", file.display()))?;
    Ok(digest)
}

/// Returns the seconds since the epoch that stand for the time at which the image was made, so that
/// it can be made again, bit by bit. They are `SOURCE_DATE_EPOCH`, else the time of the commit,
/// else 0.
fn created() -> Result<i64> {
    if let Ok(text) = env::var("SOURCE_DATE_EPOCH") {
        return text.trim().parse().context("SOURCE_DATE_EPOCH must be seconds since the epoch");
    }
    let commit = git(&["log", "-1", "--format=%ct"]).unwrap_or_else(|| "0".to_owned());
    let Ok(seconds) = commit.parse() else { bail!("git log answered {commit:?}") };
    Ok(seconds)
}

fn labels() -> BTreeMap<&'static str, String> {
    let label = |name: &'static str, value: &str| (name, value.to_owned());
    let mut labels = BTreeMap::from([
        label("org.opencontainers.image.title", "proxy-ctl"),
        label(
            "org.opencontainers.image.description",
            "A service proxy for Kubernetes nodes that replaces kube-proxy",
        ),
        label("org.opencontainers.image.version", VERSION),
        label("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE")),
    ]);
    if let Some(revision) = git(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]) {
        labels.insert("org.opencontainers.image.revision", revision);
    }
    labels
}

/// Returns what git prints. `None` if there is no git, or no repository.
fn git(arguments: &[&str]) -> Option<String> {
    let text = output(Command::new("git").args(arguments).current_dir(workspace())).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::libraries;

    #[test]
    fn libraries_are_those_that_ldd_finds() {
        let ldd = "\tlinux-vdso.so.1 (0x00007f)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(libraries(ldd), ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
    }
}
