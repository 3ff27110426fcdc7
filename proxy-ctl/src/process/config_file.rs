//! Notices that the configuration file has become another one, however that comes about: written in place, replaced by
//! renaming, or reached through symbolic links of which one changed, as in a ConfigMap's volume, where `..data` is
//! swapped. kube-proxy watches the file alone, and misses the last.

use std::{
    collections::{BTreeSet, VecDeque},
    ffi::{OsStr, OsString},
    fs, io,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor},
};
use tokio::{io::unix::AsyncFd, time::Instant};

use crate::sys::ready::{self, Watching};

/// The file is looked at this often even if nobody tells of a change: folders on the way may be replaced, and some
/// file systems tell nothing.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// A file that is gone is about to be replaced, most likely: editors take the old one away first.
const REPLACEMENT: Duration = Duration::from_secs(1);
/// As the kernel.
const MOST_LINKS: usize = 40;

const EVENTS: AddWatchFlags = AddWatchFlags::IN_CLOSE_WRITE
    .union(AddWatchFlags::IN_CREATE)
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_ONLYDIR);

/// A name in a folder; together they lead to the file.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Step {
    folder: PathBuf,
    name: OsString,
}

/// A file that is watched.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// `None`: this process may not have one, and only looks from time to time.
    inotify: Option<AsyncFd<Watching>>,
    watched: Vec<(WatchDescriptor, Step)>,
    look_again: Duration,
}

impl ConfigFile {
    /// Must be called within a tokio runtime. Changes count from now on.
    pub fn watch(path: &Path) -> Self {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(io::Error::from)
            .and_then(ready::watching)
            .inspect_err(|error| {
                tracing::warn!(%error, "changes of the configuration file are seen only every {LOOK_AGAIN:?}");
            })
            .ok();
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut file = Self { path, inotify, watched: Vec::new(), look_again: LOOK_AGAIN };
        file.follow();
        file
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completes when the file may have become another one.
    pub async fn changed(&mut self) {
        let Some(inotify) = &self.inotify else {
            tokio::time::sleep(self.look_again).await;
            return;
        };
        let mut deadline = Instant::now() + self.look_again;
        // Whatever else goes on in its folder.
        while let Ok(told) = tokio::time::timeout_at(deadline, told(inotify, &self.watched)).await {
            match told {
                Told::Changed => break,
                Told::Removed => deadline = deadline.min(Instant::now() + REPLACEMENT),
                Told::Nothing => {}
                Told::Failed(error) => {
                    tracing::warn!(%error, "changes of the configuration file are seen only every {LOOK_AGAIN:?}");
                    self.inotify = None;
                    return;
                }
            }
        }
        self.follow();
    }

    /// Watches every folder on the way to the file as it is now.
    fn follow(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let inotify = &inotify.get_ref().0;
        let before = std::mem::take(&mut self.watched);
        for step in way(&self.path) {
            // A folder that is not there is noticed when it comes back to the step before, or at the next look.
            if let Ok(descriptor) = inotify.add_watch(&step.folder, EVENTS) {
                self.watched.push((descriptor, step));
            }
        }
        let still: Vec<WatchDescriptor> = self.watched.iter().map(|(descriptor, _)| *descriptor).collect();
        let gone: Vec<WatchDescriptor> =
            before.into_iter().map(|(descriptor, _)| descriptor).filter(|one| !still.contains(one)).collect();
        for descriptor in gone {
            // It ended with its folder, or with one that was listed twice.
            let _ = inotify.rm_watch(descriptor);
        }
    }
}

/// What waiting events say.
#[derive(Debug)]
enum Told {
    Changed,
    /// Something on the way was taken away, and nothing put in its place yet.
    Removed,
    Nothing,
    Failed(io::Error),
}

async fn told(inotify: &AsyncFd<Watching>, watched: &[(WatchDescriptor, Step)]) -> Told {
    let mut ready = match inotify.readable().await {
        Ok(ready) => ready,
        Err(error) => return Told::Failed(error),
    };
    let events = match ready.get_inner().0.read_events() {
        Ok(events) => events,
        Err(Errno::EAGAIN) => {
            ready.clear_ready();
            return Told::Nothing;
        }
        Err(Errno::EINTR) => return Told::Nothing,
        Err(error) => return Told::Failed(error.into()),
    };
    let mut told = Told::Nothing;
    for event in events {
        match meaning(&event, watched) {
            Told::Nothing => {}
            Told::Removed => told = Told::Removed,
            decisive @ (Told::Changed | Told::Failed(_)) => return decisive,
        }
    }
    told
}

fn meaning(event: &InotifyEvent, watched: &[(WatchDescriptor, Step)]) -> Told {
    if event.mask.intersects(AddWatchFlags::IN_Q_OVERFLOW) {
        return Told::Changed;
    }
    let name = event.name.as_deref();
    let Some((_, step)) =
        watched.iter().find(|(descriptor, step)| *descriptor == event.wd && name == Some(&*step.name))
    else {
        return Told::Nothing;
    };
    if event.mask.intersects(AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO) {
        Told::Changed
    } else if event.mask.contains(AddWatchFlags::IN_CREATE) {
        // A file that was made empty is of interest once its writer has closed it.
        let made = fs::symlink_metadata(step.folder.join(&step.name));
        if made.is_ok_and(|made| !made.is_file() || made.len() > 0) { Told::Changed } else { Told::Nothing }
    } else {
        Told::Removed
    }
}

/// Every name by which another file can come to an absolute path: those of the symbolic links on the way, and the
/// file's own.
fn way(path: &Path) -> BTreeSet<Step> {
    let mut steps = BTreeSet::new();
    let mut place = PathBuf::from("/");
    let mut ahead: VecDeque<OsString> = names(path);
    let mut links = 0;
    while let Some(name) = ahead.pop_front() {
        if name == OsStr::new("..") {
            place.pop();
            continue;
        }
        let next = place.join(&name);
        match fs::read_link(&next) {
            Ok(target) if links < MOST_LINKS => {
                links += 1;
                steps.insert(Step { folder: place.clone(), name });
                if target.is_absolute() {
                    place = PathBuf::from("/");
                }
                for name in names(&target).into_iter().rev() {
                    ahead.push_front(name);
                }
            }
            Ok(_) => break,
            Err(_) => {
                if ahead.is_empty() {
                    steps.insert(Step { folder: place.clone(), name });
                }
                place = next;
            }
        }
    }
    steps
}

fn names(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;
    use tokio::time::timeout;

    use super::*;

    /// Far more than an event takes, and far less than the file is looked at without one.
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

    async fn is_noticed(file: &mut ConfigFile) {
        timeout(SOON, file.changed()).await.expect("the change was not noticed");
    }

    #[tokio::test]
    async fn a_file_that_is_written_in_place() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut file = ConfigFile::watch(&config);
        for text in ["two", "three"] {
            fs::write(&config, text).unwrap();
            is_noticed(&mut file).await;
        }
    }

