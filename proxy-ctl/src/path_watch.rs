//! Watches what a path leads to: a file or the files of a folder, however they are replaced. That may happen in place, by
//! renaming, or through a symbolic link on the way, as in a ConfigMap's volume, where `..data` is swapped.

use std::{
    collections::{BTreeSet, VecDeque},
    ffi::{OsStr, OsString},
    fmt, fs, io,
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, ModifyKind},
};
use tokio::sync::Notify;

/// As the kernel.
const MAX_LINKS: usize = 40;

/// notify's thread reads the events; dropping the watch ends it.
pub struct PathWatch {
    path: PathBuf,
    watcher: RecommendedWatcher,
    /// The folders that are watched.
    folders: BTreeSet<PathBuf>,
    shared: Arc<SharedRoute>,
}

#[derive(Default)]
struct SharedRoute {
    route: Mutex<Route>,
    /// Holds one notice, however many changes there are.
    changed: Notify,
}

/// Where a path leads, and what decides that.
#[derive(Debug, Default)]
struct Route {
    /// The symbolic links on the way and the path's own end, each below folders without links.
    names: BTreeSet<PathBuf>,
    target: PathBuf,
}

impl PathWatch {
    /// # Errors
    /// A folder on the way cannot be watched.
    pub fn new(path: &Path) -> notify::Result<Self> {
        let shared = Arc::new(SharedRoute::default());
        let receiver = Arc::clone(&shared);
        let watcher = notify::recommended_watcher(move |event| receiver.handle(event))?;
        let mut watch = Self { path: std::path::absolute(path)?, watcher, folders: BTreeSet::new(), shared };
        watch.follow()?;
        Ok(watch)
    }

    /// Returns when there may have been a change since the last return. A change while the caller reads makes the next
    /// call return at once.
    ///
    /// # Errors
    /// A folder on the way cannot be watched.
    pub async fn changed(&mut self) -> notify::Result<()> {
        self.shared.changed.notified().await;
        self.follow()
    }

    /// Watches the folders in which something may change where the path leads now. Every watch is made anew, because
    /// another folder may have come to the same name.
    fn follow(&mut self) -> notify::Result<()> {
        let route = Route::of(&self.path);
        let parents = route.names.iter().filter_map(|name| name.parent()).map(Path::to_owned);
        let folders: BTreeSet<PathBuf> =
            parents.chain(route.target.is_dir().then(|| route.target.clone())).collect();
        *self.shared.route.lock().unwrap_or_else(PoisonError::into_inner) = route;
        for folder in &std::mem::replace(&mut self.folders, folders) {
            // An error says that the watch has ended with its folder.
            let _ = self.watcher.unwatch(folder);
        }
        for folder in &self.folders {
            match self.watcher.watch(folder, RecursiveMode::NonRecursive) {
                Err(error) if is_gone(&error) => self.shared.changed.notify_one(),
                watched => watched?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for PathWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PathWatch").field("path", &self.path).finish_non_exhaustive()
    }
}

fn is_gone(error: &notify::Error) -> bool {
    match &error.kind {
        notify::ErrorKind::PathNotFound => true,
        notify::ErrorKind::Io(error) => error.kind() == io::ErrorKind::NotFound,
        notify::ErrorKind::Generic(_)
        | notify::ErrorKind::WatchNotFound
        | notify::ErrorKind::InvalidConfig(_)
        | notify::ErrorKind::MaxFilesWatch => false,
    }
}

impl SharedRoute {
    fn handle(&self, event: notify::Result<Event>) {
        let concerns = |event: &Event| {
            let route = self.route.lock().unwrap_or_else(PoisonError::into_inner);
            event.need_rescan() || event.paths.iter().any(|path| route.is_changed_by(event.kind, path))
        };
        // After an error, events may be missing.
        if event.as_ref().map_or(true, concerns) {
            self.changed.notify_one();
        }
    }
}

impl Route {
    fn of(path: &Path) -> Self {
        let mut route = Self { names: BTreeSet::new(), target: PathBuf::from("/") };
        let mut ahead = components(path);
        let mut links = 0;
        while let Some(name) = ahead.pop_front() {
            if name == OsStr::new("..") {
                route.target.pop();
                continue;
            }
            let next = route.target.join(&name);
            match fs::read_link(&next) {
                Ok(link) if links < MAX_LINKS => {
                    links += 1;
                    if link.is_absolute() {
                        route.target = PathBuf::from("/");
                    }
                    ahead = components(&link).into_iter().chain(ahead).collect();
                    route.names.insert(next);
                }
                Ok(_) => break,
                Err(_) => {
                    // Until a missing folder comes, nothing below it can change.
                    let ends = ahead.is_empty() || !next.exists();
                    route.target.clone_from(&next);
                    if ends {
                        route.names.insert(next);
                        break;
                    }
                }
            }
        }
        route
    }

    fn is_changed_by(&self, kind: EventKind, path: &Path) -> bool {
        let changes = match kind {
            // A file that is written is complete when its writer closes it.
            EventKind::Access(access) => access == AccessKind::Close(AccessMode::Write),
            EventKind::Modify(ModifyKind::Data(_)) => false,
            EventKind::Create(_) => !is_empty_file(path),
            EventKind::Modify(_) | EventKind::Remove(_) | EventKind::Any | EventKind::Other => true,
        };
        let is_watched_folder = || self.names.iter().any(|name| name.parent() == Some(path));
        changes && (self.names.contains(path) || path.parent() == Some(&self.target) || is_watched_folder())
    }
}

fn is_empty_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.is_file() && file.len() == 0)
}

