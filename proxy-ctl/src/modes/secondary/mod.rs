//! Combines the active mode and a secondary mode into one dataplane. The secondary mode is a
//! netfilter mode that serves what the active mode cannot.
//!
//! [`Dataplane::unserved_fields`] of the active mode decides what of a service port is delegated:
//! the whole port, or its frontends of one kind. Both modes may serve such frontends, each for its
//! own clients. The secondary mode is opened with the first delegated port. It is removed after
//! the last one, once no connection depends on it.
//!
//! While pods have no packet programs ([`PacketPrograms::are_lacking`]), every service port is
//! delegated, and the active mode goes on serving all of them. A packet that its programs have
//! translated matches no rule of netfilter, so the secondary mode serves those pods alone.

pub(super) mod dialled;
mod parts;

use std::{collections::BTreeMap, sync::Arc};

use self::{
    dialled::DialledFrontends,
    parts::{Split, can_be_delegated, secondary_host},
};
use super::{
    Applied, Dataplane, Effect, Error, HookProblems, Known, MetricFamily, PacketMode, PacketPrograms,
    Programmed, Snapshot, UnservedField, Usage, port_set::PortSet,
};
use crate::model::{
    desired::{Changes, DesiredPort, ServicePortName},
    mode::Mode,
    node::Host,
};

/// Opens and removes the secondary mode.
pub(super) trait SecondaryMode: Send {
    fn mode(&self) -> Mode;
    fn open(&self) -> Result<Box<dyn Dataplane>, Error>;
    /// Returns true if connections to these frontends depend on the mode's rules. Netfilter
    /// translates the connections that it knows, whoever has opened them, only while something of
    /// type nat is there.
    fn has_connections(&self, to: &DialledFrontends) -> Result<bool, Error>;
    /// Removes what the mode has written. Its dataplane was dropped before.
    fn remove(&self) -> Result<(), Error>;
}

pub(super) struct WithSecondary {
    active: Box<dyn Dataplane>,
    secondary: Box<dyn SecondaryMode>,
    /// The secondary mode. `None` if nothing is delegated, or if it could not be opened.
    opened: Option<Box<dyn Dataplane>>,
    /// Everything that is desired. All of it is delegated while pods have no packet programs.
    desired: PortSet,
    /// True if packet programs are attached with the next [`PacketMode::attach`]. Until then the
    /// secondary mode is not given what they will serve, because they would break connections that
    /// it opened.
    programs_come_later: bool,
    /// True if pods have no packet programs, so that everything is delegated.
    delegates_everything: bool,
    /// Number of calls of [`Dataplane::collect_garbage`] since some pod had no packet programs.
    since_last_lack: u32,
    /// True once [`Dataplane::resync`] has said what is desired.
    is_synced: bool,
    /// True if the secondary mode could not write what was delegated to it or taken back.
    is_secondary_stale: bool,
    /// The parts of service ports that are delegated.
    delegated: BTreeMap<ServicePortName, Arc<DesiredPort>>,
    /// The frontends that were delegated since the secondary mode was opened.
    was_delegated: DialledFrontends,
    /// The parts that return to the active mode. The secondary mode serves them until the active
    /// mode has written everything.
    passing: BTreeMap<ServicePortName, Arc<DesiredPort>>,
    host: Option<Host>,
    /// True if the secondary mode could not be removed yet.
    removal_pending: bool,
    /// True if the secondary mode was released, and what it has written is still there.
    is_released: bool,
    /// Number of calls of [`Dataplane::collect_garbage`] in which the secondary mode had nothing to
    /// serve.
    idle: u32,
    /// Reason why the secondary mode could not be opened.
    failure: Option<String>,
    /// True if the failure, or the ports that it concerns, have changed since
    /// [`Dataplane::take_waiting`].
    failure_changed: bool,
    waiting: BTreeMap<ServicePortName, Vec<UnservedField>>,
}

