//! The objects of mode ipvs: virtual servers, the sets that its rules use, and the device that has
//! the addresses.
//!
//! A running kube-proxy in mode ipvs removes all virtual servers but its own and those in
//! ipvs.excludeCIDRs. After it has ended, other programs may add theirs. The device kube-ipvs0
//! shows that kube-proxy was in mode ipvs, so it is removed last.

use ipnet::IpNet;

use super::{
    Error, Found, Part, PartKind, Purpose, Removal, Retained, Selection,
    from_ipvs::owner::{Addresses, Owner},
    let_go::LettingGo,
};
use crate::{
    names,
    sys::{
        CallError,
        net::{
            ipset::{Destroyed, IpSets},
            ipvs::{Destination, Ipvs, ServerChange, VirtualSocket},
            link,
        },
    },
};

const SERVERS: &str = "ipvs";
const SETS: &str = "ipset";

/// Returns the virtual servers that are kube-proxy's or this proxy's, judged by their addresses and
/// by sets.
fn of_kube_proxy(ipvs: &Ipvs, addresses: &Addresses, keeps: &[IpNet]) -> Result<Vec<VirtualSocket>, Error> {
    let mut own = sockets(ipvs)?;
    own.retain(|socket| addresses.owner(*socket, keeps) == Owner::KubeProxy);
    Ok(own)
}

fn sockets(ipvs: &Ipvs) -> Result<Vec<VirtualSocket>, Error> {
    Ok(ipvs.servers()?.into_iter().map(|server| server.socket).collect())
}

pub(super) fn find(keeps: &[IpNet], found: &mut Found) {
    let servers = find_servers(keeps);
    found.note(servers);
    let sets = find_sets();
    found.note(sets);
}

fn find_servers(keeps: &[IpNet]) -> Result<Vec<Part>, Error> {
    let Some(addresses) = Addresses::read()? else { return Ok(Vec::new()) };
    let mut parts = vec![Part::new(names::IPVS_DEVICE.into(), PartKind::Devices, 1)];
    if let Some(ipvs) = Ipvs::open()? {
        let own = of_kube_proxy(&ipvs, &addresses, keeps)?.len();
        parts.extend((own > 0).then(|| Part::new(SERVERS.into(), PartKind::VirtualServers, own)));
    }
    Ok(parts)
}

