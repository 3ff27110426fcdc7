//! Ends sockets whose backend is gone. `connect` has sent them there, and what they send meets no
//! hook again. Their processes get ECONNABORTED, and connect anew.
//!
//! A socket is ended only if all of this holds:
//!
//! - Its storage says that it was sent to a backend.
//! - The maps say that this backend does not serve what was dialled.
//! - The socket is still connected to that backend. The kernel compares its cookie, which no other
//!   socket ever has.
//!
//! A thread of its own does this, so that no change waits for it. The storage of all sockets is
//! read at once, and only namespaces with a socket to end are entered. A locked-down kernel may
//! refuse that. Then storage is read in each namespace separately.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::sys::socket::AddressFamily;
use proxy_common::{
    family::{V4, V6},
    layout::SocketOrigin,
    select::Origin,
    socket,
};

use crate::{
    config::{Ebpf, SocketLoadBalancing},
    modes::ebpf::{
        Error,
        maps::{
            family::MapFamily,
            handles::{CommonMaps, FamilyMaps, pinned_map},
            lookups::Lookups,
            paths::Paths,
        },
    },
    sys::{
        CallError,
        bpf::{
            kernel_types::KernelTypes,
            socket_storage::{SocketIterators, StorageReader, StoredSocket},
        },
        net::{
            network_namespaces::{NetworkNamespace, mounted},
            socket_diag::{SocketDiag, Transport, lacks},
        },
    },
};

/// The number of passes after a change. A `connect` that has chosen its backend just before the
/// change is found by the second pass.
const PASSES: u32 = 2;
const SECOND_AFTER: Duration = Duration::from_secs(1);
/// The thread rests this many times as long as a pass has taken.
const REST: u32 = 4;

/// The numbers of sockets that were ended.
#[derive(Debug, Default)]
struct Ended {
    tcp: AtomicU64,
    udp: AtomicU64,
}

impl Ended {
    const fn of(&self, transport: Transport) -> &AtomicU64 {
        match transport {
            Transport::Tcp => &self.tcp,
            Transport::Udp => &self.udp,
        }
    }
}

/// The thread that ends stale sockets. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct StaleSockets {
    ended: Arc<Ended>,
    /// The number of times that larger maps have replaced the pinned ones.
    growths: Arc<AtomicU64>,
    /// The protocols whose sockets are ended.
    transports: BTreeSet<Transport>,
    /// The running thread. `None` if no socket is to be ended, or if the kernel cannot end any.
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    is_over: Arc<AtomicBool>,
    /// The channel to the thread. It is closed, and `None`, when the thread is to end.
    requests: Option<Sender<Transport>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.requests = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that ends sockets whose endpoint is gone has panicked");
        }
    }
}

impl StaleSockets {
    /// Returns a value that ends no sockets.
    pub(crate) fn none() -> Self {
        Self { ended: Arc::default(), growths: Arc::default(), transports: BTreeSet::new(), running: None }
    }

    /// Starts the thread, if this configuration and the kernel allow it. Must be called in the
    /// node's network namespace.
    pub(crate) fn begin(paths: &Paths, config: &Ebpf) -> Self {
        if config.sockets() == SocketLoadBalancing::Off {
            return Self::none();
        }
        let can_end = |transport: &Transport| {
            let why = match lacks(*transport) {
                Ok(None) => return true,
                Ok(Some(option)) => format!("the kernel lacks {option}"),
                Err(error) => error.to_string(),
            };
            tracing::warn!(?transport, reason = why, "connected sockets stay with endpoints that are gone");
            false
        };
        // TCP needs a setting, because its clients notice by themselves, and an endpoint that goes
        // may finish its work.
        let of_tcp = config.reset_connections_to_gone_endpoints.then_some(Transport::Tcp);
        let transports: BTreeSet<_> = [Transport::Udp].into_iter().chain(of_tcp).filter(can_end).collect();
        if transports.is_empty() {
            return Self::none();
        }
        Self::start(paths, config, transports).unwrap_or_else(|error| {
            tracing::warn!(%error, "connected sockets stay with endpoints that are gone");
            Self::none()
        })
    }

