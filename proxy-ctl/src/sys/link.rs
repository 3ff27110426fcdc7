//! Network interfaces.

use netlink_sys::protocols::NETLINK_ROUTE;
use nix::{errno::Errno, net::if_::if_nametoindex};

use super::{
    CallError,
    netlink::{Connection, Messages, NLM_F_ACK},
};

const RTM_DELLINK: u16 = 17;
/// `ifinfomsg`: the interface is found by its name.
const HEADER: [u8; 16] = [0; 16];
const IFLA_IFNAME: u16 = 3;

pub fn exists(name: &str) -> Result<bool, CallError> {
    match if_nametoindex(name) {
        Ok(_) => Ok(true),
        Err(Errno::ENODEV) => Ok(false),
        Err(error) => Err(CallError::new("if_nametoindex", error.into())),
    }
}

/// One that is not there is no error.
pub fn delete(name: &str) -> Result<(), CallError> {
    let failed = |source| CallError::new("netlink RTM_DELLINK", source);
    let connection = Connection::open(NETLINK_ROUTE).map_err(failed)?;
    let mut request = Messages::default();
    request.begin(RTM_DELLINK, NLM_F_ACK, &HEADER).text(IFLA_IFNAME, name);
    match connection.request(&request, |_, _| ()) {
        Err(error) if error.raw_os_error() != Some(libc::ENODEV) => Err(failed(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
