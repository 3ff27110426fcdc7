//! A pod has a connection to an endpoint that no map knows, and opens one to a Service from the
//! same port.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use lab::{namespace::ip, wait};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
    },
};
use proxy_common::{
    flow::Stage,
    layout::PROTOCOL_TCP,
    packet::{TCP_ACK, TCP_SYN},
};

use super::{Group, Scene, forwarding::forward::address, scene::*};
use crate::{
    wire::KnownAddress,
    world::{LOOPBACK, Maps},
};

pub(crate) fn cases<W: Maps + 'static>(group: &mut Group) {
    group.both::<W>("a pod's flow keeps away from a connection of its own to the endpoint", |s| {
        let _connected = serve_and_connect(s)?;
        s.world.put_pod_here(LOOPBACK)?;
        let first = s.first(CLIENT, CLUSTER_IP);
        let output = s.world.run("workload_ingress", &first.bytes::<W>())?;
        let alias = s.flow_of(Stage::Opening, CLIENT)?.alias_port().number();
        ensure!(alias != CLIENT.1, "it has the port that is taken");
        let inside = first.to(LOCAL).from((CLIENT.0, alias));
        ensure!(output.packet == inside.bytes::<W>(), "it does not reach the endpoint");
        // The answers of both connections must go where they belong.
        let own = s.answer(LOCAL, CLIENT, TCP_ACK);
        s.send("workload_egress", &own, Expect::Untouched)?;
        let answer = inside.answer(TCP_SYN | TCP_ACK);
        s.send("workload_egress", &answer, Expect::Becomes(&answer.from(CLUSTER_IP).to(CLIENT)))?;
        // The next packets must have the same port.
        let next = s.packet(CLIENT, CLUSTER_IP, TCP_ACK);
        s.send("workload_ingress", &next, Expect::Becomes(&next.to(LOCAL).from((CLIENT.0, alias))))
    });
    group.both::<W>("a pod's flow keeps a port that is not in use to the endpoint", |s| {
        let _connected = serve_and_connect(s)?;
        s.world.put_pod_here(LOOPBACK)?;
        s.opens("workload_ingress", (CLIENT.0, CLIENT.1 + 1), CLUSTER_IP, LOCAL)?;
        // A socket that listens talks to nobody, and this connection goes to another endpoint.
        s.opens("workload_ingress", LOCAL, (OTHER, 80), (LOCAL.0, LOCAL.1 + 1))?;
        s.frontend((OTHER, 81), 2, 0)?;
        s.opens("workload_ingress", CLIENT, (OTHER, 81), (LOCAL.0, LOCAL.1 + 1)).map(drop)
    });
    group.both::<W>("a pod whose namespace is not known keeps its port", |s| {
        let _connected = serve_and_connect(s)?;
        s.opens("workload_ingress", CLIENT, CLUSTER_IP, LOCAL).map(drop)
    });
}

const OTHER: KnownAddress = KnownAddress::OtherClusterIp;

/// Sockets and addresses that are removed when this is dropped.
struct Connected {
    sockets: Vec<OwnedFd>,
    addresses: Vec<String>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.sockets.clear();
        if let Err(error) =
            ip(None, &self.addresses.concat().replace("addr add", "addr del").replace(" nodad", ""))
        {
            eprintln!("{error:#}");
        }
    }
}

/// Connects the client to the local endpoint, from the port that its packets have.
fn serve_and_connect<W: Maps>(s: &mut Scene<W>) -> Result<Connected> {
    s.masquerade_as(KnownAddress::Node, MASQUERADE_PORTS)?;
    s.cluster_ip()?;
    s.service(2, &[(21, (LOCAL.0, LOCAL.1 + 1), true)])?;
    s.frontend((OTHER, 80), 2, 0)?;
    let ends = [CLIENT, LOCAL].map(|(of, port)| SocketAddr::new(address::<W>(of), port));
    let add = |end: &SocketAddr| match end.ip() {
        IpAddr::V4(address) => format!("addr add {address}/32 dev lo\n"),
        IpAddr::V6(address) => format!("addr add {address}/128 dev lo nodad\n"),
    };
    let addresses: Vec<String> = ends.iter().map(add).collect();
    ip(None, &format!("link set lo up\n{}", addresses.concat()))?;
    let mut connected = Connected { sockets: Vec::new(), addresses };
    let [client, server] = ends;
    if s.protocol == PROTOCOL_TCP {
        connected.sockets.push(TcpListener::bind(server).context("listening")?.into());
    } else {
        connected.sockets.push(UdpSocket::bind(server).context("binding")?.into());
    }
    let (kind, family) = (
        if s.protocol == PROTOCOL_TCP { SockType::Stream } else { SockType::Datagram },
        if client.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 },
    );
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    // The next case uses the same ends.
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    setsockopt(&socket, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(client)).context("binding the client")?;
    // The kernel adds the route to an IPv6 address a moment later.
    wait::until("a route to the endpoint", Duration::from_secs(60), || {
        match connect(socket.as_raw_fd(), &SockaddrStorage::from(server)) {
            Err(Errno::ENETUNREACH) => Err("there is none".to_owned()),
            connected => Ok(Some(connected)),
        }
    })?
    .context("connecting")?;
    connected.sockets.push(socket);
    Ok(connected)
}