    #[tokio::test]
    async fn a_file_that_is_renamed_over_it() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut file = ConfigFile::watch(&config);
        for text in ["two", "three"] {
            fs::write(path.join("draft"), text).unwrap();
            fs::rename(path.join("draft"), &config).unwrap();
            is_noticed(&mut file).await;
        }
    }

    #[tokio::test]
    async fn an_editor_that_takes_the_old_file_away_first() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut file = ConfigFile::watch(&config);
        fs::rename(&config, path.join("config~")).unwrap();
        fs::write(&config, "two").unwrap();
        is_noticed(&mut file).await;
        assert_eq!(fs::read_to_string(&config).unwrap(), "two");
    }

    #[tokio::test]
    async fn a_config_map_that_is_swapped_again_and_again() {
        let (_folder, path) = folder();
        let config = volume(&path);
        let mut file = ConfigFile::watch(&config);
        for to in 2..6 {
            swap(&path, to - 1, to);
            is_noticed(&mut file).await;
        }
        // The same link, whose target is written: the watch has followed to the new folder.
        fs::write(path.join("..5/config.conf"), "six").unwrap();
        is_noticed(&mut file).await;
    }

    #[tokio::test]
    async fn a_link_into_another_folder() {
        let ((_one, one), (_other, other)) = (folder(), folder());
        fs::write(other.join("target"), "one").unwrap();
        symlink(other.join("target"), one.join("config")).unwrap();
        let mut file = ConfigFile::watch(&one.join("config"));
        fs::write(other.join("target"), "two").unwrap();
        is_noticed(&mut file).await;
        fs::write(other.join("target-2"), "three").unwrap();
        symlink(other.join("target-2"), one.join("link")).unwrap();
        fs::rename(one.join("link"), one.join("config")).unwrap();
        is_noticed(&mut file).await;
        fs::write(other.join("target-2"), "four").unwrap();
        is_noticed(&mut file).await;
    }

    #[tokio::test]
    async fn a_busy_folder_keeps_nobody_from_looking() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut file = ConfigFile::watch(&config);
        let pause = Duration::from_millis(10);
        file.look_again = 50 * pause;
        let busy = async {
            loop {
                fs::write(path.join("other"), "two").unwrap();
                tokio::time::sleep(pause).await;
            }
        };
        let busy = timeout(SOON, busy);
        tokio::select! {
            () = file.changed() => {}
            _ = busy => panic!("nobody has looked"),
        }
    }

    #[tokio::test]
    async fn other_files_of_the_folder_are_nothing_new() {
        let (_folder, path) = folder();
        let config = path.join("config");
        fs::write(&config, "one").unwrap();
        let mut file = ConfigFile::watch(&config);
        let changed = file.changed();
        tokio::pin!(changed);
        // Starts to wait.
        assert!(timeout(Duration::ZERO, &mut changed).await.is_err());
        fs::write(path.join("other"), "1").unwrap();
        fs::rename(path.join("other"), path.join("another")).unwrap();
        fs::read_to_string(&config).unwrap();
        assert!(timeout(Duration::from_millis(50), &mut changed).await.is_err());
        fs::write(&config, "two").unwrap();
        timeout(SOON, changed).await.unwrap();
    }

    #[test]
    fn the_way_of_a_config_map() {
        let (_folder, path) = folder();
        let config = volume(&path);
        let step = |folder: &Path, name: &str| Step { folder: folder.to_owned(), name: name.into() };
        assert_eq!(
            way(&config),
            BTreeSet::from([
                step(&path, "config.conf"),
                step(&path, "..data"),
                step(&path.join("..1"), "config.conf"),
            ])
        );
    }

    #[test]
    fn links_in_a_circle_come_to_an_end() {
        let (_folder, path) = folder();
        symlink("b", path.join("a")).unwrap();
        symlink("a", path.join("b")).unwrap();
        assert_eq!(way(&path.join("a")).len(), 2);
    }
}
