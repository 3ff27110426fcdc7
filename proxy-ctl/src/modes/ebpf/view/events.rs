//! Reads the events that the programs write while somebody watches. They are in the map `events`,
//! and `event_control` switches them on.
//!
//! They stop by themselves some seconds after they were asked for last, so that a watcher that is
//! killed leaves nothing on. A ring has one reader, so another watcher is refused.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, SystemTime},
};

use proxy_common::{
    event::EventKind,
    family::{Destination, V4, V6},
    inventory::map_name,
    layout::{EVENT_BYTES, EVENT_OF_SOCKET, Event, EventControl, NO_SERVICE},
    port::Port,
    reason::Reason,
};

use super::frontend_names::FrontendNames;
use crate::{
    model::desired::ServicePortName,
    modes::{
        self, EventQuery, EventSnapshot, EventStream,
        ebpf::{
            Error,
            maps::{
                family::MapFamily as _,
                handles::{CommonMaps, FamilyMaps, NamedMap, open_pinned},
                paths::Paths,
            },
            services::entries,
        },
    },
    sys::{
        bpf::{self, map::Ring},
        proc::{
            clock,
            lock::{self, Attempt, Lock},
        },
    },
};

/// Time for which the programs write events without being asked again.
const LASTS: Duration = Duration::from_secs(5);
/// Interval at which they are asked again.
const RENEWED_EVERY: Duration = Duration::from_secs(1);
/// Largest number of events that are returned at once. The ring never has more, because each of its
/// records has a header too.
const MOST: usize = EVENT_BYTES as usize / size_of::<Event>();

/// Service ports by id and by frontend, as found in one reading. They are not kept longer, because
/// an id is given to another service port when its own is gone.
struct ServiceNames<'a> {
    common: &'a CommonMaps,
    of_ids: HashMap<u32, Option<Arc<ServicePortName>>>,
    v4: FrontendNames<'a, V4>,
    v6: FrontendNames<'a, V6>,
}

impl<'a> ServiceNames<'a> {
    fn new(common: &'a CommonMaps, v4: &'a FamilyMaps<V4>, v6: &'a FamilyMaps<V6>) -> Self {
        Self {
            common,
            of_ids: HashMap::new(),
            v4: FrontendNames::new(common, v4),
            v6: FrontendNames::new(common, v6),
        }
    }

    fn of_event(
        &mut self,
        event: &Event,
        frontend: SocketAddr,
    ) -> Result<Option<Arc<ServicePortName>>, Error> {
        if event.service != NO_SERVICE {
            return self.of_id(event.service);
        }
        let (port, protocol) = (Port::new(frontend.port()), event.protocol);
        match frontend.ip() {
            IpAddr::V4(ip) => self.v4.of_frontend(Destination { address: ip.octets(), port, protocol }),
            IpAddr::V6(ip) => self.v6.of_frontend(Destination { address: ip.octets(), port, protocol }),
        }
    }

    fn of_id(&mut self, id: u32) -> Result<Option<Arc<ServicePortName>>, Error> {
        if let Some(known) = self.of_ids.get(&id) {
            return Ok(known.clone());
        }
        let name = self.common.names.get(&id)?.as_ref().and_then(entries::port_name).map(Arc::new);
        self.of_ids.insert(id, name.clone());
        Ok(name)
    }
}

pub(crate) struct Events {
    common: CommonMaps,
    v4: FamilyMaps<V4>,
    v6: FamilyMaps<V6>,
    paths: Paths,
    control: NamedMap<u32, EventControl>,
    ring: Ring<Event>,
    ring_id: u32,
    query: EventQuery,
    /// Time of the last renewal, in nanoseconds since boot.
    renewed: u64,
    lost_before: u64,
    _only_reader: Lock,
}

impl Events {
    /// Makes the programs write events.
    pub(crate) fn begin(paths: Paths, query: EventQuery) -> Result<Self, Error> {
        let folder = paths.maps();
        let common = CommonMaps::open(&folder, false)?;
        // The lock is on this folder, because the controller has the lock on its parent.
        let only_reader = match lock::try_lock(&paths.root) {
            Ok(Attempt::Held(lock)) => lock,
            Ok(Attempt::Taken(holder)) => return Err(Error::Watched(holder)),
            Err(source) => return Err(Error::Folder { path: paths.root.clone(), source }),
        };
        let control = NamedMap::open(&folder, map_name::event_control, None)?;
        let failed = |source| Error::Map { name: map_name::events, source };
        let fd = bpf::pinned(&folder.join(map_name::events)).map_err(failed)?;
        let ring_id = bpf::map_info(fd.as_fd()).map_err(failed)?.id;
        let mut ring = Ring::new(fd).map_err(failed)?;
        // Events that a former watcher has left unread are thrown away.
        while ring.take().is_some() {}
        let lost_before = common.counted(Reason::EventLost)?;
        let mut events = Self {
            common,
            v4: FamilyMaps::open(&folder, false)?,
            v6: FamilyMaps::open(&folder, false)?,
            paths,
            control,
            ring,
            ring_id,
            query,
            renewed: 0,
            lost_before,
            _only_reader: only_reader,
        };
        events.renew()?;
        Ok(events)
    }

