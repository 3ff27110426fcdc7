//! Measures how long a change in the cluster takes to reach this node's kernel. This is
//! kube-proxy's network programming latency.

use std::num::NonZeroI64;

use jiff::Timestamp;

use crate::{http::report::Metrics, model::objects::IpFamily};

/// The most changes whose trigger times are kept for the latency metric while nothing can be
/// written. Further changes are not measured.
const MOST_WAITING: usize = 65_536;

/// The times at which changes were triggered that are not yet written.
#[derive(Debug)]
pub(super) struct Latency {
    /// The start of the process. Changes that were triggered earlier are not measured, because they
    /// waited for the process to start.
    since: Timestamp,
    waiting: Vec<(IpFamily, Timestamp)>,
}

impl Latency {
    pub(super) fn new(since: Timestamp) -> Self {
        Self { since, waiting: Vec::new() }
    }

    pub(super) fn received(&mut self, triggers: Vec<(IpFamily, NonZeroI64)>) {
        let room = MOST_WAITING - self.waiting.len();
        let time = |(family, triggered): (IpFamily, NonZeroI64)| {
            Some((family, Timestamp::from_nanosecond(i128::from(triggered.get())).ok()?))
        };
        let new = triggers.into_iter().filter_map(time).filter(|(_, time)| *time > self.since);
        self.waiting.extend(new.take(room));
    }

    /// Measures everything received, which has been written by `now`.
    pub(super) fn written(&mut self, now: Timestamp, metrics: &Metrics) {
        for (family, triggered) in self.waiting.drain(..) {
            metrics.kube_proxy.programmed(family, now.duration_since(triggered).as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> NonZeroI64 {
        let time: Timestamp = text.parse().unwrap();
        NonZeroI64::new(time.as_nanosecond().try_into().unwrap()).unwrap()
    }

    #[test]
    fn of_many_that_wait_the_first_are_measured() {
        let mut latency = Latency::new(Timestamp::UNIX_EPOCH);
        for number in [MOST_WAITING - 1, 2] {
            latency.received(vec![(IpFamily::Ipv4, NonZeroI64::MAX); number]);
        }
        assert_eq!(latency.waiting.len(), MOST_WAITING);
    }

    #[test]
    fn only_changes_since_the_start_are_measured_and_each_once() {
        let metrics =
            Metrics::new(None, crate::kubernetes::convert::invalid::InvalidObjects::default(), |_| {});
        let mut latency = Latency::new("2026-01-01T00:00:00Z".parse().unwrap());
        latency.received(vec![
            (IpFamily::Ipv4, at("2026-01-01T00:00:00Z")),
            (IpFamily::Ipv4, at("2026-01-01T00:00:01.5Z")),
            (IpFamily::Ipv6, at("2026-01-01T00:00:01Z")),
        ]);
        latency.written("2026-01-01T00:00:02Z".parse().unwrap(), &metrics);
        latency.written("2026-01-01T00:00:09Z".parse().unwrap(), &metrics);
        let text = metrics.encode().unwrap();
        for line in [
            r#"kubeproxy_network_programming_duration_seconds_sum{ip_family="IPv4"} 0.5"#,
            r#"kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"} 1"#,
            r#"kubeproxy_network_programming_duration_seconds_sum{ip_family="IPv6"} 1.0"#,
            r#"kubeproxy_network_programming_duration_seconds_bucket{le="0.25",ip_family="IPv4"} 0"#,
            r#"kubeproxy_network_programming_duration_seconds_bucket{le="0.5",ip_family="IPv4"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
