//! Tests of watchers. The test plays the API server, on a clock that moves on only when everything
//! waits.

use std::{
    ops::RangeInclusive,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, Version, header};
use hyper::body::Frame;
use kube::client::Body;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tower::BoxError;

use super::{
    super::{kind::ResourceKind, resource::Services, state::SourceState},
    *,
};
use crate::kubernetes::transport::connection::ApiConnection;

#[test]
fn lists_are_never_older_than_what_was_seen_until_the_server_does_not_have_that() {
    let mut start = Start::Watch("7".to_owned());
    start.relist();
    assert_eq!(start, Start::List("7".to_owned()));
    start.relist();
    assert_eq!(start, Start::List("7".to_owned()));
    start.expired();
    assert_eq!(start, Start::List(String::new()));
    let mut start = Start::Watch("8".to_owned());
    start.expired();
    assert_eq!(start, Start::List("8".to_owned()));
}

/// A watcher of Services and the API server that it asks.
struct World {
    requests: mpsc::UnboundedReceiver<Asked>,
    connection: Arc<ApiConnection>,
    state: SourceState,
    watcher: JoinHandle<()>,
    _updates: mpsc::Receiver<Update>,
}

/// A request that waits for its answer.
struct Asked {
    target: String,
    answer: oneshot::Sender<Response<Scripted>>,
}

/// A body that brings what the test sends, and ends when the test drops the sender.
struct Scripted(mpsc::UnboundedReceiver<Bytes>);

impl hyper::body::Body for Scripted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.0.poll_recv(context).map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}

impl World {
    fn start() -> Self {
        let (ask, requests) = mpsc::unbounded_channel();
        let client = Client::new(
            tower::service_fn(move |request: Request<Body>| {
                let (answer, answered) = oneshot::channel();
                let asked = ask.send(Asked { target: request.uri().to_string(), answer });
                async move {
                    asked.map_err(|_| "the test has ended")?;
                    answered.await.map_err(BoxError::from)
                }
            }),
            "default",
        );
        let connection = Arc::new(ApiConnection::with_client(client));
        let (updates, received) = mpsc::channel(64);
        let state = SourceState::new();
        let context = WatchContext {
            connection: Arc::clone(&connection),
            updates,
            state: state.clone(),
            plain_lists: Arc::default(),
        };
        let watcher = tokio::spawn(async move {
            Watcher::new(context, Query::<Services>::all()).run().await;
        });
        Self { requests, connection, state, watcher, _updates: received }
    }

    /// Returns the next request, however long it takes.
    async fn asked(&mut self) -> Asked {
        self.requests.recv().await.unwrap()
    }

