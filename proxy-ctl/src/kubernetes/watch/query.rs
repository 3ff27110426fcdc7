//! The requests for one kind of object: its list and its watch.

use std::{marker::PhantomData, ops::Range, sync::atomic::Ordering, time::Duration};

use kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
    core::Request,
};
use tokio::time::timeout;

use super::{context::WatchContext, kind::Verb, resource::Watched};
use crate::kubernetes::{
    failure::{Failure, FailureReason},
    wire::{
        Page,
        answer::{ApiAnswer, Events, LONGEST_LIST, SILENCE, list_of},
    },
};

/// The time after which the server ends a watch. It is random, so that nodes do not renew their
/// watches together.
pub(crate) const WATCH: Range<Duration> = Duration::from_secs(240)..Duration::from_secs(360);
/// The time after which the server ends a watch over HTTP/1.1. Only this end proves that the
/// connection is alive. A watch that is left earlier brings no bookmark, because the server sends
/// the first one after a minute or 2 s before the end. Without bookmarks the version of a kind
/// without changes expires.
pub(super) const UNPINGED_WATCH: Range<Duration> = Duration::from_secs(30)..Duration::from_secs(35);

/// Returns a random duration of this range.
pub(super) fn random_in(range: Range<Duration>) -> Duration {
    range.start + (range.end - range.start).mul_f64(fastrand::f64())
}

/// The selection of the objects of a kind.
pub(crate) struct Query<W> {
    labels: Option<&'static str>,
    fields: Option<String>,
    kind: PhantomData<fn() -> W>,
}

impl<W: Watched> Query<W> {
    pub(crate) fn all() -> Self {
        Self { labels: None, fields: None, kind: PhantomData }
    }

    pub(crate) fn with_labels(labels: &'static str) -> Self {
        Self { labels: Some(labels), ..Self::all() }
    }

    pub(crate) fn with_fields(fields: String) -> Self {
        Self { fields: Some(fields), ..Self::all() }
    }

    /// Lists all objects in one answer, not older than `version`. Pages are not asked for, because
    /// API servers answer them from etcd.
    pub(crate) async fn list(
        &self,
        context: &WatchContext,
        client: &Client,
        version: &str,
    ) -> Result<Page, Failure> {
        let params = ListParams {
            label_selector: self.labels.map(str::to_owned),
            field_selector: self.fields.clone(),
            resource_version: (!version.is_empty()).then(|| version.to_owned()),
            ..ListParams::default()
        };
        let request = Request::new(W::path()).list(&params).map_err(kube::Error::BuildRequest)?;
        let answer = self.ask(context, client, request, Verb::List).await?;
        let encoding = answer.encoding()?;
        let page = Page::read(encoding, &answer.whole(&list_of(W::KIND), LONGEST_LIST).await?, W::KIND)?;
        if !page.continue_token.is_empty() {
            let problem = "the list is one of several pages, which were not asked for";
            return Err(Failure::new(FailureReason::Malformed, problem));
        }
        context.state.set_denied(W::RESOURCE, Verb::List, false);
        Ok(page)
    }

    /// Watches what changes after `version`. `with_list`: the watch begins with all objects, not
    /// older than `version`.
    pub(crate) async fn watch(
        &self,
        context: &WatchContext,
        client: &Client,
        version: &str,
        with_list: bool,
    ) -> Result<Events, Failure> {
        // A long list may take longer than a watch over HTTP/1.1 lasts.
        let is_long = with_list || context.connection.is_pinged.load(Ordering::Relaxed);
        let lasts = random_in(if is_long { WATCH } else { UNPINGED_WATCH });
        let params = WatchParams {
            label_selector: self.labels.map(str::to_owned),
            field_selector: self.fields.clone(),
            timeout: u32::try_from(lasts.as_secs()).ok(),
            bookmarks: true,
            send_initial_events: with_list,
        };
        let request = Request::new(W::path()).watch(&params, version).map_err(kube::Error::BuildRequest)?;
        let mut events = self.ask(context, client, request, Verb::Watch).await?.events(W::KIND, lasts)?;
        context.state.set_denied(W::RESOURCE, Verb::Watch, false);
        if with_list {
            events.begin_list();
            context.state.set_denied(W::RESOURCE, Verb::List, false);
        }
        context.state.watch_started(W::RESOURCE);
        Ok(events)
    }

    /// Sends a request, and returns when the answer has begun.
    async fn ask(
        &self,
        context: &WatchContext,
        client: &Client,
        mut request: http::Request<Vec<u8>>,
        verb: Verb,
    ) -> Result<ApiAnswer, Failure> {
        request.headers_mut().insert(http::header::ACCEPT, context.connection.accept.clone());
        let answer = async { ApiAnswer::new(client.send(request.map(Body::from)).await?).await };
        let answer = timeout(SILENCE, answer).await.unwrap_or_else(|_| Err(Failure::silence(SILENCE)));
        let answer = answer.inspect_err(|failure| {
            if failure.reason == FailureReason::Forbidden {
                context.state.set_denied(W::RESOURCE, verb, true);
            }
        })?;
        context.connection.is_pinged.store(answer.is_pinged(), Ordering::Relaxed);
        context.state.answered_in(W::RESOURCE, answer.encoding()?);
        Ok(answer)
    }
}
