//! Loads the kernel programs, bound to the pinned maps.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd as _, BorrowedFd},
    panic::resume_unwind,
    path::PathBuf,
    thread,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{CgroupSockAddr, Program, ProgramType},
    sys::{BpfHelper, is_helper_supported},
};
use aya_obj::generated::bpf_attach_type;
use proxy_common::inventory::{map_name, program};

use super::program_log::KernelLog;
use crate::{
    config::{self, SocketLoadBalancing, SourceAddress, UnallocatedServiceAddresses, Xdp},
    model::node::Role,
    modes::ebpf::{
        Error,
        maps::handles::{Shape, typed},
    },
    sys::{CallError, bpf::map::Map, net::tc::Direction, proc::clock},
};

/// The versions of the compiler and the linker that made [`OBJECT`].
pub const OBJECT_BUILT_WITH: &str = env!("PROXY_EBPF_BUILT_WITH");
/// The kernel programs, as the build script compiled them.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/proxy-ebpf"));

macro_rules! socket_hooks {
    ($($name:ident: $hook:ident;)+) => {
        &[$((stringify!($name), bpf_attach_type::$hook),)+]
    };
}

/// The programs on the cgroup, each with its name and hook.
pub(super) const SOCKET_HOOKS: &[(&str, bpf_attach_type)] = proxy_common::socket_programs!(socket_hooks);

/// The kernel programs. Each is loaded when it is first asked for, because most nodes have no
/// device that needs a `_l3` program.
#[derive(Debug)]
pub(crate) struct Programs {
    object: Ebpf,
    openings_held_until: Map<u32, u64>,
}

