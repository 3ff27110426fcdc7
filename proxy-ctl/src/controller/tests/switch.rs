//! Tests of switching from one mode to another while the process runs.

use rstest::rstest;

use super::recorder::Recording;
use super::*;

const NFTABLES: Modes = Modes { active: Mode::Nftables, secondary: None };
const EBPF: Modes = Modes { active: Mode::Ebpf, secondary: None };
const EBPF_AND_NFTABLES: Modes = Modes { active: Mode::Ebpf, secondary: Some(Mode::Nftables) };

/// Opens recorders, by mode, and records what it was asked to remove.
#[derive(Default)]
pub(super) struct Opener {
    left: BTreeMap<&'static str, Recorder>,
    removed: Mutex<Vec<&'static str>>,
    /// The number of attempts to remove that are still to fail.
    pub(super) failures: Mutex<usize>,
    /// A dataplane that nobody but its owners may hold when a mode is opened.
    before_open: Option<Recorder>,
}

impl ModeOpener for Opener {
    fn open(&self, modes: Modes, _: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error> {
        if let Some(former) = &self.before_open {
            // The references are those of this test, its fixture and this opener.
            assert_eq!(Arc::strong_count(&former.0), 3, "the draining dataplane holds the lock of its mode");
        }
        Ok(Box::new(self.left[modes.active.name()].clone()))
    }

    fn to_drain(&self, active_mode: Mode, _: &Config) -> Result<Vec<Mode>, Error> {
        let is_left = |mode: &Mode| *mode != active_mode && self.left.contains_key(mode.name());
        Ok(Mode::ALL.into_iter().filter(is_left).collect())
    }

    fn open_to_drain(&self, mode: Mode, _: &Config) -> Result<Option<Box<dyn Dataplane>>, Error> {
        Ok(self.left.get(mode.name()).map(|left| Box::new(left.clone()) as _))
    }

    fn remove_drained(&self, mode: Mode, _: Mode, _: &Config, _: &mut Remains) -> Result<bool, Error> {
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err(Error::new(ErrorKind::Other, "busy"));
        }
        self.removed.lock().unwrap().push(mode.name());
        Ok(true)
    }
}

pub(super) fn opening(mode: &'static str, dataplane: &Recorder) -> Opener {
    Opener { left: [(mode, dataplane.clone())].into(), ..Opener::default() }
}

fn serving() -> Fixture {
    let fixture = Fixture::serving(vec![service("web", "10.0.0.1")]);
    fixture.recorder.calls();
    fixture
}

impl Fixture {
    /// Switches to mode nftables and returns the recorder that was opened.
    fn switch(&mut self) -> Recorder {
        let new = Recorder::default();
        self.controller.switch(NFTABLES, &opening("nftables", &new), self.now);
        new
    }

    fn mode(&self) -> ModeInForce {
        self.reports.mode.borrow().clone()
    }
}

#[test]
fn the_new_mode_serves_everything_before_the_former_serves_nothing_new() {
    let mut fixture = serving();
    let new = fixture.switch();
    let calls = new.calls();
    assert!(matches!(calls[0], Call::SetHost(_)), "{calls:?}");
    assert_eq!(calls[1], Call::Resync(vec!["default/web".into()]));
    assert_eq!(fixture.recorder.calls(), [], "the former was not told anything yet");
    assert_eq!(fixture.reports.mode.borrow().modes, NFTABLES);

    fixture.take(Update::ApplyService(service("api", "10.0.0.2")));
    fixture.controller.write(fixture.now);
    assert_eq!(fixture.recorder.calls(), [], "changes go to the new mode");
    assert!(new.lock().programmed.contains_key("default/api"));
}

#[test]
fn the_former_mode_ends_with_its_last_connection_and_then_is_removed() {
    let mut fixture = serving();
    fixture.switch();
    let opener = Opener { failures: Mutex::new(1), ..Opener::default() };
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(fixture.recorder.calls(), [Call::Drain]);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0]);

    fixture.recorder.lock().idle = true;
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(fixture.recorder.calls(), [Call::Drain]);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0], "the first attempt has failed");
    fixture.later(PERIOD);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), ["ebpf"]);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!((fixture.recorder.calls(), opener.removed.lock().unwrap().len()), (Vec::new(), 1));
}

