//! Tests that failed writes are tried again, and that what others have changed is repaired.

use super::*;

#[test]
fn a_failed_write_is_repaired_by_a_resync_and_other_work_goes_on() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    fixture.recorder.fail(1);
    fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
    fixture.write();
    assert!(fixture.metric("proxy_sync_errors_total 1"));
    assert!(fixture.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending 1"));

    fixture.take(Update::ApplyService(service("b", "10.0.0.2")));
    assert_eq!(fixture.write(), [Call::Apply(vec!["default/b".into()], vec![])]);

    assert_eq!(fixture.controller.wants_call_at(), Some(fixture.now + Duration::from_secs(1)));
    fixture.later(Duration::from_secs(1));
    assert_eq!(fixture.write(), [Call::Resync(vec!["default/a".into(), "default/b".into()])]);
    assert_eq!(fixture.controller.wants_call_at(), Some(fixture.now + Duration::from_secs(29)));
    assert!(fixture.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending 0"));
}

#[test]
fn without_a_first_success_nothing_is_written_piecemeal() {
    let mut fixture = Fixture::started(Config::default(), Vec::new(), &[]);
    fixture.recorder.fail(2);
    assert!(matches!(fixture.write().as_slice(), [Call::SetHost(_), Call::Resync(_)]));
    fixture.take(Update::ApplyService(service("a", "10.0.0.1")));
    assert_eq!(fixture.write(), []);
    fixture.later(Duration::from_secs(1));
    assert!(
        matches!(fixture.write().as_slice(), [Call::SetHost(_), Call::Resync(ports)] if ports.len() == 1)
    );
}

#[test]
fn a_change_that_cannot_be_written_makes_the_node_unhealthy_in_time() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    fixture.recorder.fail(usize::MAX);
    fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
    fixture.write();
    assert!(fixture.is_healthy_after(Duration::from_secs(59)));
    assert!(!fixture.is_healthy_after(Duration::from_secs(61)));
}

#[test]
fn a_host_that_cannot_be_written_makes_the_node_unhealthy_in_time() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    let began = fixture.now;
    let healthy_after = |fixture: &Fixture, seconds| {
        fixture.is_healthy_after((began + Duration::from_secs(seconds)).duration_since(fixture.now))
    };
    fixture.controller.set_network(network(&["192.0.2.1"]));
    for _ in 0..10 {
        // Changes of Services are written meanwhile.
        fixture.recorder.fail(1);
        fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
        fixture.write();
        fixture.later(Duration::from_secs(4));
        fixture.controller.set_network(network(&["192.0.2.1"]));
    }
    assert!(healthy_after(&fixture, 59));
    assert!(!healthy_after(&fixture, 61));
    fixture.write();
    assert!(healthy_after(&fixture, 100));
}

#[test]
fn a_comparison_that_cannot_be_made_makes_the_node_unhealthy_in_time() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    fixture.recorder.lock().resync_fails = true;
    fixture.later(PERIOD);
    fixture.write();
    assert!(fixture.is_healthy_after(Duration::from_secs(59)));
    assert!(!fixture.is_healthy_after(Duration::from_secs(61)));
    fixture.recorder.lock().resync_fails = false;
    fixture.later(Duration::from_secs(1));
    fixture.write();
    assert!(fixture.is_healthy_after(Duration::from_secs(99)));
}

pub(super) const PERIOD: Duration = Duration::from_secs(30);

#[test]
fn after_a_sync_period_everything_is_compared_and_nothing_written() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    let written = "proxy_writes_total 1";
    assert!(fixture.metric(written) && fixture.metric("proxy_resyncs_total 1"));
    assert!(!fixture.metric("proxy_first_sync_duration_seconds 0.0"));
    fixture.later(PERIOD - Duration::from_secs(1));
    assert_eq!(fixture.write(), []);
    fixture.later(Duration::from_secs(1));
    let calls = fixture.write();
    assert!(
        matches!(calls.as_slice(), [Call::SetHost(_), Call::Resync(ports)] if ports == &["default/a"]),
        "{calls:?}"
    );
    assert_eq!(fixture.write(), []);
    assert!(fixture.metric(written) && fixture.metric("proxy_resyncs_total 2"));
    assert!(fixture.metric("proxy_drift_total 0"));
    assert_eq!(fixture.controller.wants_call_at(), Some(fixture.now + PERIOD));
}

#[test]
fn changes_of_other_programs_are_repaired_and_counted() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1"), service("b", "10.0.0.2")]);
    let removed = fixture.recorder.lock().programmed.remove("default/b").unwrap();
    fixture.recorder.lock().programmed.insert("default/other".into(), removed);
    fixture.recorder.lock().host_differs = 1;
    fixture.later(PERIOD);
    // A change that is written in the same moment is no drift.
    fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
    let calls = fixture.write();
    assert!(matches!(calls.as_slice(), [Call::SetHost(_), Call::Apply(..), Call::Resync(_)]), "{calls:?}");
    assert!(fixture.metric("proxy_drift_total 3"), "one is added, one removed, one of the node's");
    assert!(fixture.recorder.lock().programmed.contains_key("default/b"));
}

#[test]
fn a_failed_write_is_not_compared_before_it_is_repaired() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    fixture.later(PERIOD);
    fixture.recorder.fail(2);
    fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
    assert!(matches!(fixture.write().as_slice(), [Call::SetHost(_), Call::Apply(..)]));
    fixture.later(Duration::from_secs(1));
    assert!(matches!(fixture.write().as_slice(), [Call::SetHost(_), Call::Resync(_)]));
    assert!(fixture.metric("proxy_drift_total 0"));
}
