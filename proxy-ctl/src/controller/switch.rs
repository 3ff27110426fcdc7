//! From one mode to another in a running process: the new one serves everything before the former serves nothing new.

use std::{sync::Arc, time::Instant};

use super::{Controller, coverage::CoverageTracker, host::host, service_intervals};
use crate::{
    config::Config,
    dataplane::{Dataplane, Error, Modes},
    mode::Mode,
    model::desired::Changes,
    report::ModeInForce,
};

/// Opens modes, and removes what they have programmed.
pub trait ModeOpener {
    fn open(&self, modes: Modes, config: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error>;

    /// Modes that a predecessor has left, with connections that may need them.
    fn to_retire(&self, at_work: Mode, config: &Config) -> Result<Vec<Mode>, Error>;

    /// Removes what the mode has programmed. False: something still has connections, and is to be removed later.
    fn remove_retired(&self, mode: Mode, config: &Config) -> Result<bool, Error>;
}

/// A mode that was at work before, until no connection needs it.
pub(super) struct Retiring {
    mode: Mode,
    /// `None`: it is to be opened, or is not needed any more and to be removed.
    dataplane: Option<Box<dyn Dataplane>>,
    is_over: bool,
    problem: Option<String>,
}

impl Retiring {
    fn running(mode: Mode, dataplane: Box<dyn Dataplane>) -> Self {
        Self { mode, dataplane: Some(dataplane), is_over: false, problem: None }
    }

    /// Of a predecessor.
    fn left(mode: Mode) -> Self {
        Self { mode, dataplane: None, is_over: false, problem: None }
    }

    /// True: nothing is left of it.
    fn proceed(&mut self, opener: &dyn ModeOpener, config: &Arc<Config>) -> bool {
        let problem = match self.try_proceed(opener, config) {
            Ok(true) => {
                tracing::info!(mode = %self.mode, "nothing is left of the former mode");
                return true;
            }
            Ok(false) => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem.as_ref().filter(|problem| self.problem.as_ref() != Some(problem)) {
            tracing::warn!(mode = %self.mode, problem, "the former mode could not be ended; it is tried again");
        }
        self.problem = problem;
        false
    }

    fn try_proceed(&mut self, opener: &dyn ModeOpener, config: &Arc<Config>) -> Result<bool, Error> {
        if !self.is_over {
            let dataplane = match &mut self.dataplane {
                Some(dataplane) => dataplane,
                None => self.dataplane.insert(opener.open(Modes { mode: self.mode, beside: None }, config)?),
            };
            self.is_over = dataplane.retire()?;
        }
        if !self.is_over {
            return Ok(false);
        }
        // Its lock is released before others remove what it has written.
        self.dataplane = None;
        opener.remove_retired(self.mode, config)
    }
}

impl Controller {
    /// Everything is written to `new`, which then is at work; after an error nothing has changed for clients.
    pub fn switch(&mut self, modes: Modes, mut new: Box<dyn Dataplane>, now: Instant) -> Result<(), Error> {
        let (Some(active), Some(network)) = (&mut self.active, &self.network) else { return Ok(()) };
        match new.set_host(&host(network, &self.config, self.model.node(), self.model.service_cidrs())) {
            Err(error) if !error.is_of_node_addresses() => return Err(error),
            Ok(_) | Err(_) => {}
        }
        let all = self.model.desired();
        new.resync(&CoverageTracker::servable(all.clone(), new.as_ref()))?;
        let former = std::mem::replace(&mut active.dataplane, new);
        let former_mode = self.reports.mode.borrow().modes.mode;
        active.services.set_intervals(service_intervals(active.dataplane.as_ref(), &self.config), now);
        // What the mode cannot serve is told anew. Everything is written once more at the next occasion: what has changed meanwhile
        // is in neither.
        let changes = Changes { changed: all, removed: Vec::new() };
        self.coverage.changed(changes, active.dataplane.as_ref());
        active.services.begin_anew(now);
        active.host.begin_anew(now);
        self.retiring.retain(|retiring| retiring.mode != modes.mode);
        self.retiring.push(Retiring::running(former_mode, former));
        self.reports.mode.send_replace(ModeInForce::new(modes));
        tracing::info!(mode = %modes.mode, former = %former_mode, "another mode is at work");
        Ok(())
    }

    /// The mode that the configuration asks for cannot take over.
    pub fn refuse_switch(&self, modes: Modes, error: &Error) {
        tracing::error!(mode = %modes.mode, %error, "the mode cannot take over; the former one stays at work");
        self.reports.metrics.own.sync_errors.inc();
        self.reports.mode.send_modify(|in_force| in_force.refused = Some((modes.mode, error.to_string())));
    }

    /// What predecessors have left of other modes is retired once everything is programmed.
    pub(super) fn find_modes_to_retire(&mut self, opener: &dyn ModeOpener) {
        let at_work = self.reports.mode.borrow().modes.mode;
        match opener.to_retire(at_work, &self.config) {
            Ok(modes) => self.retiring = modes.into_iter().map(Retiring::left).collect(),
            Err(error) => tracing::warn!(%error, "it is unknown whether another mode was at work before"),
        }
    }

    /// Called about once a second.
    pub(super) fn retire(&mut self, opener: &dyn ModeOpener) {
        let is_complete = self.active.as_ref().is_some_and(|active| active.services.is_complete());
        if is_complete {
            let config = Arc::clone(&self.config);
            self.retiring.retain_mut(|retiring| !retiring.proceed(opener, &config));
        }
    }
}
