//! nf_tables, which iptables-nft uses too: lists tables, chains, rules, sets and elements, and
//! changes them in one step.

mod attributes;
mod batch;
mod expressions;
mod read;
mod sets;
pub mod user_data;

use std::{fs, io, path::Path};

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{setsockopt, sockopt::SndBufForce};

use self::{attributes::BATCH_END, batch::batch_header};
pub use self::{
    batch::{BaseChain, Batch, ChainType, NetfilterHook},
    expressions::{
        Comparison, Conntrack, DESTINATION_TRANSLATED, Expression, Header, LOCAL_ADDRESS, Meta, REPLY,
        Register, Side, Verdict,
    },
    read::{Chain, NotedRule, Rule, Table},
    sets::{Datum, Element, ElementData, Set, SetDefinition, SetShape, Values},
};
use super::{
    CallError,
    net::netlink::{Messages, NetlinkSocket, Refused},
};

/// The address family of a table.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum TableFamily {
    Ipv4,
    Ipv6,
}

impl TableFamily {
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    /// Returns the family's name in nft.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "ip",
            Self::Ipv6 => "ip6",
        }
    }

    const fn number(self) -> u8 {
        match self {
            Self::Ipv4 => 2,
            Self::Ipv6 => 10,
        }
    }

    /// Returns an `nfgenmsg`: family, version, resource.
    const fn header(self) -> [u8; 4] {
        [self.number(), 0, 0, 0]
    }
}

/// A connection to nf_tables in this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct NfTables(NetlinkSocket);

impl NfTables {
    /// Opens a connection. Returns `None` if the kernel has no nf_tables or its module is not
    /// loaded, so that there are no tables.
    pub fn open() -> Result<Option<Self>, CallError> {
        if !is_loaded() {
            return Ok(None);
        }
        Self::load()
    }

    /// Opens a connection, whose first use makes the kernel load its modules. Returns `None` if the
    /// kernel has no netfilter netlink.
    pub fn load() -> Result<Option<Self>, CallError> {
        match NetlinkSocket::open(NETLINK_NETFILTER) {
            Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(None),
            connection => connection
                .map(|kernel| Some(Self(kernel)))
                .map_err(CallError::of("socket(NETLINK_NETFILTER)")),
        }
    }

    /// Makes all changes of a batch. If any is refused, makes none and returns the refusals.
    pub fn commit(&self, batch: Batch) -> Result<Vec<Refused>, CallError> {
        let mut messages = batch.0;
        messages.begin(BATCH_END, 0, &batch_header());
        self.send(messages).map_err(CallError::of("netlink batch of nf_tables"))
    }

    /// Returns what the kernel would refuse of a batch. Changes nothing, because the kernel undoes
    /// a batch that has no end.
    pub fn check(&self, batch: Batch) -> Result<Vec<Refused>, CallError> {
        self.send(batch.0).map_err(CallError::of("netlink batch of nf_tables"))
    }

    fn send(&self, messages: Messages) -> io::Result<Vec<Refused>> {
        let length = messages.length();
        self.0.send_at_once(messages, |socket| make_room(socket, length))
    }
}

/// Returns true if nf_tables is loaded or built in. This asks no netlink socket, because a request
/// would load the module. If it is unknown whether it is built in, it counts as built in.
fn is_loaded() -> bool {
    let sockets = fs::read_to_string("/proc/thread-self/net/netlink");
    if sockets.is_ok_and(|sockets| !has_netfilter(&sockets)) {
        return false;
    }
    if Path::new("/sys/module/nf_tables").exists() {
        return true;
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let built_in = fs::read_to_string(format!("/lib/modules/{}/modules.builtin", release.trim()));
    built_in.map_or(true, |modules| modules.lines().any(|module| module.ends_with("/nf_tables.ko")))
}

/// Returns true if the kernel has netfilter netlink. `sockets` is the kernel's list of netlink
/// sockets. It includes the kernel's own, and has the protocol in the second column.
fn has_netfilter(sockets: &str) -> bool {
    let protocol = NETLINK_NETFILTER.to_string();
    sockets.lines().any(|socket| socket.split_whitespace().nth(1) == Some(protocol.as_str()))
}

/// Makes the send buffer large enough for a batch, which is sent as one message however long it is.
fn make_room(socket: &Socket, length: usize) -> io::Result<()> {
    const LEAST: usize = 256 * 1024;
    Ok(setsockopt(socket, SndBufForce, &(length * 2).max(LEAST))?)
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn netfilter_is_found_among_the_kernels_sockets() {
        let none = "sk               Eth Pid        Groups   Rmem\n\
                    00000000d2a1c8f1 0   12         00000551 0\n00000000a75c2d1e 15  0          00000000 0\n";
        assert!(!has_netfilter(none));
        assert!(has_netfilter(&format!("{none}000000003c5e5b0f 12  0          00000000 0\n")));
    }

    /// Opens nf_tables in a network namespace that ends with the test's thread. Returns `None` if
    /// it is not available, and prints that the test is skipped.
    fn of_own_namespace() -> Option<NfTables> {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let nftables = NfTables::load().unwrap();
        if nftables.is_none() {
            println!("skipped: the kernel has no netfilter netlink (CONFIG_NETFILTER_NETLINK)");
        }
        nftables
    }

    /// The unknown type of chain stands for a kernel without chains of type nat.
    #[test]
    #[ignore = "needs root"]
    fn as_root_a_kernel_that_can_make_no_holder_says_enoent() {
        let Some(nftables) = of_own_namespace() else { return };
        for family in TableFamily::ALL {
            let mut batch = Batch::default();
            let messages = batch.make_holder_of(family, "held", ("chain", "unheard-of"), "why");
            assert_eq!(messages, 1..4);
            // The rule is refused too, because its chain does not exist.
            let refused = [2, 3].map(|message| Refused { message, errno: libc::ENOENT });
            assert_eq!(nftables.commit(batch).unwrap(), refused);
            assert_eq!(nftables.tables(family).unwrap(), [""; 0]);
        }
    }
}
