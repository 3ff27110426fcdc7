//! Decides what becomes of the entries of a flow map that are copied to a map of another size.
//!
//! Programs work on both maps: those of before on the former map, until they are swapped, and the
//! others on the new one. So the entries are copied twice, before the swap and after it. A copy may
//! also be that of a killed controller, of which nobody knows how far it came. The decision needs
//! nothing but the entries: whoever makes it again comes to the same end.

use crate::{
    flow::{Stage, entries::collect::Entry, tcp::is_ahead},
    layout::{Address, Flow, FlowKey, Numbers},
};

/// The outcome for an entry of the former map.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Copied<A> {
    /// The new map gets the entry, unless a program has inserted one at this moment.
    Inserted,
    /// The entry of the new map becomes this one, if a program has not removed it at this moment.
    Joined(Flow<A>),
    /// The flow has ended, so the entry of the new map of established flows becomes this one.
    Ended(Flow<A>),
    /// The new map knows as much, or the flow has ended.
    Left,
}

/// Decides about an entry of the former map. `get` reads the new maps.
///
/// A program may write an entry between this decision and [`Copied::Joined`]. That is lost: it is
/// what one packet has changed.
pub fn copied<A: Address, E>(
    Entry { stage, key, flow }: &Entry<A>,
    get: impl Fn(Stage, &FlowKey<A>) -> Result<Option<Flow<A>>, E>,
) -> Result<Copied<A>, E> {
    if *stage == Stage::Opening
        && flow.state.has_ended()
        && let Some(new) = get(Stage::Established, key)?
        && new.is_same(flow)
        && !new.state.has_ended()
    {
        // The first copy has taken the flow as an established one. A former program has since
        // removed that entry, and left the end of the flow among the opening ones.
        return Ok(Copied::Ended(joined(&new, flow)));
    }
    if let Some(new) = get(*stage, key)? {
        return Ok(if new.is_same(flow) {
            let joined = joined(&new, flow);
            if joined == new { Copied::Left } else { Copied::Joined(joined) }
        } else if is_younger(&new, flow) {
            Copied::Left
        } else {
            Copied::Joined(*flow)
        });
    }
    let other = match stage {
        Stage::Opening => Stage::Established,
        Stage::Established => Stage::Opening,
    };
    // A flow that has ended leaves its state among the opening ones. If its client has dialled
    // again, another flow has the client's key.
    let client = flow.client_key();
    for (stage, key) in [(other, *key), (Stage::Established, client), (Stage::Opening, client)] {
        if let Some(new) = get(stage, &key)? {
            let has_ended_since = new.is_same(flow) && new.state.has_ended() && !flow.state.has_ended();
            if has_ended_since || is_younger(&new, flow) {
                return Ok(Copied::Left);
            }
        }
    }
    Ok(Copied::Inserted)
}

/// Returns true if `new`, which has a key of `flow`, is a flow that was opened later.
fn is_younger<A>(new: &Flow<A>, flow: &Flow<A>) -> bool {
    new.opened > flow.opened
}

/// Returns what two entries of a flow know together. Nothing goes back, so it does not matter which
/// of the two a program has written last.
fn joined<A: Address>(new: &Flow<A>, former: &Flow<A>) -> Flow<A> {
    let mut joined = *new;
    joined.last_seen = new.last_seen.max(former.last_seen);
    joined.state = new.state.union(&former.state);
    if former.state.progress > new.state.progress {
        // Before its SYN was answered, a flow knows no numbers that could be compared.
        (joined.client_numbers, joined.backend_numbers) = (former.client_numbers, former.backend_numbers);
    } else if former.state.progress == new.state.progress {
        joined.client_numbers = further(new.client_numbers, former.client_numbers);
        joined.backend_numbers = further(new.backend_numbers, former.backend_numbers);
    }
    if !new.is_masqueraded() && former.is_masqueraded() {
        joined.masquerade = former.masquerade;
        joined.set_masquerade_port(former.masquerade_port());
    }
    joined
}

