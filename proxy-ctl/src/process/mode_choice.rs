//! Chooses the modes that result from the configuration and this node, at the start and when the
//! configuration changes.

use std::sync::Arc;

use tokio::sync::watch;

use super::event;
use crate::{
    cleanup::Remains,
    config::Config,
    controller::ModeOpener,
    events::{Event, Recorder},
    http::report::{Metrics, ModeChoice, ModeInForce},
    model::mode::{self, Mode, Refusal},
    modes::{self, Dataplane, Error, Modes},
    node::facts,
};

/// Chooses the modes. The kernel modules that a mode needs are loaded before the mode is taken, as
/// far as the kernel has them.
pub(super) fn choose(config: &Config) -> Result<ModeChoice, Refusal> {
    let mut loaded = Vec::new();
    let mut host = facts::gather();
    loop {
        let probes = modes::probe(config, &host);
        let chosen = mode::choose(config.mode, config.ebpf.mode_fallback, &probes)?;
        let asked =
            if loaded.contains(&chosen.mode) { None } else { modes::load(chosen.mode, config, &host) };
        let Some(refused) = asked else {
            let modes = Modes::new(chosen.mode, &probes);
            return Ok(ModeChoice { chosen, modes });
        };
        loaded.push(chosen.mode);
        let mut refusals = std::mem::take(&mut host.modules.refused);
        refusals.extend(refused);
        host = facts::gather();
        host.modules.refused = refusals;
    }
}

/// Opens the modes of this build.
pub(super) struct BuiltModes;

impl ModeOpener for BuiltModes {
    fn open(&self, modes: Modes, config: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error> {
        modes::open(modes, config)
    }

    fn to_drain(&self, active_mode: Mode, config: &Config) -> Result<Vec<Mode>, Error> {
        modes::to_drain(active_mode, config)
    }

    fn open_to_drain(&self, mode: Mode, config: &Config) -> Result<Option<Box<dyn Dataplane>>, Error> {
        modes::open_to_drain(mode, config)
    }

    fn remove_drained(
        &self,
        mode: Mode,
        active_mode: Mode,
        config: &Config,
        remains: &mut Remains,
    ) -> Result<bool, Error> {
        modes::remove_drained(mode, active_mode, config, remains)
    }
}

/// Returns the event for a deprecated mode that was not active before.
fn deprecation(before: Option<Mode>, now: Mode) -> Option<Event> {
    (now == Mode::Ipvs && before != Some(now)).then(event::ipvs_is_deprecated)
}

/// Records events about refused modes, deprecated modes and new fallbacks, and shows each choice in
/// the metrics.
pub(super) async fn tell(
    mut in_force: watch::Receiver<ModeInForce>,
    choices: watch::Receiver<ModeChoice>,
    events: Recorder,
    metrics: Arc<Metrics>,
) {
    let mut told = None;
    let mut before = None;
    loop {
        let ModeInForce { modes, refused } = in_force.borrow_and_update().clone();
        if let Some(event) = deprecation(before.replace(modes.active), modes.active) {
            tracing::warn!("{}", event.note);
            events.record(event);
        }
        let choice = choices.borrow().clone();
        if choice.modes == modes {
            metrics.own.chosen(&choice.chosen);
            let fallback = choice.chosen.fallback.filter(|why| told.as_ref() != Some(why));
            if let Some(why) = fallback {
                events.record(event::mode_fallback(&why));
                told = Some(why);
            }
        }
        if let Some((wanted, problem)) = refused {
            events.record(event::mode_refused(wanted, modes.active, &problem));
        }
        if in_force.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        kubernetes::convert::invalid::InvalidObjects,
        model::mode::{ChosenMode, RequestedMode},
    };

    fn choice(fallback: Option<&str>) -> ModeChoice {
        let mode = if fallback.is_some() { Mode::Iptables } else { Mode::Ebpf };
        let fallback = fallback.map(str::to_owned);
        let chosen = ChosenMode { mode, requested: RequestedMode::Ebpf, reasons: Vec::new(), fallback };
        ModeChoice { chosen, modes: Modes { active: mode, secondary: None } }
    }

    #[tokio::test]
    async fn a_fallback_is_told_by_an_event_and_a_metric() {
        let (events, mut recorded) = Recorder::kept();
        let metrics = Arc::new(Metrics::new(None, InvalidObjects::default(), |_| {}));
        let (choose, choices) = watch::channel(choice(Some("no BTF")));
        let (serve, in_force) = watch::channel(ModeInForce::new(choice(Some("no BTF")).modes));
        let telling = tokio::spawn(tell(in_force, choices, events, Arc::clone(&metrics)));
        let is_told = |expected: i64| {
            metrics.encode().unwrap().contains(&format!("\nproxy_mode_fallback {expected}\n"))
        };
        for (chosen, expected) in
            [(choice(Some("no BTF")), 1), (choice(Some("no BTF")), 1), (choice(None), 0)]
        {
            let in_force = ModeInForce::new(chosen.modes);
            choose.send_replace(chosen);
            serve.send_replace(in_force);
            // The task `telling` runs on this thread until it waits.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert!(is_told(expected), "{}", metrics.encode().unwrap());
        }
        drop(serve);
        telling.await.unwrap();
        let event = recorded().unwrap();
        assert_eq!((event.reason, &*event.note), ("ProxyModeFallback", "no BTF"));
        assert!(recorded().is_none());
    }

    #[rstest]
    #[case::at_the_start(None, Mode::Ipvs, Some("IPVSDeprecation"))]
    #[case::after_a_switch(Some(Mode::Iptables), Mode::Ipvs, Some("IPVSDeprecation"))]
    #[case::as_before(Some(Mode::Ipvs), Mode::Ipvs, None)]
    #[case::another_mode(Some(Mode::Ipvs), Mode::Nftables, None)]
    fn deprecations(#[case] before: Option<Mode>, #[case] now: Mode, #[case] reason: Option<&str>) {
        assert_eq!(deprecation(before, now).map(|event| event.reason), reason);
    }
}
