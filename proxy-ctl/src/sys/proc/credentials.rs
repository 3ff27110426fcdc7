//! Credentials of one thread.

use std::io;

use nix::unistd::{Gid, setfsgid};

use crate::sys::CallError;

/// Makes `group` the owner of everything that the calling thread opens from now on, sockets
/// included. Other threads keep their group. Needs CAP_SETGID.
pub fn open_as_group(group: u32) -> Result<(), CallError> {
    let group = Gid::from_raw(group);
    setfsgid(group);
    // The call reports no errors: it returns the group that was set before.
    if setfsgid(group) == group {
        Ok(())
    } else {
        Err(CallError::new("setfsgid", io::ErrorKind::PermissionDenied.into()))
    }
}
