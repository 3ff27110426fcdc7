//! The HTTP servers, with the paths, names and bodies of kube-proxy. Health is served on
//! `healthzBindAddress`, metrics and pages for debugging on `metricsBindAddress`. What they show is
//! in [`report`].

mod connections;
#[cfg(test)]
mod documented;
mod exposition;
mod health;
mod listen;
mod pages;
mod reply;
pub mod report;
mod service_health;

use std::{net::SocketAddr, sync::Arc, time::Duration};

pub use health::HealthPages;
pub use listen::BindError;
pub use pages::Pages;
pub use service_health::service_health;
use tokio_util::sync::CancellationToken;

use crate::http::report::Metrics;

const HEALTH_ANSWER: Duration = Duration::from_secs(5);
/// The time limit for metrics and other pages. Prometheus waits 10 s for a scrape by default.
const PAGE_ANSWER: Duration = Duration::from_secs(60);

/// Answers [`HealthPages`] until `stop` is cancelled.
pub async fn healthz(
    address: SocketAddr,
    hard_fail: bool,
    pages: HealthPages,
    stop: CancellationToken,
) -> Result<(), BindError> {
    let Some(listener) = listen::listen("healthz", address, hard_fail, &stop).await? else { return Ok(()) };
    let answer = move |request: http::Request<_>| {
        let reply = pages.answer(request.uri().path());
        async move { reply }
    };
    connections::serve(listener, answer, HEALTH_ANSWER, stop).await;
    Ok(())
}

/// Answers `/metrics` and the other [`Pages`] until `stop` is cancelled.
pub async fn metrics(
    address: SocketAddr,
    hard_fail: bool,
    pages: Pages,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> Result<(), BindError> {
    let Some(listener) = listen::listen("metrics", address, hard_fail, &stop).await? else { return Ok(()) };
    let (pages, slis) = (Arc::new(pages), Arc::<pages::Slis>::default());
    let answer = move |request| {
        let (pages, metrics, slis) = (Arc::clone(&pages), Arc::clone(&metrics), Arc::clone(&slis));
        async move { pages.answer(request, &metrics, &slis).await }
    };
    connections::serve(listener, answer, PAGE_ANSWER, stop).await;
    Ok(())
}

#[cfg(test)]
mod tests;
