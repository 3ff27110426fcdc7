//! Switches from one mode to another in a running process. The new mode serves everything before
//! the former mode drains.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Controller, coverage::CoverageTracker, host::host, service_intervals};
use crate::{
    cleanup::Remains,
    config::Config,
    http::report::ModeInForce,
    model::{
        desired::{Changes, DesiredPort},
        mode::Mode,
    },
    modes::{self, Dataplane, Effect, Error, Known, Modes},
};

/// The first pause between two attempts to remove what a mode has left.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two such attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// Opens modes, and removes what they have programmed.
pub trait ModeOpener {
    fn open(&self, modes: Modes, config: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error>;

    /// Returns the modes that a predecessor has left.
    fn to_drain(&self, active_mode: Mode, config: &Config) -> Result<Vec<Mode>, Error>;

    /// Opens a mode that is to drain. Returns `None` if no connection can need it.
    fn open_to_drain(&self, mode: Mode, config: &Config) -> Result<Option<Box<dyn Dataplane>>, Error>;

    /// Removes what the mode has programmed. Returns false if something still has connections and
    /// is to be removed later. `remains` is what the attempt before has found of this mode.
    fn remove_drained(
        &self,
        mode: Mode,
        active_mode: Mode,
        config: &Config,
        remains: &mut Remains,
    ) -> Result<bool, Error>;
}

/// A mode that drains: it was active before and serves until no connection needs it, or it could
/// not take over.
pub(super) struct DrainingMode {
    mode: Mode,
    /// `None` if the mode is still to be opened, or if it is not needed any more and is to be
    /// removed.
    dataplane: Option<Box<dyn Dataplane>>,
    is_over: bool,
    problem: Option<String>,
    remains: Remains,
    /// The time of the next attempt to remove what remains.
    next_attempt: Option<Instant>,
    pause: Duration,
}

/// The circumstances in which a mode that drains may go on with that.
struct Occasion<'a> {
    opener: &'a dyn ModeOpener,
    config: &'a Arc<Config>,
    active_mode: Mode,
    now: Instant,
}

impl DrainingMode {
    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// Closes the dataplane, so that the mode can be opened as the active one. If that fails,
    /// draining goes on from what is in the kernel.
    fn release(&mut self) {
        *self = Self::left(self.mode);
    }

    fn running(mode: Mode, dataplane: Box<dyn Dataplane>) -> Self {
        Self { dataplane: Some(dataplane), ..Self::left(mode) }
    }

    /// Returns a mode that a predecessor has left.
    fn left(mode: Mode) -> Self {
        Self {
            mode,
            dataplane: None,
            is_over: false,
            problem: None,
            remains: Remains::default(),
            next_attempt: None,
            pause: FIRST_PAUSE,
        }
    }

