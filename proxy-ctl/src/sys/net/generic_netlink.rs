//! Generic netlink: protocols (families) whose numbers the kernel assigns when they are registered.

use netlink_sys::protocols::NETLINK_GENERIC;

use super::netlink::{Attributes, Messages, NLM_F_ACK, NetlinkSocket};
use crate::sys::CallError;

const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// The length of [`header`] in bytes.
pub const HEADER: usize = 4;

/// Returns a `genlmsghdr`.
pub fn header(command: u8, version: u8) -> [u8; HEADER] {
    [command, version, 0, 0]
}

/// A family and a connection to it.
pub struct GenericFamily {
    pub connection: NetlinkSocket,
    pub id: u16,
}

impl GenericFamily {
    /// Opens a connection to the family `name`. Returns `None` if the kernel does not have it or
    /// its module is not loaded.
    pub fn open(name: &str) -> Result<Option<Self>, CallError> {
        let connection =
            NetlinkSocket::open(NETLINK_GENERIC).map_err(CallError::of("socket(NETLINK_GENERIC)"))?;
        let mut request = Messages::default();
        request.begin(CONTROL, NLM_F_ACK, &header(GET_FAMILY, 1)).text(FAMILY_NAME, name);
        let mut family = None;
        let answered = connection.request(&request, |_, body| {
            let id = Attributes(body.get(HEADER..).unwrap_or_default()).get(FAMILY_ID);
            family = id.and_then(|id| id.first_chunk()).map(|id| u16::from_ne_bytes(*id));
        });
        match answered {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(CallError::of("netlink CTRL_CMD_GETFAMILY")(error)),
            Ok(()) => Ok(family.map(|id| Self { connection, id })),
        }
    }
}
