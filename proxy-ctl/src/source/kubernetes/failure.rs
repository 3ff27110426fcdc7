//! What can go wrong between a watcher and the API server, and what each means for the next attempt.

use std::{error::Error as StdError, fmt, io, time::Duration};

use super::token_file::TokenFileError;
use crate::source::schema::meta::Status;

/// Why a list or watch failed: the label of the error counter, and what state changes are judged by.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum FailureReason {
    /// The credentials are not (or no longer) accepted: 401.
    Unauthorized,
    /// RBAC does not allow it: 403.
    Forbidden,
    /// The API server does not have this resource in this version: 404.
    NotServed,
    /// The resource version has been compacted away: 410. A new list follows.
    Expired,
    /// 429, or a server that asks to come back later.
    Throttled,
    /// Any other answer of the server that is an error.
    Refused,
    /// The certificate of the server, or ours, is not accepted.
    Tls,
    /// No connection.
    Unreachable,
    /// The connection broke, or ended before its time.
    Disconnected,
    /// Nothing heard for too long.
    Timeout,
    /// The answer is not what the API promises.
    Malformed,
    /// kubeconfig, certificate or token cannot be read.
    Credentials,
}

impl FailureReason {
    /// Label value of the metric.
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

    /// Whether other credentials may help.
    pub(crate) const fn is_about_credentials(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Tls | Self::Credentials)
    }

    /// Whether every request to this API server fails likewise, whatever it asks for.
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

/// A failed list or watch.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) reason: FailureReason,
    /// For people.
    pub(crate) message: String,
    /// What the server asked for.
    pub(crate) retry_after: Option<Duration>,
    /// HTTP status, where the server answered.
    pub(crate) code: Option<u16>,
}

impl Failure {
    pub(crate) fn new(reason: FailureReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), retry_after: None, code: None }
    }

    pub(super) fn silence(limit: Duration) -> Self {
        let seconds = limit.as_secs();
        Self::new(FailureReason::Timeout, format!("nothing heard from the API server for {seconds} s"))
    }

    /// Whether a streaming list may have failed because it was a streaming one: 422 where the feature is
    /// switched off or unknown, 500 where the API server's etcd is too old for it, who knows what from a
    /// proxy in between. Not where any request would have failed.
    pub(super) fn refuses_streaming(&self) -> bool {
        self.reason == FailureReason::Refused && !matches!(self.code, None | Some(502..=504))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<&Status> for Failure {
    fn from(status: &Status) -> Self {
        if status.code == 0 && status.message.is_empty() && status.reason.is_empty() {
            return Self::new(FailureReason::Malformed, "an error that says nothing");
        }
        let reason = match status.code {
            401 => FailureReason::Unauthorized,
            403 => FailureReason::Forbidden,
            404 => FailureReason::NotServed,
            410 => FailureReason::Expired,
            429 => FailureReason::Throttled,
            // "Too large resource version": the server's history is older than ours, after a restored backup.
            504 if status.reason == "Timeout" && status.message.contains("resource version") => {
                FailureReason::Expired
            }
            _ => FailureReason::Refused,
        };
        let retry_after = status
            .details
            .as_ref()
            .and_then(|details| u64::try_from(details.retry_after_seconds).ok())
            .filter(|seconds| *seconds > 0)
            .map(Duration::from_secs);
        let message = if status.message.is_empty() { &status.reason } else { &status.message };
        Self {
            reason,
            message: format!("{message} ({})", status.code),
            retry_after,
            code: u16::try_from(status.code).ok(),
        }
    }
}

impl From<kube::Error> for Failure {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest is told apart by its causes")]
    fn from(error: kube::Error) -> Self {
        let reason = match &error {
            kube::Error::Auth(_) => FailureReason::Credentials,
            _ => connection_reason(&error),
        };
        Self::new(reason, chain(&error))
    }
}

/// Finds the cause of a transport error: the layers in between wrap it differently.
fn connection_reason(error: &(dyn StdError + 'static)) -> FailureReason {
    let mut reason = FailureReason::Disconnected;
    let mut next = Some(error);
    while let Some(cause) = next {
        let text = cause.to_string();
        if cause.is::<TokenFileError>() || cause.is::<kube::client::AuthError>() {
            return FailureReason::Credentials;
        }
        if text.contains("certificate") || text.contains("fatal alert") {
            return FailureReason::Tls;
        }
        if cause.downcast_ref::<io::Error>().is_some_and(|io| io.kind() == io::ErrorKind::TimedOut) {
            reason = FailureReason::Timeout;
        }
        if text.contains("dns error") || text.contains("tcp connect error") || text.contains("tcp open error")
        {
            reason = FailureReason::Unreachable;
        }
        next = cause.source();
    }
    reason
}

/// Whether an answer has come to an end without saying so.
pub(super) fn ends_too_early(error: &(dyn StdError + 'static)) -> bool {
    std::iter::successors(Some(error), |error| (*error).source()).any(|cause| {
        let io = cause.downcast_ref::<io::Error>();
        io.is_some_and(|io| io.kind() == io::ErrorKind::UnexpectedEof)
            || cause.to_string().contains("unexpected EOF during chunk")
    })
}

/// The error and its causes in one line, without repeating what a layer only passes on.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
