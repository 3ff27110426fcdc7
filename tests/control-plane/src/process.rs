//! A child that never outlives its owner. It is killed when it is dropped, and by the kernel when
//! this process dies.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use lab::namespace::{enter, path};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Interval between two checks of a condition.
pub(crate) const BETWEEN_LOOKS: Duration = Duration::from_millis(10);
/// Time after which a process that was asked to end is killed. An API server waits a minute for
/// watches to end, but it has stopped listening long before this.
const TERM_LIMIT: Duration = Duration::from_secs(1);

/// Child process that is killed when this is dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// Thread that started the child. The kernel kills the child when that thread ends, so the
    /// thread waits for the owner.
    parent: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Process {
    /// Starts the program with arguments and environment of `command` in a named network namespace
    /// or, without a name, in that of the caller. Its output is appended to `log`.
    pub fn start(command: &Command, log: &Path, namespace: Option<&str>) -> Result<Self> {
        let program = Path::new(command.get_program());
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("opening {}", log.display()))?;
        let mut bound = Command::new("setpriv");
        bound
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(command.get_args())
            .envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("duplicating the log")?)
            .stderr(output);

        let (owner, owned) = mpsc::channel::<()>();
        let (started, start) = mpsc::channel();
        let namespace = namespace.map(path);
        let parent = std::thread::Builder::new()
            .name(format!("parent of {name}"))
            .spawn(move || {
                let child = namespace
                    .map_or(Ok(()), |namespace| enter(&namespace))
                    .and_then(|()| bound.spawn().context("starting setpriv (package util-linux)"));
                if started.send(child).is_ok() {
                    // This returns an error once the owner is gone, which the thread waits for.
                    let _ = owned.recv();
                }
            })
            .context("starting a thread")?;
        let child = start.recv().map_err(|_| anyhow!("the thread that starts {name} is gone"))??;
        Ok(Self { name, child, log: log.to_owned(), parent: Some((owner, parent)) })
    }

    /// Returns an error with the end of the log if the process has ended.
    pub fn alive(&mut self) -> Result<()> {
        match self.child.try_wait().with_context(|| format!("waiting for {}", self.name))? {
            None => Ok(()),
            Some(status) => {
                bail!("{} has ended ({status}); its log ends with\n{}", self.name, self.last_words())
            }
        }
    }

    /// Returns the end of the log.
    pub fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Asks the process to end, and waits for it. After a second it is killed.
    pub fn stop(mut self) -> Result<ExitStatus> {
        let id = i32::try_from(self.child.id()).context("process id")?;
        kill(Pid::from_raw(id), Signal::SIGTERM).with_context(|| format!("stopping {}", self.name))?;
        let deadline = Instant::now() + TERM_LIMIT;
        loop {
            if let Some(status) =
                self.child.try_wait().with_context(|| format!("waiting for {}", self.name))?
            {
                return Ok(status);
            }
            if Instant::now() > deadline {
                self.child.kill().with_context(|| format!("killing {}", self.name))?;
            }
            std::thread::sleep(BETWEEN_LOOKS);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Errors mean that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some((owner, parent)) = self.parent.take() {
            drop(owner);
            let _ = parent.join();
        }
    }
}