    /// Continues to drain and remove the mode. Returns true if nothing is left of it.
    fn proceed(&mut self, occasion: &Occasion<'_>) -> bool {
        if self.next_attempt.is_some_and(|at| occasion.now < at) {
            return false;
        }
        let problem = match self.try_proceed(occasion) {
            Ok(true) => {
                tracing::info!(mode = %self.mode, "everything that the drained mode has written is removed");
                return true;
            }
            Ok(false) => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem.as_ref().filter(|problem| self.problem.as_ref() != Some(problem)) {
            tracing::warn!(mode = %self.mode, problem, "the drained mode could not be removed; it is tried again");
        }
        self.problem = problem;
        false
    }

    fn try_proceed(&mut self, occasion: &Occasion<'_>) -> Result<bool, Error> {
        let Occasion { opener, config, active_mode, now } = *occasion;
        if !self.is_over {
            if self.dataplane.is_none() {
                self.dataplane = opener.open_to_drain(self.mode, config)?;
            }
            self.is_over = match &mut self.dataplane {
                Some(dataplane) => dataplane.drain()?,
                None => true,
            };
        }
        if !self.is_over {
            return Ok(false);
        }
        // The lock of the mode is released before others remove what it has written.
        self.dataplane = None;
        self.next_attempt = Some(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        opener.remove_drained(self.mode, active_mode, config, &mut self.remains)
    }
}

/// Returns true if the secondary mode has something to serve: service ports that the dataplane
/// cannot serve, or all of them, for pods without packet programs.
fn needs_secondary_mode(ports: &[Arc<DesiredPort>], dataplane: &mut dyn Dataplane) -> bool {
    let are_programs_lacking = dataplane.packet_mode().is_some_and(|mode| mode.packet_programs().are_lacking);
    let is_delegated = |port: &Arc<DesiredPort>| {
        dataplane.unserved_fields(port).iter().any(|one| one.effect == Effect::Delegated)
    };
    are_programs_lacking || ports.iter().any(is_delegated)
}

impl Controller {
    /// Opens the mode and writes everything to it, and makes it the active one. After an error the
    /// former mode stays active and writes everything anew.
    pub fn switch(&mut self, modes: Modes, opener: &dyn ModeOpener, now: Instant) {
        let former = self.reports.mode.borrow().modes;
        // The former dataplane may use the mode as its secondary mode, and would hold its lock. So
        // it releases that mode. The mode's rules stay in the kernel and are adopted.
        let shares_secondary = former
            .secondary
            .is_some_and(|secondary| secondary == modes.active || Some(secondary) == modes.secondary);
        if shares_secondary && let Some(active) = &mut self.active {
            active.dataplane.invalidate(Known::OfSecondaryMode);
        }
        let returns = self.draining.iter_mut().find(|draining| draining.mode == modes.active);
        let returns = returns.map(DrainingMode::release).is_some();
        let switched =
            opener.open(modes, &self.config).and_then(|dataplane| self.write_to(modes, dataplane, now));
        let Err(error) = switched else { return };
        self.refuse_switch(modes, &error);
        if let Some(active) = &mut self.active {
            // Modes on netfilter share chains, which the new mode may have emptied.
            active.dataplane.invalidate(Known::Everything);
            active.services.begin_anew(now);
        }
        if returns || shares_secondary {
            return;
        }
        // The refused mode is removed only after the active mode has its chains back, because rules
        // in them may jump to what is to be removed.
        self.draining.push(DrainingMode { is_over: true, ..DrainingMode::left(modes.active) });
        self.report_draining();
    }

    fn write_to(&mut self, modes: Modes, mut new: Box<dyn Dataplane>, now: Instant) -> Result<(), Error> {
        let (Some(active), Some(network)) = (&mut self.active, &self.network) else { return Ok(()) };
        let Modes { active: former_mode, secondary: former_secondary } = self.reports.mode.borrow().modes;
        let draining = self.draining.iter().map(DrainingMode::mode);
        let ports = modes::masquerade_ports(draining.chain([former_mode, modes.active]));
        let host = host(network, &self.config, self.model.node(), self.model.service_cidrs(), ports);
        match new.set_host(&host) {
            Err(error) if !error.is_of_node_addresses() => return Err(error),
            Ok(_) | Err(_) => {}
        }
        let all = self.model.desired();
        let servable = CoverageTracker::servable(all.clone(), new.as_ref());
        new.resync(&servable)?;
        new.packet_mode().map_or(Ok(()), |mode| mode.attach())?;
        let former = std::mem::replace(&mut active.dataplane, new);
        let becomes_secondary =
            modes.secondary == Some(former_mode) && needs_secondary_mode(&all, active.dataplane.as_mut());
        self.draining.retain(|draining| draining.mode != modes.active);
        if becomes_secondary {
            // Dropping the former dataplane releases its lock. The new dataplane can then open the
            // same mode as its secondary mode. The secondary mode adopts the rules in the kernel,
            // and removes the rules of service ports that are not delegated.
            drop(former);
            if let Err(error) = active.dataplane.resync(&servable) {
                tracing::warn!(mode = %former_mode, %error, "the secondary mode does not serve yet; it is tried again");
            }
        } else {
            self.draining.push(DrainingMode::running(former_mode, former));
        }
        // The former dataplane has released its secondary mode. The new dataplane opens that mode
        // only when it delegates something.
        if let Some(secondary) = former_secondary.filter(|secondary| modes.secondary == Some(*secondary)) {
            self.draining.push(DrainingMode::left(secondary));
        }
        active.services.set_intervals(service_intervals(modes.active, &self.config), now);
        // The exceptions of the new mode are reported. Everything is written once more soon,
        // because what has changed meanwhile is in neither mode.
        let changes = Changes { changed: all, removed: Vec::new() };
        self.coverage.changed(changes, active.dataplane.as_ref());
        active.services.begin_anew(now);
        active.host.begin_anew(now);
        self.reports.mode.send_replace(ModeInForce::new(modes));
        self.report_draining();
        tracing::info!(mode = %modes.active, former = %former_mode, "another mode is active now");
        Ok(())
    }

    fn report_draining(&self) {
        let draining: Vec<Mode> = self.draining.iter().map(DrainingMode::mode).collect();
        self.reports.draining.send_if_modified(|told| {
            let modified = *told != draining;
            *told = draining;
            modified
        });
    }

    /// Reports that the mode that the configuration asks for cannot take over.
    pub(super) fn refuse_switch(&self, modes: Modes, error: &Error) {
        tracing::error!(mode = %modes.active, %error, "the mode cannot take over; the former one stays active");
        self.reports.metrics.own.sync_errors.inc();
        self.reports.mode.send_modify(|in_force| in_force.refused = Some((modes.active, error.to_string())));
    }

    /// Finds the other modes that predecessors have left. They drain once everything is programmed.
    pub(super) fn find_modes_to_drain(&mut self, opener: &dyn ModeOpener) {
        let active_mode = self.reports.mode.borrow().modes.active;
        match opener.to_drain(active_mode, &self.config) {
            Ok(modes) => self.draining = modes.into_iter().map(DrainingMode::left).collect(),
            Err(error) => tracing::warn!(%error, "it is unknown whether another mode was active before"),
        }
        self.report_draining();
    }

    /// Lets the former modes go on with draining. It is called about once a second.
    pub(super) fn drain(&mut self, opener: &dyn ModeOpener, now: Instant) {
        let Some(active) = self.active.as_mut().filter(|active| active.services.is_complete()) else {
            return;
        };
        if self.draining.is_empty() {
            return;
        }
        // The secondary mode has adopted what a predecessor has left of it, so that this does not
        // drain.
        let Modes { active: active_mode, secondary } = self.reports.mode.borrow().modes;
        let is_adopted =
            |draining: &DrainingMode| draining.dataplane.is_none() && Some(draining.mode) == secondary;
        // The desired state is large: it is asked for only where the answer matters.
        if self.draining.iter().any(is_adopted)
            && needs_secondary_mode(&self.model.desired(), active.dataplane.as_mut())
        {
            self.draining.retain(|draining| !is_adopted(draining));
        }
        let occasion = Occasion { opener, config: &self.config, active_mode, now };
        let before = self.draining.len();
        self.draining.retain_mut(|draining| !draining.proceed(&occasion));
        if self.draining.len() < before {
            // The active mode need not avoid the ports of the removed mode any more.
            self.ask_for_host();
        }
        self.report_draining();
    }
}
