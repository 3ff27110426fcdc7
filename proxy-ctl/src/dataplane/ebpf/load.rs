//! Loads the kernel programs, bound to the pinned tables.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{CgroupSockAddr, Program, ProgramError, ProgramType, SchedClassifier},
    sys::{BpfHelper, is_helper_supported},
};
use aya_obj::generated::bpf_attach_type;
use proxy_common::inventory::program;

use super::{Error, kernel_log::KernelLog, tables::Shape};
use crate::{
    config::SocketLoadBalancing,
    dataplane::{Interface, Role},
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

/// Loaded programs by name.
#[derive(Debug, Default)]
pub(super) struct Programs {
    loaded: BTreeMap<&'static str, OwnedFd>,
}

impl Programs {
    pub(super) fn get(&self, name: &'static str) -> Result<&OwnedFd, Error> {
        self.loaded.get(name).ok_or(Error::NoProgram(name))
    }
}

/// Name of the program for packets that go through `interface` in this direction.
pub(super) fn packet_program(interface: &Interface, direction: Direction) -> &'static str {
    macro_rules! program_of {
        ($($name:ident: ($role:ident, $direction:ident, $ethernet:literal);)+) => {
            match (interface.role, direction, interface.ethernet) {
                $((Role::$role, Direction::$direction, $ethernet) => stringify!($name),)+
            }
        };
    }
    proxy_common::packet_programs!(program_of)
}

/// Loads the programs that this configuration needs. Tables that are not pinned in `maps` yet are made there.
pub(super) fn load(
    maps: &Path,
    shapes: &[Shape],
    balancing: SocketLoadBalancing,
    learn_namespace: bool,
) -> Result<(Programs, KernelLog), Error> {
    // The kernel stops checking a program when a signal comes.
    let _undisturbed = Undisturbed::begin().map_err(Error::Signals)?;
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
        .override_global("CAN_REFUSE", &can_refuse, true);
    for shape in shapes {
        loader.map_pin_path(shape.name, maps.join(shape.name));
        if shape.limit.is_some() {
            loader.map_max_entries(shape.name, shape.entries);
        }
    }
    let mut object = loader.load(OBJECT).map_err(|e| Error::Load(Box::new(e)))?;
    let log = KernelLog::take(&mut object)?;
    let mut programs = Programs::default();
    if balancing != SocketLoadBalancing::Off {
        for (name, _) in SOCKET_HOOKS {
            programs.load_socket(&mut object, name)?;
        }
    }
    if learn_namespace {
        programs.load_socket(&mut object, program::learn_namespace)?;
    }
    for name in program::ON_INTERFACES {
        programs.load_packet(&mut object, name)?;
    }
    Ok((programs, log))
}

impl Programs {
    fn load_socket(&mut self, object: &mut Ebpf, name: &'static str) -> Result<(), Error> {
        let program: &mut CgroupSockAddr = typed(object, name)?;
        let failed = |source| Error::Program { program: name, source: Box::new(source) };
        program.load().map_err(failed)?;
        self.keep(name, program.fd().map_err(failed)?.as_fd().try_clone_to_owned())
    }

    fn load_packet(&mut self, object: &mut Ebpf, name: &'static str) -> Result<(), Error> {
        let program: &mut SchedClassifier = typed(object, name)?;
        let failed = |source| Error::Program { program: name, source: Box::new(source) };
        program.load().map_err(failed)?;
        self.keep(name, program.fd().map_err(failed)?.as_fd().try_clone_to_owned())
    }

    fn keep(&mut self, name: &'static str, fd: std::io::Result<OwnedFd>) -> Result<(), Error> {
        let fd =
            fd.map_err(|e| Error::Program { program: name, source: Box::new(ProgramError::IOError(e)) })?;
        self.loaded.insert(name, fd);
        Ok(())
    }
}

fn typed<'a, T>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut T, Error>
where
    &'a mut T: TryFrom<&'a mut Program, Error = ProgramError>,
{
    object
        .program_mut(name)
        .ok_or(Error::NoProgram(name))?
        .try_into()
        .map_err(|source| Error::Program { program: name, source: Box::new(source) })
}
