//! Corrects answers of endpoints to clients that have called them directly, while ip_vs remembers
//! connections of former clients.
//!
//! If a mode takes over that translates in `connect`, clients call endpoints. The kernel may give
//! such a call a source port that a former connection to the same endpoint had through a virtual
//! server. ip_vs remembers that connection for two minutes after its end. It gives the endpoint's
//! answers the address of the virtual server, which the client has not called.
//!
//! conntrack knows which address the client has called. A rule gives TCP answers that address as
//! their source, and changes nothing else. It leaves alone answers that netfilter has translated.
//! All other answers have that address already, also those of connections that ip_vs serves, whose
//! clients have called the virtual server.

use crate::{
    cleanup::Error,
    names::ANSWERS_TABLE as TABLE,
    sys::nftables::{
        BaseChain, Batch, ChainType, Comparison, Conntrack, DESTINATION_TRANSLATED, Expression, Header, Meta,
        NetfilterHook, NfTables, REPLY, Register, TableFamily,
    },
};

const COMMENT: &str =
    "answers come from whom their clients have called, until ip_vs has forgotten its connections";
/// The priority behind that of ip_vs, which translates answers at priorities up to 100.
const PRIORITY: i32 = 150;
const HOOKS: [(NetfilterHook, &str); 2] =
    [(NetfilterHook::Input, "input"), (NetfilterHook::Postrouting, "postrouting")];

/// Makes the tables that do not exist yet.
pub(crate) fn restore_sources() -> Result<(), Error> {
    change(NfTables::load()?, true)
}

/// Removes the tables.
pub(crate) fn leave_sources() -> Result<(), Error> {
    change(NfTables::open()?, false)
}

fn change(nftables: Option<NfTables>, are_wanted: bool) -> Result<(), Error> {
    let Some(nftables) = nftables else { return Ok(()) };
    let mut batch = Batch::default();
    for family in TableFamily::ALL {
        let is_there = nftables.tables(family)?.iter().any(|table| table == TABLE);
        match (is_there, are_wanted) {
            (false, true) => make_table(&mut batch, family),
            (true, false) => batch.delete_table(family, TABLE),
            (true, true) | (false, false) => {}
        }
    }
    if batch.is_empty() {
        return Ok(());
    }
    nftables.commit(batch)?.first().map_or(Ok(()), |refused| Err(Error::refused(refused.errno)))
}

fn make_table(batch: &mut Batch, family: TableFamily) {
    batch.add_table(family, TABLE, COMMENT);
    let rule = rule(family);
    for (hook, chain) in HOOKS {
        let base = BaseChain { kind: ChainType::Filter, hook, priority: PRIORITY };
        batch.add_chain(family, TABLE, chain, Some(base));
        batch.add_rule(family, TABLE, chain, &rule, &[]);
    }
}

