//! Sets of ipset: listed and destroyed.

use std::{io, path::Path};

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    CallError,
    netlink::{Attributes, Connection, Messages, NLM_F_ACK, NLM_F_DUMP},
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
    Done,
    /// It was not there.
    Missing,
    InUse,
}

/// A connection to ipset of this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct IpSets(Connection);

impl IpSets {
    /// `None`: the kernel has no ipset, or its module is not loaded.
    pub fn open() -> Result<Option<Self>, CallError> {
        if !Path::new("/sys/module/ip_set").exists() {
            return Ok(None);
        }
        let connection = Connection::open(NETLINK_NETFILTER);
        connection
            .map(|connection| Some(Self(connection)))
            .map_err(|e| CallError::new("socket(NETLINK_NETFILTER)", e))
    }

    pub fn names(&self) -> Result<Vec<String>, CallError> {
        let mut request = Messages::default();
        request
            .begin(LIST, NLM_F_DUMP, &HEADER)
            .attribute(PROTOCOL, &VERSION)
            .attribute(FLAGS, &NAMES_ONLY.to_be_bytes());
        let parse = |_, body: &[u8]| Some(Attributes(body.get(HEADER.len()..)?).text(SET_NAME)?.to_owned());
        self.0.dump(&request, parse).map_err(|e| CallError::new("netlink IPSET_CMD_LIST", e))
    }

    pub fn destroy(&self, name: &str) -> Result<Destroyed, CallError> {
        let mut request = Messages::default();
        request.begin(DESTROY, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, name);
        match self.0.request(&request, |_, _| ()) {
            Ok(()) => Ok(Destroyed::Done),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(Destroyed::Missing),
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