    /// Lists no Services at version 7, and returns the watch that follows.
    async fn watch(&mut self, version: Version) -> mpsc::UnboundedSender<Bytes> {
        let watch = self.asked().await.begin(version);
        watch.send(bookmark(7, true)).unwrap();
        watch
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

impl Asked {
    fn is_streaming_list(&self) -> bool {
        self.target.contains("watch=true") && self.target.contains("sendInitialEvents=true")
    }

    fn timeout_seconds(&self) -> u64 {
        let (_, after) = self.target.split_once("timeoutSeconds=").unwrap();
        after.split('&').next().unwrap().parse().unwrap()
    }

    /// Begins an answer in JSON. Returns the sender of the rest of it.
    fn begin(self, version: Version) -> mpsc::UnboundedSender<Bytes> {
        let (sender, body) = mpsc::unbounded_channel();
        let answer = Response::builder().version(version).header(header::CONTENT_TYPE, "application/json");
        self.send(answer.body(Scripted(body)).unwrap());
        sender
    }

    /// Answers with this body.
    fn answer(self, body: &Value) {
        self.begin(Version::HTTP_11).send(format!("{body}\n").into()).unwrap();
    }

    /// Refuses a request as an overloaded kube-apiserver does: with the header, and without a
    /// Status.
    fn refuse(self, code: StatusCode, retry_after: Option<&str>) {
        let (_, body) = mpsc::unbounded_channel();
        let mut answer = Response::builder().status(code);
        if let Some(retry_after) = retry_after {
            answer = answer.header(header::RETRY_AFTER, retry_after);
        }
        self.send(answer.body(Scripted(body)).unwrap());
    }

    fn send(self, answer: Response<Scripted>) {
        assert!(self.answer.send(answer).is_ok(), "nobody waits for the answer");
    }
}

fn bookmark(version: u64, ends_list: bool) -> Bytes {
    let annotations = if ends_list { json!({"k8s.io/initial-events-end": "true"}) } else { json!({}) };
    let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
    let event = json!({"type": "BOOKMARK", "object": {"metadata": metadata}});
    format!("{event}\n").into()
}

/// Returns the seconds after which a watcher asks again if it was refused like this. Meanwhile
/// another watcher recovers each second.
async fn asks_again_after(code: StatusCode, retry_after: Option<&str>) -> u64 {
    let mut world = World::start();
    world.asked().await.refuse(code, retry_after);
    let refused = Instant::now();
    let connection = Arc::clone(&world.connection);
    let recovering = tokio::spawn(async move {
        loop {
            sleep(Duration::from_secs(1)).await;
            connection.recovered.notify_waiters();
        }
    });
    world.asked().await;
    recovering.abort();
    refused.elapsed().as_secs()
}

/// If the server asks for no delay, the first delay is at most 1.6 s, and the recovery of another
/// watcher ends it.
#[rstest]
#[case::too_many_requests(StatusCode::TOO_MANY_REQUESTS, Some("20"), 20..=20)]
#[case::shutting_down(StatusCode::SERVICE_UNAVAILABLE, Some("5"), 5..=5)]
#[case::longer_than_a_node_may_be_stale(StatusCode::SERVICE_UNAVAILABLE, Some("86400"), 300..=300)]
#[case::no_delay_asked_for(StatusCode::SERVICE_UNAVAILABLE, None, 0..=1)]
#[tokio::test(start_paused = true)]
async fn the_delay_that_the_server_asks_for_is_kept_when_another_watcher_recovers(
    #[case] code: StatusCode,
    #[case] retry_after: Option<&str>,
    #[case] expected: RangeInclusive<u64>,
) {
    let found = asks_again_after(code, retry_after).await;
    assert!(expected.contains(&found), "after {found} s");
}

#[rstest]
#[case::replaced_where_nothing_else_proves_it(Version::HTTP_11, 40)]
#[case::proven_by_pings(Version::HTTP_2, 360)]
#[tokio::test(start_paused = true)]
async fn a_silent_watch_is_replaced_from_where_it_was(#[case] version: Version, #[case] seconds: u64) {
    let mut world = World::start();
    let _silent = world.watch(version).await;
    let began = Instant::now();
    let again = world.asked().await;
    assert!(began.elapsed().as_secs().abs_diff(seconds) <= 15, "{:?}", began.elapsed());
    assert!(
        again.target.contains("watch=true") && again.target.contains("resourceVersion=7"),
        "{}",
        again.target
    );
    assert!(!again.is_streaming_list(), "{}", again.target);
    let timeouts = world.state.errors(ResourceKind::Services, FailureReason::Timeout);
    assert_eq!(timeouts, u64::from(version == Version::HTTP_2), "replacing a silent watch is no failure");
}

/// An API server sends the first bookmark after a minute, or 2 s before the end of a watch that
/// ends earlier.
#[rstest]
#[case::for_a_bookmark_soon(Version::HTTP_11, 30..=35)]
#[case::for_few_requests(Version::HTTP_2, 240..=360)]
#[tokio::test(start_paused = true)]
async fn the_server_is_asked_to_end_a_watch(#[case] version: Version, #[case] expected: RangeInclusive<u64>) {
    let mut world = World::start();
    drop(world.watch(version).await);
    let again = world.asked().await;
    assert!(expected.contains(&again.timeout_seconds()), "{}", again.target);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_kind_advances_by_the_bookmark_at_the_end_of_each_watch_over_http_1() {
    let mut world = World::start();
    let _list = world.watch(Version::HTTP_11).await;
    for version in 7..12 {
        let asked = world.asked().await;
        assert!(asked.target.contains(&format!("resourceVersion={version}")), "{}", asked.target);
        let lasts = Duration::from_secs(asked.timeout_seconds());
        let watch = asked.begin(Version::HTTP_11);
        sleep(lasts - Duration::from_secs(2)).await;
        watch.send(bookmark(version + 1, false)).unwrap();
        sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(world.state.errors(ResourceKind::Services, FailureReason::Timeout), 0);
}

#[tokio::test(start_paused = true)]
async fn a_watch_over_http_1_that_does_not_end_as_asked_has_failed() {
    let mut world = World::start();
    drop(world.watch(Version::HTTP_11).await);
    let _dead = world.asked().await.begin(Version::HTTP_11);
    let began = Instant::now();
    world.asked().await;
    assert!(began.elapsed() <= Duration::from_secs(45), "{:?}", began.elapsed());
    assert_eq!(world.state.errors(ResourceKind::Services, FailureReason::Timeout), 1);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_heard_of_is_not_replaced() {
    let mut world = World::start();
    let watch = world.watch(Version::HTTP_11).await;
    for version in 8..20 {
        sleep(Duration::from_secs(29)).await;
        watch.send(bookmark(version, false)).unwrap();
    }
    assert!(world.requests.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stalled_streaming_list_gives_way_to_one_plain_list() {
    let mut world = World::start();
    let stalled = world.asked().await;
    assert!(stalled.is_streaming_list(), "{}", stalled.target);
    let _silent = stalled.begin(Version::HTTP_11);
    let plain = world.asked().await;
    assert!(!plain.target.contains("watch=true"), "{}", plain.target);
    plain.answer(&json!({"kind": "ServiceList", "metadata": {"resourceVersion": "7"}, "items": []}));
    let expired = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
    world.asked().await.answer(&json!({"type": "ERROR", "object": expired}));
    let again = world.asked().await;
    assert!(again.is_streaming_list(), "{}", again.target);
}

/// kube-apiserver before 1.27 does not know sendInitialEvents, but it refuses resourceVersionMatch
/// in a watch with 422.
#[rstest]
#[case::refused(|list: Asked| {
    list.refuse(StatusCode::UNPROCESSABLE_ENTITY, None);
    None
})]
#[case::ignored(|list: Asked| {
    let watch = list.begin(Version::HTTP_2);
    watch.send(bookmark(7, false)).unwrap();
    Some(watch)
})]
#[tokio::test(start_paused = true)]
async fn a_server_without_streaming_lists_is_asked_for_plain_ones_from_then_on(
    #[case] answer: fn(Asked) -> Option<mpsc::UnboundedSender<Bytes>>,
) {
    let mut world = World::start();
    let list = world.asked().await;
    assert!(list.is_streaming_list() && list.target.contains("resourceVersionMatch=NotOlderThan"));
    let _watch = answer(list);
    for _ in 0..2 {
        let plain = world.asked().await;
        assert!(!plain.target.contains("watch=true"), "{}", plain.target);
        plain.answer(&json!({"kind": "ServiceList", "metadata": {"resourceVersion": "7"}, "items": []}));
        let expired = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
        world.asked().await.answer(&json!({"type": "ERROR", "object": expired}));
    }
}
