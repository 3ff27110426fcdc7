//! The watcher of one kind of object, which never ends. A list is sent as one `Replace…`, and each
//! later change as one update. After a lost connection the watch continues from the last version
//! seen. If the API server no longer knows that version, everything is listed again.
//!
//! kube's own watcher is not used. It never falls back from streaming lists to plain ones, and may
//! list what is older than what was seen before. It gives up all objects of a list if one of them
//! cannot be read, and it reads JSON only.

use std::{sync::atomic::Ordering, time::Duration};

use kube::{
    Client,
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{debug, info};

use super::{
    context::WatchContext,
    kind::Verb,
    objects::{Listing, Received, Tracked},
    parsed::ParsedObject as _,
    query::{Query, UNPINGED_WATCH, WATCH, random_in},
    resource::Watched,
    state::ListMethod,
};
use crate::{
    kubernetes::{
        failure::{Failure, FailureReason},
        transport::connection::Renewed,
        wire::{Event, Raw, answer::Events},
    },
    model::Update,
};

/// The longest silence within a streaming list. After it a plain list is tried.
const NEXT_OF_LIST: Duration = Duration::from_secs(20);
/// The time over the longest duration of a watch after which a silent watch is dead.
const MARGIN: Duration = Duration::from_secs(10);
/// The margin of a watch over HTTP/1.1, where nothing else proves the connection. It is found dead
/// after at most 40 s.
const UNPINGED_MARGIN: Duration = Duration::from_secs(5);
/// The longest silence of a watch that has received a bookmark. API servers send bookmarks each
/// minute, so a longer silence proves that the watch is dead.
const BOOKMARKS: Duration = Duration::from_secs(180);
/// The shortest duration of a watch without an event. One that ends sooner is a failure, not a
/// renewal.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);
/// The time after which a watch is settled, so that earlier failures no longer count. An event
/// settles it too.
const SETTLED: Duration = Duration::from_secs(5);
/// The longest delay between two attempts, unless the API server asks for more.
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// The number of failed streaming lists in a row after which a plain one is tried.
const STREAM_ATTEMPTS: u32 = 2;

/// The reason why a watcher has ended.
pub(crate) enum EndReason {
    ReceiverGone,
    /// The API server does not have the kind, or does not say whether it has it. The watcher can be
    /// run again.
    NotServed(Failure),
}

/// The reason why an attempt has ended early.
enum Stop {
    Failed(Failure),
    ReceiverGone,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The point where the next attempt begins.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Start {
    /// The attempt begins with a list that is not older than this resource version. "0" is what the
    /// API server has in memory, with which client-go begins. "" is the newest, which costs a read
    /// of etcd.
    List(String),
    /// Everything up to this resource version has been sent, so the attempt watches from there.
    Watch(String),
}

impl Start {
    /// Makes the next attempt list, because changes may have been missed.
    fn relist(&mut self) {
        if let Self::Watch(seen) = self {
            *self = Self::List(std::mem::take(seen));
        }
    }

    /// Notes that the API server does not have this version. If it was to be watched from, it has
    /// been compacted away. If it was to be listed, the server has not reached it yet, or never
    /// will after a restored backup.
    fn expired(&mut self) {
        *self = match std::mem::replace(self, Self::List(String::new())) {
            Self::Watch(seen) => Self::List(seen),
            Self::List(_) => Self::List(String::new()),
        };
    }
}

pub(crate) struct Watcher<W: Watched> {
    context: WatchContext,
    query: Query<W>,
    /// The delays between attempts. They are those of client-go's reflector, so that the nodes of a
    /// cluster do not come back all at once.
    backoff: DefaultBackoff,
    /// The reason why the last attempt failed. None once a watch has settled.
    last_failure: Option<FailureReason>,
    start: Start,
    /// The number of streaming lists that failed since the last complete list.
    failed_streams: u32,
    tracked: Tracked<W::Parsed>,
    has_sent: bool,
}

impl<W: Watched> Watcher<W> {
    pub(crate) fn new(context: WatchContext, query: Query<W>) -> Self {
        Self {
            context,
            query,
            backoff: DefaultBackoff::default(),
            last_failure: None,
            start: Start::List("0".to_owned()),
            failed_streams: 0,
            tracked: Tracked::default(),
            has_sent: false,
        }
    }

    /// Lists and watches, whatever fails in between.
    pub(crate) async fn run(&mut self) -> EndReason {
        loop {
            let (generation, failure) = match self.context.connection.client().await {
                Ok((client, generation)) => match self.attempt(&client).await {
                    Ok(()) => continue,
                    Err(Stop::ReceiverGone) => return EndReason::ReceiverGone,
                    Err(Stop::Failed(failure)) => (Some(generation), failure),
                },
                Err(failure) => (None, failure),
            };
            if let Some(end) = self.failed(generation, failure).await {
                return end;
            }
        }
    }

    /// Handles a failed attempt, and returns when it is time for the next one. Returns a reason if
    /// the watcher is to end.
    async fn failed(&mut self, generation: Option<u64>, failure: Failure) -> Option<EndReason> {
        self.context.state.failed(W::RESOURCE, &failure);
        let reason = failure.reason;
        let is_first = self.last_failure.replace(reason) != Some(reason);
        if reason == FailureReason::Expired {
            info!(resource = %W::RESOURCE, "{failure}; listing again");
            self.start.expired();
            if is_first {
                // A single expiry is normal, so the list follows without a delay.
                return None;
            }
        }
        // RBAC is asked first and answers "forbidden" even for a kind that does not exist.
        let is_absent =
            reason == FailureReason::NotServed || reason == FailureReason::Forbidden && !self.has_sent;
        if W::MAY_BE_ABSENT && is_absent {
            self.start.relist();
            return Some(EndReason::NotServed(failure));
        }
        let delay = self.backoff.next().map_or(LONGEST_DELAY, |delay| delay.min(LONGEST_DELAY));
        let asked_for = failure.retry_after.unwrap_or_default();
        let (delay, earliest) = (delay.max(asked_for), Instant::now() + asked_for);
        let failure = match self.renew(generation, reason).await {
            Ok(Renewed::New) if asked_for.is_zero() => {
                debug!(resource = %W::RESOURCE, "{failure}; trying again with the credentials found now");
                return None;
            }
            Ok(Renewed::New | Renewed::Same) => failure,
            Err(error) => {
                let message = format!("{failure}; and the credentials cannot be read again: {error}");
                Failure::new(FailureReason::Credentials, message)
            }
        };
        self.context.state.log_failure(W::RESOURCE, &failure, delay);
        if self.send_hidden().await.is_err() {
            return Some(EndReason::ReceiverGone);
        }
        // Once another watcher has succeeded, earlier failures no longer count. The delay that the
        // API server asked this watcher for still does.
        let other_recovered = async {
            self.context.connection.recovered.notified().await;
            sleep_until(earliest).await;
        };
        tokio::select! {
            () = sleep(delay) => {}
            () = other_recovered => self.backoff.reset(),
            () = self.context.updates.closed() => return Some(EndReason::ReceiverGone),
        }
        None
    }

    async fn renew(&self, generation: Option<u64>, reason: FailureReason) -> Result<Renewed, Failure> {
        match generation {
            Some(generation) => self.context.connection.renew(generation, reason).await,
            // There is no client yet, and the next attempt makes one from the files.
            None => Ok(Renewed::Same),
        }
    }

    /// Sends the update for a kind that RBAC does not allow to list, if Services can be served
    /// without the kind. Otherwise the receiver would wait for it.
    async fn send_hidden(&mut self) -> Result<(), Stop> {
        match W::Parsed::HIDDEN {
            Some(hidden)
                if !self.has_sent && self.context.state.denied(W::RESOURCE).contains(&Verb::List) =>
            {
                self.send(hidden).await
            }
            _ => Ok(()),
        }
    }

    /// Lists if need be, and watches until the server ends the watch.
    async fn attempt(&mut self, client: &Client) -> Result<(), Stop> {
        let events = match self.start.clone() {
            Start::Watch(version) => {
                self.query.watch(&self.context, client, &version, false).await.inspect_err(|failure| {
                    if failure.reason == FailureReason::Forbidden {
                        // Changes that happen meanwhile are found by the next list.
                        self.start.relist();
                    }
                })?
            }
            Start::List(version) => match self.list(client, &version).await? {
                Some(events) => events,
                None => return Ok(()),
            },
        };
        self.follow(events, Instant::now()).await
    }

    /// Lists, and returns the watch that follows a streaming list in the same answer. None after a
    /// plain list: the next attempt watches.
    async fn list(&mut self, client: &Client, version: &str) -> Result<Option<Events>, Stop> {
        if self.failed_streams < STREAM_ATTEMPTS && !self.context.plain_lists.load(Ordering::Relaxed) {
            match self.stream(client, version).await {
                Ok(Some(events)) => return Ok(Some(events)),
                Ok(None) => self.use_plain_lists("it ignores sendInitialEvents"),
                Err(Stop::Failed(failure)) if failure.refuses_streaming() => {
                    self.use_plain_lists(&failure.message);
                }
                // An account that may not watch may still list.
                Err(Stop::Failed(failure)) if failure.reason == FailureReason::Forbidden => {}
                Err(stop) => return Err(stop),
            }
        }
        let page = self.query.list(&self.context, client, version).await?;
        let mut listing = Listing::default();
        for object in page.items {
            listing.add(Received::parse::<W>(&object)?);
        }
        self.replace(listing, page.resource_version, ListMethod::Whole).await?;
        Ok(None)
    }

    fn use_plain_lists(&self, reason: &str) {
        if !self.context.plain_lists.swap(true, Ordering::Relaxed) {
            info!(resource = %W::RESOURCE, "the API server has no streaming lists, using plain ones: {reason}");
        }
    }

    /// Reads a streaming list, and returns the watch behind it in the same answer. None if the
    /// answer is a watch without a list: kube-apiserver refuses parameters that it does not know,
    /// but something in between may drop them.
    async fn stream(&mut self, client: &Client, version: &str) -> Result<Option<Events>, Stop> {
        let mut events = self.query.watch(&self.context, client, version, true).await?;
        self.failed_streams += 1;
        let mut listing = Listing::default();
        loop {
            let event = next(&mut events, NEXT_OF_LIST).await.inspect_err(|failure| {
                if failure.reason == FailureReason::Timeout {
                    // This attempt uses a plain list, and the list after it streams again.
                    self.failed_streams = STREAM_ATTEMPTS;
                }
            })?;
            let ended = || Failure::new(FailureReason::Disconnected, "the list ended before it was complete");
            match event.ok_or_else(ended)? {
                Event::Added(object) => listing.add(Received::parse::<W>(&object)?),
                Event::Modified(object) => listing.exchange(Received::parse::<W>(&object)?),
                Event::Deleted(object) => listing.remove(&object.meta()?.name()),
                Event::Bookmark { resource_version, ends_list: true } => {
                    events.end_list();
                    self.replace(listing, resource_version, ListMethod::Streamed).await?;
                    return Ok(Some(events));
                }
                // The first bookmark of a streaming list is the one that ends it.
                Event::Bookmark { ends_list: false, .. } => return Ok(None),
                Event::Error(failure) => return Err(failure.into()),
            }
        }
    }

    /// Passes on changes until the server ends the watch.
    async fn follow(&mut self, mut events: Events, started: Instant) -> Result<(), Stop> {
        if self.context.state.works(W::RESOURCE) {
            self.context.connection.recovered.notify_waiters();
        }
        let (mut longest, is_dead_after) = longest_silence(&events);
        let mut heard = false;
        loop {
            let event = tokio::select! {
                event = timeout(longest, events.next()) => event,
                () = self.context.updates.closed() => return Err(Stop::ReceiverGone),
            };
            if started.elapsed() >= SETTLED {
                self.settled();
            }
            let event = match event {
                Ok(event) => event,
                Err(_) if is_dead_after => Err(Failure::silence(longest)),
                Err(_) => {
                    debug!(resource = %W::RESOURCE, "replacing a watch that is silent for {longest:?}");
                    return Ok(());
                }
            };
            let event = event.inspect_err(|failure| {
                // A new watch from this version would receive the same event, so everything is
                // listed again.
                if failure.reason == FailureReason::Malformed {
                    self.start.relist();
                }
            })?;
            match event {
                None if !heard && started.elapsed() < SHORTEST_WATCH => {
                    let problem = "the watch ended as soon as it began";
                    return Err(Failure::new(FailureReason::Disconnected, problem).into());
                }
                None => return Ok(()),
                Some(Event::Error(failure)) => {
                    // The server cannot go on from here for a reason of its own, so everything is
                    // listed again.
                    if failure.reason == FailureReason::Refused {
                        self.start.relist();
                    }
                    return Err(failure.into());
                }
                Some(event) => {
                    self.context.state.heard_from(W::RESOURCE);
                    heard = true;
                    self.settled();
                    if matches!(event, Event::Bookmark { .. }) {
                        longest = longest.min(BOOKMARKS);
                    }
                    self.take(event).await?;
                }
            }
        }
    }

    async fn take(&mut self, event: Event) -> Result<(), Stop> {
        match event {
            Event::Added(object) => self.changed(&object, 1).await,
            Event::Modified(object) => self.changed(&object, 0).await,
            Event::Deleted(object) => {
                let meta = object.meta()?;
                self.context.state.objects_changed(W::RESOURCE, -1);
                let update = self.tracked.delete(meta.name());
                self.send(update).await?;
                self.reached(meta.resource_version);
                Ok(())
            }
            Event::Bookmark { resource_version, .. } => {
                self.reached(resource_version);
                Ok(())
            }
            Event::Error(failure) => Err(failure.into()),
        }
    }

    async fn changed(&mut self, object: &Raw, more: i64) -> Result<(), Stop> {
        let received = Received::parse::<W>(object)?;
        let version = received.resource_version.clone();
        self.context.state.objects_changed(W::RESOURCE, more);
        let (update, new) = self.tracked.change(received);
        self.context.state.found_invalid(W::RESOURCE, new);
        if let Some(update) = update {
            self.send(update).await?;
        }
        self.reached(version);
        Ok(())
    }

    async fn replace(
        &mut self,
        listing: Listing<W::Parsed>,
        version: String,
        method: ListMethod,
    ) -> Result<(), Stop> {
        if version.is_empty() {
            return Err(Failure::new(FailureReason::Malformed, "the list has no resource version").into());
        }
        debug!(resource = %W::RESOURCE, objects = listing.objects, method = method.name(), "listed");
        self.context.state.listed(W::RESOURCE, method, listing.objects);
        let (updates, new) = self.tracked.replace(listing);
        self.context.state.found_invalid(W::RESOURCE, new);
        for update in updates {
            self.send(update).await?;
        }
        self.start = Start::Watch(version);
        self.failed_streams = 0;
        Ok(())
    }

    fn settled(&mut self) {
        self.backoff.reset();
        self.last_failure = None;
    }

    fn reached(&mut self, version: String) {
        if !version.is_empty() {
            self.start = Start::Watch(version);
        }
    }

    async fn send(&mut self, update: Update) -> Result<(), Stop> {
        self.has_sent = true;
        self.context.updates.send(update).await.map_err(|_| Stop::ReceiverGone)
    }
}

/// Returns how long a watch may be silent. The second value is true if a longer silence proves that
/// its connection is dead, because the server should have ended the watch meanwhile.
fn longest_silence(events: &Events) -> (Duration, bool) {
    if events.is_pinged() {
        (WATCH.end + MARGIN, true)
    } else if events.lasts() <= UNPINGED_WATCH.end {
        (events.lasts() + UNPINGED_MARGIN, true)
    } else {
        // The watch behind a streaming list is replaced by a shorter one. The time is random
        // because all nodes have heard the last event at the same moment.
        (random_in(UNPINGED_WATCH) + UNPINGED_MARGIN, false)
    }
}

/// Returns the next event, or None at the end.
async fn next(events: &mut Events, limit: Duration) -> Result<Option<Event>, Failure> {
    timeout(limit, events.next()).await.unwrap_or_else(|_| Err(Failure::silence(limit)))
}

#[cfg(test)]
mod tests;
