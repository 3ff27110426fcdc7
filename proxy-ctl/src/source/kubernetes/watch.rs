//! One resource's list and watch, for ever: what is listed goes out as one `Replace…`, what changes
//! afterwards as it comes. Where a connection was lost the watch goes on from the last version seen; where
//! the API server no longer knows that version, everything is listed again.
//!
//! kube's own watcher is not used: it never leaves streaming lists for paged ones, lists from
//! whatever an API server's cache holds (possibly older than what was seen before), gives up
//! all objects of a page that has one it cannot read, and reads JSON only.

use std::{collections::HashSet, sync::Arc, time::Duration};

use kube::{
    Client,
    api::{ListParams, WatchParams},
    client::Body,
    core::Request,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, info};

use super::{
    answer::{Answer, Events},
    backoff::{Backoff, random},
    connection::{Connection, Renewed},
    failure::{Failure, FailureReason},
    health::Health,
    kept::Kept,
    kind::Verb,
    reported::Reported,
    resource::Watched,
    state::{ListMethod, SourceState},
    wire::{Event, Meta, Page, Raw},
};
use crate::{
    model::objects::ObjectName,
    source::{InvalidField, Update, convert, schema::Object as _},
};

/// Objects of the first page, as client-go asks for.
const PAGE: u32 = 500;
/// Pages shorter than this, in bytes, are followed by longer ones: each costs one of few requests a second.
const SHORT_PAGE: usize = 2 << 20;
const LONGEST_PAGE: u32 = 8000;
/// For an answer to begin, and for the next page of a list.
const ANSWER: Duration = Duration::from_secs(60);
/// For the next object of a streaming list. An API server so old that it ignores the wish for one goes silent.
const NEXT_OF_LIST: Duration = Duration::from_secs(20);
/// How long a watch lasts before the server ends it, in seconds; spread so that nodes do not renew together.
const WATCH_SECONDS: std::ops::Range<f64> = 240.0..360.0;
/// A watch that is silent for this much longer is dead.
const MARGIN: Duration = Duration::from_secs(10);
/// So is one that has brought a bookmark, as API servers do each minute, and then nothing for this long.
const BOOKMARKS: Duration = Duration::from_secs(180);
/// A watch that ends sooner without having said anything is a failure, not a renewal.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);
/// One that has lasted this long, or has brought something, shows that what failed before is over.
const SETTLED: Duration = Duration::from_secs(5);
/// Failed streaming lists in a row, after which a paged one is tried.
const STREAM_ATTEMPTS: u32 = 2;

/// Why a watcher has ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum End {
    /// Nobody takes the updates any more.
    Unwanted,
    /// The API server may serve something better, or not this any more. It can be run again.
    AskAgain,
}

/// What an attempt that went well has come to.
enum Done {
    Listed,
    /// As watches do after some minutes.
    WatchEnded,
}

