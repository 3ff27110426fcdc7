//! Writes what the kernel programs tell of refused and dropped clients to our own log. They do so only while its level is debug (`-v 4`,
//! also when set at run time).

use std::{fmt, io};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use proxy_common::{
    inventory::table,
    layout::{Event, EventControl, LOG_LINES_PER_SECOND},
    reason::{Reason, Verdict},
};
use tracing::Level;

use super::{Error, events::log_line};
use crate::sys::map::Ring;

const TARGET: &str = "proxy_ebpf";

/// The log of one load of the programs.
pub(super) struct KernelLog {
    control: Array<MapData, EventControl>,
    events: Ring<Event>,
    enabled: bool,
}

impl fmt::Debug for KernelLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelLog").field("enabled", &self.enabled).finish_non_exhaustive()
    }
}

impl KernelLog {
    pub(super) fn take(object: &mut Ebpf) -> Result<Self, Error> {
        let mut take = |name| object.take_map(name).ok_or_else(|| failed("the object has no such table"));
        Ok(Self {
            control: Array::try_from(take(table::log_control)?).map_err(failed)?,
            events: Ring::try_from(take(table::log_events)?).map_err(failed)?,
            enabled: false,
        })
    }

    /// Tells the lines that have come, and switches the programs' log where the level of ours has changed.
    pub(super) fn follow(&mut self) -> Result<(), Error> {
        while let Some(event) = self.events.take() {
            if let Some(line) = log_line(&event) {
                tracing::debug!(target: TARGET, "{line}");
            }
        }
        let enabled = tracing::enabled!(target: TARGET, Level::DEBUG);
        if enabled != self.enabled {
            self.control.set(0, if enabled { on() } else { EventControl::default() }, 0).map_err(failed)?;
            self.enabled = enabled;
            if enabled {
                tracing::debug!(
                    target: TARGET,
                    "the kernel programs log refused and dropped clients, at most {LOG_LINES_PER_SECOND} a second"
                );
            }
        }
        Ok(())
    }
}

fn on() -> EventControl {
    let refusals = Reason::ALL.iter().copied().filter(|reason| reason.verdict() != Verdict::Pass);
    let mut control = EventControl::new(u64::MAX, refusals, 1);
    control.in_a_second = LOG_LINES_PER_SECOND;
    control
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::KernelLog(io::Error::other(error))
}
