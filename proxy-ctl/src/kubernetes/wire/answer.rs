//! An answer of the API server: an error, or a body in one of the encodings.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, Response, Version,
    header::{CONTENT_TYPE, RETRY_AFTER},
};
use http_body_util::BodyExt as _;
use jiff::{Timestamp, fmt::rfc2822};
use kube::client::Body;
use tokio::time::timeout;

use super::{ApiType, Event, frames::Frames};
use crate::{
    config::Encoding,
    kubernetes::{
        failure::{Failure, FailureReason, ends_too_early},
        transport::secrets::LONGEST_ERROR,
        wire,
    },
};

/// The longest silence before an answer begins, and between two parts of it.
pub(crate) const SILENCE: Duration = Duration::from_secs(60);
/// The number of bytes that are shown of an error that is no Status.
const SHOWN: usize = 500;

/// The longest list in bytes. It has room for some 600,000 endpoints in JSON.
pub(crate) const LONGEST_LIST: usize = 256 << 20;

pub(crate) struct ApiAnswer {
    is_pinged: bool,
    encoding: Option<Encoding>,
    content_type: String,
    body: Body,
}

impl ApiAnswer {
    /// Returns the answer, or a failure if it is an error. The failure has the message of the body.
    pub(crate) async fn new(response: Response<Body>) -> Result<Self, Failure> {
        let code = response.status();
        let delay = retry_after(response.headers(), Timestamp::now());
        let is_pinged = response.version() == Version::HTTP_2;
        let content_type = response.headers().get(CONTENT_TYPE);
        let content_type =
            content_type.map(|of| String::from_utf8_lossy(of.as_bytes()).into_owned()).unwrap_or_default();
        let encoding = Encoding::of(&content_type);
        let answer = Self { is_pinged, encoding, content_type, body: response.into_body() };
        if !(code.is_client_error() || code.is_server_error()) {
            return Ok(answer);
        }
        let body = read(answer.body, LONGEST_ERROR, SILENCE).await?;
        let status = encoding.and_then(|encoding| wire::status(encoding, &body).ok());
        // A proxy on the way may answer in another form, such as a page of HTML.
        let mut status = status.unwrap_or_default();
        if status.message.is_empty() && status.reason.is_empty() {
            let text = &body[..body.len().min(SHOWN)];
            status.message = match String::from_utf8_lossy(text).trim() {
                "" => code.to_string(),
                text => text.to_owned(),
            };
        }
        status.code = code.as_u16().into();
        Err(Failure::from(&status).asked_to_wait(delay))
    }

    /// Returns the whole body. Fails if `what` has more than `most` bytes.
    pub(crate) async fn whole(self, what: &str, most: usize) -> Result<Bytes, Failure> {
        let whole = read(self.body, most + 1, SILENCE).await?;
        if whole.len() > most { Err(too_long(what, most)) } else { Ok(whole) }
    }

    /// Returns the encoding that the content type names.
    pub(crate) fn encoding(&self) -> Result<Encoding, Failure> {
        self.encoding.ok_or_else(|| {
            let problem = format!(
                "the answer's content type is {:?}, {} and {} can be read",
                self.content_type,
                Encoding::Protobuf.media_type(),
                Encoding::Json.media_type()
            );
            Failure::new(FailureReason::Malformed, problem)
        })
    }

    /// Returns true if the answer came over HTTP/2, whose pings prove the connection.
    pub(crate) fn is_pinged(&self) -> bool {
        self.is_pinged
    }

    /// Returns the events of a watch of this kind. `lasts` is the time after which the server was
    /// asked to end it.
    pub(crate) fn events(self, of: ApiType, lasts: Duration) -> Result<Events, Failure> {
        let encoding = self.encoding()?;
        let (is_pinged, body) = (self.is_pinged, self.body);
        Ok(Events { is_pinged, lasts, encoding, of, frames: Frames::new(encoding), body, list: None })
    }
}

/// Returns the delay that the header Retry-After asks for: seconds, or a date (RFC 9110, section
/// 10.2.3). An API server that is overloaded or shutting down has the delay in this header alone,
/// without a Status.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = rfc2822::DateTimeParser::new().parse_timestamp(value).ok()?;
    date.duration_since(now).try_into().ok()
}

pub(crate) fn list_of(kind: ApiType) -> String {
    format!("the list of objects of kind {}", kind.kind)
}

