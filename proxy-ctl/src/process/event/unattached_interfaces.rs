//! Reports interfaces that packet programs cannot be attached to, by events. There is one event for
//! each interface and reason. There are few in an hour, because each new pod may bring such an
//! interface. Metric, log and `status` name all of them.

use std::collections::BTreeMap;

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::unserved_fields::Allowance;
use crate::{events::Recorder, modes::HookProblems, process::event};

/// Sends the events. It ends when there is no dataplane any more.
pub(in crate::process) async fn follow(mut problems: watch::Receiver<HookProblems>, events: Recorder) {
    let (mut told, mut allowance) = (BTreeMap::new(), Allowance::default());
    loop {
        let now = problems.borrow_and_update().unattached.clone();
        told.retain(|index, _| now.contains_key(index));
        let news = next(&told, &now);
        if let Some((index, reason)) = news {
            let moment = allowance.next(Instant::now());
            if moment <= Instant::now() {
                events.record(event::interface_not_attached(reason));
                allowance.spend(moment);
                told.insert(index, reason.clone());
                continue;
            }
            tokio::select! {
                () = sleep_until(moment) => continue,
                changed = problems.changed() => if changed.is_err() { return },
            }
        } else if problems.changed().await.is_err() {
            return;
        }
    }
}

/// Returns an interface whose present reason was not reported yet.
fn next<'a>(told: &BTreeMap<u32, String>, now: &'a BTreeMap<u32, String>) -> Option<(u32, &'a String)> {
    now.iter().map(|(index, reason)| (*index, reason)).find(|(index, reason)| told.get(index) != Some(reason))
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::{
        super::unserved_fields::{HOUR, MOST_IN_AN_HOUR},
        *,
    };

    #[test]
    fn an_interface_is_told_again_only_with_another_reason() {
        let problem = |reason: &str| BTreeMap::from([(7, reason.to_owned())]);
        let (none, full, denied) = (BTreeMap::new(), problem("full"), problem("denied"));
        let steps = [(&none, &full), (&full, &full), (&full, &denied), (&denied, &none)];
        assert_eq!(steps.map(|(told, now)| next(told, now).is_some()), [true, false, true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn of_many_interfaces_few_are_told_in_an_hour_and_all_of_them_later() {
        let interfaces = u32::try_from(MOST_IN_AN_HOUR).unwrap() + 5;
        let unattached = (0..interfaces).map(|index| (index, format!("veth{index}"))).collect();
        let (_sender, problems) = watch::channel(HookProblems { unattached, ..HookProblems::default() });
        let (events, mut taken) = Recorder::kept();
        let following = follow(problems, events);
        tokio::pin!(following);
        let mut told = 0;
        for (span, expected) in [(HOUR / 2, MOST_IN_AN_HOUR), (HOUR, MOST_IN_AN_HOUR + 5)] {
            assert!(timeout(span, &mut following).await.is_err(), "it goes on");
            told += std::iter::from_fn(&mut taken).count();
            assert_eq!(told, expected);
        }
    }
}
