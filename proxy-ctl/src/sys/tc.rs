//! BPF filters on the clsact qdisc, for kernels without tcx (before 6.6).

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::CallError;

/// Which way packets go through the interface.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Direction {
    Ingress,
    Egress,
}

/// A BPF filter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Filter {
    pub priority: u16,
    pub handle: u32,
    /// Id of its program; 0: the kernel does not tell (before 4.16).
    pub program: u32,
}

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

const TC_H_CLSACT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;
const ETH_P_ALL: u16 = 3;

const NLMSG_HEADER: usize = 16;
const TC_HEADER: usize = 20;
const ATTRIBUTE_HEADER: usize = 4;

impl Direction {
    fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

/// A message about a qdisc or filter, in the order of bytes that netlink has: the machine's.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16, interface: u32, handle: u32, parent: u32, info: u32) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend([0; 4]);
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        bytes.extend(1_u32.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(interface.to_ne_bytes());
        bytes.extend(handle.to_ne_bytes());
        bytes.extend(parent.to_ne_bytes());
        bytes.extend(info.to_ne_bytes());
        Self(bytes)
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = (ATTRIBUTE_HEADER + value.len()) as u16;
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    fn nested(self, kind: u16, inner: impl FnOnce(Self) -> Self) -> Self {
        let inner = inner(Self(Vec::new()));
        self.attribute(kind, &inner.0)
    }

    fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// Sends a request and gives each answer's type and payload to `answer`, until the kernel is done.
fn exchange(message: Message, mut answer: impl FnMut(u16, &[u8])) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&message.finish(), 0)?;
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while let Some((length, kind)) = header(rest) {
            let body = rest.get(NLMSG_HEADER..length).unwrap_or_default();
            match kind {
                NLMSG_ERROR => {
                    let errno = word(body, 0).unwrap_or(0).cast_signed();
                    return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-errno)) };
                }
                NLMSG_DONE => return Ok(()),
                _ => answer(kind, body),
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn header(bytes: &[u8]) -> Option<(usize, u16)> {
    let length = word(bytes, 0)? as usize;
    (length >= NLMSG_HEADER && length <= bytes.len()).then_some((length, half(bytes, 4)?))
}

/// Value of the first attribute of this kind.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = half(bytes, 0)? as usize;
        let value = bytes.get(ATTRIBUTE_HEADER..length)?;
        // The highest two bits are flags.
        if half(bytes, 2)? & 0x3fff == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

fn request(call: &'static str, message: Message) -> Result<(), CallError> {
    exchange(message, |_, _| ()).map_err(|e| CallError::new(call, e))
}

/// Makes the clsact qdisc. False: there is one already.
pub fn add_clsact(interface: u32) -> Result<bool, CallError> {
    let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    let message =
        Message::new(RTM_NEWQDISC, flags, interface, CLSACT_HANDLE, TC_H_CLSACT, 0).text(TCA_KIND, "clsact");
    match request("netlink RTM_NEWQDISC clsact", message) {
        Ok(()) => Ok(true),
        Err(e) if e.errno() == libc::EEXIST => Ok(false),
        Err(e) => Err(e),
    }
}

/// Removes the clsact qdisc with every filter on it.
pub fn remove_clsact(interface: u32) -> Result<(), CallError> {
    let message = Message::new(RTM_DELQDISC, NLM_F_ACK, interface, CLSACT_HANDLE, TC_H_CLSACT, 0);
    request("netlink RTM_DELQDISC clsact", message)
}

fn filter_info(priority: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(ETH_P_ALL.to_be())
}

/// Attaches `program`, or swaps it in where there is a filter with this priority and handle.
pub fn replace_filter(
    interface: u32,
    direction: Direction,
    priority: u16,
    handle: u32,
    program: BorrowedFd<'_>,
    name: &str,
) -> Result<(), CallError> {
    let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
    let message =
        Message::new(RTM_NEWTFILTER, flags, interface, handle, direction.parent(), filter_info(priority))
            .text(TCA_KIND, "bpf")
            .nested(TCA_OPTIONS, |options| {
                options
                    .attribute(TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes())
                    .text(TCA_BPF_NAME, name)
                    .attribute(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes())
            });
    request("netlink RTM_NEWTFILTER bpf", message)
}

/// False: there is no such filter.
pub fn remove_filter(
    interface: u32,
    direction: Direction,
    priority: u16,
    handle: u32,
) -> Result<bool, CallError> {
    let message =
        Message::new(RTM_DELTFILTER, NLM_F_ACK, interface, handle, direction.parent(), filter_info(priority))
            .text(TCA_KIND, "bpf");
    match request("netlink RTM_DELTFILTER bpf", message) {
        Ok(()) => Ok(true),
        // EINVAL: no clsact qdisc.
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::EINVAL | libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Gives the body of each filter message of one direction to `take`; none where there is no clsact qdisc.
fn each_filter(interface: u32, direction: Direction, mut take: impl FnMut(&[u8])) -> Result<(), CallError> {
    let message = Message::new(RTM_GETTFILTER, NLM_F_DUMP, interface, 0, direction.parent(), 0);
    let result = exchange(message, |kind, body| {
        if kind == RTM_NEWTFILTER {
            take(body);
        }
    });
    match result {
        Err(e) if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::ENODEV)) => {
            Err(CallError::new("netlink RTM_GETTFILTER", e))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Is there a filter of any kind (BPF, flower, u32, …) in this direction?
pub fn has_filters(interface: u32, direction: Direction) -> Result<bool, CallError> {
    let mut found = false;
    each_filter(interface, direction, |_| found = true)?;
    Ok(found)
}

/// Every BPF filter in one direction; none where there is no clsact qdisc.
pub fn filters(interface: u32, direction: Direction) -> Result<Vec<Filter>, CallError> {
    let mut found = Vec::new();
    each_filter(interface, direction, |body| {
        let (Some(handle), Some(info)) = (word(body, 8), word(body, 16)) else { return };
        let attributes = body.get(TC_HEADER..).unwrap_or_default();
        let bpf = attribute(attributes, TCA_KIND).is_some_and(|name| name.starts_with(b"bpf\0"));
        // Without options it is the chain that a priority stands for.
        let Some(options) = attribute(attributes, TCA_OPTIONS).filter(|_| bpf) else { return };
        let program = attribute(options, TCA_BPF_ID).and_then(|id| word(id, 0)).unwrap_or(0);
        found.push(Filter { priority: (info >> 16) as u16, handle, program });
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_found_again() {
        let bytes = Message(Vec::new())
            .text(TCA_KIND, "bpf")
            .nested(TCA_OPTIONS, |options| options.attribute(TCA_BPF_ID, &7_u32.to_ne_bytes()))
            .0;
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(attribute(&bytes, TCA_KIND), Some(b"bpf\0".as_slice()));
        let options = attribute(&bytes, TCA_OPTIONS).unwrap();
        assert_eq!(attribute(options, TCA_BPF_ID).and_then(|id| word(id, 0)), Some(7));
        assert_eq!(attribute(options, TCA_BPF_NAME), None);
    }

    #[test]
    fn the_length_of_a_message_is_its_own() {
        let bytes = Message::new(RTM_DELQDISC, NLM_F_ACK, 3, 0, TC_H_CLSACT, 0).finish();
        assert_eq!(header(&bytes), Some((NLMSG_HEADER + TC_HEADER, RTM_DELQDISC)));
        assert_eq!(word(&bytes, NLMSG_HEADER + 4), Some(3));
    }
}
