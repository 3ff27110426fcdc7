//! Counts connections while some service port uses least connection.

use super::count::SocketCounter;
use crate::modes::ebpf::{
    EbpfDataplane, connections,
    error::Error,
    services::{sync::Services, writer::Failures},
};

/// The state of counting the connections of backends.
#[derive(Debug, Default)]
pub(crate) struct ConnectionCount {
    /// The counter of sockets. `None` if it was not tried yet, or if the kernel cannot load it.
    pub(crate) sockets: Option<SocketCounter>,
    is_tried: bool,
}

impl EbpfDataplane {
    /// Begins to count connections, if they are asked for, before a service port that needs them is
    /// published.
    pub(crate) fn count_connections(&mut self, are_asked_for: bool, failures: &mut Failures) {
        if !are_asked_for || self.connections.counts.is_some() {
            return;
        }
        self.begin_to_count();
        if let Err(error) = self.hooks.attach_release() {
            failures.add("socket hooks", error);
        }
    }

    pub(crate) fn begin_to_count(&mut self) {
        self.connections.counts = Some(ConnectionCount::default());
        self.hooks.count_sockets(true);
    }

    /// Stops counting connections if no service port uses least connection any more. Open flows and
    /// sockets stay noted as counted, in case counting begins again.
    fn stop_counting(&mut self) -> Result<(), Error> {
        let Services { shared, v4, v6, is_synced, .. } = &self.services;
        if !is_synced || v4.goes_by_connections(shared) || v6.goes_by_connections(shared) {
            return Ok(());
        }
        self.hooks.count_sockets(false);
        self.hooks.attach_release()?;
        (self.connections.flows4.recount, self.connections.flows6.recount) = (None, None);
        self.services.v4.maps.connections.forget_all()?;
        self.connections.counts = None;
        Ok(())
    }

    /// Lets the next walks through the flows compare the counts with the flows that exist.
    pub(crate) fn recount_flows(&mut self) -> Result<(), Error> {
        if self.connections.counts.is_none() {
            return Ok(());
        }
        self.connections.flows4.count_connections(&self.services.v4.maps)?;
        self.connections.flows6.count_connections(&self.services.v6.maps)
    }

    /// Counts the connections of sockets anew and at once. [`recount_flows`](Self::recount_flows)
    /// is its counterpart for flows.
    pub(crate) fn recount_sockets(&mut self) -> Result<(), Error> {
        let Some(ConnectionCount { sockets, is_tried }) = &mut self.connections.counts else { return Ok(()) };
        connections::count::forget_gone(&self.services.v4.maps, &self.services.v6.maps)?;
        if !std::mem::replace(is_tried, true) {
            match SocketCounter::load() {
                Ok(counter) => *sockets = Some(counter),
                Err(error) => {
                    tracing::warn!(%error, "connections of sockets are not counted anew: what hooks have missed of them stays uncounted")
                }
            }
        }
        if let Some(counter) = sockets {
            counter.recount(&self.maps.paths.maps(), &self.services.v4.maps, &self.services.v6.maps)?;
        }
        self.stop_counting()
    }
}