fn too_long(what: &str, most: usize) -> Failure {
    let problem = format!("{what} is longer than {most} bytes, the most that is read");
    Failure::new(FailureReason::Malformed, problem)
}

/// Reads a body until it ends or has `enough` bytes. `silence` is the time that each part may take.
async fn read<B>(mut body: B, enough: usize, silence: Duration) -> Result<Bytes, Failure>
where
    B: hyper::body::Body<Data = Bytes, Error = kube::Error> + Unpin,
{
    let mut read = BytesMut::new();
    while read.len() < enough {
        let frame = timeout(silence, body.frame()).await.map_err(|_| Failure::silence(silence))?;
        let Some(frame) = frame.transpose()? else { break };
        if let Ok(data) = frame.into_data() {
            read.extend_from_slice(&data);
        }
    }
    Ok(read.freeze())
}

/// The events of a watch, one after the other.
pub(crate) struct Events {
    is_pinged: bool,
    lasts: Duration,
    encoding: Encoding,
    of: ApiType,
    frames: Frames,
    body: Body,
    /// The number of bytes that may still come before the list at the beginning ends.
    list: Option<usize>,
}

impl Events {
    /// Returns true if the events come over HTTP/2, whose pings prove the connection.
    pub(crate) fn is_pinged(&self) -> bool {
        self.is_pinged
    }

    /// Returns the time after which the server was asked to end the watch.
    pub(crate) fn lasts(&self) -> Duration {
        self.lasts
    }

    /// Notes that the events begin with a list, which must end within [`LONGEST_LIST`] bytes.
    pub(crate) fn begin_list(&mut self) {
        self.list = Some(LONGEST_LIST);
    }

    pub(crate) fn end_list(&mut self) {
        self.list = None;
    }

