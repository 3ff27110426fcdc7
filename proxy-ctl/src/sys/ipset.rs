//! Sets of ipset: listed and destroyed.

use std::{io, path::Path};

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    CallError,
    netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket},
};

const SUBSYSTEM: u16 = 6;
const DESTROY: u16 = SUBSYSTEM << 8 | 3;
const LIST: u16 = SUBSYSTEM << 8 | 7;
const PROTOCOL: u16 = 1;
const SET_NAME: u16 = 2;
const FLAGS: u16 = 6 | NET_BYTE_ORDER;
const NET_BYTE_ORDER: u16 = 1 << 14;
/// What every kernel since 2.6.39 understands.
const VERSION: [u8; 1] = [6];
const NAMES_ONLY: u32 = 1 << 1;
/// `nfgenmsg` of no family.
const HEADER: [u8; 4] = [0; 4];
/// `IPSET_ERR_BUSY`: a rule or another set uses it.
const BUSY: i32 = 4100;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Destroyed {
    /// Or it was not there.
    Done,
    InUse,
}

/// A connection to ipset of this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct IpSets(NetlinkSocket);

impl IpSets {
    /// `None`: the kernel has no ipset, or its module is not loaded.
    pub fn open() -> Result<Option<Self>, CallError> {
        if !Path::new("/sys/module/ip_set").exists() {
            return Ok(None);
        }
        let connection = NetlinkSocket::open(NETLINK_NETFILTER);
        connection
            .map(|connection| Some(Self(connection)))
            .map_err(CallError::of("socket(NETLINK_NETFILTER)"))
    }

    pub fn names(&self) -> Result<Vec<String>, CallError> {
        let mut request = Messages::default();
        request
            .begin(LIST, NLM_F_DUMP, &HEADER)
            .attribute(PROTOCOL, &VERSION)
            .attribute(FLAGS, &NAMES_ONLY.to_be_bytes());
        let parse = |_, body: &[u8]| Some(Attributes(body.get(HEADER.len()..)?).text(SET_NAME)?.to_owned());
        self.0.dump(&request, parse).map_err(CallError::of("netlink IPSET_CMD_LIST"))
    }

    pub fn destroy(&self, name: &str) -> Result<Destroyed, CallError> {
        let mut request = Messages::default();
        request.begin(DESTROY, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, name);
        match self.0.request(&request, |_, _| ()) {
            Ok(()) => Ok(Destroyed::Done),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(Destroyed::Done),
                Some(BUSY) => Ok(Destroyed::InUse),
                // The others from 4096 on are ipset's own numbers.
                Some(own @ 4096..) => {
                    let source = io::Error::other(format!("error {own} of ipset"));
                    Err(CallError::new("netlink IPSET_CMD_DESTROY", source))
                }
                Some(_) | None => Err(CallError::new("netlink IPSET_CMD_DESTROY", error)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    const CREATE: u16 = SUBSYSTEM << 8 | 2;
    const ADD: u16 = SUBSYSTEM << 8 | 9;

    fn create(sets: &IpSets, name: &str, kind: &str, revision: u8) {
        let mut request = Messages::default();
        request
            .begin(CREATE, NLM_F_ACK, &HEADER)
            .attribute(PROTOCOL, &VERSION)
            .text(SET_NAME, name)
            .text(3, kind)
            .attribute(4, &[revision])
            .attribute(5, &[2])
            .nested(7, |_| ());
        sets.0.request(&request, |_, _| ()).unwrap();
    }

    /// Puts the set `member` into the set `list`.
    fn add(sets: &IpSets, list: &str, member: &str) {
        let mut request = Messages::default();
        request.begin(ADD, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, list).nested(
            7,
            |inner| {
                inner.text(18, member);
            },
        );
        sets.0.request(&request, |_, _| ()).unwrap();
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_sets_are_listed_and_destroyed() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let Some(sets) = IpSets::open().unwrap() else {
            println!("skipped: the kernel's ip_set (CONFIG_IP_SET) is not loaded");
            return;
        };
        assert_eq!(sets.names().unwrap(), [""; 0]);
        create(&sets, "KUBE-CLUSTER-IP", "hash:ip,port", 1);
        create(&sets, "KUBE-6-CLUSTER-IP", "hash:ip", 1);
        create(&sets, "all", "list:set", 0);
        add(&sets, "all", "KUBE-CLUSTER-IP");
        let mut names = sets.names().unwrap();
        names.sort_unstable();
        assert_eq!(names, ["KUBE-6-CLUSTER-IP", "KUBE-CLUSTER-IP", "all"]);
        assert_eq!(sets.destroy("KUBE-6-CLUSTER-IP").unwrap(), Destroyed::Done);
        assert_eq!(sets.destroy("KUBE-6-CLUSTER-IP").unwrap(), Destroyed::Done);
        assert_eq!(sets.destroy("KUBE-CLUSTER-IP").unwrap(), Destroyed::InUse);
        assert_eq!(sets.destroy("all").unwrap(), Destroyed::Done);
        assert_eq!(sets.destroy("KUBE-CLUSTER-IP").unwrap(), Destroyed::Done);
    }
}
