//! Keeps the names of what a process makes on this machine and must remove again: on drop, or on a
//! signal. What a killed process has left is removed before another one makes more of it.

use std::{
    collections::BTreeSet,
    fs::File,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::signals;

/// Labs or clusters of this process.
pub struct Claims {
    kind: &'static str,
    guard: &'static str,
    remove: fn(&str) -> Result<()>,
    running: Mutex<BTreeSet<String>>,
}

impl Claims {
    /// `kind` is what messages call one of them, and `remove` removes one by its name. `guard` is a
    /// file that is locked while one comes or goes. Without it, another process could take one that
    /// has no lock yet, or is half removed, for an abandoned one.
    pub const fn new(kind: &'static str, guard: &'static str, remove: fn(&str) -> Result<()>) -> Self {
        Self { kind, guard, remove, running: Mutex::new(BTreeSet::new()) }
    }

    /// Waits until no other process makes or removes one, and keeps them from it as long as the
    /// value lives.
    pub fn guard(&self) -> Result<Flock<File>> {
        let Self { guard, .. } = self;
        let file = File::create(guard).with_context(|| format!("creating {guard}"))?;
        Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, error)| error)
            .with_context(|| format!("locking {guard}"))
    }

    pub fn add(&self, name: &str) {
        self.running().insert(name.to_owned());
    }

    /// Leaves it where it is when this process ends.
    pub fn forget(&self, name: &str) {
        self.running().remove(name);
    }

    /// Removes it under the lock, so that a signal that comes now waits for that instead of doing
    /// the same twice.
    pub fn end(&self, name: &str) {
        let mut running = self.running();
        running.remove(name);
        self.remove(name);
    }

    /// Makes SIGINT, SIGTERM and SIGHUP remove all before they end the process. It must be called
    /// before any other thread exists, since threads inherit the signals that are blocked.
    pub fn end_on_signals(&'static self) -> Result<()> {
        signals::before_end(|| {
            let running = self.running();
            running.iter().for_each(|name| self.remove(name));
            running
        })
    }

    fn remove(&self, name: &str) {
        if let Err(error) = self.guard().and_then(|_guard| (self.remove)(name)) {
            eprintln!("removing {} {name}: {error:#}", self.kind);
        }
    }

    fn running(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the lock that says that what is in the folder belongs to a living process. `None`: another
/// process has it.
pub fn lock(folder: &Path) -> Option<Flock<File>> {
    let file = File::create(folder.join("lock")).ok()?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).ok()
}
