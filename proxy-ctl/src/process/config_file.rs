//! Notices changes of the configuration file. kube-proxy watches the file alone, and misses a swapped ConfigMap.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};

use crate::path_watch::PathWatch;

/// The file is also read this often: some file systems report no changes.
const REREAD: Duration = Duration::from_secs(60);
/// Some editors remove a file before they write it anew.
const REPLACEMENT: Duration = Duration::from_secs(1);

/// A file that is watched.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// `None`: it cannot be watched, and is only read from time to time.
    watch: Option<PathWatch>,
}

impl ConfigFile {
    /// Changes from now on are noticed.
    pub fn watch(path: &Path) -> Self {
        let watch = PathWatch::new(path).inspect_err(warn).ok();
        Self { path: path.to_owned(), watch }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completes when the file may have changed.
    pub async fn changed(&mut self) {
        self.change_within(REREAD).await;
        let deadline = Instant::now() + REPLACEMENT;
        while !self.path.exists() && Instant::now() < deadline {
            self.change_within(deadline - Instant::now()).await;
        }
    }

    async fn change_within(&mut self, time: Duration) {
        let Some(watch) = &mut self.watch else { return sleep(time).await };
        if let Ok(Err(error)) = timeout(time, watch.changed()).await {
            warn(&error);
            self.watch = None;
        }
    }
}

fn warn(error: &notify::Error) {
    tracing::warn!(%error, "the configuration file cannot be watched; it is read every {REREAD:?}");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn editor_that_removes_the_old_file_first() {
        let folder = tempfile::TempDir::new().unwrap();
        let config = folder.path().join("config");
        fs::write(&config, "one").unwrap();
        let mut file = ConfigFile::watch(&config);
        fs::rename(&config, folder.path().join("config~")).unwrap();
        let written = async {
            sleep(Duration::from_millis(20)).await;
            fs::write(&config, "two").unwrap();
        };
        let noticed = async {
            file.changed().await;
            config.exists()
        };
        let ((), is_replaced) = tokio::join!(biased; written, noticed);
        assert!(is_replaced, "the file was reported while it was gone");
    }
}