/// A mode is reported as draining until nothing is left of it, so that its rules are not taken for
/// another kube-proxy's.
#[test]
fn a_mode_counts_as_draining_until_nothing_is_left_of_it() {
    let mut fixture = serving();
    let told = fixture.reports.draining.subscribe();
    fixture.recorder.lock().idle = true;
    fixture.switch();
    assert_eq!(*told.borrow(), [Mode::Ebpf], "it has not let go of its name yet");
    let opener = Opener { failures: Mutex::new(1), ..Opener::default() };
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*told.borrow(), [Mode::Ebpf]);
    fixture.later(PERIOD);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*told.borrow(), []);
}

#[test]
fn what_cannot_be_removed_yet_is_looked_at_less_and_less_often() {
    let mut fixture = serving();
    fixture.recorder.lock().idle = true;
    fixture.switch();
    let opener = Opener { failures: Mutex::new(8), ..Opener::default() };
    let mut attempts = Vec::new();
    for second in 0..70 {
        let left = *opener.failures.lock().unwrap();
        fixture.controller.drain(&opener, fixture.now);
        attempts.extend((*opener.failures.lock().unwrap() < left).then_some(second));
        fixture.later(Duration::from_secs(1));
    }
    assert_eq!(attempts, [0, 1, 3, 7, 15, 30, 45, 60]);
    assert_eq!(fixture.recorder.calls(), [Call::Drain], "it is over once");
}

fn last_host(recorder: &Recorder) -> Option<Host> {
    let host = |call| if let Call::SetHost(host) = call { Some(*host) } else { None };
    recorder.calls().into_iter().rev().find_map(host)
}

#[rstest]
#[case::ebpf_is_active(EBPF_AND_NFTABLES, true)]
#[case::another_is_active(NFTABLES, false)]
fn sources_of_a_secondary_mode_get_no_ports_of_the_active_mode(
    #[case] modes: Modes,
    #[case] kept_apart: bool,
) {
    let mut fixture = Fixture::started(Config::default(), Vec::new(), &["192.0.2.1"]);
    fixture.reports.mode.send_replace(ModeInForce::new(modes));
    fixture.controller.write(fixture.now);
    assert_eq!(last_host(&fixture.recorder).unwrap().masquerade_ports.is_some(), kept_apart);
}

/// Netfilter must not masquerade to ports of flows that go on, because the answers would be taken
/// for those of the flows.
#[test]
fn sources_get_no_ports_of_flows_that_go_on() {
    let mut fixture = serving();
    let new = fixture.switch();
    assert!(last_host(&new).unwrap().masquerade_ports.is_some());
    let opener = Opener::default();
    fixture.controller.drain(&opener, fixture.now);
    fixture.controller.write(fixture.now);
    assert!(last_host(&new).unwrap().masquerade_ports.is_some());
    fixture.controller.drain(&opener, fixture.now);
    fixture.controller.write(fixture.now);
    assert_eq!(last_host(&new), None, "nothing is over");

    fixture.recorder.lock().idle = true;
    fixture.controller.drain(&opener, fixture.now);
    fixture.controller.write(fixture.now);
    assert_eq!(last_host(&new).unwrap().masquerade_ports, None);
}

#[test]
fn before_everything_is_listed_another_mode_replaces_the_one_that_waits() {
    let mut fixture = Fixture::new(Config::default());
    let new = Recorder::default();
    let opener = opening("nftables", &new);
    let mut waiting: Option<Box<dyn Dataplane>> = Some(Box::new(fixture.recorder.clone()));
    for (modes, renewals) in [(EBPF, 0), (NFTABLES, 1)] {
        run::switch(&mut fixture.controller, &mut waiting, modes, &opener, fixture.now);
        assert_eq!(fixture.mode().modes, modes);
        waiting.as_mut().unwrap().packet_mode().unwrap().renew_lease().unwrap();
        assert_eq!(new.lock().renewals, renewals);
    }
}