    fn start(paths: &Paths, config: &Ebpf, transports: BTreeSet<Transport>) -> Result<Self, Error> {
        let (ended, growths) = (Arc::new(Ended::default()), Arc::new(AtomicU64::new(0)));
        let is_over = Arc::new(AtomicBool::new(false));
        let types = KernelTypes::read()
            .map_err(|source| Error::Folder { path: "/sys/kernel/btf/vmlinux".into(), source })?;
        let own = |source| Error::Folder { path: "/proc/thread-self/ns/net".into(), source };
        let namespace = NetworkNamespace::own().map_err(own)?;
        let sweep = Sweep {
            storage: Storage::open(&types).map_err(Error::Sockets)?,
            inode: namespace.inode().map_err(own)?,
            folder: paths.maps(),
            is_everywhere: config.sockets() == SocketLoadBalancing::All,
            node: SocketDiag::open().map_err(Error::Sockets)?,
            namespace,
            ended: Arc::clone(&ended),
            growths: Arc::clone(&growths),
            is_over: Arc::clone(&is_over),
            problem: None,
        };
        let (requests, received) = channel();
        let thread = thread::Builder::new()
            .name("stale-sockets".to_owned())
            .spawn(move || sweep.run(&received))
            .map_err(|source| Error::Sockets(CallError::new("starting a thread", source)))?;
        let running = Running { is_over, requests: Some(requests), thread: Some(thread) };
        Ok(Self { ended, growths, transports, running: Some(running) })
    }

    /// Notes that maps have grown. Call this before anything is written to the larger maps.
    pub(crate) fn maps_have_grown(&self) {
        self.growths.fetch_add(1, Ordering::Release);
    }

    /// Asks for passes over the sockets of a protocol, because some may have lost their backend
    /// just now.
    pub(crate) fn end(&self, transport: Transport) {
        let requests = self.running.as_ref().and_then(|running| running.requests.as_ref());
        if let Some(requests) = requests
            && self.transports.contains(&transport)
            && requests.send(transport).is_err()
        {
            tracing::error!("the thread that ends sockets whose endpoint is gone has ended");
        }
    }

