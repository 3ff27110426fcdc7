//! A small HTTP/1 server: one task a connection, bounded in number and in the time a request may take.

use std::{future::Future, sync::Arc, time::Duration};

use ::http::Request;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

use super::reply::Reply;

const MOST_CONNECTIONS: usize = 128;
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after accept failed, which is nearly always for want of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

pub(super) async fn serve<H, F>(listener: TcpListener, answer: H, stop: CancellationToken)
where
    H: Fn(Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Reply> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await.ok()?;
                Some((listener.accept().await, place))
            } => accepted,
            () = stop.cancelled() => return,
        };
        let Some((accepted, place)) = accepted else { return };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accept");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let answer = answer.clone();
        let stop = stop.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let response = answer(request);
                async move { Ok::<_, std::convert::Infallible>(response.await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                ended = connection => if let Err(error) = ended { tracing::debug!(%error, "HTTP connection") },
                () = stop.cancelled() => {}
            }
            drop(place);
        });
    }
}