/// Number of collections between two attempts to remove the secondary mode. An attempt lists all
/// connections that netfilter knows.
const COLLECTIONS_BETWEEN_REMOVALS: u32 = 30;

impl WithSecondary {
    pub(super) fn new(active: Box<dyn Dataplane>, secondary: Box<dyn SecondaryMode>) -> Self {
        Self {
            active,
            secondary,
            opened: None,
            desired: PortSet::default(),
            programs_come_later: false,
            delegates_everything: false,
            since_last_lack: 0,
            is_synced: false,
            is_secondary_stale: false,
            delegated: BTreeMap::new(),
            was_delegated: DialledFrontends::default(),
            passing: BTreeMap::new(),
            host: None,
            removal_pending: false,
            is_released: false,
            idle: 0,
            failure: None,
            failure_changed: false,
            waiting: BTreeMap::new(),
        }
    }

    /// Returns true if pods have no packet programs and not everything is delegated yet.
    fn begins_to_lack(&mut self) -> bool {
        !self.delegates_everything && self.packet_programs().are_lacking
    }

    /// Delegates everything from now on if pods have no packet programs.
    fn follow_lack(&mut self) -> Result<Applied, Error> {
        if self.begins_to_lack() { self.delegate_anew(true) } else { Ok(Applied::default()) }
    }

    /// Delegates everything, or takes it back some time after all pods have got packet programs.
    /// The pause is there because the next pod without any may follow soon.
    fn follow_end_of_lack(&mut self) -> Result<Applied, Error> {
        if self.packet_programs().are_lacking {
            self.since_last_lack = 0;
            return self.follow_lack();
        }
        self.since_last_lack = self.since_last_lack.saturating_add(1);
        if !self.delegates_everything || self.since_last_lack < COLLECTIONS_BETWEEN_REMOVALS {
            return Ok(Applied::default());
        }
        self.delegate_anew(false)
    }

    fn delegate_anew(&mut self, everything: bool) -> Result<Applied, Error> {
        if everything && !self.delegates_everything {
            tracing::info!(
                mode = %self.secondary.mode(),
                "some pods have no packet programs: the secondary mode serves every service port for them"
            );
        }
        if everything {
            self.share_frontends(true)?;
        }
        self.delegates_everything = everything;
        if !self.is_synced {
            // The first resync delegates.
            return Ok(Applied::default());
        }
        let before = std::mem::take(&mut self.delegated);
        let mut changes = Changes::default();
        let mut desired: Vec<_> = self.desired.iter().cloned().collect();
        desired.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        for port in desired {
            match self.parts(&port).delegated {
                Some(part) => {
                    if before.get(&port.name) != Some(&part) {
                        changes.changed.push(Arc::clone(&part));
                    }
                    self.delegate(&part);
                }
                None if before.contains_key(&port.name) => changes.removed.push(port.name.clone()),
                None => {}
            }
        }
        self.failure_changed |= self.failure.is_some();
        if changes.is_empty() {
            // If a write has failed before, `is_secondary_stale` still says so.
            return Ok(Applied::default());
        }
        self.is_secondary_stale = true;
        let applied = self.apply_to_secondary(&changes)?;
        self.is_secondary_stale = false;
        Ok(applied)
    }

