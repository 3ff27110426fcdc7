//! The failures between a watcher and the API server, and what each means for the next attempt.

use std::{error::Error as StdError, io, iter, time::Duration};

use super::transport::token_file::TokenFileError;
use crate::kubernetes::schema::meta::Status;

/// The longest delay that the API server, or a proxy in front of it, can ask for. The node follows
/// no changes meanwhile.
pub(super) const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(300);

/// The reason why a list or watch failed. It is the label of the error counter, and a change of it
/// is logged.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum FailureReason {
    /// The credentials are not, or no longer, accepted: status 401.
    Unauthorized,
    /// RBAC does not allow the request: status 403.
    Forbidden,
    /// The API server does not have this resource in this version: status 404.
    NotServed,
    /// The resource version has been compacted away: status 410. A new list follows.
    Expired,
    /// The API server limits the rate of requests: status 429.
    Throttled,
    /// The server answered with any other error.
    Refused,
    /// The certificate of the server, or ours, is not accepted.
    Tls,
    /// No connection could be made.
    Unreachable,
    /// The connection broke, or ended before its time.
    Disconnected,
    /// Nothing was heard for too long.
    Timeout,
    /// The answer does not have the form that the API promises.
    Malformed,
    /// The kubeconfig, a certificate or a token cannot be read.
    Credentials,
}

impl FailureReason {
    /// Returns the value of the metric's label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::NotServed => "not_served",
            Self::Expired => "expired",
            Self::Throttled => "throttled",
            Self::Refused => "refused",
            Self::Tls => "tls",
            Self::Unreachable => "unreachable",
            Self::Disconnected => "disconnected",
            Self::Timeout => "timeout",
            Self::Malformed => "malformed",
            Self::Credentials => "credentials",
        }
    }

    /// Returns true if other credentials may help.
    pub(crate) const fn is_about_credentials(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Tls | Self::Credentials)
    }

    /// Returns true if every request to this API server fails in the same way, whatever it asks
    /// for.
    pub(super) const fn is_about_the_server(self) -> bool {
        match self {
            Self::Unauthorized
            | Self::Throttled
            | Self::Tls
            | Self::Unreachable
            | Self::Disconnected
            | Self::Timeout
            | Self::Credentials => true,
            Self::Forbidden | Self::NotServed | Self::Expired | Self::Refused | Self::Malformed => false,
        }
    }
}

/// A request that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) reason: FailureReason,
    /// The description for messages.
    pub(crate) message: String,
    /// The delay that the server asked for, at most [`LONGEST_RETRY_AFTER`].
    pub(crate) retry_after: Option<Duration>,
    /// The HTTP status, if the server answered.
    pub(crate) code: Option<u16>,
}

impl Failure {
    pub(crate) fn new(reason: FailureReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), retry_after: None, code: None }
    }

    /// Builds the failure of an answer that is an error. `retry_after` is in seconds, and 0 if the
    /// server does not ask for a delay.
    fn refused(code: i32, reason: &str, message: &str, retry_after: i64) -> Self {
        if code == 0 && message.is_empty() && reason.is_empty() {
            return Self::new(FailureReason::Malformed, "an error that says nothing");
        }
        let kind = match code {
            401 => FailureReason::Unauthorized,
            403 => FailureReason::Forbidden,
            404 => FailureReason::NotServed,
            410 => FailureReason::Expired,
            429 => FailureReason::Throttled,
            // "Too large resource version": the server's history is older than ours, as after a
            // restored backup.
            504 if reason == "Timeout" && message.contains("resource version") => FailureReason::Expired,
            _ => FailureReason::Refused,
        };
        let message = if message.is_empty() { reason } else { message };
        let failure = Self::new(kind, format!("{message} ({code})"));
        Self { code: u16::try_from(code).ok(), ..failure }
            .asked_to_wait(u64::try_from(retry_after).ok().map(Duration::from_secs))
    }

    /// Adds a delay that the server asked for. Of two delays the longer one counts.
    pub(super) fn asked_to_wait(mut self, delay: Option<Duration>) -> Self {
        let delay = delay.filter(|delay| !delay.is_zero()).map(|delay| delay.min(LONGEST_RETRY_AFTER));
        self.retry_after = self.retry_after.max(delay);
        self
    }

    pub(super) fn silence(limit: Duration) -> Self {
        let seconds = limit.as_secs();
        Self::new(FailureReason::Timeout, format!("nothing heard from the API server for {seconds} s"))
    }

    /// Returns true if a streaming list may have failed because it was a streaming one. The status
    /// is 422 if the feature is switched off or unknown, and 500 if the API server's etcd is too
    /// old for it. A proxy in between may answer any other status. Returns false if any request
    /// would have failed.
    pub(super) fn refuses_streaming(&self) -> bool {
        self.reason == FailureReason::Refused && !matches!(self.code, None | Some(502..=504))
    }
}

impl From<&Status> for Failure {
    fn from(status: &Status) -> Self {
        let retry_after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        Self::refused(status.code, &status.reason, &status.message, retry_after.into())
    }
}

