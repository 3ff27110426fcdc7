//! Loads the kernel programs, bound to the pinned tables.

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{CgroupSockAddr, Program, ProgramType},
    sys::{BpfHelper, is_helper_supported},
};
use aya_obj::generated::bpf_attach_type;
use proxy_common::inventory::program;

use super::{Error, attach::DIRECTIONS, kernel_log::KernelLog, tables::Shape};
use crate::{
    config::{self, SocketLoadBalancing},
    dataplane::Role,
    sys::{sampler::Undisturbed, tc::Direction},
};

/// The kernel programs, as the build script compiled them.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/proxy-ebpf"));

macro_rules! socket_hooks {
    ($($name:ident: $hook:ident;)+) => {
        &[$((stringify!($name), bpf_attach_type::$hook),)+]
    };
}

/// Programs on the cgroup, by name and hook.
pub(super) const SOCKET_HOOKS: &[(&str, bpf_attach_type)] = proxy_common::socket_programs!(socket_hooks);

/// The kernel programs, each loaded when it is first asked for: most nodes have no device that needs `_l3`.
#[derive(Debug)]
pub(super) struct Programs(Ebpf);

impl Programs {
    pub(super) fn get(&mut self, name: &'static str) -> Result<BorrowedFd<'_>, Error> {
        let program = self.0.program_mut(name).ok_or(Error::NoProgram(name))?;
        let failed = |source| Error::Program { program: name, source: Box::new(source) };
        if program.fd().is_err() {
            // The kernel stops checking a program when a signal comes.
            let _undisturbed = Undisturbed::begin().map_err(Error::Signals)?;
            let loaded = if let Program::SchedClassifier(program) = program {
                program.load()
            } else {
                <&mut CgroupSockAddr>::try_from(&mut *program).and_then(CgroupSockAddr::load)
            };
            loaded.map_err(failed)?;
        }
        Ok(program.fd().map_err(failed)?.as_fd())
    }
}

/// Name of the program for packets in this direction through interfaces of this role, with an Ethernet header or without.
pub(super) fn packet_program(role: Role, direction: Direction, ethernet: bool) -> &'static str {
    macro_rules! program_of {
        ($($name:ident: ($role:ident, $direction:ident, $ethernet:literal);)+) => {
            match (role, direction, ethernet) {
                $((Role::$role, Direction::$direction, $ethernet) => stringify!($name),)+
            }
        };
    }
    proxy_common::packet_programs!(program_of)
}

/// Loads the programs that every node with this configuration needs. Tables that are not pinned in `maps` yet are made there.
pub(super) fn load(
    maps: &Path,
    shapes: &[Shape],
    config: &config::Ebpf,
    learn_namespace: bool,
) -> Result<(Programs, KernelLog), Error> {
    // The kernel stops checking a program when a signal comes.
    let _undisturbed = Undisturbed::begin().map_err(Error::Signals)?;
    let balancing = config.socket_load_balancing;
    let lease = u32::from(!config.withdraw_after.is_zero());
    let host_only = u32::from(balancing == SocketLoadBalancing::Host);
    let host_packets = u32::from(balancing == SocketLoadBalancing::Off);
    let can_refuse = u32::from(
        is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval)
            .map_err(|source| Error::Program { program: "connect4", source: Box::new(source) })?,
    );
    let mut loader = EbpfLoader::new();
    loader
        .override_global("SOCKET_HOST_ONLY", &host_only, true)
        .override_global("HOST_PACKETS", &host_packets, true)
        .override_global("CAN_REFUSE", &can_refuse, true)
        .override_global("LEASE", &lease, true);
    for shape in shapes {
        loader.map_pin_path(shape.name, maps.join(shape.name));
        if shape.limit.is_some() {
            loader.map_max_entries(shape.name, shape.entries);
        }
    }
    let mut object = loader.load(OBJECT).map_err(|e| Error::Load(Box::new(e)))?;
    let log = KernelLog::take(&mut object)?;
    let mut programs = Programs(object);
    if balancing != SocketLoadBalancing::Off {
        for (name, _) in SOCKET_HOOKS {
            programs.get(name)?;
        }
    }
    if learn_namespace {
        programs.get(program::learn_namespace)?;
    }
    for role in [Role::Workload, Role::Uplink] {
        for direction in DIRECTIONS {
            programs.get(packet_program(role, direction, true))?;
        }
    }
    Ok((programs, log))
}