    /// Tries again to write what the secondary mode could not write.
    fn refresh_secondary(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.is_secondary_stale) {
            let all = self.secondary_ports();
            let written = self.opened.as_mut().map_or(Ok(Applied::default()), |opened| opened.resync(&all));
            self.is_secondary_stale = written.is_err();
            written?;
        }
        Ok(())
    }

    /// Returns who serves a pod whose interface has no packet programs, as `status` shows it.
    fn serves_instead(&self) -> String {
        let mode = self.secondary.mode();
        match &self.failure {
            None => format!("the secondary mode {mode} serves its pod where socket hooks do not"),
            Some(failure) => {
                format!(
                    "the secondary mode {mode}, which would serve its pod where socket hooks do not, cannot be opened: {failure}"
                )
            }
        }
    }

    /// Returns the frontends whose connections may depend on the secondary mode. These are what it
    /// has served, and the frontends of the active mode, because the rules of a former proxy, now
    /// gone, have translated connections to them.
    fn dialled(&self) -> Result<DialledFrontends, Error> {
        let mut dialled = self.was_delegated.clone();
        if let Some(host) = &self.host {
            dialled.node_addresses.clone_from(&host.node_port_addresses);
        }
        for service in self.active.snapshot()?.services {
            service.frontends.iter().for_each(|frontend| dialled.add(frontend.address, frontend.port));
        }
        Ok(dialled)
    }

    fn is_secondary_idle(&self) -> bool {
        self.delegated.is_empty() && self.passing.is_empty()
    }

    /// Returns what the secondary mode has to serve.
    fn secondary_ports(&self) -> Vec<Arc<DesiredPort>> {
        self.delegated.values().chain(self.passing.values()).cloned().collect()
    }

    /// Returns the secondary mode. If it was not open, it is opened with everything that is
    /// delegated. Returns `None` if it cannot be opened.
    fn open_secondary(&mut self, applied: &mut Applied) -> Result<Option<&mut Box<dyn Dataplane>>, Error> {
        if self.opened.is_none() {
            match self.secondary.open() {
                Ok(dataplane) => {
                    let all = self.secondary_ports();
                    let opened = self.opened.insert(dataplane);
                    (self.removal_pending, self.is_released) = (false, false);
                    tracing::info!(mode = %self.secondary.mode(), "the secondary mode serves what the active mode cannot");
                    if let Some(host) = &self.host {
                        *applied += opened.set_host(&secondary_host(host))?;
                    }
                    *applied += opened.resync(&all)?;
                    self.set_failure(None);
                }
                Err(error) => {
                    self.set_failure(Some(error.to_string()));
                    return Ok(None);
                }
            }
        }
        Ok(self.opened.as_mut())
    }

    fn set_failure(&mut self, failure: Option<String>) {
        self.failure_changed |= self.failure != failure;
        self.failure = failure;
    }

    fn apply_to_secondary(&mut self, changes: &Changes) -> Result<Applied, Error> {
        let mut applied = Applied::default();
        if changes.is_empty() {
            return Ok(applied);
        }
        if self.is_secondary_idle() {
            if let Some(opened) = &mut self.opened {
                applied += opened.apply(changes)?;
            }
            self.remove_idle_secondary()?;
            return Ok(applied);
        }
        let was_open = self.opened.is_some();
        if let Some(opened) = self.open_secondary(&mut applied)?
            && was_open
        {
            applied += opened.apply(changes)?;
        }
        Ok(applied)
    }

    /// Removes the secondary mode, to which nothing is delegated any more, unless connections
    /// depend on it.
    fn remove_idle_secondary(&mut self) -> Result<(), Error> {
        self.idle = 0;
        if self.opened.is_some() {
            match self.dialled().and_then(|dialled| self.secondary.has_connections(&dialled)) {
                Ok(false) => {}
                Ok(true) => return Ok(()),
                Err(error) => {
                    tracing::warn!(
                        mode = %self.secondary.mode(), %error,
                        "rules of the secondary mode stay although they serve nothing, because connections cannot be listed; it is tried again"
                    );
                    return Ok(());
                }
            }
        }
        self.remove_secondary()
    }

    fn remove_secondary(&mut self) -> Result<(), Error> {
        self.set_failure(None);
        if self.opened.take().is_some() {
            self.removal_pending = true;
        }
        if self.removal_pending {
            self.secondary.remove()?;
            self.removal_pending = false;
            self.was_delegated = DialledFrontends::default();
            tracing::info!(mode = %self.secondary.mode(), "the secondary mode is removed, because the active mode serves everything");
        }
        Ok(())
    }
}

