//! Keeps the connections that netfilter translates apart from flows, and decides whether segments
//! of unknown connections are answered.

use std::time::Instant;

use super::{
    netfilter_ports::{KeepPorts, ListRest},
    unknown::Circumstances,
};
use crate::{
    modes::ebpf::{EbpfDataplane, connections, error::Error},
    sys::{net::conntrack::Conntrack, proc::clock},
};

/// The number of garbage collections, about one a second, after which the connections that
/// netfilter translates are listed once more. It counts from the last moment at which netfilter may
/// have taken one. Until then, some may be in their handshake, and lists leave these out.
const COLLECTIONS_OF_HANDSHAKES: u32 = 60;

/// The knowledge of the connections that netfilter translates.
#[derive(Debug)]
pub(crate) struct NetfilterConnections {
    pub(crate) keep_ports: KeepPorts,
    /// The pause after the last list of
    /// [`keep_netfilter_ports`](EbpfDataplane::keep_netfilter_ports).
    pub(crate) list_rest: ListRest,
    /// True if the ends of all connections that netfilter translates are reserved, and the
    /// connections were listed after the last moment at which it may have taken one.
    are_kept: bool,
    /// The number of garbage collections since that moment.
    since: u32,
}

impl NetfilterConnections {
    pub(crate) fn new() -> Self {
        Self {
            keep_ports: KeepPorts::BeforePackets,
            list_rest: ListRest::default(),
            are_kept: false,
            since: 0,
        }
    }

    /// Notes that netfilter may have taken connections up to now.
    fn note(&mut self) {
        self.are_kept = false;
        self.since = 0;
    }
}

impl EbpfDataplane {
    pub(crate) fn keep_netfilter_ports(&mut self) {
        // A mode that drains opens no flow, and ends only when its maps are empty.
        if self.is_draining {
            return;
        }
        self.netfilter.note();
        self.follow_circumstances_or_warn();
        let started = Instant::now();
        // This is no failure: all of these connections may go on even so, and new ones matter more.
        if let Err(error) = self.list_netfilters() {
            tracing::warn!(%error, "connections that netfilter translates may lose packets to new flows");
        }
        self.netfilter.list_rest.begin_after(started);
    }

    /// Reserves the ends of the connections that netfilter translates. Returns true if there was
    /// room for all of them.
    fn list_netfilters(&mut self) -> Result<bool, Error> {
        self.connections.flows4.ended.forget();
        self.connections.flows6.ended.forget();
        let now = clock::since_boot();
        let conntrack = Conntrack::open().map_err(Error::Conntrack)?;
        let v4 = connections::netfilter_ports::keep(&self.services.v4.maps, &conntrack, now)?;
        let v6 = connections::netfilter_ports::keep(&self.services.v6.maps, &conntrack, now)?;
        let new = v4.new + v6.new;
        if new > 0 {
            tracing::info!(kept = new, "connections that netfilter translates are kept apart from flows");
        }
        Ok(v4.are_all && v6.are_all)
    }

    /// Lists the connections of netfilter once more when their last handshakes have ended.
    pub(crate) fn list_netfilters_after_handshakes(&mut self) {
        if self.hooks.has_waiting() || self.hooks.have_failed() {
            self.netfilter.note();
        }
        self.netfilter.since = self.netfilter.since.saturating_add(1);
        let is_due = !self.netfilter.are_kept && self.netfilter.since > COLLECTIONS_OF_HANDSHAKES;
        if !is_due || self.is_draining || self.netfilter.keep_ports != KeepPorts::Done {
            return;
        }
        match self.list_netfilters() {
            Ok(are_all) => self.netfilter.are_kept = are_all,
            Err(error) => tracing::debug!(%error, "connections that netfilter translates are not listed"),
        }
        // If this was in vain, the next attempt comes after the same time.
        self.netfilter.since = 0;
    }

    /// Lets the programs answer segments of unknown connections, or stops that.
    pub(crate) fn follow_circumstances(&self) -> Result<(), Error> {
        let circumstances = Circumstances {
            is_synced: self.services.is_synced,
            has_taken_over: self.netfilter.keep_ports == KeepPorts::Done && !self.node.attaches_later,
            is_draining: self.is_draining,
            lacks_programs: self.hooks.lacks_programs(),
            are_frontends_shared: self.node.are_frontends_shared,
            are_netfilters_kept: self.netfilter.are_kept,
            are_netfilters_gone: self.connections.flows4.ended.are_gone()
                && self.connections.flows6.ended.are_gone(),
            are_flows_whole: self.flow_maps.are_finished(),
        };
        let answers = circumstances.allow_answers();
        if self.services.shared.write_settings(|settings| settings.answers_unknown = answers.into())? {
            let told = if answers { "are answered by RST" } else { "pass" };
            tracing::info!("segments of connections that no map knows {told}");
        }
        Ok(())
    }

    fn follow_circumstances_or_warn(&self) {
        if let Err(error) = self.follow_circumstances() {
            tracing::warn!(%error, "segments of unknown connections are answered as before");
        }
    }

    /// Follows whether another mode serves all frontends too.
    pub(crate) fn follow_sharing(&mut self, are_shared: bool) -> Result<(), Error> {
        if std::mem::replace(&mut self.node.are_frontends_shared, are_shared) == are_shared {
            return Ok(());
        }
        if !are_shared {
            // The other mode may have opened connections up to the last moment.
            self.keep_netfilter_ports();
        }
        self.follow_circumstances()
    }
}