fn further(new: Numbers, former: Numbers) -> Numbers {
    let of = |new, former| if is_ahead(former, new) { former } else { new };
    Numbers { reached: of(new.reached, former.reached), awaited: of(new.awaited, former.awaited) }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, convert::Infallible};

    use rstest::rstest;

    use super::*;
    use crate::{
        layout::{FIN_SEEN, PROGRESS_ANSWERED, PROGRESS_CONFIRMED, PROTOCOL_TCP, RESET_CONFIRMED},
        port::Port,
    };

    type A = [u8; 4];
    type New = HashMap<(Stage, FlowKey<A>), Flow<A>>;

    const CLIENT: A = [203, 0, 113, 1];

    fn flow(opened: u64, backend: u8) -> Flow<A> {
        let mut flow = Flow::default();
        (flow.opened, flow.last_seen, flow.protocol) = (opened, opened, PROTOCOL_TCP);
        (flow.client, flow.frontend, flow.backend) = (CLIENT, [10, 96, 0, 1], [10, 244, 1, backend]);
        flow.set_client_port(Port::new(40_000));
        flow.set_alias_port(Port::new(40_000));
        flow.set_frontend_port(Port::new(80));
        flow.set_backend_port(Port::new(8080));
        flow.state.progress = PROGRESS_CONFIRMED;
        flow
    }

    fn with(flow: Flow<A>, change: impl FnOnce(&mut Flow<A>)) -> Flow<A> {
        let mut changed = flow;
        change(&mut changed);
        changed
    }

    fn decide(stage: Stage, key: FlowKey<A>, flow: Flow<A>, new: &New) -> Copied<A> {
        let get = |stage, key: &FlowKey<A>| Ok::<_, Infallible>(new.get(&(stage, *key)).copied());
        copied(&Entry { stage, key, flow }, get).unwrap()
    }

    fn put(new: &mut New, stage: Stage, flow: Flow<A>) {
        for key in [flow.client_key(), flow.backend_key()] {
            new.insert((stage, key), flow);
        }
    }

    #[rstest]
    fn what_the_new_map_lacks_is_inserted(
        #[values(Stage::Opening, Stage::Established)] stage: Stage,
        #[values(Flow::client_key, Flow::backend_key)] key: fn(&Flow<A>) -> FlowKey<A>,
    ) {
        let flow = flow(7, 1);
        assert_eq!(decide(stage, key(&flow), flow, &New::new()), Copied::Inserted);
        let mut new = New::new();
        put(&mut new, stage, flow);
        assert_eq!(decide(stage, key(&flow), flow, &new), Copied::Left);
    }

    #[rstest]
    #[case::seen_later(|flow: &mut Flow<A>| flow.last_seen = 99)]
    #[case::fin(|flow: &mut Flow<A>| (flow.state.client_fin, flow.backend_numbers.awaited) = (FIN_SEEN, 6_000))]
    #[case::data(|flow: &mut Flow<A>| flow.client_numbers.reached = 70_000)]
    #[case::masquerade(|flow: &mut Flow<A>| {
        flow.masquerade = [192, 0, 2, 1];
        flow.set_masquerade_port(Port::new(1_024));
    })]
    fn what_either_entry_knows_is_known(#[case] change: fn(&mut Flow<A>)) {
        let old = with(flow(7, 1), |flow| {
            (flow.client_numbers.reached, flow.backend_numbers.awaited) = (5_000, 5_000);
        });
        let changed = with(old, change);
        let key = old.client_key();
        let new = |flow| New::from([((Stage::Established, key), flow)]);
        assert_eq!(decide(Stage::Established, key, changed, &new(old)), Copied::Joined(changed));
        assert_eq!(decide(Stage::Established, key, old, &new(changed)), Copied::Left);
    }

    /// The number of a stream begins anywhere, and wraps around.
    #[rstest]
    #[case::unknown_before(0, 3_000_000_000, PROGRESS_ANSWERED, 3_000_000_000)]
    #[case::wrapped(u32::MAX - 10, 20, PROGRESS_CONFIRMED, 20)]
    #[case::behind(20, u32::MAX - 10, PROGRESS_CONFIRMED, 20)]
    fn numbers_do_not_go_back(
        #[case] new: u32,
        #[case] former: u32,
        #[case] progress: u8,
        #[case] expected: u32,
    ) {
        let of = |number, progress| {
            with(flow(7, 1), |flow| {
                (flow.client_numbers.awaited, flow.state.progress) = (number, progress);
            })
        };
        let new_progress = if progress == PROGRESS_ANSWERED { 0 } else { progress };
        let joined = joined(&of(new, new_progress), &of(former, progress));
        assert_eq!((joined.client_numbers.awaited, joined.state.progress), (expected, progress));
    }

    #[rstest]
    fn a_flow_that_was_opened_later_keeps_its_keys(
        #[values(Stage::Opening, Stage::Established)] of_new: Stage,
        #[values(Stage::Opening, Stage::Established)] of_former: Stage,
    ) {
        let (former, later) = (flow(7, 1), flow(8, 2));
        let mut new = New::new();
        put(&mut new, of_new, later);
        for key in [former.client_key(), former.backend_key()] {
            assert_eq!(decide(of_former, key, former, &new), Copied::Left, "{key:?}");
        }
        let mut new = New::new();
        put(&mut new, of_new, former);
        let expected = if of_new == of_former { Copied::Joined(later) } else { Copied::Inserted };
        assert_eq!(decide(of_former, later.client_key(), later, &new), expected);
    }

    #[test]
    fn a_flow_that_ends_after_the_first_copy_ends_in_the_new_map_too() {
        let established = flow(7, 1);
        let ended = with(established, |flow| flow.state.reset = RESET_CONFIRMED);
        let mut new = New::new();
        put(&mut new, Stage::Established, established);
        for key in [established.client_key(), established.backend_key()] {
            assert_eq!(decide(Stage::Opening, key, ended, &new), Copied::Ended(ended));
        }
        put(&mut new, Stage::Established, ended);
        assert_eq!(decide(Stage::Opening, ended.client_key(), ended, &new), Copied::Inserted);
    }

    #[test]
    fn a_flow_that_has_ended_is_not_established_again() {
        let former = flow(7, 1);
        let ended = with(former, |flow| flow.state.reset = RESET_CONFIRMED);
        let mut new = New::new();
        put(&mut new, Stage::Opening, ended);
        for key in [former.client_key(), former.backend_key()] {
            assert_eq!(decide(Stage::Established, key, former, &new), Copied::Left);
            assert_eq!(decide(Stage::Opening, key, former, &new), Copied::Left);
        }
    }
}
