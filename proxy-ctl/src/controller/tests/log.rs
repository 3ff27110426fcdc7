//! A lasting condition is logged when it begins and when it ends, not each time that it is seen.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::format;

use super::{switch::opening, *};
use crate::log::capture;

/// Asserts that `work` logs this above debug level. An empty text means that it logs nothing.
fn logs(expected: &str, work: impl FnOnce()) {
    let lines = capture::logged(format().without_time(), LevelFilter::INFO, work).concat();
    assert!(lines.contains(expected) && lines.is_empty() == expected.is_empty(), "{lines}");
}

#[test]
fn that_there_is_no_node() {
    let mut fixture = Fixture::new(Config::default());
    let missing = "there is no such Node";
    for (node, expected) in [(None, missing), (None, ""), (Some(Node::default()), ""), (None, missing)] {
        logs(expected, || fixture.take(Update::Node(node)));
    }
}

#[test]
fn that_expired_flows_are_not_removed() {
    let mut fixture = Fixture::serving(Vec::new());
    fixture.recorder.fail(2);
    for expected in ["removing expired flows failed", "", "expired flows are removed again", ""] {
        logs(expected, || fixture.controller.collect_garbage());
    }
}

#[test]
fn that_a_former_mode_cannot_be_removed() {
    let mut fixture = Fixture::serving(Vec::new());
    let left = Recorder::default();
    left.lock().idle = true;
    let opener = opening("nftables", &left);
    *opener.failures.lock().unwrap() = 2;
    fixture.controller.find_modes_to_drain(&opener);
    for expected in
        ["could not be removed", "", "everything that the drained mode has written is removed", ""]
    {
        logs(expected, || fixture.controller.drain(&opener, fixture.now));
        fixture.later(PERIOD);
    }
}

#[test]
fn that_a_service_port_is_not_served_as_asked() {
    let mut fixture = Fixture::serving(Vec::new());
    let sticky = Service { affinity_seconds: Some(10_800), ..service("a", "10.0.0.1") };
    let updates = [
        (Update::ApplyService(sticky.clone()), &*AFFINITY.instead),
        (Update::ApplySlice(slice("a", "10.1.0.1")), ""),
        (Update::ApplyService(service("a", "10.0.0.1")), ""),
        (Update::ApplyService(sticky), &*AFFINITY.instead),
    ];
    for (update, expected) in updates {
        fixture.take(update);
        logs(expected, || fixture.controller.write(fixture.now));
        // Delegated service ports are logged at debug level.
        fixture.recorder.lock().delegates = true;
    }
}

#[test]
fn that_another_program_has_changed_what_is_programmed() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    fixture.recorder.lock().programmed.clear();
    for expected in ["another program had changed what is programmed", ""] {
        fixture.later(PERIOD);
        logs(expected, || fixture.controller.write(fixture.now));
    }
}
