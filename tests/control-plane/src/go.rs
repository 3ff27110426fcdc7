//! Programs that are Go modules. They are built once from a module of this repository, and kept in
//! a cache folder.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    fcntl::{Flock, FlockArg},
    unistd::{AccessFlags, access},
};

/// Folder with go.mod and go.sum, and the way to build programs from it.
#[derive(Clone, Debug)]
pub struct Module {
    folder: PathBuf,
    /// Beginning of the name of the module's cache folder.
    name: &'static str,
    tags: &'static str,
    linker_flags: String,
    /// Files below the folder whose content distinguishes one cache folder from another, beside
    /// go.mod.
    sources: &'static [&'static str],
}

/// A file of another module that is replaced for a build.
#[derive(Clone, Copy, Debug)]
pub struct Replaced<'a> {
    pub module: &'a str,
    /// The file's path in the other module.
    pub file: &'a str,
    /// The path of the file that replaces it, in this module.
    pub by: &'a str,
}

const PAUSES_BETWEEN_DOWNLOADS: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(20)];

impl Module {
    pub fn new(folder: PathBuf, name: &'static str) -> Self {
        Self { folder, name, tags: "", linker_flags: "-s -w".to_owned(), sources: &[] }
    }

    /// Returns the module with a cache folder that depends on these files of it. A change of one
    /// builds its programs anew.
    pub fn with_sources(self, sources: &'static [&'static str]) -> Self {
        Self { sources, ..self }
    }

    pub fn with_tags(self, tags: &'static str) -> Self {
        Self { tags, ..self }
    }

    pub fn with_linker_flags(self, flags: &str) -> Self {
        Self { linker_flags: format!("{} {flags}", self.linker_flags), ..self }
    }

    /// Returns `$XDG_CACHE_HOME/proxy-ctl/<name>-<hash>`. The hash is of go.mod and of the sources,
    /// so that other versions have another folder.
    pub fn cache(&self) -> Result<PathBuf> {
        let base = match env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
            Some(folder) => PathBuf::from(folder),
            None => Path::new(&env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
                .join(".cache"),
        };
        let mut content = self.go_mod()?.into_bytes();
        for source in self.sources {
            let path = self.folder.join(source);
            content.extend(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
        }
        let hash = fnv1a(&content);
        Ok(base.join("proxy-ctl").join(format!("{}-{hash:016x}", self.name)))
    }

    /// Returns the version of a module that this one requires, such as `v1.36.1`.
    pub fn required(&self, module: &str) -> Result<String> {
        self.go_mod()?
            .lines()
            .find_map(|line| {
                let line = line.trim().trim_start_matches("require ");
                line.strip_prefix(module)?.strip_prefix(' ')?.split_whitespace().next()
            })
            .map(str::to_owned)
            .with_context(|| format!("{} does not require {module}", self.folder.join("go.mod").display()))
    }

    /// Returns the folder with the sources of a module that this one requires. They are downloaded
    /// if necessary.
    pub fn sources(&self, module: &str) -> Result<PathBuf> {
        self.download(&["mod", "download", module])?;
        Ok(PathBuf::from(self.run(&["list", "-m", "-f", "{{.Dir}}", module])?.trim()))
    }

    /// Runs `go` in this module, and returns its standard output. Returns an error without Go.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.go()?;
        let output = command.args(arguments).output().context("starting go")?;
        if !output.status.success() {
            // With -json, errors are in the output.
            let answer = if arguments.contains(&"-json") { output.stdout } else { Vec::new() };
            let said = [output.stderr, answer].concat();
            bail!("go {}: {}", arguments.join(" "), String::from_utf8_lossy(&said).trim());
        }
        String::from_utf8(output.stdout).with_context(|| format!("go {} prints no text", arguments.join(" ")))
    }

    /// Does what [`run`](Self::run) does for a command that downloads modules, in several attempts.
    /// Each attempt has fewer modules to get.
    pub fn download(&self, arguments: &[&str]) -> Result<String> {
        let mut answer = self.run(arguments);
        for pause in PAUSES_BETWEEN_DOWNLOADS {
            if let Err(error) = &answer {
                eprintln!("{error:#}; trying again in {} s", pause.as_secs());
                thread::sleep(pause);
                answer = self.run(arguments);
            }
        }
        answer
    }

    /// Returns the program if an earlier build has left it in the cache.
    pub fn built(&self, program: &str) -> Option<PathBuf> {
        self.cache().ok().map(|cache| cache.join(program)).filter(|file| is_executable(file))
    }

    /// Builds the programs of these packages that no earlier build has left, all in one go. Returns
    /// an error without Go.
    pub fn build(&self, packages: &[&str]) -> Result<()> {
        let programs: Vec<&str> = packages.iter().copied().map(program_of).collect();
        self.provide(&programs, |missing, folder| {
            let is_missing = |package: &&str| missing.contains(&program_of(package));
            let packages: Vec<&str> = packages.iter().copied().filter(is_missing).collect();
            self.download(&[&["list", "-deps", "-tags", self.tags], &packages[..]].concat())?;
            self.compile(&["build"], &packages, folder)
        })
    }

    /// Builds the tests of a package as one program of this name, unless an earlier build has left
    /// it. If a file is given, a file of this module replaces it. Returns an error without Go.
    pub fn build_tests(&self, other: Option<&Replaced<'_>>, package: &str, program: &str) -> Result<()> {
        self.provide(&[program], |_, folder| {
            self.download(&["list", "-deps", "-test", "-tags", self.tags, package])?;
            let build_folder = tempfile::tempdir().context("creating a folder for the build")?;
            let replaced = other.map(|other| self.replace(other, build_folder.path())).transpose()?;
            let flags = replaced.iter().flatten().map(String::as_str);
            let command: Vec<&str> = ["test", "-vet=off", "-c"].into_iter().chain(flags).collect();
            self.compile(&command, &[package], &folder.join(program))
        })
    }

    /// Returns the flags of `go build` for a replaced file. Go refuses to replace files of its
    /// module cache, so a link in `build_folder` becomes the module's folder.
    fn replace(&self, other: &Replaced<'_>, build_folder: &Path) -> Result<[String; 2]> {
        let module = build_folder.join("module");
        symlink(self.sources(other.module)?, &module).context("linking the module's folder")?;
        let theirs = module.join(other.file);
        ensure!(theirs.is_file(), "{} has no file {}", other.module, other.file);
        let ours = fs::canonicalize(self.folder.join(other.by)).with_context(|| other.by.to_owned())?;
        let write = |name: &str, text: String| {
            let path = build_folder.join(name);
            fs::write(&path, text).map(|()| path).with_context(|| format!("writing {name}"))
        };
        let modules = format!("{}\nreplace {} => {}\n", self.go_mod()?, other.module, module.display());
        let modules = write("go.mod", modules)?;
        fs::copy(self.folder.join("go.sum"), build_folder.join("go.sum")).context("copying go.sum")?;
        let files = serde_json::json!({ "Replace": { (theirs.to_string_lossy()): ours } });
        let overlay = write("overlay.json", files.to_string())?;
        Ok([format!("-modfile={}", modules.display()), format!("-overlay={}", overlay.display())])
    }

    /// Keeps the programs that `make` writes to a folder. `make` gets the names of those that are
    /// missing.
    fn provide(&self, programs: &[&str], make: impl FnOnce(&[&str], &Path) -> Result<()>) -> Result<()> {
        let cache = self.cache()?;
        fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
        let lock = cache.join("lock");
        let lock = fs::File::create(&lock).with_context(|| format!("creating {}", lock.display()))?;
        let _building = Flock::lock(lock, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .with_context(|| format!("waiting for another build in {}", cache.display()))?;
        let missing: Vec<&str> =
            programs.iter().copied().filter(|program| self.built(program).is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        // A program is moved into the cache when it is complete. An interrupted build must not look
        // like a program.
        let partial = cache.join("partial");
        fs::create_dir_all(&partial).with_context(|| format!("creating {}", partial.display()))?;
        eprintln!("building {}: once, some minutes", missing.join(", "));
        make(&missing, &partial).with_context(|| format!("building {} failed", missing.join(", ")))?;
        for program in missing {
            let (from, to) = (partial.join(program), cache.join(program));
            fs::rename(&from, &to).with_context(|| format!("renaming {}", from.display()))?;
        }
        Ok(())
    }

    fn compile(&self, command: &[&str], packages: &[&str], output: &Path) -> Result<()> {
        let status = self
            .go()?
            .args(command)
            .args(["-trimpath", "-tags", self.tags, "-ldflags", &self.linker_flags, "-o"])
            .arg(output)
            .args(packages)
            .status()
            .context("starting go")?;
        ensure!(status.success(), "go {}: {status}", command.join(" "));
        Ok(())
    }

    fn go(&self) -> Result<Command> {
        let mut command = Command::new(find_go()?);
        command.current_dir(&self.folder).env("CGO_ENABLED", "0").stdin(Stdio::null());
        // The compiler ends before its memory is worth collecting. Otherwise it would take a tenth
        // of its time for that.
        if env::var_os("GOGC").is_none() {
            command.env("GOGC", "400");
        }
        Ok(command)
    }

    fn go_mod(&self) -> Result<String> {
        let path = self.folder.join("go.mod");
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    }
}

/// Returns the name that `go build` gives to the program of a package.
fn program_of(package: &str) -> &str {
    package.rsplit('/').next().unwrap_or(package)
}

/// Returns the program if it is on PATH.
pub fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(program)).find(|file| is_executable(file))
}

