//! Cookies: numbers of network namespaces and sockets, which the kernel never uses again.

use std::os::fd::{AsFd, AsRawFd};

use crate::sys::CallError;

const SO_COOKIE: libc::c_int = 57;
const SO_NETNS_COOKIE: libc::c_int = 71;

fn read_cookie(socket: impl AsFd, option: libc::c_int, call: &'static str) -> Result<u64, CallError> {
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    let target: *mut u64 = &mut cookie;
    let length_target: *mut libc::socklen_t = &mut length;
    // SAFETY: the kernel writes at most `length` bytes to `target`.
    let result = unsafe {
        libc::getsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, option, target.cast(), length_target)
    };
    if result == 0 { Ok(cookie) } else { Err(CallError::last(call)) }
}

/// Returns the cookie of the network namespace that `socket` belongs to, as `bpf_get_netns_cookie`
/// does. Needs Linux 5.14; older kernels return `ENOPROTOOPT`.
pub fn netns_cookie(socket: impl AsFd) -> Result<u64, CallError> {
    read_cookie(socket, SO_NETNS_COOKIE, "getsockopt(SO_NETNS_COOKIE)")
}

/// Returns the cookie of `socket`, as `bpf_get_socket_cookie` does. Needs Linux 4.12.
pub fn socket_cookie(socket: impl AsFd) -> Result<u64, CallError> {
    read_cookie(socket, SO_COOKIE, "getsockopt(SO_COOKIE)")
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn sockets_of_one_namespace_share_its_cookie_and_have_their_own() {
        let (one, other) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        assert_eq!(netns_cookie(&one).unwrap(), netns_cookie(&other).unwrap());
        assert_ne!(socket_cookie(&one).unwrap(), socket_cookie(&other).unwrap());
    }
}
