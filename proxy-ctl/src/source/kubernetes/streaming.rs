//! Whether the API server answers streaming lists: asked once, for all kinds.

use std::time::Duration;

use tokio::{sync::watch, time::timeout};

/// The longest time that a kind waits for the answer to another kind's request.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Knowledge {
    #[default]
    Unknown,
    /// One kind has asked; the others wait for its answer, since each refusal would cost a request.
    Asked,
    Accepted,
    Refused,
}

/// Shared by all watchers of one API server.
#[derive(Debug, Default)]
pub(super) struct StreamingLists(watch::Sender<Knowledge>);

impl StreamingLists {
    /// Streaming lists are not requested.
    pub(super) fn unwanted() -> Self {
        Self(watch::Sender::new(Knowledge::Refused))
    }

    /// Whether to ask for a streaming list. A caller that gets `true` while nothing is known must report the answer.
    pub(super) async fn may_be_asked_for(&self) -> bool {
        let mut answer = self.0.subscribe();
        loop {
            let asks = self.0.send_if_modified(|knowledge| {
                let is_unknown = *knowledge == Knowledge::Unknown;
                if is_unknown {
                    *knowledge = Knowledge::Asked;
                }
                is_unknown
            });
            if asks {
                return true;
            }
            // After the timeout each kind asks for itself.
            drop(timeout(PATIENCE, answer.wait_for(|knowledge| *knowledge != Knowledge::Asked)).await);
            match *self.0.borrow() {
                // The request failed for another reason: one of those that wait asks again.
                Knowledge::Unknown => {}
                Knowledge::Asked | Knowledge::Accepted => return true,
                Knowledge::Refused => return false,
            }
        }
    }

    pub(super) fn accepted(&self) {
        self.learn(Knowledge::Accepted);
    }

    /// Returns whether that is new.
    pub(super) fn refused(&self) -> bool {
        self.learn(Knowledge::Refused)
    }

    /// The request failed for another reason.
    pub(super) fn not_answered(&self) {
        if *self.0.borrow() == Knowledge::Asked {
            self.learn(Knowledge::Unknown);
        }
    }

    fn learn(&self, new: Knowledge) -> bool {
        self.0.send_replace(new) != new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_refusal_is_learned_once_for_all_kinds() {
        let streaming = StreamingLists::default();
        assert!(streaming.may_be_asked_for().await, "the first asks");
        let others = async { tokio::join!(streaming.may_be_asked_for(), streaming.may_be_asked_for()) };
        let (others, new) = tokio::join!(others, async { streaming.refused() });
        assert_eq!((others, new), ((false, false), true), "the others wait for its answer");
        assert!(!streaming.refused() && !streaming.may_be_asked_for().await);
    }

    #[tokio::test]
    async fn unwanted_ones_are_not_asked_for() {
        assert!(!StreamingLists::unwanted().may_be_asked_for().await);
    }

    #[tokio::test]
    async fn after_a_failure_that_says_nothing_one_of_those_that_wait_asks() {
        let streaming = StreamingLists::default();
        assert!(streaming.may_be_asked_for().await);
        let ask = async || {
            let asks = streaming.may_be_asked_for().await;
            if asks {
                streaming.refused();
            }
            asks
        };
        let (first, second, ()) = tokio::join!(ask(), ask(), async { streaming.not_answered() });
        assert!(first != second, "one asks, the other learns that it was refused");
        streaming.not_answered();
        assert!(!streaming.may_be_asked_for().await, "a later failure does not change what is known");
    }
}