    /// Returns how many sockets were ended since the controller has started, by protocol.
    pub(crate) fn ended(&self) -> [(&'static str, u64); 2] {
        [("TCP", &self.ended.tcp), ("UDP", &self.ended.udp)]
            .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }
}

/// The readers of the origins of sockets.
enum Storage {
    AtOnce {
        v4: StorageReader<SocketOrigin<[u8; 4]>>,
        v6: StorageReader<SocketOrigin<[u8; 16]>>,
    },
    /// A reader for each network namespace separately.
    ByNamespace(SocketIterators),
}

impl Storage {
    fn open(types: &KernelTypes) -> Result<Self, CallError> {
        match StorageReader::load(types) {
            Ok(v4) => Ok(Self::AtOnce { v4, v6: StorageReader::load(types)? }),
            Err(error) if error.errno() == libc::EPERM => SocketIterators::open(types).map(Self::ByNamespace),
            Err(error) => Err(error),
        }
    }
}

/// The state of the thread.
struct Sweep {
    /// The folder of the pinned maps.
    folder: PathBuf,
    /// True if sockets are ended in all network namespaces, not only in the node's own.
    is_everywhere: bool,
    storage: Storage,
    /// The node's own namespace, its inode, and its sockets.
    namespace: NetworkNamespace,
    inode: u64,
    node: SocketDiag,
    ended: Arc<Ended>,
    growths: Arc<AtomicU64>,
    /// True if the thread is to end.
    is_over: Arc<AtomicBool>,
    /// The error of the last pass.
    problem: Option<String>,
}

impl Sweep {
    fn run(mut self, requests: &Receiver<Transport>) {
        let mut passes: BTreeMap<Transport, u32> = BTreeMap::new();
        let (mut next, mut rests_until) = (None::<Instant>, Instant::now());
        loop {
            let request = match next {
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => requests.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            match request {
                // All waiting requests are taken before the next pass.
                Ok(transport) => {
                    passes.insert(transport, PASSES);
                    let soonest = rests_until.max(Instant::now());
                    next = Some(next.map_or(soonest, |at| at.min(soonest)));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let began = Instant::now();
                    self.pass(&passes.keys().copied().collect::<Vec<_>>());
                    let rest = began.elapsed() * REST;
                    rests_until = Instant::now() + rest;
                    passes.retain(|_, left| {
                        *left -= 1;
                        *left > 0
                    });
                    next = (!passes.is_empty()).then(|| Instant::now() + SECOND_AFTER.max(rest));
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn pass(&mut self, transports: &[Transport]) {
        let problem = self.end_all(transports).err().map(|error| error.to_string());
        if problem != self.problem
            && let Some(problem) = &problem
        {
            tracing::warn!(problem, "some sockets may stay with endpoints that are gone");
        }
        self.problem = problem;
    }

    fn end_all(&self, transports: &[Transport]) -> Result<(), Error> {
        let Found { stale, unread } = self.stale(transports)?;
        let mut outcome = self.visit(&stale);
        if stale.values().flatten().any(|(_, cookie, _)| *cookie == 0) {
            // These sockets have got their cookies when their namespace was visited.
            outcome = self.visit(&self.stale(transports)?.stale);
        }
        outcome.and(unread)
    }

    fn stale(&self, transports: &[Transport]) -> Result<Found, Error> {
        loop {
            let growths = self.growths.load(Ordering::Acquire);
            let maps = OpenMaps::open(&self.folder)?;
            let find = Find { transports, node: self.inode, is_everywhere: self.is_everywhere };
            let found = match &self.storage {
                Storage::AtOnce { v4, v6 } => {
                    let mut stale = Stale::new();
                    find.add(&maps.v4, &maps.common, v4.read(maps.v4.origins.as_fd()), &mut stale)?;
                    find.add(&maps.v6, &maps.common, v6.read(maps.v6.origins.as_fd()), &mut stale)?;
                    Found { stale, unread: Ok(()) }
                }
                Storage::ByNamespace(iterators) => self.by_namespace(iterators, &find, &maps)?,
            };
            // If maps have grown meanwhile, the former ones lack what was written since.
            if self.growths.load(Ordering::Acquire) == growths {
                return Ok(found);
            }
        }
    }

    fn by_namespace(
        &self,
        iterators: &SocketIterators,
        find: &Find<'_>,
        maps: &OpenMaps,
    ) -> Result<Found, Error> {
        let v4 = iterators.storage(maps.v4.origins.as_fd(), find.transports).map_err(Error::Sockets)?;
        let v6 = iterators.storage(maps.v6.origins.as_fd(), find.transports).map_err(Error::Sockets)?;
        let mut stale = Stale::new();
        // A socket that cannot be read does not keep others from being ended.
        let mut read_here = || {
            let mut outcome = Ok(());
            for sockets in v4.read() {
                outcome = outcome.and(find.add(&maps.v4, &maps.common, sockets, &mut stale));
            }
            for sockets in v6.read() {
                outcome = outcome.and(find.add(&maps.v6, &maps.common, sockets, &mut stale));
            }
            outcome
        };
        let mut unread = read_here();
        let (mounts, seen) = mounts_if(self.is_everywhere);
        unread = unread.and(seen);
        for (inode, path) in mounts.iter().filter(|(inode, _)| **inode != self.inode) {
            if self.is_over.load(Ordering::Relaxed) {
                break;
            }
            match NetworkNamespace::open(path, *inode) {
                Ok(Some(namespace)) => unread = unread.and(self.within(&namespace, &mut read_here)),
                Ok(None) => {}
                Err(error) => unread = unread.and(Err(Error::Mounts(error))),
            }
        }
        Ok(Found { stale, unread })
    }

    /// Ends the sockets as far as possible. The error is that of the first namespace or socket
    /// where it is not.
    fn visit(&self, stale: &Stale) -> Result<(), Error> {
        let others = stale.keys().any(|inode| *inode != self.inode);
        let (mounts, mut outcome) = mounts_if(others);
        for (inode, sockets) in stale {
            let ended = if *inode == self.inode {
                self.end(&self.node, sockets)
            } else {
                self.end_elsewhere(*inode, mounts.get(inode), sockets)
            };
            outcome = outcome.and(ended);
        }
        outcome
    }

    fn end_elsewhere(&self, inode: u64, mount: Option<&PathBuf>, sockets: &StaleOfOne) -> Result<(), Error> {
        let namespace = mount.map(|path| NetworkNamespace::open(path, inode)).transpose();
        match namespace.map_err(Error::Mounts)?.flatten() {
            Some(namespace) => self.within(&namespace, || {
                let diag = SocketDiag::open().map_err(Error::Sockets)?;
                self.end(&diag, sockets)
            }),
            None => {
                tracing::debug!(
                    inode,
                    sockets = sockets.len(),
                    "a network namespace is not mounted in sight"
                );
                Err(Error::OutOfSight)
            }
        }
    }

    fn within(
        &self,
        namespace: &NetworkNamespace,
        act: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        namespace.enter().map_err(Error::OtherNamespaces)?;
        let outcome = act();
        // A namespace lives as long as a thread is in it.
        self.namespace.enter().map_err(Error::Sockets)?;
        outcome
    }

    fn end(&self, diag: &SocketDiag, stale: &StaleOfOne) -> Result<(), Error> {
        let transports: BTreeSet<Transport> = stale.iter().map(|(transport, ..)| *transport).collect();
        let mut outcome = Ok(());
        for transport in transports {
            for family in [AddressFamily::Inet, AddressFamily::Inet6] {
                outcome = outcome.and(self.end_of(diag, family, transport, stale));
            }
        }
        outcome.map_err(Error::Sockets)
    }

    fn end_of(
        &self,
        diag: &SocketDiag,
        family: AddressFamily,
        transport: Transport,
        stale: &StaleOfOne,
    ) -> Result<(), CallError> {
        let (mut ended, mut outcome) = (0, Ok(()));
        for socket in diag.connected(family, transport)? {
            let peer = SocketAddr::new(socket.peer.ip().to_canonical(), socket.peer.port());
            if !stale.contains(&(transport, socket.cookie, peer)) {
                continue;
            }
            match diag.destroy(&socket) {
                Ok(done) => ended += u64::from(done),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        self.ended.of(transport).fetch_add(ended, Ordering::Relaxed);
        tracing::debug!(ended, ?family, ?transport, "sockets whose endpoint is gone were ended");
        outcome
    }
}

/// Returns where the network namespaces are mounted, and why that cannot be known. They are not
/// looked for unless `wanted`.
fn mounts_if(wanted: bool) -> (BTreeMap<u64, PathBuf>, Result<(), Error>) {
    match if wanted { mounted() } else { Ok(BTreeMap::new()) } {
        Ok(mounts) => (mounts, Ok(())),
        Err(error) => (BTreeMap::new(), Err(Error::Mounts(error))),
    }
}

/// The protocol and cookie of each socket, and the backend that it is connected to. A socket of
/// both families may have been sent to one backend in each.
type StaleOfOne = HashSet<(Transport, u64, SocketAddr)>;
/// The stale sockets of each network namespace, by its inode.
type Stale = BTreeMap<u64, StaleOfOne>;

struct Found {
    stale: Stale,
    /// Why some network namespaces were not read.
    unread: Result<(), Error>,
}

/// The criteria for the sockets to find.
struct Find<'a> {
    transports: &'a [Transport],
    /// The inode of the node's own namespace.
    node: u64,
    is_everywhere: bool,
}

impl Find<'_> {
    fn add<F: MapFamily>(
        &self,
        of_family: &OfFamily<F>,
        services: &CommonMaps,
        sockets: Result<Vec<StoredSocket<SocketOrigin<F::Address>>>, CallError>,
        stale: &mut Stale,
    ) -> Result<(), Error> {
        let lookups = Lookups::new(services, &of_family.maps);
        for found in sockets.map_err(Error::Sockets)? {
            let StoredSocket { cookie, protocol, value: origin, .. } = found;
            let transport = u8::try_from(protocol).ok().and_then(Transport::from_number);
            let Some(transport) = transport.filter(|one| self.transports.contains(one)) else { continue };
            let namespace = u64::from(found.namespace);
            let client = if namespace == self.node { Origin::Host } else { Origin::Workload };
            if (self.is_everywhere || client == Origin::Host)
                && lookups.ask(|maps| socket::is_stale(maps, &origin, transport.number(), client))?
            {
                let backend = SocketAddr::new(F::ip(origin.backend), origin.backend_port().number());
                stale.entry(namespace).or_default().insert((transport, cookie, backend));
            }
        }
        Ok(())
    }
}

/// The maps as they are pinned now.
struct OpenMaps {
    common: CommonMaps,
    v4: OfFamily<V4>,
    v6: OfFamily<V6>,
}

impl OpenMaps {
    fn open(folder: &Path) -> Result<Self, Error> {
        let common = CommonMaps::open(folder, false)?;
        Ok(Self { common, v4: OfFamily::open(folder)?, v6: OfFamily::open(folder)? })
    }
}

struct OfFamily<F: MapFamily> {
    maps: FamilyMaps<F>,
    origins: OwnedFd,
}

impl<F: MapFamily> OfFamily<F> {
    fn open(folder: &Path) -> Result<Self, Error> {
        let origins = pinned_map(folder, F::SOCKET_ORIGIN)?;
        Ok(Self { maps: FamilyMaps::open(folder, false)?, origins })
    }
}

/// Says for people whose sockets are ended, without ending any. `may_load` is true if this process
/// may load programs. Otherwise, the kernel is not asked to load one.
pub(crate) fn reach(sockets: SocketLoadBalancing, may_enter: bool, may_load: bool) -> String {
    let in_sight = || -> io::Result<usize> {
        let own = NetworkNamespace::own()?.inode()?;
        Ok(mounted()?.keys().filter(|inode| **inode != own).count())
    };
    let refused = || {
        let types = KernelTypes::read().map_err(CallError::of("reading the kernel's types"));
        types.and_then(|types| Storage::open(&types)).err().map(|error| error.to_string())
    };
    let missing = match lacks(Transport::Udp) {
        _ if sockets == SocketLoadBalancing::Off => None,
        Ok(Some(option)) => Some(format!("the kernel lacks {option}")),
        Ok(None) => may_load.then(refused).flatten(),
        Err(error) => Some(error.to_string()),
    };
    match (sockets, missing) {
        (SocketLoadBalancing::Off, _) => "nobody: they are left alone".to_owned(),
        (_, Some(why)) => format!("nobody: {why}"),
        (SocketLoadBalancing::Host, None) => "the node".to_owned(),
        (SocketLoadBalancing::All, None) if !may_enter => {
            "the node; for pods CAP_SYS_ADMIN is missing".to_owned()
        }
        (SocketLoadBalancing::All, None) => match in_sight() {
            Ok(0) => "the node; no network namespace of a pod is mounted in sight".to_owned(),
            Ok(count) => format!("the node and {count} mounted network namespaces"),
            Err(error) => format!("the node; /proc/thread-self/mountinfo: {error}"),
        },
    }
}
