//! Tests of the events about connections, as whoever watches gets them.

use std::time::{Duration, Instant, SystemTime};

use proxy_common::{event::EventKind, layout::EventControl, reason::Reason};
use proxy_ctl::{
    modes::{
        Dataplane as _, EventQuery, EventSnapshot, EventStream, Programmed as _,
        ebpf::{EbpfDataplane, cleanup::cleanup, view::status::Pinned},
    },
    sys::{bpf::map::Map, proc::clock},
};

use crate::{
    desired::{endpoint, port, shared},
    sandbox::{Sandbox, serve},
};

/// The longest wait for events. Only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(60);

fn watch(sandbox: &Sandbox) -> Result<Box<dyn EventStream>, String> {
    let query = EventQuery { reasons: Reason::ALL.to_vec(), one_of: 1 };
    let pinned = Pinned::open(&sandbox.config.bpffs).unwrap();
    pinned.watch(query).map(Option::unwrap).map_err(|error| error.to_string())
}

fn control(sandbox: &Sandbox) -> EventControl {
    let map: Map<u32, EventControl> = sandbox.map("event_control");
    map.get(&0).unwrap().unwrap()
}

/// Reads until there are `count` events.
fn read(events: &mut dyn EventStream, count: usize) -> Vec<EventSnapshot> {
    let (mut all, begun) = (Vec::new(), Instant::now());
    while all.len() < count && begun.elapsed() < PATIENCE {
        all.extend(events.read().unwrap());
    }
    all
}

/// Programs one Service with a backend, and one without.
fn programmed(sandbox: &Sandbox) -> EbpfDataplane {
    let mut dataplane = sandbox.open();
    let listening = serve("127.0.0.1", "backend");
    dataplane
        .resync(&shared([
            port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)]),
            port("empty", "10.96.0.2", Vec::new()),
        ]))
        .unwrap();
    dataplane
}

#[test]
fn sockets_that_are_connected_and_refused_are_told() {
    let Some(sandbox) = Sandbox::new() else { return };
    let dataplane = programmed(&sandbox);
    sandbox.dial("10.96.0.1", 80).unwrap();
    let begun = SystemTime::now();
    let mut events = watch(&sandbox).unwrap();
    sandbox.dial("10.96.0.1", 80).unwrap();
    sandbox.dial("10.96.0.2", 80).unwrap_err();
    let told = read(&mut *events, 2);
    let [connected, refused] = told.as_slice() else { panic!("{told:?}") };
    let name = |event: &EventSnapshot| event.service.as_ref().map(ToString::to_string);
    assert_eq!((connected.kind, connected.reason), (EventKind::Connected, Reason::SocketConnected));
    assert_eq!((refused.kind, refused.reason), (EventKind::Refused, Reason::NoEndpoints));
    assert_eq!(name(connected).as_deref(), Some("test/web:http"));
    assert_eq!(name(refused).as_deref(), Some("test/empty:http"));
    assert_eq!((connected.frontend.to_string().as_str(), connected.client), ("10.96.0.1:80", None));
    assert_eq!(connected.backend.unwrap().ip(), std::net::Ipv4Addr::LOCALHOST);
    assert_eq!((refused.frontend.to_string().as_str(), refused.backend), ("10.96.0.2:80", None));
    for event in &told {
        assert!(event.of_socket && event.time + Duration::from_secs(1) >= begun, "{event:?}");
        assert!(event.time <= SystemTime::now() + Duration::from_secs(1), "{event:?}");
    }
    assert_eq!(events.lost().unwrap(), 0);

    // A following controller keeps the ring.
    drop(dataplane);
    let _next = sandbox.open();
    // The restart took longer than the programs go on sending events when nobody asks for them.
    assert!(events.read().unwrap().is_empty());
    sandbox.dial("10.96.0.1", 80).unwrap();
    assert_eq!(read(&mut *events, 1).len(), 1);
}

#[test]
fn events_end_with_who_watches() {
    let Some(sandbox) = Sandbox::new() else { return };
    let _dataplane = programmed(&sandbox);
    let mut events = watch(&sandbox).unwrap();
    let first = control(&sandbox).until;
    let left = Duration::from_nanos(first.saturating_sub(clock::since_boot()));
    assert!(left <= Duration::from_secs(5) && !left.is_zero(), "where nobody renews it: {left:?}");
    let begun = Instant::now();
    while control(&sandbox).until == first && begun.elapsed() < PATIENCE {
        events.read().unwrap();
    }
    assert!(control(&sandbox).until > first, "it is renewed while events are read");
    // Events can be watched in spite of the controller's lock on the folder above.
    let refusal = watch(&sandbox).err().unwrap();
    let process = format!("process {} watches already", std::process::id());
    assert!(refusal.contains(&process), "{refusal}");
    sandbox.dial("10.96.0.1", 80).unwrap();
    drop(events);
    assert_eq!(control(&sandbox), EventControl::default());
    let mut next = watch(&sandbox).unwrap();
    assert!(next.read().unwrap().is_empty(), "what was not read is of no use to the next");
    sandbox.dial("10.96.0.1", 80).unwrap();
    assert_eq!(read(&mut *next, 1).len(), 1);
}

#[test]
fn who_watches_learns_that_the_maps_are_gone() {
    let Some(sandbox) = Sandbox::new() else { return };
    drop(programmed(&sandbox));
    let mut events = watch(&sandbox).unwrap();
    cleanup(&sandbox.config.bpffs).unwrap();
    let begun = Instant::now();
    let error = loop {
        match events.read() {
            Err(error) => break error.to_string(),
            Ok(_) => assert!(begun.elapsed() < PATIENCE, "nothing is told"),
        }
    };
    assert!(error.contains("removed or replaced"), "{error}");
}
