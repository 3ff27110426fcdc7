//! The tasks of the watchers, and the error when one of them ends.

use tokio::{
    sync::mpsc,
    task::{Id, JoinSet},
};

use super::kind::ResourceKind;
use crate::model::Update;

/// The error that a watcher has ended. Its objects are stale from then on, and only a new process
/// watches them again.
#[derive(Debug, thiserror::Error)]
#[error("watching {resource} has ended, which it never should: {problem}")]
pub struct WatcherEnded {
    resource: ResourceKind,
    problem: String,
}

#[derive(Default)]
pub(crate) struct Watchers {
    tasks: JoinSet<()>,
    kinds: Vec<(Id, ResourceKind)>,
}

impl Watchers {
    /// Starts a watcher at once.
    pub(crate) fn spawn(&mut self, kind: ResourceKind, watcher: impl Future<Output = ()> + Send + 'static) {
        let id = self.tasks.spawn(watcher).id();
        self.kinds.push((id, kind));
    }

    /// Waits until one watcher ends, and then stops the others. It is no error if the receiver was
    /// closed.
    pub(crate) async fn first_end(mut self, updates: &mpsc::Sender<Update>) -> Result<(), WatcherEnded> {
        let (id, problem) = match self.tasks.join_next_with_id().await {
            None => return Ok(()),
            Some(Ok(_)) if updates.is_closed() => return Ok(()),
            Some(Ok((id, ()))) => (id, "it went away".to_owned()),
            Some(Err(error)) => (error.id(), error.to_string()),
        };
        match self.kinds.iter().find(|(task, _)| *task == id) {
            Some(&(_, resource)) => Err(WatcherEnded { resource, problem }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_watcher_that_panics_is_named() {
        let (updates, _received) = mpsc::channel(1);
        let mut watchers = Watchers::default();
        watchers.spawn(ResourceKind::Services, std::future::pending());
        watchers.spawn(ResourceKind::Nodes, async { panic!("no such field") });
        let error = watchers.first_end(&updates).await.unwrap_err().to_string();
        assert!(error.starts_with("watching nodes has ended"), "{error}");
        assert!(error.contains("panicked") && error.contains("no such field"), "{error}");
    }

    #[tokio::test]
    async fn a_watcher_that_returns_is_an_error_while_somebody_receives() {
        let (updates, received) = mpsc::channel(1);
        let mut watchers = Watchers::default();
        watchers.spawn(ResourceKind::EndpointSlices, async {});
        let error = watchers.first_end(&updates).await.unwrap_err().to_string();
        assert!(error.starts_with("watching endpointslices has ended"), "{error}");

        drop(received);
        let mut watchers = Watchers::default();
        watchers.spawn(ResourceKind::EndpointSlices, async {});
        watchers.first_end(&updates).await.unwrap();
    }
}