#[rstest]
#[case::not_the_node(Recording { failures: 1, ..Recording::default() })]
#[case::no_services(Recording { resync_fails: true, ..Recording::default() })]
fn a_mode_that_cannot_write_everything_does_not_take_over(#[case] new: Recording) {
    let mut fixture = serving();
    let new = Recorder(Arc::new(Mutex::new(new)));
    let opener = opening("nftables", &new);
    fixture.controller.switch(NFTABLES, &opener, fixture.now);
    let in_force = fixture.mode();
    assert_eq!(in_force.modes.active, Mode::Ebpf);
    assert_eq!(in_force.refused, Some((Mode::Nftables, full().to_string())));
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0], "the former mode's rules may lead to it");
    assert_eq!(
        fixture.write(),
        [Call::Invalidate(Known::Everything), Call::Resync(vec!["default/web".into()])],
        "it may have changed what the former mode has written"
    );
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), ["nftables"], "what it has written before it failed");
    fixture.take(Update::ApplyService(service("api", "10.0.0.2")));
    fixture.controller.write(fixture.now);
    assert!(fixture.recorder.lock().programmed.contains_key("default/api"), "the former mode serves on");
}

#[test]
fn what_a_refused_mode_has_written_is_removed_in_the_end() {
    let mut fixture = serving();
    let new = Recorder::default();
    new.fail(1);
    let opener = Opener { failures: Mutex::new(1), ..opening("nftables", &new) };
    fixture.controller.switch(NFTABLES, &opener, fixture.now);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0], "the first attempt has failed");
    assert_eq!(*fixture.reports.draining.borrow(), [Mode::Nftables]);
    fixture.later(PERIOD);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), ["nftables"]);
    assert_eq!(*fixture.reports.draining.borrow(), []);
    assert_eq!(new.calls().len(), 1, "it is not opened again");
}

#[test]
fn a_mode_without_room_for_the_nodes_addresses_takes_over() {
    let mut fixture = serving();
    let new = Recorder::default();
    new.lock().addresses_fail = true;
    fixture.controller.switch(NFTABLES, &opening("nftables", &new), fixture.now);
    assert_eq!(fixture.mode().modes, NFTABLES);
}

/// A mode that comes back must be released first, because the draining dataplane holds its lock.
#[test]
fn a_mode_that_still_drains_can_come_back() {
    let mut fixture = serving();
    fixture.switch();
    fixture.controller.drain(&Opener::default(), fixture.now);
    assert_eq!(fixture.recorder.calls(), [Call::Drain]);
    fixture.recorder.lock().idle = true;
    let (former, again) = (fixture.recorder.clone(), Recorder::default());
    let opener = Opener { before_open: Some(former.clone()), ..opening("ebpf", &again) };
    fixture.controller.switch(EBPF, &opener, fixture.now);
    assert_eq!(fixture.mode().modes, EBPF);
    assert_eq!(again.calls()[1], Call::Resync(vec!["default/web".into()]));
    let opener = Opener::default();
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0], "it is active");
}

#[test]
fn a_mode_that_cannot_come_back_goes_on_draining() {
    let mut fixture = serving();
    fixture.switch();
    let again = Recorder::default();
    again.fail(2);
    let opener = opening("ebpf", &again);
    fixture.controller.switch(EBPF, &opener, fixture.now);
    assert_eq!(fixture.mode().modes, NFTABLES);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0], "it may have connections");
    again.calls();
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(again.calls(), [Call::Drain]);
}

