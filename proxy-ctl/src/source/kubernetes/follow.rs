//! One room's way through the versions of its API: asks what the API server serves, watches that, and asks again
//! where the answer may have changed: the API server was upgraded, or goes back to an older version.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::sleep};
use tracing::{debug, info};

use super::{
    backoff::{Backoff, random},
    connection::Connection,
    discovery::{Choice, EndpointsApi, ServiceCidrApi},
    health::Health,
    kind::ResourceKind,
    resource::{
        EndpointSlices, EndpointSlicesV1Beta1, LegacyEndpoints, SERVED, ServiceCidrs, ServiceCidrsV1Beta1,
        Watched,
    },
    state::SourceState,
    watch::{End, Selection, Watcher},
};
use crate::source::Update;

/// An API server that had no ServiceCIDRs is asked again after this time, whatever happens.
const PATIENCE: Duration = Duration::from_secs(600);

/// What every watcher needs.
#[derive(Clone)]
pub(super) struct Room {
    pub(super) connection: Arc<Connection>,
    pub(super) updates: mpsc::Sender<Update>,
    pub(super) state: SourceState,
}

/// Nobody takes the updates any more.
pub(super) struct Unwanted;

impl Room {
    fn watcher<W: Watched>(&self, selection: Selection) -> Watcher<W> {
        Watcher::new(Arc::clone(&self.connection), selection, self.updates.clone(), self.state.clone())
    }

    /// A kind that every API server has in the same version.
    pub(super) async fn watch<W: Watched>(self, selection: Selection) {
        let mut watcher = self.watcher::<W>(selection);
        while watcher.run().await == End::AskAgain {}
    }

    /// EndpointSlices, or what stands for them.
    pub(super) async fn watch_endpoints(self) {
        let served = || Selection { labels: Some(SERVED.to_owned()), fields: None };
        let mut next = self.ask(ResourceKind::EndpointSlices).await;
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
                EndpointsApi::SlicesV1 => self.watch_while::<EndpointSlices, _>(served(), api).await,
                EndpointsApi::SlicesV1Beta1 => {
                    info!("the API server has no discovery.k8s.io/v1: watching EndpointSlices of v1beta1");
                    self.watch_while::<EndpointSlicesV1Beta1, _>(served(), api).await
                }
                EndpointsApi::Endpoints => {
                    info!("the API server has no EndpointSlices: watching Endpoints");
                    self.watch_while::<LegacyEndpoints, _>(served(), api).await
                }
            };
        }
    }

    /// ServiceCIDRs, where there are any.
    pub(super) async fn watch_service_cidrs(self) {
        let all = Selection::default;
        let mut next = self.ask(ResourceKind::ServiceCidrs).await;
        while let Ok(api) = next {
            next = match api {
                ServiceCidrApi::V1 => {
                    self.state.begin(ResourceKind::ServiceCidrs);
                    self.watch_while::<ServiceCidrs, _>(all(), api).await
                }
                ServiceCidrApi::V1Beta1 => {
                    self.state.begin(ResourceKind::ServiceCidrs);
                    self.watch_while::<ServiceCidrsV1Beta1, _>(all(), api).await
                }
                ServiceCidrApi::Nowhere => self.without_service_cidrs().await,
            };
        }
    }

    /// Until the connection was lost and found again: it may be another server then.
    async fn without_service_cidrs(&self) -> Result<ServiceCidrApi, Unwanted> {
        self.state.end(ResourceKind::ServiceCidrs);
        self.updates.send(Update::ReplaceServiceCidrs(Vec::new())).await.map_err(|_| Unwanted)?;
        debug!("the API server has no ServiceCIDRs");
        tokio::select! {
            () = self.connection.recovered.notified() => {}
            () = sleep(PATIENCE) => {}
            () = self.updates.closed() => return Err(Unwanted),
        }
        self.ask(ResourceKind::ServiceCidrs).await
    }

    /// Watches `W` until the API server's answer is another one than `api`.
    async fn watch_while<W: Watched, A: Choice>(&self, selection: Selection, api: A) -> Result<A, Unwanted> {
        let mut watcher = self.watcher::<W>(selection);
        loop {
            match watcher.run().await {
                End::Unwanted => return Err(Unwanted),
                End::AskAgain => {}
            }
            let now = self.ask::<A>(W::RESOURCE).await?;
            if now != api {
                info!(resource = %W::RESOURCE, before = ?api, ?now, "the API server serves something else");
                return Ok(now);
            }
        }
    }

    /// Asks until there is an answer.
    async fn ask<A: Choice>(&self, kind: ResourceKind) -> Result<A, Unwanted> {
        let mut health = Health::new(kind);
        let mut backoff = Backoff::default();
        loop {
            let failure = match A::ask(&self.connection).await {
                Ok(answer) => {
                    self.connection.outage.ends(kind);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            self.state.failed(kind, &failure);
            let delay = backoff.next(random());
            health.bad(&self.connection.outage, &failure, &[], delay);
            tokio::select! {
                () = sleep(delay) => {}
                () = self.connection.recovered.notified() => backoff.reset(),
                () = self.updates.closed() => return Err(Unwanted),
            }
        }
    }
}