/// Why an attempt has failed.
enum Stop {
    Failed(Failure),
    /// Nobody takes our updates any more.
    Unwanted,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<kube::Error> for Stop {
    fn from(error: kube::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// What an object means to us.
enum Sense<P> {
    Served(P),
    /// Somebody else's, nobody's, or nothing that could be served.
    NotServed,
    /// Nobody knows whether it has changed in what matters: what it was last stays in force.
    Unreadable,
}

/// Which objects.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
}

pub(super) struct Watcher<W: Watched> {
    connection: Arc<Connection>,
    selection: Selection,
    updates: mpsc::Sender<Update>,
    state: SourceState,
    health: Health,
    backoff: Backoff,
    /// Why the last attempt failed; None once a watch has settled.
    last_failure: Option<FailureReason>,
    reported: Reported,
    /// Everything up to this resource version has been sent; None: nothing, list first.
    position: Option<String>,
    /// Streaming lists that failed since the last complete list.
    failed_streams: u32,
    refusal_told: bool,
    /// Something was sent.
    told: bool,
    /// What was sent last, where there is only one object.
    last: Option<W::Parsed>,
    /// What those who take the updates have.
    served: HashSet<ObjectName>,
}

impl<W: Watched> Watcher<W> {
    pub(super) fn new(
        connection: Arc<Connection>,
        selection: Selection,
        updates: mpsc::Sender<Update>,
        state: SourceState,
    ) -> Self {
        Self {
            connection,
            selection,
            updates,
            state,
            health: Health::new(W::RESOURCE),
            backoff: Backoff::default(),
            last_failure: None,
            reported: Reported::default(),
            position: None,
            failed_streams: 0,
            refusal_told: false,
            told: false,
            last: None,
            served: HashSet::new(),
        }
    }

    /// Lists and watches, whatever fails in between.
    pub(super) async fn run(&mut self) -> End {
        loop {
            let (generation, failure) = match self.connection.client().await {
                Ok((client, generation)) => match self.attempt(&client).await {
                    Ok(Done::WatchEnded) if W::STOPGAP => return End::AskAgain,
                    Ok(Done::Listed | Done::WatchEnded) => continue,
                    Err(Stop::Unwanted) => return End::Unwanted,
                    Err(Stop::Failed(failure)) => (Some(generation), failure),
                },
                Err(failure) => (None, failure),
            };
            self.state.failed(W::RESOURCE, &failure);
            let first = self.last_failure.replace(failure.reason) != Some(failure.reason);
            if failure.reason == FailureReason::Expired {
                info!(resource = %W::RESOURCE, "{failure}; listing again");
                self.position = None;
                if first {
                    // The first in a row is the usual course of things, and every change waits for it.
                    continue;
                }
            }
            let mut delay = self.backoff.next(random());
            if let Some(wanted) = failure.retry_after {
                delay = delay.max(wanted);
            }
            if failure.reason == FailureReason::NotServed && first {
                info!(resource = %W::RESOURCE, "{failure}; asking the API server what it serves");
                self.position = None;
                return End::AskAgain;
            }
            match self.renew(generation, failure.reason).await {
                Ok(Renewed::New) => {
                    debug!(resource = %W::RESOURCE, "{failure}; trying again with the credentials found now");
                    continue;
                }
                Ok(Renewed::Same | Renewed::Asked) => self.bad(&failure, delay),
                Err(error) => {
                    let message = format!("{failure}; and the credentials cannot be read again: {error}");
                    self.bad(&Failure::new(FailureReason::Credentials, message), delay);
                }
            }
            if self.state.denied(W::RESOURCE).contains(&Verb::List)
                && !self.told
                && let Some(hidden) = W::Parsed::hidden()
                && let Err(Stop::Unwanted) = self.send(hidden).await
            {
                return End::Unwanted;
            }
            tokio::select! {
                () = sleep(delay) => {}
                // Another watcher gets through again: what went wrong before says nothing any more.
                () = self.connection.recovered.notified() => self.backoff.reset(),
                () = self.updates.closed() => return End::Unwanted,
            }
            if W::STOPGAP || failure.reason == FailureReason::NotServed {
                return End::AskAgain;
            }
        }
    }

    async fn renew(&self, generation: Option<u64>, reason: FailureReason) -> Result<Renewed, Failure> {
        match generation {
            Some(generation) => self.connection.renew(generation, reason).await,
            // There is no client yet: it will be made from what the files say then.
            None => Ok(Renewed::Same),
        }
    }

    fn bad(&mut self, failure: &Failure, delay: Duration) {
        let denied = self.state.denied(W::RESOURCE);
        self.health.bad(&self.connection.outage, failure, &denied, delay);
    }

    /// Lists if need be and watches until the server ends the watch.
    async fn attempt(&mut self, client: &Client) -> Result<Done, Stop> {
        let Some(version) = self.position.clone() else {
            // Servers that have only what is watched in better's stead do not know streaming lists.
            if !W::STOPGAP && self.failed_streams < STREAM_ATTEMPTS {
                match self.stream(client).await {
                    Err(Stop::Failed(failure)) if failure.refuses_streaming() && self.position.is_none() => {
                        if !std::mem::replace(&mut self.refusal_told, true) {
                            info!(resource = %W::RESOURCE, "the API server refuses streaming lists, using pages: {failure}");
                        }
                    }
                    // Whoever may not watch may still list, and knows what there is.
                    Err(Stop::Failed(failure))
                        if failure.reason == FailureReason::Forbidden && self.position.is_none() => {}
                    other => return other,
                }
            }
            return self.list(client).await;
        };
        let events = match self.open(client, false, &version).await {
            Err(Stop::Failed(failure)) if failure.reason == FailureReason::Forbidden => {
                // What happens meanwhile is seen by listing again.
                self.position = None;
                return Err(failure.into());
            }
            other => other?,
        };
        self.follow(events, Instant::now()).await
    }

    /// A list and the watch after it in one answer.
    async fn stream(&mut self, client: &Client) -> Result<Done, Stop> {
        // No version: the list is at least as new as this request.
        let mut events = self.open(client, true, "").await?;
        self.failed_streams += 1;
        let mut listing = Listing::<W>::default();
        loop {
            let event = next(&mut events, NEXT_OF_LIST).await.inspect_err(|failure| {
                if failure.reason == FailureReason::Timeout {
                    self.failed_streams = STREAM_ATTEMPTS;
                }
            })?;
            match event.ok_or_else(|| {
                Failure::new(FailureReason::Disconnected, "the list ended before it was complete")
            })? {
                Event::Added(object) | Event::Modified(object) => {
                    self.listed(&mut listing, &object)?;
                }
                Event::Deleted(object) => {
                    let name = object.meta()?.name();
                    return Err(Failure::new(
                        FailureReason::Malformed,
                        format!("deletion of {name} within a list"),
                    )
                    .into());
                }
                Event::Bookmark { resource_version, ends_list } => {
                    self.state.heard_from(W::RESOURCE);
                    if ends_list {
                        self.replace(listing, resource_version, ListMethod::Streamed).await?;
                        break;
                    }
                }
                Event::Error(failure) => return Err(failure.into()),
            }
        }
        self.follow(events, Instant::now()).await
    }

    /// A list page by page; the watch is the next attempt.
    async fn list(&mut self, client: &Client) -> Result<Done, Stop> {
        let request = Request::new(W::path());
        let mut listing = Listing::<W>::default();
        let mut params = ListParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        loop {
            // No version: as new as this request, from the first page to the last.
            let page_request = request.list(&params).map_err(kube::Error::BuildRequest)?;
            let page = timeout(ANSWER, self.page(client, page_request))
                .await
                .map_err(|_| Failure::silence(ANSWER))?
                .inspect_err(|failure| self.answered(Verb::List, failure));
            let (page, bytes) = match page {
                // The pages took longer than the server keeps versions: all at once is slower for the
                // server, but comes to an end.
                Err(failure) if failure.code == Some(410) && params.continue_token.is_some() => {
                    info!(resource = %W::RESOURCE, "the pages of the list expired, listing all at once");
                    listing = Listing::default();
                    params.limit = None;
                    params.continue_token = None;
                    continue;
                }
                other => other?,
            };
            params.limit = params.limit.map(|objects| next_page(objects, bytes));
            for object in page.items {
                self.listed(&mut listing, &object)?;
            }
            params.continue_token = Some(page.continue_token).filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                self.replace(listing, page.resource_version, ListMethod::Paged).await?;
                return Ok(Done::Listed);
            }
        }
    }

    /// Also how many bytes it had.
    async fn page(&self, client: &Client, request: http::Request<Vec<u8>>) -> Result<(Page, usize), Failure> {
        let answer = self.ask(client, request).await?;
        let encoding = answer.encoding()?;
        self.state.answered_in(W::RESOURCE, encoding);
        let body = answer.whole().await?;
        Ok((Page::read(encoding, &body, W::KIND)?, body.len()))
    }

    async fn ask(&self, client: &Client, mut request: http::Request<Vec<u8>>) -> Result<Answer, Failure> {
        request.headers_mut().insert(http::header::ACCEPT, self.connection.accept.clone());
        Answer::new(client.send(request.map(Body::from)).await?).await
    }

    async fn open(&self, client: &Client, with_list: bool, version: &str) -> Result<Events, Stop> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 240 and 360")]
        let seconds = (WATCH_SECONDS.start + random() * (WATCH_SECONDS.end - WATCH_SECONDS.start)) as u32;
        let params = WatchParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: with_list,
        };
        let request = Request::new(W::path()).watch(&params, version).map_err(kube::Error::BuildRequest)?;
        let answer = timeout(ANSWER, self.ask(client, request))
            .await
            .map_err(|_| Failure::silence(ANSWER))?
            .inspect_err(|failure| self.answered(Verb::Watch, failure))?;
        self.state.answered_in(W::RESOURCE, answer.encoding()?);
        let events = answer.events(W::KIND)?;
        for verb in [Some(Verb::Watch), with_list.then_some(Verb::List)].into_iter().flatten() {
            self.state.set_denied(W::RESOURCE, verb, false);
        }
        self.state.watch_started(W::RESOURCE);
        Ok(events)
    }

    /// Passes on what changes, until the server ends the watch.
    async fn follow(&mut self, mut events: Events, started: Instant) -> Result<Done, Stop> {
        self.good();
        let mut longest = Duration::from_secs_f64(WATCH_SECONDS.end) + MARGIN;
        let mut heard = false;
        loop {
            let event = tokio::select! {
                event = next(&mut events, longest) => event,
                () = self.updates.closed() => return Err(Stop::Unwanted),
            };
            if started.elapsed() >= SETTLED {
                self.settled();
            }
            let event = event.inspect_err(|failure| {
                // The same would come again from here.
                if failure.reason == FailureReason::Malformed {
                    self.position = None;
                }
            })?;
            let Some(event) = event else {
                if !heard && started.elapsed() < SHORTEST_WATCH {
                    return Err(Failure::new(
                        FailureReason::Disconnected,
                        "the watch ended as soon as it began",
                    )
                    .into());
                }
                return Ok(Done::WatchEnded);
            };
            if !matches!(event, Event::Error(_)) {
                self.state.heard_from(W::RESOURCE);
                heard = true;
                self.settled();
            }
            match event {
                Event::Added(object) => self.changed(&object, 1).await?,
                Event::Modified(object) => self.changed(&object, 0).await?,
                Event::Deleted(object) => self.deleted(&object).await?,
                Event::Bookmark { resource_version, .. } => {
                    self.reached(resource_version);
                    longest = longest.min(BOOKMARKS);
                }
                Event::Error(failure) => {
                    // The server cannot go on from here for a reason of its own: start from a list.
                    if failure.reason == FailureReason::Refused {
                        self.position = None;
                    }
                    return Err(failure.into());
                }
            }
        }
    }

    fn settled(&mut self) {
        self.backoff.reset();
        self.last_failure = None;
    }

    fn good(&mut self) {
        self.state.heard_from(W::RESOURCE);
        if self.health.good(&self.connection.outage) {
            self.connection.recovered.notify_waiters();
        }
    }

    /// Notes whether RBAC has denied it.
    fn answered(&self, verb: Verb, failure: &Failure) {
        if failure.reason == FailureReason::Forbidden {
            self.state.set_denied(W::RESOURCE, verb, true);
        }
    }

    fn reached(&mut self, version: String) {
        if !version.is_empty() {
            self.position = Some(version);
        }
    }

    fn listed(&mut self, listing: &mut Listing<W>, object: &Raw) -> Result<(), Failure> {
        listing.objects += 1;
        match self.parse(object)? {
            (_, Sense::Served(parsed)) => listing.parsed.push(parsed),
            (_, Sense::NotServed) => {}
            (meta, Sense::Unreadable) => listing.unreadable.push(meta.name()),
        }
        Ok(())
    }

    async fn replace(
        &mut self,
        listing: Listing<W>,
        version: String,
        method: ListMethod,
    ) -> Result<(), Stop> {
        if version.is_empty() {
            return Err(Failure::new(FailureReason::Malformed, "the list has no resource version").into());
        }
        let Listing { parsed, mut unreadable, objects } = listing;
        debug!(resource = %W::RESOURCE, objects, method = method.name(), "listed");
        self.state.listed(W::RESOURCE, method, objects);
        self.state.set_denied(W::RESOURCE, Verb::List, false);
        unreadable.retain(|name| self.served.contains(name));
        let keeps = !unreadable.is_empty();
        let now: HashSet<_> = parsed.iter().map(Kept::name).chain(unreadable).collect();
        let before = std::mem::replace(&mut self.served, now);
        if W::Parsed::SINGLE && !keeps {
            self.last = parsed.last().cloned();
        }
        if keeps {
            // As a whole the list would take away what it has and cannot tell. What comes in another's place is there
            // before that goes: the receiver may write at any moment between.
            for parsed in parsed {
                self.send(parsed.apply()).await?;
            }
            for gone in before.into_iter().filter(|name| !self.served.contains(name)).collect::<Vec<_>>() {
                self.send(W::Parsed::delete(gone)).await?;
            }
        } else {
            self.send(Kept::replace(parsed)).await?;
        }
        self.position = Some(version);
        self.failed_streams = 0;
        Ok(())
    }

    async fn changed(&mut self, object: &Raw, more: i64) -> Result<(), Stop> {
        let (meta, sense) = self.parse(object)?;
        self.state.objects_changed(W::RESOURCE, more);
        let parsed = match sense {
            Sense::Served(parsed) => Some(parsed),
            Sense::NotServed => None,
            Sense::Unreadable => {
                self.reached(meta.resource_version);
                return Ok(());
            }
        };
        if !W::Parsed::SINGLE || self.last != parsed {
            if W::Parsed::SINGLE {
                self.last.clone_from(&parsed);
            }
            let update = match parsed {
                Some(parsed) => {
                    self.served.insert(parsed.name());
                    parsed.apply()
                }
                // It may have been served until now.
                None => {
                    self.served.remove(&meta.name());
                    W::Parsed::delete(meta.name())
                }
            };
            self.send(update).await?;
        }
        self.reached(meta.resource_version);
        Ok(())
    }

    async fn deleted(&mut self, object: &Raw) -> Result<(), Stop> {
        let meta = object.meta()?;
        let name = meta.name();
        self.state.objects_changed(W::RESOURCE, -1);
        self.reported.forget(&name.to_string());
        self.last = None;
        self.served.remove(&name);
        self.send(W::Parsed::delete(name)).await?;
        self.reached(meta.resource_version);
        Ok(())
    }

    /// Fails only where the object cannot even be named.
    fn parse(&mut self, object: &Raw) -> Result<(Meta, Sense<W::Parsed>), Failure> {
        let invalid_field = |meta: &Meta, field: &str, problem: String| InvalidField {
            object: format!("{} {}", W::KIND.kind, meta.name()),
            field: field.to_owned(),
            problem,
        };
        let (meta, sense, invalid) = match object.object::<W::Object>() {
            Ok(object) => {
                let (parsed, invalid) = W::convert(&object);
                let sense = parsed.map_or(Sense::NotServed, Sense::Served);
                (Meta::take(object.into_metadata()), sense, invalid)
            }
            Err(error) => {
                let meta = object.meta()?;
                let kept = if self.served.contains(&meta.name()) {
                    "; what it was when it could be read stays in force"
                } else {
                    ""
                };
                let field = invalid_field(&meta, "(object)", format!("cannot be read: {error}{kept}"));
                (meta, Sense::Unreadable, vec![field])
            }
        };
        let (sense, invalid) = if convert::is_whole(&meta.namespace) && convert::is_whole(&meta.name) {
            (sense, invalid)
        } else {
            // Two of them may look the same.
            (Sense::NotServed, vec![invalid_field(&meta, "metadata.name", String::from("must be UTF-8"))])
        };
        let new = self.reported.tell(|| meta.name().to_string(), &invalid);
        self.state.found_invalid(W::RESOURCE, new);
        Ok((meta, sense))
    }

    async fn send(&mut self, update: Update) -> Result<(), Stop> {
        self.told = true;
        self.updates.send(update).await.map_err(|_| Stop::Unwanted)
    }
}

