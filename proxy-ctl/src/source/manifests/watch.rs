//! Waits for changes of a folder, by inotify.

use std::{
    ffi::OsString,
    io,
    os::fd::{AsFd, AsRawFd, RawFd},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor},
};
use tokio::io::unix::AsyncFd;

use super::Error;

/// A file is of interest once its writer has closed it, or it came under its name; a symbolic link also when it
/// is created.
const IN_FOLDER: AddWatchFlags = AddWatchFlags::IN_CLOSE_WRITE
    .union(AddWatchFlags::IN_CREATE)
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_MOVE_SELF)
    .union(AddWatchFlags::IN_ONLYDIR);

/// Enough to notice that another folder has come to the path.
const IN_PARENT: AddWatchFlags =
    AddWatchFlags::IN_CREATE.union(AddWatchFlags::IN_MOVED_TO).union(AddWatchFlags::IN_ONLYDIR);

pub(super) struct Watch {
    folder: PathBuf,
    /// Name of the folder in its parent.
    name: Option<OsString>,
    inotify: AsyncFd<Fd>,
    parent: Option<WatchDescriptor>,
}

struct Fd(Inotify);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Watch {
    /// Must be called within a tokio runtime.
    pub(super) fn new(folder: &Path) -> Result<Self, Error> {
        let error = |call| move |source: Errno| Error::Watch { folder: folder.to_owned(), call, source };
        let inotify =
            Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).map_err(error("inotify_init1"))?;
        inotify.add_watch(folder, IN_FOLDER).map_err(error("inotify_add_watch"))?;
        let name = folder.file_name().map(OsString::from);
        let parent = name
            .as_ref()
            .and(folder.parent())
            .map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
        // A folder whose parent cannot be watched can still be served.
        let parent = parent.and_then(|parent| inotify.add_watch(parent, IN_PARENT).ok());
        let inotify = register(inotify).map_err(errno).map_err(error("epoll_ctl"))?;
        Ok(Self { folder: folder.to_owned(), name, inotify, parent })
    }

    /// Returns when something has changed since the last return. What changes while the caller reads the
    /// folder makes the next call return at once.
    pub(super) async fn changed(&self) -> Result<(), Error> {
        loop {
            let readable = self.inotify.readable().await;
            let mut readable = readable.map_err(|source| self.error("epoll_wait", errno(source)))?;
            let changed = self.drain(&readable.get_inner().0)?;
            readable.clear_ready();
            if changed {
                return Ok(());
            }
        }
    }

    /// Reads every event that is waiting; says whether one concerns the folder.
    fn drain(&self, inotify: &Inotify) -> Result<bool, Error> {
        let mut changed = false;
        loop {
            let events = match inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => return Ok(changed),
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(self.error("read of inotify events", error)),
            };
            for event in events {
                let at_our_path = event.name == self.name;
                if Some(event.wd) != self.parent {
                    changed = true;
                } else if at_our_path {
                    // The same folder keeps its watch; one that is new at this path gets one.
                    match inotify.add_watch(&self.folder, IN_FOLDER) {
                        Ok(_) | Err(Errno::ENOENT | Errno::ENOTDIR) => changed = true,
                        Err(error) => return Err(self.error("inotify_add_watch", error)),
                    }
                }
            }
        }
    }

    fn error(&self, call: &'static str, source: Errno) -> Error {
        Error::Watch { folder: self.folder.clone(), call, source }
    }
}

#[expect(deprecated, reason = "its successor is unsafe; that an Inotify keeps its descriptor is plain here")]
fn register(inotify: Inotify) -> io::Result<AsyncFd<Fd>> {
    AsyncFd::new(Fd(inotify))
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}