fn find_sets() -> Result<Vec<Part>, Error> {
    let Some(sets) = IpSets::open()? else { return Ok(Vec::new()) };
    let own = sets.names()?.iter().filter(|name| names::is_ip_set(name)).count();
    Ok((own > 0).then(|| Part::new(SETS.into(), PartKind::IpSets, own)).into_iter().collect())
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PendingServer {
    socket: VirtualSocket,
    /// True if the server takes no new connections.
    quiesced: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Remove,
    Quiesce,
    /// The server is left alone. It had been drained, and another program has since let a
    /// destination take new connections again.
    Leave,
}

/// Decides what to do with a virtual server. On [`Purpose::TakeOver`] it takes no new connections,
/// and is removed once it has none. It is removed at once if it is `needless`.
fn step(purpose: Purpose, quiesced: bool, needless: bool, destinations: &[Destination]) -> Step {
    let used = destinations.iter().any(|destination| destination.is_used);
    let known = destinations.iter().any(|destination| destination.connections > 0);
    match purpose {
        Purpose::Cleanup => Step::Remove,
        Purpose::TakeOver if quiesced && used => Step::Leave,
        Purpose::TakeOver if known && !needless => Step::Quiesce,
        Purpose::TakeOver => Step::Remove,
    }
}

/// Removes or quiesces virtual servers. `by_connect` is the same as for
/// [`super::PendingRemoval::before`].
///
/// The programs of a mode that translates in `connect` get datagrams before ip_vs, so UDP servers
/// are removed at once. Otherwise ip_vs would still translate answers of its former connections. A
/// client that uses its port again, for another Service with the same endpoint, would then lose its
/// answers.
///
/// The connections go with the server if `net/ipv4/vs/expire_nodest_conn` is set (Linux 5.9).
pub(super) fn remove_servers(
    purpose: Purpose,
    keeps: &[IpNet],
    by_connect: bool,
    scope: &Selection<PendingServer>,
    removed: &mut Removal,
) {
    if let Err(error) = try_remove_servers(purpose, keeps, by_connect, scope, removed) {
        removed.pending.servers = scope.clone();
        removed.note(Err(error));
    }
}

/// Does the work of [`remove_servers`]. After an error, nothing was tried.
fn try_remove_servers(
    purpose: Purpose,
    keeps: &[IpNet],
    by_connect: bool,
    scope: &Selection<PendingServer>,
    removed: &mut Removal,
) -> Result<(), Error> {
    if scope.is_empty() {
        return Ok(());
    }
    let Some(addresses) = Addresses::read()? else { return Ok(()) };
    let Some(ipvs) = Ipvs::open()? else { return Ok(()) };
    let wanted = match scope {
        Selection::Only(remaining) => remaining.clone(),
        Selection::All => wanted(purpose, keeps, &addresses, sockets(&ipvs)?, removed),
    };
    let (mut count, mut left) = (0, Vec::new());
    for mut remaining in wanted {
        match remove_server(purpose, &ipvs, by_connect, &remaining) {
            Ok(Step::Remove) => count += 1,
            Ok(Step::Quiesce) => {
                remaining.quiesced = true;
                removed.waiting += 1;
                left.push(remaining);
            }
            Ok(Step::Leave) => {
                let why = "another program sends it new connections again";
                removed.retained.push(retained(remaining.socket, why));
            }
            Err(error) => {
                left.push(remaining);
                removed.note(Err(error));
            }
        }
    }
    removed.part(SERVERS.into(), PartKind::VirtualServers, count);
    removed.pending.servers = Selection::Only(left);
    Ok(())
}

/// Returns the virtual servers to remove. Those of unknown origin that stay are added to
/// `removed.retained`.
fn wanted(
    purpose: Purpose,
    keeps: &[IpNet],
    addresses: &Addresses,
    sockets: Vec<VirtualSocket>,
    removed: &mut Removal,
) -> Vec<PendingServer> {
    let mut wanted = Vec::new();
    for socket in sockets {
        match (addresses.owner(socket, keeps), purpose) {
            (Owner::KubeProxy, _) | (Owner::Unknown, Purpose::Cleanup) => {
                wanted.push(PendingServer { socket, quiesced: false });
            }
            (Owner::Unknown, Purpose::TakeOver) => {
                let why = "another program may have made it: it is neither for an address of kube-ipvs0 nor a node port, nor in one \
                     of kube-proxy's sets";
                removed.retained.push(retained(socket, why));
            }
            (Owner::Other, _) => {}
        }
    }
    wanted
}

/// Returns the virtual servers of [`of_kube_proxy`] as a selection to remove.
pub(super) fn known_servers(keeps: &[IpNet]) -> Result<Selection<PendingServer>, Error> {
    let (Some(addresses), Some(ipvs)) = (Addresses::read()?, Ipvs::open()?) else {
        return Ok(Selection::default());
    };
    let own = of_kube_proxy(&ipvs, &addresses, keeps)?.into_iter();
    Ok(Selection::Only(own.map(|socket| PendingServer { socket, quiesced: false }).collect()))
}

fn retained(socket: VirtualSocket, why: &str) -> Retained {
    Retained::new(SERVERS.into(), socket.to_string(), why.to_owned())
}

fn remove_server(
    purpose: Purpose,
    ipvs: &Ipvs,
    by_connect: bool,
    remaining: &PendingServer,
) -> Result<Step, Error> {
    let socket = remaining.socket;
    let destinations = match purpose {
        Purpose::Cleanup => Vec::new(),
        Purpose::TakeOver => ipvs.destinations(socket)?,
    };
    let needless = by_connect && i32::from(socket.protocol) == libc::IPPROTO_UDP;
    let step = step(purpose, remaining.quiesced, needless, &destinations);
    let used = destinations.iter().filter(|destination| destination.is_used);
    let changes = match step {
        Step::Remove => vec![ServerChange::Remove(socket)],
        Step::Quiesce => used.map(|one| ServerChange::UseDestination(socket, one.address, false)).collect(),
        Step::Leave => Vec::new(),
    };
    let is_gone = |error: &CallError| matches!(error.errno(), libc::ESRCH | libc::ENOENT);
    match ipvs.write(&changes)?.into_iter().find(|(_, error)| !is_gone(error)) {
        Some((_, error)) => Err(error.into()),
        None => Ok(step),
    }
}

/// Removes the sets. Must be called after the rules that use them are removed.
pub(super) fn remove_sets(scope: &Selection<String>, removed: &mut Removal) {
    if removed.pending.servers == Selection::All {
        // The sets show who owns the virtual servers, which could not be removed yet.
        removed.pending.sets = scope.clone();
        return;
    }
    if let Err(error) = try_remove_sets(scope, removed) {
        removed.pending.sets = scope.clone();
        removed.note(Err(error));
    }
}

/// Does the work of [`remove_sets`]. After an error, nothing was tried.
fn try_remove_sets(scope: &Selection<String>, removed: &mut Removal) -> Result<(), Error> {
    if scope.is_empty() {
        return Ok(());
    }
    let Some(sets) = IpSets::open()? else { return Ok(()) };
    let mut there = sets.names()?;
    there.retain(|name| match scope {
        Selection::All => names::is_ip_set(name),
        Selection::Only(names) => names.contains(name),
    });
    let (mut count, mut left) = (0, Vec::new());
    let letting_go = LettingGo::begin();
    for name in there {
        match letting_go.wait(Destroyed::InUse, || sets.destroy(&name)) {
            Ok(Destroyed::Done) => count += 1,
            // A rule that could not be removed yet uses the set.
            Ok(Destroyed::InUse) if removed.pending.has_rules() => left.push(name),
            Ok(Destroyed::InUse) => {
                removed.retained.push(Retained::new(
                    SETS.into(),
                    name,
                    "a rule or another set uses it".into(),
                ));
            }
            Err(error) => {
                left.push(name);
                removed.note(Err(error.into()));
            }
        }
    }
    removed.part(SETS.into(), PartKind::IpSets, count);
    removed.pending.sets = Selection::Only(left);
    Ok(())
}

/// Removes the device. Must be called after the virtual servers are removed. The device stays if a
/// running kube-proxy has added new servers. It also stays while servers have connections, or while
/// sockets with its addresses are still to be ended.
pub(super) fn remove_device(keeps: &[IpNet], removed: &mut Removal) {
    if !removed.pending.servers.is_empty() || removed.pending.by_connect {
        removed.pending.device = true;
        return;
    }
    let done = try_remove_device(keeps, removed);
    removed.pending.device = done.is_err();
    removed.note(done);
}

fn try_remove_device(keeps: &[IpNet], removed: &mut Removal) -> Result<(), Error> {
    let Some(addresses) = Addresses::read()? else { return Ok(()) };
    if let Some(ipvs) = Ipvs::open()?
        && !of_kube_proxy(&ipvs, &addresses, keeps)?.is_empty()
    {
        return Ok(());
    }
    link::delete(names::IPVS_DEVICE)?;
    removed.part(names::IPVS_DEVICE.into(), PartKind::Devices, 1);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
        process::Command,
        thread,
        time::{Duration, Instant},
    };

    use rstest::rstest;

    use super::{
        super::{
            PendingRemoval,
            from_ipvs::owner::tests::{tcp, write},
        },
        *,
    };
    use crate::{
        model::mode::Mode,
        sys::net::{
            ipset::{Member, SetKind},
            ipvs::tests::{forgotten, of_own_namespace, serve},
            namespace_lock::NamespaceLock,
        },
    };

    const IDLE: Destination = destination(true, 0);
    const BUSY: Destination = destination(true, 3);
    const DRAINING: Destination = destination(false, 1);

    const fn destination(is_used: bool, connections: u32) -> Destination {
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        Destination { address, is_used, connections }
    }

    #[rstest]
    #[case::idle(false, false, &[IDLE], Step::Remove)]
    #[case::without_real_servers(false, false, &[], Step::Remove)]
    #[case::one_has_connections(false, false, &[IDLE, BUSY], Step::Quiesce)]
    #[case::connections_need_it_no_longer(false, true, &[IDLE, BUSY], Step::Remove)]
    #[case::kube_proxy_was_draining_it(false, false, &[DRAINING], Step::Quiesce)]
    #[case::connections_last(true, false, &[DRAINING], Step::Quiesce)]
    #[case::connections_have_ended(true, false, &[destination(false, 0)], Step::Remove)]
    #[case::in_service_again(true, false, &[DRAINING, IDLE], Step::Leave)]
    fn steps(
        #[case] quiesced: bool,
        #[case] needless: bool,
        #[case] destinations: &[Destination],
        #[case] expected: Step,
    ) {
        assert_eq!(step(Purpose::TakeOver, quiesced, needless, destinations), expected);
        assert_eq!(step(Purpose::Cleanup, quiesced, needless, destinations), Step::Remove);
    }

    fn ip(arguments: &str) -> bool {
        Command::new("ip").args(arguments.split(' ')).status().unwrap().success()
    }

    fn kept_names(kept: &[Retained]) -> Vec<&str> {
        let mut names: Vec<_> = kept.iter().map(|kept| kept.name.as_str()).collect();
        names.sort_unstable();
        names
    }

    fn listed(ipvs: &Ipvs) -> Vec<String> {
        let mut sockets: Vec<_> = sockets(ipvs).unwrap().iter().map(VirtualSocket::to_string).collect();
        sockets.sort_unstable();
        sockets
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_virtual_servers_go_when_they_can_and_those_of_others_stay() {
        let Some(ipvs) = of_own_namespace() else { return };
        if !ip("link add kube-ipvs0 type dummy") {
            println!("skipped: the kernel has no dummy devices (CONFIG_DUMMY)");
            return;
        }
        assert!(ip("link set lo up") && ip("address add 192.0.2.10/32 dev lo"));
        for address in ["10.96.0.1/32", "10.96.0.2/32", "fd00:10:96::1/128"] {
            assert!(ip(&format!("address add {address} dev kube-ipvs0")));
        }
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let real = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        let of_ipv6: [SocketAddr; 1] = ["[fd00::1]:80".parse().unwrap()];
        serve(&ipvs, "10.96.0.1:80", &real);
        serve(&ipvs, "10.96.0.2:80", &real);
        serve(&ipvs, "[fd00:10:96::1]:80", &of_ipv6);
        serve(&ipvs, "192.0.2.10:30080", &real);
        let sets = IpSets::load().unwrap().unwrap();
        serve(&ipvs, "192.0.2.10:81", &real);
        write(&sets, "KUBE-EXTERNAL-IP", SetKind::Sockets, true, Member::Socket(tcp("192.0.2.10:81")));
        let theirs = ["192.0.2.10:80/TCP", "198.51.100.1:30080/TCP"];
        serve(&ipvs, "192.0.2.10:80", &real);
        serve(&ipvs, "198.51.100.1:30080", &real);
        let excluded = "203.0.113.1:80/TCP";
        serve(&ipvs, "203.0.113.1:80", &real);
        let keeps = ["203.0.113.0/24".parse().unwrap()];

        let mut found = Found::default();
        find(&keeps, &mut found);
        let parts: Vec<_> = found.parts.iter().map(Part::to_string).collect();
        assert_eq!(parts, ["1 device in kube-ipvs0", "5 virtual servers in ipvs", "1 set in ipset"]);

        let client =
            TcpStream::connect_timeout(&([10, 96, 0, 1], 80).into(), Duration::from_secs(2)).unwrap();
        let remove = |purpose, pending: &PendingRemoval| {
            // A child that another test has just forked holds the mode's name from the former
            // removal until exec. While anybody holds it, virtual servers of that mode are left
            // alone.
            let limit = Instant::now() + Duration::from_mins(1);
            while NamespaceLock::is_held(Mode::Ipvs.name()) {
                assert!(Instant::now() < limit, "the name of mode ipvs is held");
                thread::yield_now();
            }
            let removed = super::super::remove(purpose, &keeps, pending);
            assert!(removed.problems.is_empty(), "{:?}", removed.problems);
            removed
        };
        let everything =
            PendingRemoval { nft: Vec::new(), legacy: Vec::new(), ..PendingRemoval::everything() };
        let removed = remove(Purpose::TakeOver, &everything);
        assert_eq!((removed.waiting, removed.parts[0].count), (1, 4));
        assert_eq!(kept_names(&removed.retained), theirs);
        let left = ["10.96.0.1:80/TCP", theirs[0], theirs[1], excluded];
        assert_eq!(listed(&ipvs), left);
        let waiting = tcp("10.96.0.1:80");
        let destinations = ipvs.destinations(waiting).unwrap();
        assert!(destinations.len() == 2 && destinations.iter().all(|one| !one.is_used), "{destinations:?}");

        // A running kube-proxy writes the server again.
        serve(&ipvs, "10.96.0.2:80", &real);
        let removed = remove(Purpose::TakeOver, &removed.pending);
        assert_eq!((removed.waiting, removed.parts.len(), removed.retained.len()), (1, 0, 0));
        drop((client, listeners));
        forgotten(&ipvs, waiting);
        let removed = remove(Purpose::TakeOver, &removed.pending);
        assert_eq!((removed.waiting, removed.pending.is_empty()), (0, true));
        assert_eq!(listed(&ipvs), ["10.96.0.2:80/TCP", theirs[0], theirs[1], excluded]);
        assert!(link::index(names::IPVS_DEVICE).unwrap().is_some());

        let removed = remove(Purpose::TakeOver, &everything);
        assert_eq!(listed(&ipvs), [theirs[0], theirs[1], excluded]);
        assert_eq!(kept_names(&removed.retained), theirs);
        assert!(removed.pending.is_empty());
        assert_eq!(link::index(names::IPVS_DEVICE).unwrap(), None);
        // Without the device, no virtual server is taken for kube-proxy's.
        assert_eq!(remove(Purpose::Cleanup, &everything).parts, []);
        assert!(ip("link add kube-ipvs0 type dummy"));
        assert_eq!(remove(Purpose::Cleanup, &everything).parts[0].count, 2);
        assert_eq!(listed(&ipvs), [excluded]);
    }
}
