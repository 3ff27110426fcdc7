//! What a mode of this proxy leaves when another has taken its place.

use ipnet::IpNet;

use super::{Error, Leftovers, PendingRemoval, Purpose, Retained};

/// Kept from one attempt to the next, which goes on with what the one before has left.
#[derive(Debug)]
pub struct Remains {
    leftovers: Leftovers,
    pending: PendingRemoval,
    has_ended_sockets: bool,
    /// Virtual servers, as was logged.
    waiting: usize,
    /// What stays, as others use it; it was logged.
    retained: Vec<Retained>,
}

impl Default for Remains {
    /// Nothing is removed yet.
    fn default() -> Self {
        Self {
            leftovers: Leftovers::default(),
            pending: PendingRemoval::everything(),
            has_ended_sockets: false,
            waiting: 0,
            retained: Vec::new(),
        }
    }
}

impl Remains {
    /// Removes what no connection needs. False: virtual servers with connections stay, for a later attempt. `keeps`: as for
    /// [`Leftovers::find`]; `by_connect`: as for [`PendingRemoval::before`].
    pub fn remove(&mut self, keeps: &[IpNet], by_connect: bool) -> Result<bool, Error> {
        self.pending.sockets = by_connect && !self.has_ended_sockets;
        let removal = self.leftovers.remove(Purpose::TakeOver, keeps, &self.pending);
        self.pending = removal.pending;
        self.has_ended_sockets |= by_connect && !self.pending.sockets;
        if removal.waiting > 0 && removal.waiting != self.waiting {
            let servers = removal.waiting;
            tracing::info!(
                servers,
                "virtual servers of the former mode stay until their connections have ended"
            );
        }
        self.waiting = removal.waiting;
        for retained in removal.retained {
            if !self.retained.contains(&retained) {
                let Retained { place, name, why } = &retained;
                tracing::warn!(place, name, "of the former mode, {why}");
                self.retained.push(retained);
            }
        }
        removal.problems.into_iter().next().map_or(Ok(self.pending.is_empty()), Err)
    }
}
