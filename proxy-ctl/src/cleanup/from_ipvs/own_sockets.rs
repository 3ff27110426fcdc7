//! Ends sockets of the node's own processes that mode ipvs has sent to its virtual servers, when a
//! mode takes over that translates in `connect`.
//!
//! An address of kube-ipvs0 is an address of the node. So it is also the source of what the node
//! sends to it. ip_vs forwards such a datagram with this source, and the rules that masqueraded it
//! are gone. No answer comes back, and with each datagram ip_vs keeps its connection for longer.
//!
//! An IPv6 address that kube-proxy has added can also be the source of what the node sends to a pod
//! whose interface has no address. The answer would go to a port of a ClusterIP that no Service
//! has.
//!
//! A process that gets an error connects anew.

use std::{collections::BTreeSet, net::IpAddr};

use nix::sys::socket::AddressFamily;

use crate::{
    cleanup::{Error, Removal},
    names,
    sys::{
        CallError,
        net::{
            link::{self, Address, AddressChange},
            socket_diag::{ConnectedSocket, SocketDiag, Transport, lacks},
        },
    },
};

/// Deprecates the IPv6 addresses of the device for as long as it exists. No socket that connects
/// from now on gets one of them as its source, unless it calls that address.
pub fn deprecate_addresses() -> Result<(), Error> {
    Ok(deprecate(&link::addresses_of(names::IPVS_DEVICE)?)?)
}

/// Ends the sockets. Must be called before the device is removed. TCP connections go on, because
/// conntrack masquerades them as before.
pub(crate) fn end(removed: &mut Removal) {
    let done = try_end();
    removed.pending.by_connect = done.is_err();
    removed.note(done);
}

fn try_end() -> Result<(), Error> {
    let Some(device) = link::index(names::IPVS_DEVICE)? else { return Ok(()) };
    let (of_device, others): (Vec<_>, Vec<_>) =
        link::addresses()?.into_iter().partition(|one| one.interface == device);
    if of_device.is_empty() {
        return Ok(());
    }
    let deprecated = deprecate(&of_device);
    end_sockets(&of_device, &others)?;
    Ok(deprecated?)
}

/// Ends the UDP sockets that get no answers from now on.
fn end_sockets(of_device: &[Address], others: &[Address]) -> Result<(), CallError> {
    if let Some(option) = lacks(Transport::Udp)? {
        tracing::warn!(
            option,
            "UDP sockets of the node that have an address of {} get no answers until they are connected anew: the \
             kernel cannot end them",
            names::IPVS_DEVICE
        );
        return Ok(());
    }
    let [of_device, others] =
        [of_device, others].map(|all| all.iter().map(|one| one.address).collect::<BTreeSet<IpAddr>>());
    let is_without_answers = |socket: &ConnectedSocket| {
        let [local, peer] = [socket.local, socket.peer].map(|end| end.ip().to_canonical());
        let is_source = local.is_ipv6() && !others.contains(&local);
        of_device.contains(&local) && (is_source || of_device.contains(&peer))
    };
    let diag = SocketDiag::open()?;
    let ended =
        [AddressFamily::Inet, AddressFamily::Inet6].map(|family| end_of(&diag, family, is_without_answers));
    let ended: u32 = ended.into_iter().sum::<Result<_, CallError>>()?;
    if ended > 0 {
        tracing::info!(
            ended,
            "UDP sockets of the node that mode ipvs served were ended, to be connected anew"
        );
    }
    Ok(())
}