/// The active dataplane contains the secondary mode, and holds its lock until
/// it is invalidated. The new dataplane needs the same lock.
#[rstest]
#[case::it_is_active(NFTABLES)]
#[case::it_is_secondary(Modes { active: Mode::Userspace, secondary: Some(Mode::Nftables) })]
fn the_secondary_mode_is_released_before_it_is_opened_anew(#[case] to: Modes) {
    let mut fixture = serving();
    fixture.reports.mode.send_replace(ModeInForce::new(EBPF_AND_NFTABLES));
    let new = Recorder::default();
    fixture.controller.switch(to, &opening(to.active.name(), &new), fixture.now);
    assert_eq!(fixture.recorder.calls(), [Call::Invalidate(Known::OfSecondaryMode)]);
    assert_eq!(fixture.mode().modes, to);
}

#[rstest]
#[case::something_is_delegated(true, &["ebpf"])]
#[case::nothing_is_delegated(false, &["ebpf", "nftables"])]
fn the_common_secondary_mode_is_removed_if_the_new_mode_delegates_nothing(
    #[case] delegates: bool,
    #[case] removed: &[&str],
) {
    let mut fixture = serving();
    fixture.reports.mode.send_replace(ModeInForce::new(EBPF_AND_NFTABLES));
    let (new, left) = (Recorder::default(), Recorder::default());
    new.lock().delegates = delegates;
    fixture.recorder.lock().idle = true;
    left.lock().idle = true;
    let mut opener = opening("userspace", &new);
    opener.left.insert("nftables", left);
    let to = Modes { active: Mode::Userspace, secondary: Some(Mode::Nftables) };
    fixture.controller.switch(to, &opener, fixture.now);
    fixture.controller.write(fixture.now);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), removed);
}

#[rstest]
#[case::something_is_delegated(true, &[])]
#[case::nothing_is_delegated(false, &["nftables"])]
fn the_former_mode_becomes_secondary_for_what_is_delegated(
    #[case] delegates: bool,
    #[case] removed: &[&str],
) {
    let mut fixture = serving();
    fixture.reports.mode.send_replace(ModeInForce::new(NFTABLES));
    let (new, former) = (Recorder::default(), fixture.recorder.clone());
    new.lock().delegates = delegates;
    former.lock().idle = true;
    let opener = opening("ebpf", &new);
    fixture.controller.switch(EBPF_AND_NFTABLES, &opener, fixture.now);
    let adoptions = new.calls().iter().filter(|call| matches!(call, Call::Resync(_))).count();
    assert_eq!(adoptions, if delegates { 2 } else { 1 }, "what is delegated is adopted at once");
    fixture.controller.write(fixture.now);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), removed);
}

#[rstest]
#[case::nothing_is_delegated(false, &["nftables"])]
#[case::it_is_secondary_again(true, &[])]
fn what_a_predecessor_has_left_of_the_secondary_mode_is_adopted_where_it_is_needed(
    #[case] delegates: bool,
    #[case] removed: &[&str],
) {
    let left = Recorder::default();
    left.lock().idle = true;
    let opener = opening("nftables", &left);
    let mut fixture = serving();
    fixture.recorder.lock().delegates = delegates;
    fixture.reports.mode.send_replace(ModeInForce::new(EBPF_AND_NFTABLES));
    fixture.controller.find_modes_to_drain(&opener);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(*opener.removed.lock().unwrap(), removed);
}

#[test]
fn what_a_predecessor_has_left_of_another_mode_drains_once_everything_is_programmed() {
    let left = Recorder::default();
    left.lock().idle = true;
    let opener = Opener { left: [("nftables", left.clone())].into(), ..Opener::default() };
    let mut fixture = Fixture::started(Config::default(), vec![service("web", "10.0.0.1")], &["192.0.2.1"]);
    fixture.controller.find_modes_to_drain(&opener);
    assert_eq!(*fixture.reports.draining.borrow(), [Mode::Nftables]);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(left.calls(), [], "nothing is programmed yet");
    fixture.controller.write(fixture.now);
    fixture.controller.drain(&opener, fixture.now);
    assert_eq!(left.calls(), [Call::Drain]);
    assert_eq!(*opener.removed.lock().unwrap(), ["nftables"]);
}
