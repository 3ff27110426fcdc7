//! Flows that have all of their entries or none, and entries that restore each other.

use super::*;

#[rstest]
#[case::same_backend_before_the_first_write(0, FIRST)]
#[case::same_backend_before_the_second_write(1, FIRST)]
#[case::other_backend_before_the_first_write(0, LAST)]
#[case::other_backend_before_the_second_write(1, LAST)]
fn two_first_packets_at_once_get_one_backend(
    #[case] nth: u32,
    #[case] other_dice: u32,
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
) {
    let host = Host::new();
    let winner = Rc::new(Cell::new(None));
    let seen = winner.clone();
    host.interrupt(nth, move |host| {
        host.dice.borrow_mut().extend([other_dice, LAST]);
        seen.set(Some(host.arriving(&syn(), origin)));
    });
    let loser = host.arriving(&syn(), origin);
    assert_eq!(Some(loser), winner.get());
    assert!(loser.is_ok());
    host.assert_whole();
    assert_eq!(host.entries(Stage::Opening), 2);
    through(&host, &syn(), origin).unwrap();
    host.assert_whole();
    assert_eq!(host.entries(Stage::Opening), if origin == Origin::Outside { 3 } else { 2 });
}

#[rstest]
fn a_flow_is_created_whole_or_not_at_all(#[values(0, 1)] room: u32) {
    let host = Host::new();
    host.until_full.set(Some(room));
    let refused = host.arriving(&syn(), Origin::Outside);
    assert!(refused.is_err_and(|reason| reason.verdict() == crate::reason::Verdict::Drop));
    assert_eq!(host.entries(Stage::Opening), 0);
}

/// The packet is dropped, and the next one of the same flow finds room.
#[test]
fn without_room_for_a_masqueraded_source_the_packet_is_dropped() {
    let host = Host::new();
    host.until_full.set(Some(2));
    assert_eq!(through(&host, &syn(), Origin::Outside), Err(Reason::MasqueradePortsExhausted));
    host.until_full.set(None);
    assert_eq!(through(&host, &syn(), Origin::Outside).map(|packet| packet.source), Ok(NODE));
    host.assert_whole();
}

#[test]
fn two_packets_that_leave_at_once_may_have_two_sources_and_both_are_answered() {
    let host = Host::new();
    let inside = rewritten(&syn(), host.arriving(&syn(), Origin::Outside).unwrap());
    let other = Rc::new(Cell::new(None));
    let seen = other.clone();
    host.interrupt(0, move |host| {
        host.dice.borrow_mut().push_back(LAST);
        seen.set(Some(host.leaving(&inside).unwrap()));
    });
    let sources = [source(host.leaving(&inside).unwrap()), source(other.get().unwrap())];
    assert_ne!(sources[0], sources[1]);
    for source in sources {
        let answer = answer((BACKENDS[0], PORT), source, TCP_SYN | TCP_ACK);
        assert_eq!(host.arriving(&answer, Origin::Outside).map(destination), Ok(CLIENT));
    }
}

#[rstest]
fn a_flow_is_established_whole_or_not_at_all(#[values(0, 1, 2)] room: u32) {
    let host = Host::new();
    through(&host, &syn(), Origin::Outside).unwrap();
    host.leaving(&answer((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    host.until_full.set(Some(room));
    let ack = packet(CLIENT, FRONTEND, TCP_ACK);
    assert_eq!(host.arriving(&ack, Origin::Outside).map(|r| r.destination), Ok(BACKENDS[0]));
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (3, 0));
    assert_eq!(host.counted(Reason::FlowsFull), 1);
    // It is tried again once a second, not at each packet.
    host.until_full.set(None);
    assert!(host.arriving(&ack, Origin::Outside).is_ok());
    assert_eq!(host.entries(Stage::Established), 0);
    host.wait(REFRESH_AFTER);
    assert!(host.arriving(&ack, Origin::Outside).is_ok());
    assert_eq!(host.entries(Stage::Established), 3);
    host.assert_whole();
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Client,
    Backend,
    Masquerade,
}

#[rstest]
fn every_entry_restores_the_others(#[values(Left::Client, Left::Backend, Left::Masquerade)] left: Left) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    let keys = [
        (Left::Client, flow.client_key()),
        (Left::Backend, flow.backend_key()),
        (Left::Masquerade, flow.masquerade_key()),
    ];
    for (_, key) in keys.iter().filter(|(of, _)| *of != left) {
        host.remove(Stage::Established, key);
        host.remove(Stage::Opening, key);
    }
    host.wait(REFRESH_AFTER);
    let translated = match left {
        Left::Client => host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Outside),
        Left::Backend => host.leaving(&answer((flow.backend, PORT), CLIENT, TCP_ACK)),
        Left::Masquerade => {
            let masquerade = (NODE, flow.masquerade_port());
            host.arriving(&answer((flow.backend, PORT), masquerade, TCP_ACK), Origin::Outside)
        }
    };
    assert!(translated.is_ok());
    for (_, key) in keys {
        let entry = host.flow(Stage::Established, &key).unwrap().read();
        assert!(entry.last_seen > flow.last_seen + REFRESH_AFTER);
        assert_eq!(entry.backend, flow.backend);
    }
    assert_eq!(host.counted(Reason::FlowRestored), 2);
}

#[test]
fn flows_keep_the_address_that_they_were_opened_with() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    host.masquerade.set([192, 0, 2, 2]);
    let answer = answer((flow.backend, PORT), (NODE, flow.masquerade_port()), TCP_ACK);
    assert_eq!(host.arriving(&answer, Origin::Outside).map(destination), Ok(CLIENT));
}

#[test]
fn entries_are_left_alone_within_a_second() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    host.wait(REFRESH_AFTER / 2);
    host.remove(Stage::Established, &flow.backend_key());
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!(host.entries(Stage::Established), 1);
    assert_eq!(host.counted(Reason::FlowRestored), 0);
}

/// The element that a lookup found is given to another flow before it is read, or while it is.
#[test]
fn an_element_that_has_become_another_flows_is_none_of_ours() {
    let host = Host::new();
    establish_one(&host, Origin::Workload);
    let other = packet((CLIENT.0, Port::new(40_001)), FRONTEND, TCP_SYN);
    host.arriving(&other, Origin::Workload).unwrap();
    let reused = host.flow_of(Stage::Opening, &other);
    host.flow(Stage::Established, &syn().key()).unwrap().change(|flow| *flow = reused);
    let late = host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload);
    assert_eq!(late, Err(Reason::NotAService));
}