pub(crate) fn is_executable(file: &Path) -> bool {
    file.is_file() && access(file, AccessFlags::X_OK).is_ok()
}

/// Returns Go from PATH, from GOROOT, or from /usr/local/go. https://go.dev/doc/install puts it
/// into the last one, which is on no PATH before somebody adds it.
pub(crate) fn find_go() -> Result<PathBuf> {
    let root = env::var_os("GOROOT").map(PathBuf::from);
    let installed = root.into_iter().chain([PathBuf::from("/usr/local/go")]);
    on_path("go")
        .or_else(|| installed.map(|root| root.join("bin/go")).find(|go| is_executable(go)))
        .context("there is no Go on PATH, in GOROOT or in /usr/local/go")
}

/// Returns the FNV-1a hash. The hash of std may change with the compiler, and with it the name of
/// the folder.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_go_mod_requires_is_found_by_its_whole_name() {
        let folder = tempfile::tempdir().unwrap();
        let text = "module x\nrequire a.b/c v1.2.3\nrequire (\n\ta.b/c/d v0.1.0 // indirect\n)\n";
        fs::write(folder.path().join("go.mod"), text).unwrap();
        let module = Module::new(folder.path().to_owned(), "x");
        assert_eq!(module.required("a.b/c").unwrap(), "v1.2.3");
        assert_eq!(module.required("a.b/c/d").unwrap(), "v0.1.0");
        assert!(module.required("a.b").unwrap_err().to_string().contains("does not require a.b"));
    }

    #[test]
    fn another_source_is_another_cache_folder() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("go.mod"), "module x\n").unwrap();
        fs::write(folder.path().join("main.go"), "package main\n").unwrap();
        let module = Module::new(folder.path().to_owned(), "x");
        let watched = module.clone().with_sources(&["main.go"]);
        let (before, plain) = (watched.cache().unwrap(), module.cache().unwrap());
        assert_ne!(before, plain);
        fs::write(folder.path().join("main.go"), "package other\n").unwrap();
        assert_ne!(watched.cache().unwrap(), before);
        assert_eq!(module.cache().unwrap(), plain);
        let absent = module.with_sources(&["no.go"]).cache().unwrap_err();
        assert!(absent.to_string().contains("no.go"), "{absent}");
    }

    #[test]
    fn the_hash_is_fnv1a() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