impl From<kube::Error> for Failure {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest is told apart by its causes")]
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => {
                let retry_after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
                Self::refused(status.code.into(), &status.reason, &status.message, retry_after.into())
            }
            kube::Error::Service(source) => match source.downcast::<Self>() {
                Ok(failure) => *failure,
                Err(source) => Self::new(transport_reason(&*source), with_causes(&*source)),
            },
            error => Self::new(transport_reason(&error), with_causes(&error)),
        }
    }
}

/// Returns the reason of a failure without an answer. Each layer wraps the cause in an error of its
/// own, so the innermost error of a known type decides.
fn transport_reason(error: &(dyn StdError + 'static)) -> FailureReason {
    let mut reason = FailureReason::Disconnected;
    for cause in causes(error) {
        if cause.is::<TokenFileError>() || cause.is::<kube::client::AuthError>() {
            return FailureReason::Credentials;
        }
        if cause.is::<rustls::Error>() {
            return FailureReason::Tls;
        }
        if cause.downcast_ref::<io::Error>().is_some_and(|io| io.kind() == io::ErrorKind::TimedOut) {
            return FailureReason::Timeout;
        }
        let client = cause.downcast_ref::<hyper_util::client::legacy::Error>();
        if client.is_some_and(hyper_util::client::legacy::Error::is_connect) {
            reason = FailureReason::Unreachable;
        }
    }
    reason
}

/// Returns the error and its causes, outermost first. `io::Error::source` skips the error that it
/// wraps and returns that one's source, so the wrapped error is taken from `get_ref`.
fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    iter::successors(Some(error), |&cause: &&'a (dyn StdError + 'static)| {
        match cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(content) => Some(content as &'a (dyn StdError + 'static)),
            None => cause.source(),
        }
    })
}

/// Returns true if an answer has ended in the middle.
pub(super) fn ends_too_early(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| {
        let io = cause.downcast_ref::<io::Error>();
        io.is_some_and(|io| io.kind() == io::ErrorKind::UnexpectedEof)
    })
}

/// Returns the error and its causes in one line, without repeating what a layer only passes on.
pub(crate) fn with_causes(error: &(dyn StdError + 'static)) -> String {
    causes(error).map(ToString::to_string).fold(String::new(), |mut text, cause| {
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.push_str(colon);
            text.push_str(&cause);
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use rstest::rstest;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::{
        super::{transport::connection::ApiConnection, wire::answer::ApiAnswer},
        *,
    };
    use crate::{
        free_port::free_port,
        kubernetes::{Config, Requests},
    };

    fn connection(server: String) -> ApiConnection {
        let config = Config { master: Some(server), ..Config::default() };
        ApiConnection::new(config, http::HeaderValue::from_static("*/*"), Requests::default())
    }

    async fn failure(server: String) -> Failure {
        let answer = async {
            let (client, _) = connection(server).client().await?;
            let request = http::Request::get("/").body(kube::client::Body::empty()).unwrap();
            ApiAnswer::new(client.send(request).await?).await
        };
        answer.await.err().unwrap()
    }

    /// Starts a server that answers the first bytes of each connection with these bytes, and closes
    /// it.
    async fn server(answer: &'static [u8]) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = listener.accept().await {
                let _ = connection.read(&mut [0; 4096]).await;
                let _ = connection.write_all(answer).await;
            }
        });
        port
    }

    #[rstest]
    #[case::fatal_alert("https", b"\x15\x03\x03\x00\x02\x02\x30", FailureReason::Tls)]
    #[case::server_without_tls("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", FailureReason::Tls)]
    #[case::closed_during_the_handshake("https", b"", FailureReason::Unreachable)]
    #[case::closed_without_an_answer("http", b"", FailureReason::Disconnected)]
    #[case::words_about_a_certificate(
        "http",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 15\r\n\r\nbad certificate",
        FailureReason::Refused
    )]
    #[tokio::test]
    async fn a_cause_is_told_by_its_type(
        #[case] scheme: &str,
        #[case] answer: &'static [u8],
        #[case] expected: FailureReason,
    ) {
        let failure = failure(format!("{scheme}://127.0.0.1:{}", server(answer).await)).await;
        assert_eq!(failure.reason, expected, "{failure}");
    }

    #[tokio::test]
    async fn a_name_that_is_not_found_and_a_port_without_a_listener_are_unreachable() {
        let closed = free_port();
        // The resolver refuses the empty label in the second name without a query.
        for server in [format!("http://127.0.0.1:{closed}"), "http://certificate..invalid:1".to_owned()] {
            let failure = failure(server).await;
            assert_eq!(failure.reason, FailureReason::Unreachable, "{failure}");
        }
    }

    #[rstest]
    #[case::within_a_chunk(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe")]
    #[case::before_a_chunk(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n")]
    #[tokio::test]
    async fn an_answer_that_breaks_off_has_ended_too_early(#[case] answer: &'static [u8]) {
        let server = format!("http://127.0.0.1:{}", server(answer).await);
        let (client, _) = connection(server).client().await.unwrap();
        let request = http::Request::get("/").body(kube::client::Body::empty()).unwrap();
        let error = client.send(request).await.unwrap().into_body().collect().await.unwrap_err();
        assert!(ends_too_early(&error), "{error:?}");
    }
}