fn deprecate(addresses: &[Address]) -> Result<(), CallError> {
    let sources: Vec<_> =
        addresses.iter().filter(|one| one.address.is_ipv6() && !one.is_deprecated).collect();
    let Some(first) = sources.first() else { return Ok(()) };
    let changes: Vec<_> = sources.iter().map(|one| AddressChange::Add(one.address)).collect();
    match link::change_addresses(first.interface, &changes)?.into_iter().next() {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Ends the sockets that satisfy `is_to_end`, and returns their number. An error is that of the
/// first socket that could not be ended; the other sockets are ended all the same.
fn end_of(
    diag: &SocketDiag,
    family: AddressFamily,
    is_to_end: impl Fn(&ConnectedSocket) -> bool,
) -> Result<u32, CallError> {
    let (mut ended, mut outcome) = (0, Ok(()));
    for socket in diag.connected(family, Transport::Udp)? {
        if is_to_end(&socket) {
            match diag.destroy(&socket) {
                Ok(done) => ended += u32::from(done),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
    }
    outcome.map(|()| ended)
}

#[cfg(test)]
mod tests {
    use std::{
        io::ErrorKind,
        net::{TcpListener, TcpStream, UdpSocket},
        process::Command,
    };

    use nix::sched::{CloneFlags, unshare};

    use crate::cleanup::PendingRemoval;

    fn ip(arguments: &str) {
        assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
    }

    /// Returns a socket that is connected to a server at the server's own address.
    fn connected(bind: &str, server: &UdpSocket) -> UdpSocket {
        let socket = UdpSocket::bind(bind).unwrap();
        socket.connect(server.local_addr().unwrap()).unwrap();
        socket
    }

    fn is_ended(socket: &UdpSocket) -> bool {
        socket.set_nonblocking(true).unwrap();
        let error = socket.recv(&mut [0]).unwrap_err().kind();
        assert!(matches!(error, ErrorKind::ConnectionAborted | ErrorKind::WouldBlock), "{error}");
        error == ErrorKind::ConnectionAborted
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_sockets_that_have_an_address_of_the_device_are_ended_and_no_others() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        // The test uses a bridge, because not every kernel has dummy devices.
        ip("link add kube-ipvs0 type bridge");
        ip("address add 10.96.0.1/32 dev kube-ipvs0");
        ip("address add fd00:10:96::1/128 dev kube-ipvs0 nodad");
        ip("link set lo up");
        ip("link set kube-ipvs0 up");
        ip("address add 192.0.2.10/32 dev lo");
        ip("address add 2001:db8::10/128 dev lo nodad");
        // This is an external IP that the node has itself.
        ip("address add 2001:db8::20/128 dev kube-ipvs0 nodad");
        ip("address add 2001:db8::20/128 dev lo nodad");
        let at = |address: &str| UdpSocket::bind((address, 53)).unwrap();
        ip("link add pod type bridge");
        ip("link set pod up");
        ip("route add fd00:10:244::/64 dev pod");
        let (service, service6) = (at("10.96.0.1"), at("fd00:10:96::1"));
        let (node, node6) = (at("192.0.2.10"), at("2001:db8::10"));
        let connected_to_pod = || {
            let socket = UdpSocket::bind("[::]:0").unwrap();
            socket.connect("[fd00:10:244::2]:53").unwrap();
            let source = socket.local_addr().unwrap().ip().to_string();
            (socket, source)
        };
        let (to_pod, source) = connected_to_pod();
        assert_eq!(source, "fd00:10:96::1");
        let of_services = [
            connected("0.0.0.0:0", &service),
            connected("[::]:0", &service6),
            connected("[::]:0", &service6),
        ];
        let mapped = UdpSocket::bind("[::]:0").unwrap();
        mapped.connect("[::ffff:10.96.0.1]:53").unwrap();
        let others = [
            connected("0.0.0.0:0", &node),
            connected("10.96.0.1:0", &node),
            connected("[2001:db8::20]:0", &node6),
            UdpSocket::bind("10.96.0.1:0").unwrap(),
        ];
        let listener = TcpListener::bind("10.96.0.1:80").unwrap();
        let connection = TcpStream::connect("10.96.0.1:80").unwrap();

        let remove = |pending: &PendingRemoval| {
            let removed = crate::cleanup::remove(crate::cleanup::Purpose::TakeOver, &[], pending);
            assert!(removed.problems.is_empty(), "{:?}", removed.problems);
            assert!(removed.pending.is_empty());
        };
        remove(&PendingRemoval::default());
        assert!(of_services.iter().all(|socket| !is_ended(socket)), "another mode masquerades them");
        remove(&PendingRemoval { by_connect: true, ..PendingRemoval::default() });
        assert!(of_services.iter().chain([&mapped, &to_pod]).all(is_ended));
        assert_ne!(connected_to_pod().1, "fd00:10:96::1");
        assert!(others.iter().chain([&service, &service6]).all(|socket| !is_ended(socket)));
        assert_eq!((connection.take_error().unwrap().is_none(), listener.accept().is_ok()), (true, true));
    }
}
