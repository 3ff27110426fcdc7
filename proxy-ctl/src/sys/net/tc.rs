//! BPF filters on the clsact qdisc, for kernels without tcx (before 6.6), and lists of tcx
//! programs.

use std::{
    collections::BTreeMap,
    os::fd::{AsRawFd, BorrowedFd},
};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
use aya_obj::generated::bpf_attach_type;
use libc::{
    RTM_DELQDISC, RTM_DELTFILTER, RTM_GETQDISC, RTM_GETTFILTER, RTM_NEWQDISC, RTM_NEWTFILTER, TCA_KIND,
    TCA_OPTIONS,
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::netlink::{
    Attributes, Messages, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSocket, word,
};
use crate::sys::{CallError, bpf};

/// The direction in which packets pass an interface.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Direction {
    Ingress,
    Egress,
}

/// A BPF filter.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Filter {
    pub priority: u16,
    pub handle: u32,
    /// The id of its program. 0 means that the kernel does not report it (before Linux 4.16).
    pub program: u32,
    /// The name that its owner has given it. It may be empty.
    pub name: String,
}

/// A program that is attached to a hook.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AttachedProgram {
    pub id: u32,
    /// The name, of which the kernel keeps at most 15 characters. It may be empty.
    pub name: String,
}

const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// The kind of queueing discipline that takes filters in both directions.
pub const CLSACT: &str = "clsact";
/// The parent of `clsact` and of `ingress`. An interface has at most one of the two.
const TC_H_CLSACT: u32 = 0xffff_fff1;
const CLSACT_HANDLE: u32 = 0xffff_0000;
const ETH_P_ALL: u16 = 3;

/// The length of `tcmsg`: family, interface, handle, parent, info.
const HEADER: usize = 20;

impl Direction {
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    /// Returns the kernel's name of the direction.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    /// Returns the tcx hook for the direction.
    pub const fn tcx_hook(self) -> bpf_attach_type {
        match self {
            Self::Ingress => bpf_attach_type::BPF_TCX_INGRESS,
            Self::Egress => bpf_attach_type::BPF_TCX_EGRESS,
        }
    }

    fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

/// Returns a message about a qdisc or filter, with a `tcmsg` in the machine's byte order.
fn message(kind: u16, flags: u16, interface: u32, handle: u32, parent: u32, info: u32) -> Messages {
    let mut header = [0; HEADER];
    for (field, word) in header.chunks_exact_mut(4).skip(1).zip([interface, handle, parent, info]) {
        field.copy_from_slice(&word.to_ne_bytes());
    }
    let mut message = Messages::default();
    message.begin(kind, flags, &header);
    message
}

fn request(call: &'static str, message: &Messages) -> Result<(), CallError> {
    let asked = NetlinkSocket::open(NETLINK_ROUTE).and_then(|kernel| kernel.request(message, |_, _| ()));
    asked.map_err(CallError::of(call))
}

/// The [`CallError::call`] of an error in making the clsact qdisc.
pub const ADD_CLSACT: &str = "netlink RTM_NEWQDISC clsact";
/// The [`CallError::call`] of an error in adding a filter.
pub const ADD_FILTER: &str = "netlink RTM_NEWTFILTER bpf";
/// The [`CallError::call`] of an error in replacing a filter, which keeps its program then.
pub const REPLACE_FILTER: &str = "netlink RTM_NEWTFILTER bpf, which replaces one,";

/// Makes the clsact qdisc. Returns false if there is one already.
pub fn add_clsact(interface: u32) -> Result<bool, CallError> {
    let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    let mut message = message(RTM_NEWQDISC, flags, interface, CLSACT_HANDLE, TC_H_CLSACT, 0);
    match request(ADD_CLSACT, message.text(TCA_KIND, CLSACT)) {
        Ok(()) => Ok(true),
        Err(e) if e.errno() == libc::EEXIST => Ok(false),
        Err(e) => Err(e),
    }
}

/// Removes the clsact qdisc with every filter on it. Returns false if there is none. An ingress
/// qdisc of another kind stays.
pub fn remove_clsact(interface: u32) -> Result<bool, CallError> {
    let mut message = message(RTM_DELQDISC, NLM_F_ACK, interface, CLSACT_HANDLE, TC_H_CLSACT, 0);
    match request("netlink RTM_DELQDISC clsact", message.text(TCA_KIND, CLSACT)) {
        Ok(()) => Ok(true),
        // EINVAL means that the qdisc is of another kind.
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::EINVAL | libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Returns the kind of each interface's qdisc for received packets, by interface index: [`CLSACT`]
/// or `ingress`. Interfaces without one are left out.
pub fn ingress_qdiscs() -> Result<BTreeMap<u32, String>, CallError> {
    let request = message(RTM_GETQDISC, NLM_F_DUMP, 0, 0, 0, 0);
    let parse = |kind, body: &[u8]| if kind == RTM_NEWQDISC { ingress_qdisc(body) } else { None };
    let listed = NetlinkSocket::open(NETLINK_ROUTE).and_then(|kernel| kernel.dump(&request, parse));
    Ok(listed.map_err(CallError::of("netlink RTM_GETQDISC"))?.into_iter().collect())
}

fn ingress_qdisc(body: &[u8]) -> Option<(u32, String)> {
    let (interface, parent) = (word(body, 4)?, word(body, 12)?);
    let kind = Attributes(body.get(HEADER..)?).text(TCA_KIND)?;
    (parent == TC_H_CLSACT).then(|| (interface, kind.to_owned()))
}

fn filter_info(priority: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(ETH_P_ALL.to_be())
}

/// Attaches `program`, or replaces the program of the filter with this priority and handle. An
/// error names `call`, which is [`ADD_FILTER`] or, to replace a filter, [`REPLACE_FILTER`].
pub fn put_filter(
    call: &'static str,
    interface: u32,
    direction: Direction,
    priority: u16,
    handle: u32,
    program: BorrowedFd<'_>,
    name: &str,
) -> Result<(), CallError> {
    let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
    let info = filter_info(priority);
    let mut message = message(RTM_NEWTFILTER, flags, interface, handle, direction.parent(), info);
    message.text(TCA_KIND, "bpf").nested(TCA_OPTIONS, |options| {
        options
            .attribute(TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes())
            .text(TCA_BPF_NAME, name)
            .attribute(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
    });
    request(call, &message)
}

/// Removes a filter. Returns false if there is no such filter.
pub fn remove_filter(
    interface: u32,
    direction: Direction,
    priority: u16,
    handle: u32,
) -> Result<bool, CallError> {
    let info = filter_info(priority);
    let mut message = message(RTM_DELTFILTER, NLM_F_ACK, interface, handle, direction.parent(), info);
    match request("netlink RTM_DELTFILTER bpf", message.text(TCA_KIND, "bpf")) {
        Ok(()) => Ok(true),
        // EINVAL means that there is no clsact qdisc.
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::EINVAL | libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Returns what `parse` makes of each filter message of one direction. The list is empty if there
/// is no clsact qdisc.
fn list<T>(
    interface: u32,
    direction: Direction,
    parse: impl Fn(&[u8]) -> Option<T>,
) -> Result<Vec<T>, CallError> {
    let request = message(RTM_GETTFILTER, NLM_F_DUMP, interface, 0, direction.parent(), 0);
    let parse = |kind, body: &[u8]| if kind == RTM_NEWTFILTER { parse(body) } else { None };
    match NetlinkSocket::open(NETLINK_ROUTE).and_then(|kernel| kernel.dump(&request, parse)) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::ENODEV)) => {
            Ok(Vec::new())
        }
        listed => listed.map_err(CallError::of("netlink RTM_GETTFILTER")),
    }
}

/// Returns true if there is a filter of any kind (BPF, flower, u32, …) in this direction.
pub fn has_filters(interface: u32, direction: Direction) -> Result<bool, CallError> {
    Ok(!list(interface, direction, |_| Some(()))?.is_empty())
}

/// Returns every BPF filter in one direction, in the order in which they run. The list is empty if
/// there is no clsact qdisc.
pub fn filters(interface: u32, direction: Direction) -> Result<Vec<Filter>, CallError> {
    list(interface, direction, filter)
}

/// Returns true if the kernel has tcx (6.6). Also returns true if that is not known, for example
/// because the interface is gone.
pub fn has_tcx(index: u32) -> bool {
    let listed = bpf::tcx_programs(index, Direction::Ingress.tcx_hook());
    listed.err().is_none_or(|error| error.errno() != libc::EINVAL)
}

/// Returns the ids of the programs of a tcx hook in the order in which they run. Returns `None` if
/// the interface is gone or the kernel does not report them.
pub fn tcx_program_ids(index: u32, direction: Direction) -> Option<Vec<u32>> {
    let listed = bpf::tcx_programs(index, direction.tcx_hook());
    let told = |error: &CallError| tracing::debug!(index, %error, "the programs of a hook cannot be listed");
    listed.inspect_err(told).ok()
}

/// Returns the programs of a tcx hook in the order in which they run. Their names cost a system
/// call each. Returns `None` if the interface is gone or the kernel does not report them.
pub fn tcx_programs(index: u32, direction: Direction) -> Option<Vec<AttachedProgram>> {
    let name =
        nix::net::if_::if_indextoname(index).ok()?.into_string().ok().filter(|name| !name.is_empty())?;
    let hook = match direction {
        Direction::Ingress => TcAttachType::Ingress,
        Direction::Egress => TcAttachType::Egress,
    };
    match SchedClassifier::query_tcx(&name, hook) {
        Ok((_, programs)) => {
            let attached = |program: &ProgramInfo| AttachedProgram {
                id: program.id(),
                name: program.name_as_str().unwrap_or_default().to_owned(),
            };
            Some(programs.iter().map(attached).collect())
        }
        Err(error) => {
            tracing::debug!(interface = name, %error, "the programs of a hook cannot be listed");
            None
        }
    }
}

fn filter(body: &[u8]) -> Option<Filter> {
    let (handle, info) = (word(body, 8)?, word(body, 16)?);
    let attributes = Attributes(body.get(HEADER..)?);
    // A message without options is about the chain that stands for a priority.
    let options = attributes.nested(TCA_OPTIONS).filter(|_| attributes.text(TCA_KIND) == Some("bpf"))?;
    let program = options.get(TCA_BPF_ID).and_then(|id| word(id, 0)).unwrap_or(0);
    let name = options.text(TCA_BPF_NAME).unwrap_or_default().to_owned();
    Some(Filter { priority: (info >> 16) as u16, handle, program, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_read_from_its_message() {
        let of = |kind: &str| {
            let mut message = message(RTM_NEWTFILTER, 0, 3, 0x7063, 0, 7 << 16);
            message.text(TCA_KIND, kind).nested(TCA_OPTIONS, |options| {
                options.attribute(TCA_BPF_ID, &42_u32.to_ne_bytes()).text(TCA_BPF_NAME, "other");
            });
            let after_netlink_header = 16;
            filter(&message.bytes()[after_netlink_header..])
        };
        assert_eq!(
            of("bpf"),
            Some(Filter { priority: 7, handle: 0x7063, program: 42, name: "other".into() })
        );
        assert_eq!(of("u32"), None);
        assert_eq!(filter(&[0; HEADER]), None);
    }

    #[test]
    fn a_qdisc_of_what_is_received_is_read_from_its_message() {
        let of = |parent, kind: &str| {
            let mut message = message(RTM_NEWQDISC, 0, 3, CLSACT_HANDLE, parent, 0);
            message.text(TCA_KIND, kind);
            let after_netlink_header = 16;
            ingress_qdisc(&message.bytes()[after_netlink_header..])
        };
        assert_eq!(of(TC_H_CLSACT, "ingress"), Some((3, "ingress".to_owned())));
        const TC_H_ROOT: u32 = u32::MAX;
        assert_eq!(of(TC_H_ROOT, "fq_codel"), None);
        assert_eq!(ingress_qdisc(&[0; HEADER]), None);
    }
}