impl Programs {
    pub(crate) fn get(&mut self, name: &'static str) -> Result<BorrowedFd<'_>, Error> {
        let program = self.object.program_mut(name).ok_or(Error::NoProgram(name))?;
        if program.fd().is_err() {
            load_program(name, program)?;
        }
        let fd = program.fd().map_err(|source| Error::Program { program: name, source: Box::new(source) })?;
        Ok(fd.as_fd())
    }

    /// Lets no flow open for this time, or until [`let_open`](Self::let_open).
    pub(crate) fn hold_openings(&self, time: Duration) -> Result<(), Error> {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.set_held_until(clock::since_boot().saturating_add(nanoseconds))
    }

    /// Lets flows open again.
    pub(crate) fn let_open(&self) -> Result<(), Error> {
        self.set_held_until(0)
    }

    fn set_held_until(&self, time: u64) -> Result<(), Error> {
        let held_until = &self.openings_held_until;
        held_until.set(&0, &time).map_err(|source| Error::Map { name: map_name::openings_held_until, source })
    }

    /// Loads the named programs that are not loaded yet, in parallel. The kernel verifies a program
    /// on the CPU that asks for it, so each gets a thread.
    pub(super) fn load_all(&mut self, names: impl IntoIterator<Item = &'static str>) -> Result<(), Error> {
        let mut wanted = BTreeSet::from_iter(names);
        let mut programs = Vec::new();
        for (name, program) in self.object.programs_mut() {
            if let Some(name) = wanted.take(name)
                && program.fd().is_err()
            {
                programs.push((name, program));
            }
        }
        if let Some(name) = wanted.first() {
            return Err(Error::NoProgram(name));
        }
        thread::scope(|scope| {
            let load = |(name, program)| scope.spawn(move || load_program(name, program));
            let loading: Vec<_> = programs.into_iter().map(load).collect();
            loading
                .into_iter()
                .try_for_each(|loaded| loaded.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }
}

/// Returns the map by which flows are held, which each load of the programs has for itself.
fn held_until(object: &Ebpf) -> Result<Map<u32, u64>, Error> {
    let name = map_name::openings_held_until;
    let failed = |source| Error::Map { name, source };
    let Some(aya::maps::Map::Array(map)) = object.map(name) else {
        let problem = io::Error::other("the object has no such map");
        return Err(failed(CallError::new("loading the object", problem)));
    };
    let fd = map.fd().as_fd().try_clone_to_owned();
    typed(&fd.map_err(|e| failed(CallError::new("fcntl(F_DUPFD_CLOEXEC)", e)))?, name)
}

fn load_program(name: &'static str, program: &mut Program) -> Result<(), Error> {
    let loaded = if let Program::SchedClassifier(program) = program {
        program.load()
    } else if let Program::Xdp(program) = program {
        program.load()
    } else if let Program::CgroupSock(program) = program {
        program.load()
    } else {
        <&mut CgroupSockAddr>::try_from(program).and_then(CgroupSockAddr::load)
    };
    loaded.map_err(|source| Error::Program { program: name, source: Box::new(source) })
}

/// Returns the name of the program for packets in this direction through interfaces of this role,
/// with or without an Ethernet header.
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

/// Returns the names of the packet programs that most nodes need.
pub(super) fn common_packet_programs() -> impl Iterator<Item = &'static str> {
    [Role::Workload, Role::Uplink]
        .into_iter()
        .flat_map(|role| Direction::ALL.map(|direction| packet_program(role, direction, true)))
}

/// Loads the object with the socket hooks of this configuration. Maps that are not pinned yet are
/// made in the folder that `pins` returns for them.
///
/// Packet programs are loaded later, when they are attached.
pub(crate) fn load(
    shapes: &[Shape],
    pins: impl Fn(&Shape) -> PathBuf,
    config: &config::Ebpf,
    learn_namespace: bool,
) -> Result<(Programs, KernelLog), Error> {
    let balancing = config.sockets();
    let lease = u32::from(!config.withdraw_after.is_zero());
    let host_only = u32::from(balancing == SocketLoadBalancing::Host);
    let host_packets = u32::from(balancing == SocketLoadBalancing::Off);
    let masquerade = u32::from(config.source_address == SourceAddress::Masquerade);
    let resets_gone = u32::from(config.reset_connections_to_gone_endpoints);
    let drop_unallocated =
        u32::from(config.unallocated_service_addresses == UnallocatedServiceAddresses::Drop);
    let answer_ping = u32::from(config.answer_ping);
    let can_refuse = u32::from(
        is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval)
            .map_err(|source| Error::Program { program: "connect4", source: Box::new(source) })?,
    );
    let skip_stack = u32::from(config.xdp != Xdp::Off);
    let mut loader = EbpfLoader::new();
    loader
        // No program has CO-RE relocations. `new` has read the kernel's BTF, and the loader would
        // keep its 16 MB while it loads.
        .btf(None)
        .override_global("SOCKET_HOST_ONLY", &host_only, true)
        .override_global("HOST_PACKETS", &host_packets, true)
        .override_global("CAN_REFUSE", &can_refuse, true)
        .override_global("LEASE", &lease, true)
        .override_global("RESETS_GONE", &resets_gone, true)
        .override_global("MASQUERADE_AS_KUBE_PROXY", &masquerade, true)
        .override_global("DROP_UNALLOCATED", &drop_unallocated, true)
        .override_global("ANSWER_PING", &answer_ping, true)
        .override_global("SKIP_STACK", &skip_stack, true);
    for shape in shapes {
        loader.map_pin_path(shape.name, pins(shape).join(shape.name));
        if shape.limit.is_some() {
            loader.map_max_entries(shape.name, shape.entries);
        }
    }
    let mut object = loader.load(OBJECT).map_err(|e| Error::Load(Box::new(e)))?;
    let log = KernelLog::take(&mut object)?;
    let of_sockets = SOCKET_HOOKS.iter().filter(|_| balancing != SocketLoadBalancing::Off);
    let mut names: Vec<_> = of_sockets.map(|(name, _)| *name).collect();
    names.extend(learn_namespace.then_some(program::learn_namespace));
    let mut programs = Programs { openings_held_until: held_until(&object)?, object };
    programs.load_all(names)?;
    Ok((programs, log))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_program_needs_the_kernels_types() {
        let object = aya_obj::Object::parse(OBJECT).unwrap();
        assert!(!object.has_btf_relocations());
    }
}