fn rule(family: TableFamily) -> Vec<Expression> {
    // The header of IPv6 has no checksum.
    let (source, length, checksum) = match family {
        TableFamily::Ipv4 => (12, 4, Some(10)),
        TableFamily::Ipv6 => (8, 16, None),
    };
    const SOURCE_PORT: u32 = 0;
    const CHECKSUM_OF_TCP: u32 = 16;
    let register = Register::new(0);
    let equals =
        |value: &[u8]| Expression::Compare { register, comparison: Comparison::Equal, value: value.to_vec() };
    let translated = DESTINATION_TRANSLATED.to_ne_bytes().to_vec();
    vec![
        Expression::Meta { key: Meta::Protocol, to: register },
        equals(&[libc::IPPROTO_TCP as u8]),
        Expression::Conntrack { key: Conntrack::Direction, to: register },
        equals(&[REPLY]),
        Expression::Conntrack { key: Conntrack::Status, to: register },
        Expression::Bitwise { register, mask: translated, xor: vec![0; 4] },
        equals(&[0; 4]),
        Expression::Conntrack { key: Conntrack::CalledAddress, to: register },
        Expression::SetPayload { header: Header::Network, offset: source, length, checksum, from: register },
        Expression::Conntrack { key: Conntrack::CalledPort, to: register },
        Expression::SetPayload {
            header: Header::Transport,
            offset: SOURCE_PORT,
            length: 2,
            checksum: Some(CHECKSUM_OF_TCP),
            from: register,
        },
    ]
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read as _, Write as _},
        net::{SocketAddr, TcpListener, TcpStream},
        process::Command,
        time::Duration,
    };

    use nix::sched::{CloneFlags, unshare};
    use rstest::rstest;
    use socket2::{Domain, Socket, Type};

    use super::*;
    use crate::sys::net::ipvs::tests::{of_own_namespace, serve};

    const OTHER: &str = "other";

    /// Does what ip_vs does with an answer of a connection that it remembers: gives it another
    /// source, at ip_vs's priority in input.
    fn translate_answers(nftables: &NfTables, family: TableFamily, server: SocketAddr, source: &[u8]) {
        let (offset, checksum) = match family {
            TableFamily::Ipv4 => (12, Some(10)),
            TableFamily::Ipv6 => (8, None),
        };
        let register = Register::new(0);
        let port = server.port().to_be_bytes().to_vec();
        let length = source.len() as u32;
        let rule = [
            Expression::Payload { header: Header::Transport, offset: 0, length: 2, to: register },
            Expression::Compare { register, comparison: Comparison::Equal, value: port },
            Expression::Immediate { value: source.to_vec(), to: register },
            Expression::SetPayload { header: Header::Network, offset, length, checksum, from: register },
            Expression::Immediate { value: vec![0x1f, 0x90], to: register },
            Expression::SetPayload {
                header: Header::Transport,
                offset: 0,
                length: 2,
                checksum: Some(16),
                from: register,
            },
        ];
        let mut batch = Batch::default();
        batch.add_table(family, OTHER, "as ip_vs");
        let base = BaseChain { kind: ChainType::Filter, hook: NetfilterHook::Input, priority: 98 };
        batch.add_chain(family, OTHER, "input", Some(base));
        batch.add_rule(family, OTHER, "input", &rule, &[]);
        assert_eq!(nftables.commit(batch).unwrap(), []);
    }

    fn call(server: SocketAddr) -> std::io::Result<TcpStream> {
        TcpStream::connect_timeout(&server, Duration::from_millis(500))
    }

    #[rstest]
    #[case::ipv4("127.0.0.1:0", TableFamily::Ipv4, &[127, 0, 0, 9])]
    #[case::ipv6("[::1]:0", TableFamily::Ipv6, &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9])]
    #[ignore = "needs root"]
    fn as_root_answers_come_from_whom_the_client_has_called(
        #[case] server: &str,
        #[case] family: TableFamily,
        #[case] source: &[u8],
    ) {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        let nftables = NfTables::load().unwrap().unwrap();
        let listener = TcpListener::bind(server).unwrap();
        let server = listener.local_addr().unwrap();
        assert!(call(server).is_ok());
        let _first = listener.accept().unwrap();

        translate_answers(&nftables, family, server, source);
        assert_eq!(call(server).unwrap_err().kind(), ErrorKind::TimedOut);
        restore_sources().unwrap();
        let mut client = call(server).unwrap();
        let (mut answering, _) = listener.accept().unwrap();
        answering.write_all(&[7; 100_000]).unwrap();
        drop(answering);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, [7; 100_000]);

        // Each attempt to remove what is left may call it.
        restore_sources().unwrap();
        leave_sources().unwrap();
        leave_sources().unwrap();
        assert_eq!(nftables.tables(family).unwrap(), [OTHER]);
    }
    fn call_from(client: SocketAddr, server: SocketAddr) -> std::io::Result<TcpStream> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&client.into())?;
        socket.connect_timeout(&server.into(), Duration::from_millis(500))?;
        Ok(socket.into())
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_port_that_ipvs_remembers_can_be_used_again() {
        let Some(ipvs) = of_own_namespace() else { return };
        for command in ["link set lo up", "address add 10.96.0.1/32 dev lo"] {
            assert!(Command::new("ip").args(command.split(' ')).status().unwrap().success());
        }
        std::fs::write("/proc/sys/net/ipv4/vs/conntrack", "1").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = listener.local_addr().unwrap();
        serve(&ipvs, "10.96.0.1:80", &[endpoint]);
        let virtual_server = "10.96.0.1:80".parse().unwrap();
        let clients = [20_001, 20_002].map(|port| SocketAddr::from(([127, 0, 0, 5], port)));
        for client in clients {
            drop(call_from(client, virtual_server).unwrap());
            drop(listener.accept().unwrap());
        }
        let error = call_from(clients[0], endpoint).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        restore_sources().unwrap();
        assert!(call_from(clients[1], endpoint).is_ok());
    }
}
