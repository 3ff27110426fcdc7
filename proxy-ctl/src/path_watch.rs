//! A watch of a file or of the files of a folder, however they are replaced. They may be written in
//! place or replaced by renaming. In a ConfigMap's volume, the link `..data` beside them is
//! swapped.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, ModifyKind},
};
use tokio::{sync::Notify, time::timeout};

/// The time after which a path is looked at although no change was reported. A target behind a link
/// into another folder is not watched, some file systems report no changes, and a process may have
/// no more watches.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

pub struct PathWatch {
    path: PathBuf,
    /// The watcher, whose thread reads the events and ends when this is dropped. `None` if the path
    /// cannot be watched.
    watcher: Option<RecommendedWatcher>,
    /// The notification of a change. It holds one notice, however many changes there are.
    changed: Arc<Notify>,
}

impl PathWatch {
    /// Begins to watch a path. If it cannot be watched, that is a warning, and it is looked at from
    /// time to time.
    pub fn new(path: &Path) -> Self {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut watch = Self { path, watcher: None, changed: Arc::default() };
        watch.watcher = watch.watch().inspect_err(|error| watch.warn(error)).ok();
        watch
    }

    /// Returns when there may have been a change since the last return. A change while the caller
    /// reads makes the next call return at once.
    pub async fn changed(&mut self) {
        // After a timeout there may have been a change all the same.
        let _ = timeout(LOOK_AGAIN, self.changed.notified()).await;
        // The watch is made anew, because another folder may have been put under the same name.
        let watcher = self.watch();
        if let (Some(_), Err(error)) = (&self.watcher, &watcher) {
            self.warn(error);
        }
        self.watcher = watcher.ok();
    }

    /// Watches the path if it is a folder, or else the folder that it is in.
    fn watch(&self) -> notify::Result<RecommendedWatcher> {
        let (path, changed) = (self.path.clone(), Arc::clone(&self.changed));
        let is_folder = path.is_dir();
        let folder = path.parent().filter(|_| !is_folder).unwrap_or(&path).to_owned();
        let is_meant = move |changed: &PathBuf| is_folder || *changed == path || changed.ends_with("..data");
        let concerns = move |event: &Event| {
            event.need_rescan() || event.paths.iter().any(|path| changes(event.kind, path) && is_meant(path))
        };
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            // After an error, events may be missing.
            if event.as_ref().map_or(true, &concerns) {
                changed.notify_one();
            }
        })?;
        watcher.watch(&folder, RecursiveMode::NonRecursive)?;
        if self.path.is_dir() != is_folder {
            self.changed.notify_one();
        }
        Ok(watcher)
    }

    fn warn(&self, error: &notify::Error) {
        let path = self.path.display();
        tracing::warn!(%error, "{path} cannot be watched; it is read every {LOOK_AGAIN:?}");
    }
}

fn changes(kind: EventKind, path: &Path) -> bool {
    match kind {
        // A file that is being written is complete when its writer closes it.
        EventKind::Access(access) => access == AccessKind::Close(AccessMode::Write),
        EventKind::Modify(ModifyKind::Data(_)) => false,
        EventKind::Create(_) => {
            !fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.len() == 0)
        }
        EventKind::Modify(_) | EventKind::Remove(_) | EventKind::Any | EventKind::Other => true,
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, time::Duration};

    use tempfile::TempDir;
    use tokio::time::timeout;

    use super::*;

    /// A time that is far longer than an event takes, and shorter than [`LOOK_AGAIN`].
    const SOON: Duration = Duration::from_secs(50);

    fn folder() -> (TempDir, PathBuf) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().canonicalize().unwrap();
        (folder, path)
    }

    /// Makes a volume as the kubelet does: `config.conf` → `..data/config.conf`, `..data` → `..1/`.
    fn volume(path: &Path) -> PathBuf {
        fs::create_dir(path.join("..1")).unwrap();
        fs::write(path.join("..1/config.conf"), "one").unwrap();
        symlink("..1", path.join("..data")).unwrap();
        symlink("..data/config.conf", path.join("config.conf")).unwrap();
        path.join("config.conf")
    }

    fn swap(path: &Path, from: u32, to: u32) {
        let (from, to) = (format!("..{from}"), format!("..{to}"));
        fs::create_dir(path.join(&to)).unwrap();
        fs::write(path.join(&to).join("config.conf"), &to).unwrap();
        symlink(&to, path.join("..data_tmp")).unwrap();
        fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
        fs::remove_dir_all(path.join(from)).unwrap();
    }

    /// Waits for a change and takes all of its events, so that the next change is noticed by its
    /// own events.
    async fn is_noticed(watch: &mut PathWatch) {
        timeout(SOON, watch.changed()).await.expect("the change was not noticed");
        while timeout(Duration::from_millis(50), watch.changed()).await.is_ok() {}
    }

    #[tokio::test]
    async fn file_written_in_place() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut watch = PathWatch::new(&config);
        for text in ["two", "three"] {
            fs::write(&config, text).unwrap();
            is_noticed(&mut watch).await;
        }
    }

    #[tokio::test]
    async fn file_replaced_by_renaming() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut watch = PathWatch::new(&config);
        for text in ["two", "three"] {
            fs::write(path.join("draft"), text).unwrap();
            fs::rename(path.join("draft"), &config).unwrap();
            is_noticed(&mut watch).await;
        }
    }

    #[tokio::test]
    async fn config_map_swapped_again_and_again() {
        let (_folder, path) = folder();
        let config = volume(&path);
        let mut watch = PathWatch::new(&config);
        for to in 2..6 {
            swap(&path, to - 1, to);
            is_noticed(&mut watch).await;
        }
    }

    #[tokio::test]
    async fn other_files_of_the_folder_and_readers_are_ignored() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut watch = PathWatch::new(&config);
        fs::write(path.join("other"), "1").unwrap();
        fs::rename(path.join("other"), path.join("another")).unwrap();
        fs::read_to_string(&config).unwrap();
        assert!(timeout(Duration::from_millis(50), watch.changed()).await.is_err());
        fs::write(&config, "two").unwrap();
        is_noticed(&mut watch).await;
    }
}
