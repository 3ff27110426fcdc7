//! Selects the version of an API that is watched. The newest is watched first. Where the API server does not serve it,
//! the API server is asked which versions it serves, and again whenever that may have changed by an upgrade or a downgrade.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};
use tracing::{debug, info};

use super::{
    backoff::Backoff,
    context::WatchContext,
    discovery::{EndpointsApi, ServedApi, ServiceCidrApi},
    kind::ResourceKind,
    query::Query,
    resource::{
        EndpointSlices, EndpointSlicesV1Beta1, LegacyEndpoints, SERVED_SELECTOR, ServiceCidrs, Watched,
    },
    watcher::{EndReason, Watcher},
};
use crate::source::Update;

/// An API server that had no ServiceCIDRs is asked again after this time, whatever happens.
const PATIENCE: Duration = Duration::from_secs(600);

/// Nobody receives the updates any more.
pub(super) struct ReceiverGone;

impl WatchContext {
    /// A kind that every API server has in the same version.
    pub(super) async fn watch<W: Watched>(self, query: Query<W>) {
        let mut watcher = Watcher::new(self, query);
        while watcher.run().await == EndReason::AskWhatIsServed {}
    }

    /// EndpointSlices, or Endpoints where the API server has none.
    pub(super) async fn watch_endpoints(self) {
        let mut next = Ok(EndpointsApi::SlicesV1);
        while let Ok(api) = next {
            let (kind, other) = match api {
                EndpointsApi::SlicesV1 | EndpointsApi::SlicesV1Beta1 => {
                    (ResourceKind::EndpointSlices, ResourceKind::Endpoints)
                }
                EndpointsApi::Endpoints => (ResourceKind::Endpoints, ResourceKind::EndpointSlices),
            };
            self.state.end(other);
            self.state.begin(kind);
            next = match api {
                EndpointsApi::SlicesV1 => {
                    self.watch_while(Query::<EndpointSlices>::with_labels(SERVED_SELECTOR), api).await
                }
                EndpointsApi::SlicesV1Beta1 => {
                    info!("the API server has no discovery.k8s.io/v1: watching EndpointSlices of v1beta1");
                    self.watch_while(Query::<EndpointSlicesV1Beta1>::with_labels(SERVED_SELECTOR), api).await
                }
                EndpointsApi::Endpoints => {
                    info!("the API server has no EndpointSlices: watching Endpoints");
                    self.watch_while(Query::<LegacyEndpoints>::with_labels(SERVED_SELECTOR), api).await
                }
            };
        }
    }

    /// ServiceCIDRs, where there are any, while they are `wanted`. If nobody can say so any more, nothing changes.
    pub(super) async fn watch_service_cidrs(self, mut wanted: watch::Receiver<bool>) {
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
        let mut next = Ok(ServiceCidrApi::V1);
        while let Ok(api) = next {
            next = match api {
                ServiceCidrApi::V1 => {
                    self.state.begin(ResourceKind::ServiceCidrs);
                    self.watch_while(Query::<ServiceCidrs>::all(), api).await
                }
                ServiceCidrApi::Nowhere => self.without_service_cidrs().await,
            };
        }
    }

    /// Returns once the connection was lost and found again: it may be another server then.
    async fn without_service_cidrs(&self) -> Result<ServiceCidrApi, ReceiverGone> {
        self.state.end(ResourceKind::ServiceCidrs);
        self.updates.send(Update::ReplaceServiceCidrs(Vec::new())).await.map_err(|_| ReceiverGone)?;
        debug!("the API server has no ServiceCIDRs");
        tokio::select! {
            () = self.connection.recovered.notified() => {}
            () = sleep(PATIENCE) => {}
            () = self.updates.closed() => return Err(ReceiverGone),
        }
        self.ask(ResourceKind::ServiceCidrs).await
    }

    /// Watches `W` until the API server's answer is another one than `api`.
    async fn watch_while<W: Watched, A: ServedApi>(
        &self,
        query: Query<W>,
        api: A,
    ) -> Result<A, ReceiverGone> {
        let mut watcher = Watcher::new(self.clone(), query);
        loop {
            match watcher.run().await {
                EndReason::ReceiverGone => return Err(ReceiverGone),
                EndReason::AskWhatIsServed => {}
            }
            let now = self.ask::<A>(W::RESOURCE).await?;
            if now != api {
                info!(resource = %W::RESOURCE, before = ?api, ?now, "the API server serves another version");
                return Ok(now);
            }
        }
    }

    /// Asks until there is an answer.
    async fn ask<A: ServedApi>(&self, kind: ResourceKind) -> Result<A, ReceiverGone> {
        let mut backoff = Backoff::default();
        loop {
            let failure = match A::ask(&self.connection).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            self.state.failed(kind, &failure);
            let delay = backoff.next();
            self.state.log_failure(kind, &failure, delay);
            tokio::select! {
                () = sleep(delay) => {}
                () = self.connection.recovered.notified() => backoff.reset(),
                () = self.updates.closed() => return Err(ReceiverGone),
            }
        }
    }
}
