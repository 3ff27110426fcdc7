//! From one mode to another while the process runs.

use super::*;

const NFTABLES: Modes = Modes { mode: Mode::Nftables, beside: None };

/// Of recorders, by mode; what it was asked to remove.
#[derive(Default)]
struct Opener {
    left: BTreeMap<&'static str, Recorder>,
    removed: Mutex<Vec<&'static str>>,
    /// Attempts to remove that fail.
    failures: Mutex<usize>,
}

impl ModeOpener for Opener {
    fn open(&self, modes: Modes, _: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error> {
        Ok(Box::new(self.left[modes.mode.name()].clone()))
    }

    fn to_retire(&self, at_work: Mode, _: &Config) -> Result<Vec<Mode>, Error> {
        let is_left = |mode: &Mode| *mode != at_work && self.left.contains_key(mode.name());
        Ok(Mode::ALL.into_iter().filter(is_left).collect())
    }

    fn remove_retired(&self, mode: Mode, _: &Config) -> Result<bool, Error> {
        let mut failures = self.failures.lock().unwrap();
        if *failures > 0 {
            *failures -= 1;
            return Err(Error::new(ErrorKind::Other, "busy"));
        }
        self.removed.lock().unwrap().push(mode.name());
        Ok(true)
    }
}

fn serving() -> Fixture {
    let fixture = Fixture::serving(vec![service("web", "10.0.0.1")]);
    fixture.recorder.calls();
    fixture
}

impl Fixture {
    fn switch(&mut self) -> (Recorder, Result<(), Error>) {
        let new = Recorder::default();
        let done = self.controller.switch(NFTABLES, Box::new(new.clone()), self.now);
        (new, done)
    }
}

#[test]
fn the_new_mode_serves_everything_before_the_former_serves_nothing_new() {
    let mut fixture = serving();
    let (new, done) = fixture.switch();
    done.unwrap();
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
    fixture.switch().1.unwrap();
    let opener = Opener { failures: Mutex::new(1), ..Opener::default() };
    fixture.controller.retire(&opener);
    assert_eq!(fixture.recorder.calls(), [Call::Retire]);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0]);

    fixture.recorder.lock().idle = true;
    fixture.controller.retire(&opener);
    assert_eq!(fixture.recorder.calls(), [Call::Retire]);
    assert_eq!(*opener.removed.lock().unwrap(), [""; 0], "the first attempt has failed");
    fixture.controller.retire(&opener);
    assert_eq!(*opener.removed.lock().unwrap(), ["ebpf"]);
    fixture.controller.retire(&opener);
    assert_eq!((fixture.recorder.calls(), opener.removed.lock().unwrap().len()), (Vec::new(), 1));
}

#[test]
fn a_mode_that_cannot_write_everything_does_not_take_over() {
    let mut fixture = serving();
    let new = Recorder::default();
    new.fail(2);
    let error = fixture.controller.switch(NFTABLES, Box::new(new.clone()), fixture.now).unwrap_err();
    fixture.controller.refuse_switch(NFTABLES, &error);
    let in_force = fixture.reports.mode.borrow().clone();
    assert_eq!(in_force.modes.mode, Mode::Ebpf);
    assert_eq!(in_force.refused, Some((Mode::Nftables, error.to_string())));
    fixture.take(Update::ApplyService(service("api", "10.0.0.2")));
    fixture.controller.write(fixture.now);
    assert!(fixture.recorder.lock().programmed.contains_key("default/api"), "the former mode serves on");
}

#[test]
fn what_a_predecessor_has_left_of_another_mode_is_retired_once_everything_is_programmed() {
    let left = Recorder::default();
    left.lock().idle = true;
    let opener = Opener { left: [("nftables", left.clone())].into(), ..Opener::default() };
    let mut fixture = Fixture::started(Config::default(), vec![service("web", "10.0.0.1")], &["192.0.2.1"]);
    fixture.controller.find_modes_to_retire(&opener);
    fixture.controller.retire(&opener);
    assert_eq!(left.calls(), [], "nothing is programmed yet");
    fixture.controller.write(fixture.now);
    fixture.controller.retire(&opener);
    assert_eq!(left.calls(), [Call::Retire]);
    assert_eq!(*opener.removed.lock().unwrap(), ["nftables"]);
}