impl Programmed for WithSecondary {
    fn snapshot(&self) -> Result<Snapshot, Error> {
        let mut snapshot = self.active.snapshot()?;
        if let Some(opened) = &self.opened {
            snapshot.add(self.secondary.mode(), opened.snapshot()?);
        }
        Ok(snapshot)
    }

    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.active.usage()?;
        if let Some(opened) = &self.opened {
            let secondary = opened.usage()?;
            usage.maps.extend(secondary.maps);
            usage.reasons.extend(secondary.reasons);
        }
        Ok(usage)
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        let mut families = self.active.metrics()?;
        if let Some(opened) = &self.opened {
            families.extend(opened.metrics()?);
        }
        Ok(families)
    }
}

impl Dataplane for WithSecondary {
    /// Writes changes. What moves to the secondary mode is served there before the active mode
    /// leaves it, and the other way round. Everything else is written to the active mode first,
    /// which is faster.
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        let Split { own, arriving, delegated } = self.split(changes);
        let arrived = self.apply_to_secondary(&arriving);
        let mut applied = self.active.apply(&own)?;
        for name in &delegated.removed {
            self.passing.remove(name);
        }
        applied += arrived?;
        applied += self.apply_to_secondary(&delegated)?;
        Ok(applied)
    }

    /// Writes everything. What moves is served by both modes meanwhile. A secondary mode that is
    /// not open yet comes after the active mode: it adopts what a former process has written, and
    /// removes whatever of it is not delegated.
    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let mut own = Vec::with_capacity(desired.len());
        self.desired = desired.iter().cloned().collect();
        self.is_synced = true;
        let mut before = std::mem::take(&mut self.passing);
        before.append(&mut self.delegated);
        for port in desired {
            let parts = self.parts(port);
            own.extend(parts.own);
            match parts.delegated {
                Some(part) => self.delegate(&part),
                None => {
                    let passing = before.get_key_value(&port.name);
                    self.passing.extend(passing.map(|(name, part)| (name.clone(), Arc::clone(part))));
                }
            }
        }
        self.failure_changed |= self.failure.is_some();
        let arriving = self.delegated.iter().filter(|(name, port)| before.get(*name) != Some(*port));
        let changed: Vec<_> = arriving.map(|(_, port)| Arc::clone(port)).collect();
        let arrived = match &mut self.opened {
            Some(opened) if !changed.is_empty() => opened.apply(&Changes { changed, removed: Vec::new() }),
            _ => Ok(Applied::default()),
        };
        let own = self.active.resync(&own);
        if own.is_ok() {
            self.passing.clear();
        }
        let mut applied = arrived?;
        let all = self.secondary_ports();
        match &mut self.opened {
            Some(opened) => applied += opened.resync(&all)?,
            None if !all.is_empty() || self.is_released => {
                self.open_secondary(&mut applied)?;
            }
            None => {}
        }
        if all.is_empty() && !self.is_released {
            self.remove_idle_secondary()?;
        }
        applied += own?;
        Ok(applied)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        self.host = Some(host.clone());
        let secondary = &mut self.opened;
        let secondary = secondary
            .as_mut()
            .map_or(Ok(Applied::default()), |opened| opened.set_host(&secondary_host(host)));
        let own = self.active.set_host(host);
        // A secondary mode that serves already goes on with what it has.
        self.programs_come_later = self.opened.is_none() && self.packet_programs().come_later;
        // Some pods may have no packet programs, whether or not the call has failed.
        let delegated = self.follow_lack();
        let mut applied = own?;
        applied += secondary?;
        applied += delegated?;
        Ok(applied)
    }

    fn collect_garbage(&mut self) -> Result<(), Error> {
        let secondary = self.opened.as_mut().map_or(Ok(()), |opened| opened.collect_garbage());
        let own = self.active.collect_garbage();
        let delegated = self.refresh_secondary().and_then(|()| self.follow_end_of_lack());
        let is_over = !self.delegates_everything && !self.is_secondary_stale;
        let shared = if is_over { self.share_frontends(false) } else { Ok(()) };
        own?;
        shared?;
        delegated?;
        if self.is_secondary_idle() && (self.opened.is_some() || self.removal_pending) {
            self.idle += 1;
            if self.idle >= COLLECTIONS_BETWEEN_REMOVALS {
                self.remove_idle_secondary()?;
            }
        }
        secondary
    }

    fn drain(&mut self) -> Result<bool, Error> {
        if self.opened.as_mut().map_or(Ok(true), |opened| opened.drain())? {
            self.remove_secondary()?;
        }
        let done = self.active.drain()?;
        Ok(done && self.opened.is_none())
    }

    fn invalidate(&mut self, known: Known) {
        match known {
            Known::Everything => {
                self.active.invalidate(known);
                if let Some(opened) = &mut self.opened {
                    opened.invalidate(known);
                }
            }
            Known::OfSecondaryMode => self.is_released |= self.opened.take().is_some(),
        }
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        let mode = self.secondary.mode();
        let told = |one: UnservedField| match can_be_delegated(&one) {
            true => UnservedField {
                effect: Effect::Delegated,
                instead: format!("served by the secondary mode {mode}").into(),
                ..one
            },
            false => one,
        };
        self.active.unserved_fields(port).into_iter().map(told).collect()
    }

    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        let of_active = self.active.take_waiting();
        if of_active.is_none() && !std::mem::take(&mut self.failure_changed) {
            return None;
        }
        if let Some(ports) = of_active {
            self.waiting = ports;
        }
        let mut all = self.waiting.clone();
        for (name, unserved_fields) in self.delegated_but_unserved() {
            all.entry(name).or_default().extend(unserved_fields);
        }
        Some(all)
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        if self.active.packet_mode().is_some() { Some(self) } else { None }
    }
}