    fn renew(&mut self) -> Result<(), Error> {
        let now = clock::since_boot();
        if self.renewed != 0 && now < clock::later(self.renewed, RENEWED_EVERY) {
            return Ok(());
        }
        let failed = |source| Error::Map { name: map_name::events, source };
        let pinned = open_pinned(&self.paths.maps().join(map_name::events)).map_err(failed)?;
        let id = pinned.map(|fd| bpf::map_info(fd.as_fd()).map(|info| info.id)).transpose();
        if id.map_err(failed)? != Some(self.ring_id) {
            return Err(Error::NoLongerWatched);
        }
        let until = clock::later(now, LASTS);
        let reasons = self.query.reasons.iter().copied();
        self.control.set(&0, &EventControl::new(until, reasons, self.query.one_of.into()))?;
        self.renewed = now;
        Ok(())
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl EventStream for Events {
    fn read(&mut self) -> Result<Vec<EventSnapshot>, modes::Error> {
        self.renew()?;
        let Self { common, v4, v6, ring, .. } = self;
        let (mut events, clocks, mut names) = (Vec::new(), Clocks::now(), ServiceNames::new(common, v4, v6));
        while events.len() < MOST
            && let Some(event) = ring.take()
        {
            let Some(shown) = snapshot(&event, &clocks) else { continue };
            let service = names.of_event(&event, shown.frontend)?;
            events.push(EventSnapshot { service, ..shown });
        }
        Ok(events)
    }

    fn lost(&self) -> Result<u64, modes::Error> {
        Ok(self.common.counted(Reason::EventLost)?.wrapping_sub(self.lost_before))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Err(error) = self.control.set(&0, &EventControl::default()) {
            tracing::debug!(%error, "events end by themselves in {LASTS:?}");
        }
    }
}

/// The times of both clocks at one moment.
struct Clocks {
    wall: SystemTime,
    /// The time in nanoseconds since boot.
    boot: u64,
}

impl Clocks {
    fn now() -> Self {
        Self { wall: SystemTime::now(), boot: clock::since_boot() }
    }

    fn wall(&self, boot: u64) -> SystemTime {
        match self.boot.checked_sub(boot) {
            Some(ago) => self.wall.checked_sub(Duration::from_nanos(ago)),
            None => self.wall.checked_add(Duration::from_nanos(boot.saturating_sub(self.boot))),
        }
        .unwrap_or(self.wall)
    }
}

/// Returns the event without its service port, or `None` if programs of another version have
/// written it.
fn snapshot(event: &Event, clocks: &Clocks) -> Option<EventSnapshot> {
    let reason = *Reason::ALL.iter().find(|reason| **reason as u32 == event.reason)?;
    let ip = |bytes: [u8; 16]| match (event.family, bytes) {
        (4, [a, b, c, d, ..]) => Some(V4::ip([a, b, c, d])),
        (6, bytes) => Some(V6::ip(bytes)),
        _ => None,
    };
    let end = |bytes, port| Some(SocketAddr::new(ip(bytes)?, port));
    let known = |end: Option<SocketAddr>| end.filter(|end| !end.ip().is_unspecified() || end.port() != 0);
    Some(EventSnapshot {
        time: clocks.wall(event.time),
        kind: EventKind::of(reason)?,
        reason,
        of_socket: event.hook == EVENT_OF_SOCKET,
        service: None,
        client: known(end(event.client, event.client_port)),
        frontend: end(event.frontend, event.frontend_port)?,
        backend: known(end(event.backend, event.backend_port)),
        protocol: entries::protocol(event.protocol)?,
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn refused() -> Event {
        let mut event = Event::new(20, Reason::NoEndpoints as u32);
        (event.frontend_port, event.protocol, event.family) = (80, 6, 4);
        event.frontend[..4].copy_from_slice(&[10, 96, 0, 1]);
        event
    }

    fn changed(change: impl FnOnce(&mut Event)) -> Event {
        let mut event = refused();
        change(&mut event);
        event
    }

    fn shown(event: &Event) -> Option<EventSnapshot> {
        snapshot(event, &Clocks { wall: SystemTime::UNIX_EPOCH + Duration::from_secs(100), boot: 50 })
    }

    #[test]
    fn a_refused_client() {
        let mut event = changed(|event| event.client_port = 40_000);
        event.client[..4].copy_from_slice(&[10, 1, 0, 1]);
        let shown = shown(&event).unwrap();
        assert_eq!((shown.kind, shown.reason), (EventKind::Refused, Reason::NoEndpoints));
        assert_eq!(shown.client.map(|end| end.to_string()).as_deref(), Some("10.1.0.1:40000"));
        assert_eq!((shown.frontend.to_string().as_str(), shown.backend), ("10.96.0.1:80", None));
        let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(100) - Duration::from_nanos(30);
        assert_eq!((shown.time, shown.of_socket), (moment, false));
    }

    #[test]
    fn a_socket_has_no_address_yet() {
        let event = changed(|event| event.hook = EVENT_OF_SOCKET);
        let shown = shown(&event).unwrap();
        assert_eq!((shown.client, shown.of_socket), (None, true));
    }

    #[rstest]
    #[case::of_another_version(changed(|event| event.reason = 63))]
    #[case::a_reason_without_events(changed(|event| event.reason = Reason::Malformed as u32))]
    #[case::no_family(changed(|event| event.family = 5))]
    #[case::no_protocol(changed(|event| event.protocol = 1))]
    fn what_no_program_makes_is_left_out(#[case] event: Event) {
        assert_eq!(shown(&event), None);
    }
}
