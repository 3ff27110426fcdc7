//! Distinguishes an interface that refuses packet programs from a failure that may pass.

use crate::{
    modes::ebpf::Error,
    sys::{CallError, bpf, net::tc},
};

/// Returns true if the kernel or a program of others keeps ours from a hook that has none of ours,
/// and trying again at once cannot help. All other errors leave what runs as it is.
pub(super) fn is_refused(error: &Error) -> bool {
    matches!(error, Error::Attach { source, .. } if adds(source.call) && is_lasting(source))
        || matches!(error, Error::IngressQdiscTaken(_))
}

fn adds(call: &str) -> bool {
    [bpf::LINK_CREATE, tc::ADD_CLSACT, tc::ADD_FILTER].contains(&call)
}

fn is_lasting(source: &CallError) -> bool {
    match source.errno() {
        // Memory or descriptors are short, or the call was interrupted.
        0 | libc::ENOMEM
        | libc::ENOBUFS
        | libc::EMFILE
        | libc::ENFILE
        | libc::EAGAIN
        | libc::EINTR
        // The interface has vanished.
        | libc::ENODEV => false,
        // The kernel detaches a removed link in the background, so that the same program may still
        // be there.
        libc::EEXIST => source.call != bpf::LINK_CREATE,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::full_hook(bpf::LINK_CREATE, libc::ERANGE, true)]
    #[case::denied_by_a_security_module(bpf::LINK_CREATE, libc::EPERM, true)]
    #[case::kernel_without_clsact(tc::ADD_CLSACT, libc::ENOENT, true)]
    #[case::priorities_all_taken(tc::ADD_FILTER, libc::EINVAL, true)]
    #[case::still_detaching(bpf::LINK_CREATE, libc::EEXIST, false)]
    #[case::interface_gone(bpf::LINK_CREATE, libc::ENODEV, false)]
    #[case::no_memory_for_a_link(bpf::LINK_CREATE, libc::ENOMEM, false)]
    #[case::no_memory_for_a_filter(tc::ADD_FILTER, libc::ENOMEM, false)]
    #[case::no_descriptor(bpf::LINK_CREATE, libc::EMFILE, false)]
    #[case::no_descriptor_for_netlink(tc::ADD_CLSACT, libc::EMFILE, false)]
    #[case::bpffs_read_only("bpf(BPF_OBJ_PIN)", libc::EROFS, false)]
    #[case::bpffs_full("bpf(BPF_OBJ_PIN)", libc::ENOSPC, false)]
    #[case::no_bpffs("bpf(BPF_OBJ_PIN)", libc::EPERM, false)]
    #[case::link_cannot_be_looked_at("bpf(BPF_OBJ_GET_INFO_BY_FD)", libc::EPERM, false)]
    #[case::link_keeps_its_program("bpf(BPF_LINK_UPDATE)", libc::EPERM, false)]
    #[case::filter_keeps_its_program(tc::REPLACE_FILTER, libc::EINVAL, false)]
    #[case::filters_cannot_be_listed("netlink RTM_GETTFILTER", libc::EPERM, false)]
    fn refusals(#[case] call: &'static str, #[case] errno: i32, #[case] expected: bool) {
        let source = CallError { call, source: io::Error::from_raw_os_error(errno) };
        let error = Error::Attach { program: "workload_ingress", target: "veth7 (ingress)".into(), source };
        assert_eq!(is_refused(&error), expected);
    }

    #[test]
    fn a_qdisc_that_is_taken_is_a_refusal() {
        assert!(is_refused(&Error::IngressQdiscTaken("ingress".to_owned())));
    }
}