/// How many objects to ask for after a page of so many objects and bytes.
fn next_page(objects: u32, bytes: usize) -> u32 {
    if bytes < SHORT_PAGE { objects.saturating_mul(2).min(LONGEST_PAGE) } else { objects }
}

/// The next event; None at the end.
async fn next(events: &mut Events, limit: Duration) -> Result<Option<Event>, Failure> {
    timeout(limit, events.next()).await.unwrap_or_else(|_| Err(Failure::silence(limit)))
}

/// A list that is not complete yet: parsed objects only, the rest of each is already dropped.
struct Listing<W: Watched> {
    parsed: Vec<W::Parsed>,
    unreadable: Vec<ObjectName>,
    /// Received, also those that are not served.
    objects: usize,
}

impl<W: Watched> Default for Listing<W> {
    fn default() -> Self {
        Self { parsed: Vec::new(), unreadable: Vec::new(), objects: 0 }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::{
        super::resource::{OwnNode, Services},
        *,
    };
    use crate::config::Encoding;

    fn watcher<W: Watched>() -> (Watcher<W>, mpsc::Receiver<Update>) {
        let config = super::super::Config::default();
        let (accept, state) = (config.accept().unwrap(), SourceState::new());
        let connection = Arc::new(Connection::new(config, accept, state.requests.clone()));
        let (updates, receiver) = mpsc::channel(64);
        (Watcher::new(connection, Selection::default(), updates, state), receiver)
    }

    fn raw(object: &Value) -> Raw {
        let list = serde_json::to_vec(&json!({"metadata": {}, "items": [object]})).unwrap();
        Page::read(Encoding::Json, &Bytes::from(list), Services::KIND).unwrap().items.remove(0)
    }

    /// What a list of these comes to, in short.
    async fn list<W: Watched>(watcher: &mut Watcher<W>, objects: &[Value]) {
        let mut listing = Listing::default();
        for object in objects {
            watcher.listed(&mut listing, &raw(object)).unwrap();
        }
        let listed = watcher.replace(listing, "1".into(), ListMethod::Paged).await;
        assert!(listed.is_ok());
    }

    fn told(updates: &mut mpsc::Receiver<Update>) -> Vec<String> {
        let mut told = Vec::new();
        while let Ok(update) = updates.try_recv() {
            told.push(match update {
                Update::ReplaceServices(all) => {
                    let names: Vec<_> = all.iter().map(|of| of.name.to_string()).collect();
                    format!("all: {}", names.join(" "))
                }
                Update::ApplyService(of) => format!("apply {}", of.name),
                Update::DeleteService(name) => format!("delete {name}"),
                Update::Node(node) => format!("node {:?}", node.map(|node| node.name)),
                other @ (Update::ReplaceSlices(_)
                | Update::ApplySlice(_)
                | Update::DeleteSlice(_)
                | Update::ReplaceServiceSlices(_)
                | Update::ReplaceServiceCidrs(_)
                | Update::ApplyServiceCidr(_)
                | Update::DeleteServiceCidr(_)) => panic!("{other:?}"),
            });
        }
        told
    }

    fn service(name: &str) -> Value {
        let spec = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]});
        json!({"metadata": {"namespace": "a", "name": name, "resourceVersion": "1"}, "spec": spec})
    }

    fn unreadable(name: &str) -> Value {
        json!({"metadata": {"namespace": "a", "name": name, "resourceVersion": "1"}, "spec": "x", "status": 1})
    }

    #[tokio::test]
    async fn what_cannot_be_read_stays_as_it_was_until_it_is_deleted() {
        let (mut watcher, mut updates) = watcher::<Services>();
        list(&mut watcher, &[service("web"), service("gone"), unreadable("broken")]).await;
        assert_eq!(told(&mut updates), ["all: a/web a/gone"]);
        assert!(watcher.changed(&raw(&unreadable("web")), 0).await.is_ok());
        assert_eq!(told(&mut updates), [""; 0]);
        list(&mut watcher, &[unreadable("web"), service("new"), unreadable("broken")]).await;
        assert_eq!(told(&mut updates), ["apply a/new", "delete a/gone"]);
        list(&mut watcher, &[unreadable("web"), service("new")]).await;
        assert_eq!(told(&mut updates), ["apply a/new"]);
        assert!(watcher.deleted(&raw(&unreadable("web"))).await.is_ok());
        assert_eq!(told(&mut updates), ["delete a/web"]);
        list(&mut watcher, &[unreadable("web"), service("new")]).await;
        assert_eq!(told(&mut updates), ["all: a/new"]);
        assert!(watcher.changed(&raw(&service("web")), 0).await.is_ok());
        let mut foreign = service("web");
        foreign["spec"]["type"] = json!("ExternalName");
        assert!(watcher.changed(&raw(&foreign), 0).await.is_ok());
        list(&mut watcher, &[unreadable("web")]).await;
        assert_eq!(told(&mut updates), ["apply a/web", "delete a/web", "all: "]);
    }

    #[tokio::test]
    async fn the_node_stays_as_it_was_while_it_cannot_be_read() {
        let (mut watcher, mut updates) = watcher::<OwnNode>();
        let node = |name: &str| json!({"metadata": {"name": name, "resourceVersion": "1"}});
        let broken = json!({"metadata": {"name": "n", "resourceVersion": "1"}, "spec": "x"});
        list(&mut watcher, &[node("n")]).await;
        assert_eq!(told(&mut updates), ["node Some(\"n\")"]);
        assert!(watcher.changed(&raw(&broken), 0).await.is_ok());
        list(&mut watcher, std::slice::from_ref(&broken)).await;
        assert!(watcher.changed(&raw(&node("n")), 0).await.is_ok());
        assert_eq!(told(&mut updates), [""; 0]);
        assert!(watcher.deleted(&raw(&broken)).await.is_ok());
        list(&mut watcher, &[broken]).await;
        assert_eq!(told(&mut updates), ["node None", "node None"]);
    }

    #[tokio::test]
    async fn a_name_that_is_no_text_is_nobody() {
        let (mut watcher, mut updates) = watcher::<Services>();
        list(&mut watcher, &[service("we\u{fffd}"), service("web")]).await;
        assert_eq!(told(&mut updates), ["all: a/web"]);
        assert!(watcher.changed(&raw(&service("we\u{fffd}")), 1).await.is_ok());
        assert_eq!(told(&mut updates), ["delete a/we\u{fffd}"]);
    }

    #[test]
    fn pages_of_small_objects_grow_and_pages_of_large_ones_do_not() {
        assert_eq!(next_page(PAGE, 600_000), 1000);
        assert_eq!(next_page(PAGE, 5_000_000), PAGE);
        assert_eq!(next_page(LONGEST_PAGE, 1000), LONGEST_PAGE);
        let mut objects = PAGE;
        let mut pages = 0;
        let mut left = 10_000_u32;
        while left > 0 {
            pages += 1;
            left = left.saturating_sub(objects);
            objects = next_page(objects, objects as usize * 1000);
        }
        assert_eq!(pages, 5, "for 10,000 Services of 1 kB");
    }
}
