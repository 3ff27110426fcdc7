//! The servers of `healthCheckNodePort`s. There is one for each Service whose load balancer sends
//! clients only to nodes that have endpoints. Ports, headers and bodies are those of kube-proxy.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use http::{HeaderName, HeaderValue, StatusCode};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    HEALTH_ANSWER, connections, listen,
    reply::{JSON, Reply, reply},
};
use crate::{
    http::report::{HealthChecks, SharedHealth},
    model::objects::ObjectName,
};

/// The header by which load balancers may weigh nodes.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");
/// The pause before addresses that could not be bound are tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Listens for every Service in `checks` until `stop` is cancelled. `failed` is called once for an
/// address that cannot be bound. The address is tried again until it can be bound.
pub async fn service_health(
    mut checks: watch::Receiver<HealthChecks>,
    health: Arc<SharedHealth>,
    failed: impl Fn(&ObjectName, SocketAddr, &std::io::Error),
    stop: CancellationToken,
) {
    let mut open: BTreeMap<SocketAddr, Server> = BTreeMap::new();
    let mut reported: BTreeSet<(SocketAddr, ObjectName)> = BTreeSet::new();
    loop {
        let wanted = checks.borrow_and_update().sockets();
        // Old servers are closed before new ones are opened, because the port of one Service may
        // have passed to another.
        let unwanted = open.extract_if(.., |socket, server| wanted.get(socket) != Some(&server.service));
        for (_, server) in unwanted.collect::<Vec<_>>() {
            server.close().await;
        }
        reported.retain(|(socket, service)| wanted.get(socket) == Some(service));
        for (socket, service) in wanted {
            if open.contains_key(&socket) {
                continue;
            }
            match listen::bind(socket) {
                Ok(listener) => {
                    tracing::info!(%service, address = %socket, "healthCheckNodePort: listening");
                    reported.remove(&(socket, service.clone()));
                    open.insert(
                        socket,
                        Server::start(listener, service, checks.clone(), Arc::clone(&health)),
                    );
                }
                Err(error) => {
                    if reported.insert((socket, service.clone())) {
                        failed(&service, socket, &error);
                    }
                }
            }
        }
        tokio::select! {
            changed = checks.changed() => if changed.is_err() { return stop.cancelled().await },
            () = tokio::time::sleep(RETRY), if !reported.is_empty() => {}
            () = stop.cancelled() => return,
        }
    }
}

/// The server of one Service on one address. It answers until it is closed or dropped.
struct Server {
    service: ObjectName,
    task: JoinHandle<()>,
    stop: DropGuard,
}

impl Server {
    fn start(
        listener: TcpListener,
        service: ObjectName,
        checks: watch::Receiver<HealthChecks>,
        health: Arc<SharedHealth>,
    ) -> Self {
        let stop = CancellationToken::new();
        let name = service.clone();
        let answer = move |_| {
            let local_ready = checks.borrow().local_ready(&name);
            let reply = answer(&name, local_ready, health.report().healthy);
            async move { reply }
        };
        let task = tokio::spawn(connections::serve(listener, answer, HEALTH_ANSWER, stop.clone()));
        Self { service, task, stop: stop.drop_guard() }
    }

    /// Stops the server. When this returns, the address is free.
    async fn close(self) {
        drop(self.stop);
        if let Err(error) = self.task.await {
            tracing::error!(service = %self.service, %error, "healthCheckNodePort: the server ended unexpectedly");
        }
    }
}

