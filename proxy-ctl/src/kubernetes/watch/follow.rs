//! Watches of the kinds that every API server has, and of ServiceCIDRs, which older API servers
//! lack.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};
use tracing::debug;

use super::{
    context::WatchContext,
    kind::ResourceKind,
    query::Query,
    resource::{ServiceCidrs, Watched},
    watcher::{EndReason, Watcher},
};
use crate::{kubernetes::failure::FailureReason, model::Update};

/// The time after which an API server that had no ServiceCIDRs is asked again at the latest.
const PATIENCE: Duration = Duration::from_secs(600);

impl WatchContext {
    /// Watches until nobody receives the updates any more.
    pub(crate) async fn watch<W: Watched>(self, query: Query<W>) {
        Watcher::new(self, query).run().await;
    }

    /// Watches ServiceCIDRs while they are `wanted`, if the API server has them. When the sender of
    /// `wanted` is gone, the last value counts.
    pub(crate) async fn watch_service_cidrs(self, mut wanted: watch::Receiver<bool>) {
        while wanted.wait_for(|wanted| *wanted).await.is_ok() {
            let are_unwanted = async {
                if wanted.wait_for(|wanted| !wanted).await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = self.follow_service_cidrs() => return,
                () = are_unwanted => {}
            }
            self.state.end(ResourceKind::ServiceCidrs);
            if self.updates.send(Update::ReplaceServiceCidrs(Vec::new())).await.is_err() {
                return;
            }
        }
        self.updates.closed().await;
    }

    async fn follow_service_cidrs(&self) {
        let mut watcher = Watcher::new(self.clone(), Query::<ServiceCidrs>::all());
        self.state.begin(ResourceKind::ServiceCidrs);
        while let EndReason::NotServed(failure) = watcher.run().await {
            if failure.reason == FailureReason::Forbidden {
                self.state.log_failure(ResourceKind::ServiceCidrs, &failure, PATIENCE);
            } else {
                debug!("the API server has no ServiceCIDRs: {failure}");
            }
            self.state.end(ResourceKind::ServiceCidrs);
            if self.updates.send(Update::ReplaceServiceCidrs(Vec::new())).await.is_err() {
                return;
            }
            tokio::select! {
                // The connection was lost and found again, so it may lead to another server now.
                () = self.connection.recovered.notified() => {}
                () = sleep(PATIENCE) => {}
                () = self.updates.closed() => return,
            }
        }
    }
}
