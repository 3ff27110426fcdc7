//! Reports flow maps that are nearly full by events, one each time that a map becomes so.

use std::collections::BTreeMap;

use tokio::sync::watch;

use crate::{events::Recorder, modes::HookProblems, process::event};

/// Sends the events. It ends when there is no dataplane any more.
pub(in crate::process) async fn follow(mut problems: watch::Receiver<HookProblems>, events: Recorder) {
    let mut told = BTreeMap::new();
    loop {
        let now = problems.borrow_and_update().filling.clone();
        for (name, capacity) in now.iter().filter(|(name, _)| !told.contains_key(*name)) {
            events.record(event::flows_filling(name, *capacity));
        }
        told = now;
        if problems.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_time_that_a_map_fills_is_told_once() {
        let (sender, problems) = watch::channel(HookProblems::default());
        let (events, mut taken) = Recorder::kept();
        let following = tokio::spawn(follow(problems, events));
        let full = BTreeMap::from([("flows4", 100)]);
        let states = [full.clone(), full.clone(), BTreeMap::new(), full];
        let told = async |filling: BTreeMap<&'static str, u64>| {
            sender.send_replace(HookProblems { filling, ..HookProblems::default() });
            tokio::task::yield_now().await;
        };
        for state in states {
            told(state).await;
        }
        drop(sender);
        following.await.unwrap();
        let notes: Vec<_> = std::iter::from_fn(&mut taken).map(|event| event.reason).collect();
        assert_eq!(notes, ["FlowMapFilling", "FlowMapFilling"]);
    }
}