/// Forwards to the active mode, which has packet programs, and delegates what they do not serve.
impl PacketMode for WithSecondary {
    fn attach(&mut self) -> Result<(), Error> {
        let attached = self.active.packet_mode().map_or(Ok(()), |mode| mode.attach());
        let came_later = std::mem::take(&mut self.programs_come_later);
        let lacks = self.begins_to_lack();
        let delegated = if came_later || lacks {
            self.delegate_anew(self.delegates_everything || lacks)
        } else {
            Ok(Applied::default())
        };
        attached?;
        delegated.map(drop)
    }

    fn renew_lease(&mut self) -> Result<(), Error> {
        self.active.packet_mode().map_or(Ok(()), |mode| mode.renew_lease())
    }

    fn share_frontends(&mut self, are_shared: bool) -> Result<(), Error> {
        self.active.packet_mode().map_or(Ok(()), |mode| mode.share_frontends(are_shared))
    }

    fn packet_programs(&mut self) -> PacketPrograms {
        self.active.packet_mode().map(|mode| mode.packet_programs()).unwrap_or_default()
    }

    fn hook_problems(&mut self) -> HookProblems {
        let mut problems = self.active.packet_mode().map(|mode| mode.hook_problems()).unwrap_or_default();
        if !problems.unattached.is_empty() {
            let instead = self.serves_instead();
            problems.unattached.values_mut().for_each(|reason| *reason = format!("{reason}; {instead}"));
        }
        problems
    }

    fn inspection_share(&mut self) -> u32 {
        // With a secondary mode the share is 0, because other programs write netfilter's rules too.
        // So it is after a failure, because each resync tries again to open the mode.
        if self.opened.is_some() || self.failure.is_some() {
            return 0;
        }
        self.active.packet_mode().map_or(0, |mode| mode.inspection_share())
    }
}

#[cfg(test)]
mod tests;
