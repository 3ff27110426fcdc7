//! Named counters into which netfilter rules count packets (nfnetlink_acct, Linux 3.3).

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NetlinkSocket};
use crate::sys::CallError;

const SUBSYSTEM: u16 = 7;
const NEW: u16 = SUBSYSTEM << 8;
const GET: u16 = SUBSYSTEM << 8 | 1;
const DELETE: u16 = SUBSYSTEM << 8 | 3;
const NAME: u16 = 1;
const PACKETS: u16 = 2;
/// An `nfgenmsg` without a family, version and resource.
const HEADER: [u8; 4] = [0; 4];

/// The result of removing a counter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RemovedCounter {
    Done,
    NotThere,
    /// A rule counts into the counter.
    InUse,
}

/// A connection to the counters of this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct PacketCounters(NetlinkSocket);

impl PacketCounters {
    pub fn open() -> Result<Self, CallError> {
        NetlinkSocket::open(NETLINK_NETFILTER).map(Self).map_err(CallError::of("socket(NETLINK_NETFILTER)"))
    }

    /// Makes a counter. An existing one keeps counting. Returns false if the kernel has no such
    /// counters (CONFIG_NETFILTER_NETLINK_ACCT).
    pub fn create(&self, name: &str) -> Result<bool, CallError> {
        match self.ask(NEW, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, name) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(true),
            Err(error) if is_lacking(&error) => Ok(false),
            Err(error) => Err(CallError::new("netlink NFNL_MSG_ACCT_NEW", error)),
        }
    }

    /// Returns the number of packets counted, or `None` if there is no such counter.
    pub fn packets(&self, name: &str) -> Result<Option<u64>, CallError> {
        match self.ask(GET, NLM_F_ACK, name) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) || is_lacking(&error) => Ok(None),
            counted => counted.map_err(CallError::of("netlink NFNL_MSG_ACCT_GET")),
        }
    }

    pub fn remove(&self, name: &str) -> Result<RemovedCounter, CallError> {
        match self.ask(DELETE, NLM_F_ACK, name) {
            Ok(_) => Ok(RemovedCounter::Done),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(RemovedCounter::InUse),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) || is_lacking(&error) => {
                Ok(RemovedCounter::NotThere)
            }
            Err(error) => Err(CallError::new("netlink NFNL_MSG_ACCT_DEL", error)),
        }
    }

    /// Sends a request and returns the number of packets in the answer, if it has one.
    fn ask(&self, kind: u16, flags: u16, name: &str) -> io::Result<Option<u64>> {
        let mut request = Messages::default();
        request.begin(kind, flags, &HEADER).text(NAME, name);
        let mut packets = None;
        self.0.request(&request, |_, body| packets = body.get(HEADER.len()..).and_then(counted))?;
        Ok(packets)
    }
}

/// Returns true if the error means that the kernel has no such counters.
fn is_lacking(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

fn counted(attributes: &[u8]) -> Option<u64> {
    Attributes(attributes).get(PACKETS)?.first_chunk().copied().map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_counter_is_made_once_read_and_removed() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let counters = PacketCounters::open().unwrap();
        if !counters.create("test_counter").unwrap() {
            println!("skipped: the kernel is built without CONFIG_NETFILTER_NETLINK_ACCT");
            return;
        }
        assert!(counters.create("test_counter").unwrap(), "it is there");
        assert_eq!(counters.packets("test_counter").unwrap(), Some(0));
        assert_eq!(counters.packets("another").unwrap(), None);
        assert_eq!(counters.remove("test_counter").unwrap(), RemovedCounter::Done);
        assert_eq!(counters.remove("test_counter").unwrap(), RemovedCounter::NotThere);
    }
}