fn components(path: &Path) -> VecDeque<OsString> {
    let name = |component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, time::Duration};

    use tempfile::TempDir;
    use tokio::time::timeout;

    use super::*;

    /// Far more than an event takes.
    const SOON: Duration = Duration::from_secs(10);

    fn folder() -> (TempDir, PathBuf) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().canonicalize().unwrap();
        (folder, path)
    }

    /// A volume as the kubelet makes it: `config.conf` → `..data/config.conf`, `..data` → `..1/`.
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

    /// A change makes several events: all of them are taken, so that the next change is seen by its own.
    async fn is_noticed(watch: &mut PathWatch) {
        timeout(SOON, watch.changed()).await.expect("the change was not noticed").unwrap();
        while let Ok(changed) = timeout(Duration::from_millis(50), watch.changed()).await {
            changed.unwrap();
        }
    }

    #[tokio::test]
    async fn file_written_in_place() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut watch = PathWatch::new(&config).unwrap();
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
        let mut watch = PathWatch::new(&config).unwrap();
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
        let mut watch = PathWatch::new(&config).unwrap();
        for to in 2..6 {
            swap(&path, to - 1, to);
            is_noticed(&mut watch).await;
        }
        // The same link, whose target is written: the watch has followed to the new folder.
        fs::write(path.join("..5/config.conf"), "six").unwrap();
        is_noticed(&mut watch).await;
    }

    #[tokio::test]
    async fn link_into_another_folder() {
        let ((_one, one), (_other, other)) = (folder(), folder());
        fs::write(other.join("target"), "one").unwrap();
        symlink(other.join("target"), one.join("config")).unwrap();
        let mut watch = PathWatch::new(&one.join("config")).unwrap();
        fs::write(other.join("target"), "two").unwrap();
        is_noticed(&mut watch).await;
        fs::write(other.join("target-2"), "three").unwrap();
        symlink(other.join("target-2"), one.join("link")).unwrap();
        fs::rename(one.join("link"), one.join("config")).unwrap();
        is_noticed(&mut watch).await;
        fs::write(other.join("target-2"), "four").unwrap();
        is_noticed(&mut watch).await;
    }

    #[tokio::test]
    async fn folder_that_comes_later() {
        let (_folder, path) = folder();
        let config = path.join("a/b/config");
        let mut watch = PathWatch::new(&config).unwrap();
        fs::create_dir_all(path.join("a/b")).unwrap();
        is_noticed(&mut watch).await;
        fs::write(&config, "one").unwrap();
        is_noticed(&mut watch).await;
        fs::rename(path.join("a/b"), path.join("a/old")).unwrap();
        fs::create_dir(path.join("a/b")).unwrap();
        fs::write(&config, "two").unwrap();
        is_noticed(&mut watch).await;
        fs::write(&config, "three").unwrap();
        is_noticed(&mut watch).await;
    }

    #[tokio::test]
    async fn other_files_of_the_folder_and_readers_are_ignored() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut watch = PathWatch::new(&config).unwrap();
        fs::write(path.join("other"), "1").unwrap();
        fs::rename(path.join("other"), path.join("another")).unwrap();
        fs::read_to_string(&config).unwrap();
        assert!(timeout(Duration::from_millis(50), watch.changed()).await.is_err());
        fs::write(&config, "two").unwrap();
        is_noticed(&mut watch).await;
    }

    #[test]
    fn links_in_a_circle() {
        let (_folder, path) = folder();
        symlink("b", path.join("a")).unwrap();
        symlink("a", path.join("b")).unwrap();
        assert_eq!(Route::of(&path.join("a")).names.len(), 2);
    }
}
