//! Credentials of one thread.

use std::io;

use nix::unistd::{Gid, setfsgid};

use super::CallError;

/// Gives what the calling thread opens from now on to `group`, sockets too. Other threads keep
/// their group. Needs CAP_SETGID.
pub fn open_as_group(group: u32) -> Result<(), CallError> {
    let group = Gid::from_raw(group);
    setfsgid(group);
    // The call reports no errors: it answers with the group from before.
    if setfsgid(group) == group {
        Ok(())
    } else {
        Err(CallError::new("setfsgid", io::ErrorKind::PermissionDenied.into()))
    }
}