fn answer(service: &ObjectName, local_ready: usize, healthy: bool) -> Reply {
    let status = if local_ready > 0 && healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    // The names of objects need no escapes in JSON.
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{}\",\n\t\t\"name\": \"{}\"\n\t}},\n\t\"localEndpoints\": \
         {local_ready},\n\t\"serviceProxyHealthy\": {healthy}\n}}",
        service.namespace, service.name
    );
    let mut reply = reply(status, JSON, body);
    reply.headers_mut().insert(WEIGHT, HeaderValue::from(local_ready));
    reply
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, sync::Mutex};

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;
    use crate::{
        free_port::free_port,
        http::report::{Health, HealthCheckAddresses},
        model::objects::HealthCheck,
    };

    fn check(name: &str, port: u16, local_ready: usize) -> HealthCheck {
        HealthCheck { service: ObjectName::new("shop", name), port, local_ready }
    }

    fn checks(services: Vec<HealthCheck>) -> HealthChecks {
        let services = services.into_iter().map(|check| (check.service.clone(), check)).collect();
        HealthChecks { addresses: HealthCheckAddresses::Only([Ipv4Addr::LOCALHOST.into()].into()), services }
    }

    async fn get(port: u16) -> std::io::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        stream.write_all(b"GET /any HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    /// Asks again and again until the answer is as wanted.
    async fn until(port: u16, wanted: impl Fn(&std::io::Result<String>) -> bool) -> std::io::Result<String> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            let answer = get(port).await;
            if wanted(&answer) {
                return answer;
            }
            assert!(tokio::time::Instant::now() < deadline, "{answer:?}");
            tokio::task::yield_now().await;
        }
    }

    fn start(
        first: HealthChecks,
        failed: impl Fn(&ObjectName, SocketAddr, &std::io::Error) + Send + 'static,
    ) -> (watch::Sender<HealthChecks>, DropGuard) {
        let (sender, receiver) = watch::channel(first);
        let health = Arc::new(SharedHealth::new(Health::new(Duration::from_secs(30))));
        let stop = CancellationToken::new();
        tokio::spawn({
            let stop = stop.clone();
            async move { service_health(receiver, health, failed, stop).await }
        });
        (sender, stop.drop_guard())
    }

    #[tokio::test]
    async fn a_service_answers_with_its_endpoints_until_it_is_gone() {
        let port = free_port();
        let (sender, _stop) = start(checks(vec![check("web", port, 2)]), |_, _, _| {});
        let answer = until(port, Result::is_ok).await.unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("endpoint-weight: 2"),
            "{answer}"
        );

        sender.send_replace(checks(vec![check("web", port, 0)]));
        let answer = get(port).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("endpoint-weight: 0"), "{answer}");

        let moved = free_port();
        sender.send_replace(checks(vec![check("web", moved, 1)]));
        until(moved, |answer| answer.as_ref().is_ok_and(|text| text.contains(" 200 "))).await.unwrap();
        until(port, Result::is_err).await.unwrap_err();
        sender.send_replace(checks(Vec::new()));
        until(moved, Result::is_err).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_port_in_use_is_reported_once_and_tried_again() {
        let port = free_port();
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let reported = Arc::new(Mutex::new(Vec::new()));
        let failures = Arc::clone(&reported);
        let (sender, _stop) = start(checks(vec![check("web", port, 1)]), move |service, socket, _| {
            failures.lock().unwrap().push((service.to_string(), socket.port()));
        });
        let other = free_port();
        sender.send_replace(checks(vec![check("other", other, 1), check("web", port, 1)]));
        until(other, Result::is_ok).await.unwrap();
        assert_eq!(*reported.lock().unwrap(), [("shop/web".to_owned(), port)]);
        drop(taken);
        sender.send_replace(checks(vec![check("web", port, 1)]));
        until(port, Result::is_ok).await.unwrap();
        assert_eq!(reported.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_port_that_passes_to_another_service_answers_for_it_without_a_failure() {
        let port = free_port();
        let (failed, mut failures) = tokio::sync::mpsc::unbounded_channel();
        let (sender, _stop) = start(checks(vec![check("blue", port, 1)]), move |service, _, _| {
            failed.send(service.to_string()).unwrap();
        });
        until(port, |answer| answer.as_ref().is_ok_and(|text| text.contains("blue"))).await.unwrap();
        sender.send_replace(checks(vec![check("green", port, 1)]));
        tokio::select! {
            answer = until(port, |answer| answer.as_ref().is_ok_and(|text| text.contains("green"))) => drop(answer),
            service = failures.recv() => panic!("{service:?} has found its port in use"),
        }
    }
}
