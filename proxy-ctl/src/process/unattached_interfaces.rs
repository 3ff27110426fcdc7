//! Tells the cluster of interfaces that packet programs cannot be attached to: one event for each
//! interface and reason.

use std::collections::BTreeMap;

use tokio::sync::watch;

use super::event;
use crate::{
    dataplane::HookProblems,
    events::{Event, Recorder},
};

/// Ends when there is no dataplane any more.
pub(super) async fn follow(mut problems: watch::Receiver<HookProblems>, events: Recorder) {
    let mut told = BTreeMap::new();
    while problems.changed().await.is_ok() {
        let now = problems.borrow_and_update().unattached.clone();
        news(&told, &now).for_each(|event| events.record(event));
        told = now;
    }
}

fn news(told: &BTreeMap<u32, String>, now: &BTreeMap<u32, String>) -> impl Iterator<Item = Event> {
    let is_new = |(index, reason): &(&u32, &String)| told.get(*index) != Some(*reason);
    now.iter().filter(is_new).map(|(_, reason)| event::interface_not_attached(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_told_again_only_with_another_reason() {
        let problem = |reason: &str| BTreeMap::from([(7, reason.to_owned())]);
        let (none, full, denied) = (BTreeMap::new(), problem("full"), problem("denied"));
        let steps = [(&none, &full), (&full, &full), (&full, &denied), (&denied, &none)];
        assert_eq!(steps.map(|(told, now)| news(told, now).count()), [1, 0, 1, 0]);
    }
}
