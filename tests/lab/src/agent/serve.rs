//! Servers: one that answers with its name and with what it sees, one that sends bytes back, and
//! one that takes many bytes.
//!
//! A request over TCP is a length (4 bytes, big endian) and as many bytes. The answer has the same
//! form, and holds a [`Seen`]. Over UDP, both are one datagram without length, and the answer is at
//! least as long as the request. If `GET ` stands instead of the length, it is an HTTP request,
//! because people look around in a lab with curl.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket},
    sync::Arc,
    thread,
    time::Duration,
};

use nix::sys::socket::{
    SockaddrIn, SockaddrIn6, getsockopt,
    sockopt::{Ip6tOriginalDst, OriginalDst},
};
use serde::{Deserialize, Serialize};

use super::socket::{self, reset_on_close};

/// Largest request that is accepted.
const MAX_REQUEST: usize = 1 << 20;
/// Number of threads of a byte server. It is larger than the number of connections that a bench
/// opens at once.
const BYTE_SERVERS: usize = 8;
/// Number of bytes that [`bulk`] answers with one byte.
pub const BULK: usize = 1 << 20;

/// Request as the server saw it.
#[derive(Debug, Deserialize, Serialize)]
pub struct Seen {
    pub by: String,
    pub source: SocketAddr,
    pub server: SocketAddr,
    pub original: Option<SocketAddr>,
    pub bytes: usize,
}

/// Listens on each address, and answers until the process ends.
pub fn describe(name: &str, addresses: &[SocketAddr]) -> io::Result<()> {
    for address in addresses {
        let listener = TcpListener::bind(address)?;
        let datagrams = UdpSocket::bind(address)?;
        let name: Arc<str> = name.into();
        let udp_name = Arc::clone(&name);
        thread::spawn(move || describe_streams(&name, &listener, true));
        let server = *address;
        thread::spawn(move || describe_datagrams(&udp_name, server, &datagrams));
    }
    Ok(())
}

/// Serves SCTP as [`describe`] serves TCP. Returns an error if the kernel has no SCTP.
pub fn describe_sctp(name: &str, addresses: &[SocketAddr]) -> io::Result<()> {
    for address in addresses {
        let listener = socket::listen_sctp(*address)?;
        let name: Arc<str> = name.into();
        thread::spawn(move || describe_streams(&name, &listener, false));
    }
    Ok(())
}

fn describe_streams(name: &Arc<str>, listener: &TcpListener, is_tcp: bool) {
    for stream in listener.incoming().flatten() {
        let name = Arc::clone(name);
        // The thread ends with its client.
        thread::spawn(move || describe_stream(&name, stream, is_tcp));
    }
}

fn describe_stream(name: &str, mut stream: TcpStream, is_tcp: bool) -> io::Result<()> {
    let (source, server) = (stream.peer_addr()?, stream.local_addr()?);
    let original = original_destination(&stream, server);
    if is_tcp {
        stream.set_nodelay(true)?;
    }
    loop {
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        if length == *b"GET " {
            let seen = Seen { by: name.into(), source, server, original, bytes: 0 };
            return answer_http(stream, &serde_json::to_string(&seen)?);
        }
        let request = read_rest(&mut stream, length)?;
        let seen = Seen { by: name.into(), source, server, original, bytes: request.len() };
        write_frame(&mut stream, &serde_json::to_vec(&seen)?)?;
    }
}

/// Returns the address that the client dialled before netfilter gave the connection to `server`.
/// The kernel knows it only from an entry of conntrack.
fn original_destination(stream: &TcpStream, server: SocketAddr) -> Option<SocketAddr> {
    Some(match server {
        SocketAddr::V4(_) => {
            SocketAddrV4::from(SockaddrIn::from(getsockopt(stream, OriginalDst).ok()?)).into()
        }
        SocketAddr::V6(_) => {
            SocketAddrV6::from(SockaddrIn6::from(getsockopt(stream, Ip6tOriginalDst).ok()?)).into()
        }
    })
}

fn answer_http(stream: TcpStream, body: &str) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while reader.read_line(&mut line)? > 0 && !line.trim().is_empty() {
        line.clear();
    }
    write!(
        reader.get_mut(),
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}\n",
        body.len() + 1
    )
}

fn describe_datagrams(name: &str, server: SocketAddr, socket: &UdpSocket) {
    let mut request = vec![0; usize::from(u16::MAX)];
    loop {
        // ECONNREFUSED comes from a client that is gone, and does not concern this server.
        let Ok((bytes, source)) = socket.recv_from(&mut request) else { continue };
        let seen = Seen { by: name.into(), source, server, original: None, bytes };
        let Ok(mut answer) = serde_json::to_vec(&seen) else { continue };
        answer.resize(answer.len().max(bytes), b' ');
        let _client_may_be_gone = socket.send_to(&answer, source);
    }
}

pub fn read_frame(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    read_rest(stream, length)
}

fn read_rest(stream: &mut TcpStream, length: [u8; 4]) -> io::Result<Vec<u8>> {
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_REQUEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "frame too long"));
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame)?;
    Ok(frame)
}

/// Writes length and frame at once, so that a small request is one packet.
pub fn write_frame(stream: &mut TcpStream, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "frame too long"))?;
    let mut bytes = Vec::with_capacity(4 + frame.len());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(frame);
    stream.write_all(&bytes)
}

/// Listens on each address, and sends back what each connection and each datagram brings.
pub fn bytes(addresses: &[SocketAddr]) -> io::Result<()> {
    accept(addresses, echo)?;
    for address in addresses {
        let datagrams = UdpSocket::bind(address)?;
        thread::spawn(move || {
            let mut datagram = [0; 64];
            loop {
                let Ok((length, source)) = datagrams.recv_from(&mut datagram) else { continue };
                let _client_may_be_gone = datagrams.send_to(&datagram[..length], source);
            }
        });
    }
    Ok(())
}

/// Listens on each address, and answers every [`BULK`] bytes of a connection with one byte.
pub fn bulk(addresses: &[SocketAddr]) -> io::Result<()> {
    accept(addresses, |stream| {
        let mut buffer = vec![0; BULK];
        while stream.read_exact(&mut buffer).is_ok() {
            stream.write_all(&[1])?;
        }
        Ok(())
    })
}

/// Longest silence of a client. A client whose end of the connection never comes, because the proxy
/// between is gone, must not keep the thread.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// Serves as many connections at a time as an address has threads.
fn accept(addresses: &[SocketAddr], serve: fn(&mut TcpStream) -> io::Result<()>) -> io::Result<()> {
    for address in addresses {
        let listener = Arc::new(TcpListener::bind(address)?);
        for _ in 0..BYTE_SERVERS {
            let listener = Arc::clone(&listener);
            thread::spawn(move || {
                for mut stream in listener.incoming().flatten() {
                    // The client counts the failures.
                    let _closed_early = stream
                        .set_read_timeout(Some(LONGEST_SILENCE))
                        .and_then(|()| serve(&mut stream))
                        .and_then(|()| reset_on_close(&stream));
                }
            });
        }
    }
    Ok(())
}

/// Sends bytes back until the client has closed. The side that closes first pays with TIME_WAIT.
fn echo(stream: &mut TcpStream) -> io::Result<()> {
    let mut bytes = [0; 64];
    while let Ok(length @ 1..) = stream.read(&mut bytes) {
        stream.write_all(&bytes[..length])?;
    }
    Ok(())
}