    /// Returns the next event, or None at the end. Nothing is lost if the future is dropped.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>, Failure> {
        loop {
            if let Some(frame) = self.frames.next()? {
                return Event::read(self.encoding, &frame, self.of).map(Some);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        if let Some(left) = &mut self.list {
                            let after = left.checked_sub(data.len());
                            *left = after.ok_or_else(|| too_long(&list_of(self.of), LONGEST_LIST))?;
                        }
                        self.frames.push(data);
                    }
                }
                // Old API servers end watches in this way.
                Some(Err(error)) if ends_too_early(&error) => return Ok(None),
                Some(Err(error)) => return Err(error.into()),
                None if self.frames.is_within_one() => {
                    return Err(Failure::new(
                        FailureReason::Disconnected,
                        "the watch ended in the middle of an event",
                    ));
                }
                None => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::Pin,
        task::{Context, Poll, ready},
    };

    use hyper::body::Frame;
    use rstest::rstest;
    use tokio::time::{Sleep, sleep};

    use super::*;

    const STATUS: &[u8] = include_bytes!("../recorded/status.protobuf");
    const WATCH: &[u8] = include_bytes!("../recorded/watch.protobuf");
    const LASTS: Duration = Duration::from_secs(300);
    const SERVICE: ApiType = ApiType { api_version: "v1", kind: "Service" };

    async fn answer(code: u16, content_type: &str, body: &[u8]) -> Result<ApiAnswer, Failure> {
        let response = Response::builder().status(code).header(CONTENT_TYPE, content_type);
        ApiAnswer::new(response.body(Body::from(body.to_vec())).unwrap()).await
    }

    #[tokio::test]
    async fn an_error_says_what_its_body_says_in_whatever_form() {
        let denied =
            br#"{"kind":"Status","message":"services is forbidden","reason":"Forbidden","code":403}"#;
        for (code, content_type, body, reason, message) in [
            (
                403,
                "application/json",
                denied.as_slice(),
                FailureReason::Forbidden,
                "services is forbidden (403)",
            ),
            (
                410,
                "application/vnd.kubernetes.protobuf",
                STATUS,
                FailureReason::Expired,
                "too old resource version: 1 (7) (410)",
            ),
            (502, "text/html", b"<h1>Bad Gateway</h1>", FailureReason::Refused, "<h1>Bad Gateway</h1> (502)"),
            (503, "application/vnd.kubernetes.protobuf", b"k8s\0\xff", FailureReason::Refused, "k8s"),
            (401, "", b"", FailureReason::Unauthorized, "401 Unauthorized (401)"),
        ] {
            let failure = answer(code, content_type, body).await.err().unwrap();
            assert_eq!((failure.reason, failure.code), (reason, Some(code)));
            assert!(failure.message.starts_with(message), "{failure}");
        }
    }

    #[rstest]
    #[case::seconds("7", Some(7))]
    #[case::date("Sun, 06 Nov 1994 08:49:37 GMT", Some(37))]
    #[case::date_that_has_passed("Sun, 06 Nov 1994 08:48:59 GMT", None)]
    #[case::neither("soon", None)]
    #[case::negative("-1", None)]
    fn retry_after_is_a_number_of_seconds_or_a_date(#[case] value: &str, #[case] expected: Option<u64>) {
        let now: Timestamp = "1994-11-06T08:49:00Z".parse().unwrap();
        let headers = HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]);
        assert_eq!(retry_after(&headers, now), expected.map(Duration::from_secs));
    }

    /// The clock is paused: it moves on only when the reader and the body both wait.
    #[tokio::test(start_paused = true)]
    async fn a_long_answer_may_take_its_time_but_not_fall_silent() {
        let slow = Trickle { left: 12, pause: Duration::from_millis(100), next: None };
        let whole = read(slow, usize::MAX, Duration::from_secs(1)).await.unwrap();
        assert_eq!(whole.len(), 12, "each part in time, and all of them after the limit");
        let silent = Trickle { left: 1, pause: Duration::from_secs(600), next: None };
        let failure = read(silent, usize::MAX, Duration::from_millis(10)).await.unwrap_err();
        assert_eq!(failure.reason, FailureReason::Timeout);
    }

    /// A body that brings one byte after each pause.
    struct Trickle {
        left: u32,
        pause: Duration,
        next: Option<Pin<Box<Sleep>>>,
    }

    impl hyper::body::Body for Trickle {
        type Data = Bytes;
        type Error = kube::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, kube::Error>>> {
            let Some(left) = self.left.checked_sub(1) else { return Poll::Ready(None) };
            let pause = self.pause;
            ready!(self.next.get_or_insert_with(|| Box::pin(sleep(pause))).as_mut().poll(context));
            (self.left, self.next) = (left, None);
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
        }
    }

    #[tokio::test]
    async fn a_list_that_is_too_long_is_named_with_the_limit() {
        let list = || answer(200, "application/json", b"12345");
        let what = list_of(SERVICE);
        assert_eq!(&*list().await.unwrap().whole(&what, 5).await.unwrap(), b"12345");
        let failure = list().await.unwrap().whole(&what, 4).await.unwrap_err();
        assert_eq!(failure.reason, FailureReason::Malformed);
        let expected = "the list of objects of kind Service is longer than 4 bytes, the most that is read";
        assert_eq!(failure.message, expected);

        let content_type = "application/vnd.kubernetes.protobuf;stream=watch";
        let mut events = answer(200, content_type, WATCH).await.unwrap().events(SERVICE, LASTS).unwrap();
        events.list = Some(WATCH.len() - 1);
        let failure = events.next().await.err().unwrap();
        assert!(failure.message.contains("kind Service is longer than"), "{failure}");
        let mut events = answer(200, content_type, WATCH).await.unwrap().events(SERVICE, LASTS).unwrap();
        events.begin_list();
        assert!(events.next().await.unwrap().is_some());
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_named() {
        let page = answer(200, "text/html; charset=utf-8", b"<h1>Sign in</h1>").await.unwrap();
        let failure = page.events(SERVICE, LASTS).err().unwrap();
        assert_eq!(failure.reason, FailureReason::Malformed);
        assert!(failure.message.contains("\"text/html; charset=utf-8\""), "{failure}");
    }

    #[tokio::test]
    async fn a_watch_that_ends_within_an_event_has_failed() {
        let content_type = "application/vnd.kubernetes.protobuf;stream=watch";
        let mut whole = answer(200, content_type, WATCH).await.unwrap().events(SERVICE, LASTS).unwrap();
        let mut events = 0;
        while whole.next().await.unwrap().is_some() {
            events += 1;
        }
        assert_eq!(events, 6);
        let cut = &WATCH[..WATCH.len() - 1];
        let mut cut = answer(200, content_type, cut).await.unwrap().events(SERVICE, LASTS).unwrap();
        for _ in 0..5 {
            assert!(cut.next().await.unwrap().is_some());
        }
        let failure = cut.next().await.unwrap_err();
        assert_eq!(failure.reason, FailureReason::Disconnected);
        assert!(failure.message.contains("in the middle of an event"), "{failure}");
    }
}
