//! Attaches the socket hooks to the cgroup.

use std::{
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::PathBuf,
};

use aya_obj::generated::bpf_attach_type;
use proxy_common::inventory::program;

use super::Hooks;
use crate::{
    modes::ebpf::{
        Error,
        hooks::load::{Programs, SOCKET_HOOKS},
        maps::{paths::SOCKET_LINK, pins::Ensured},
    },
    sys::bpf::{self, LinkTarget},
};

/// A cgroup v2 folder.
#[derive(Debug)]
pub(crate) struct Cgroup {
    pub(super) path: PathBuf,
    pub(super) fd: OwnedFd,
    pub(super) inode: u64,
}

impl Cgroup {
    pub(crate) fn open(path: PathBuf) -> Result<Self, Error> {
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.ino(), file)));
        match opened {
            Ok((inode, file)) => Ok(Self { path, fd: file.into(), inode }),
            Err(source) => Err(Error::Folder { path, source }),
        }
    }

    /// Attaches a program until the returned descriptor is dropped.
    pub(crate) fn attach(
        &self,
        programs: &mut Programs,
        name: &'static str,
        hook: bpf_attach_type,
    ) -> Result<OwnedFd, Error> {
        bpf::link_cgroup(programs.get(name)?, self.fd.as_fd(), hook).map_err(|source| Error::Attach {
            program: name,
            target: self.path.display().to_string(),
            source,
        })
    }
}

impl Hooks {
    /// Returns true if a former controller has counted sockets.
    pub(crate) fn is_release_pinned(&self) -> bool {
        self.socket_link(program::sock_release).exists()
    }

    /// Attaches or detaches the socket hooks, and returns true if anything had to be done.
    pub(crate) fn attach_sockets(&mut self) -> Result<bool, Error> {
        // The release hook comes first, so that each socket that the other hooks count is also seen
        // to close.
        let mut outcome = self.attach_release();
        for &(name, hook) in SOCKET_HOOKS {
            let attached = self.attach_socket_hook(name, hook);
            outcome = outcome.and_then(|changed| Ok(changed | attached?));
        }
        outcome
    }

    fn attach_socket_hook(&mut self, name: &'static str, hook: bpf_attach_type) -> Result<bool, Error> {
        let path = self.socket_link(name);
        let Some(cgroup) = &self.cgroup else { return self.links.remove(&path) };
        let program = self.programs.get(name)?;
        let is_target = |target| target == LinkTarget::Cgroup(cgroup.inode);
        let create = || bpf::link_cgroup(program, cgroup.fd.as_fd(), hook);
        let failed =
            |source| Error::Attach { program: name, target: cgroup.path.display().to_string(), source };
        self.links.ensure(&path, program, is_target, create).map(Ensured::is_change).map_err(failed)
    }

    /// Attaches the hook for sockets that are closed if sockets are counted, and otherwise detaches
    /// it.
    pub(crate) fn attach_release(&mut self) -> Result<bool, Error> {
        let (name, hook) = (program::sock_release, bpf_attach_type::BPF_CGROUP_INET_SOCK_RELEASE);
        if self.counts_sockets {
            self.attach_socket_hook(name, hook)
        } else {
            self.links.remove(&self.socket_link(name))
        }
    }

    fn socket_link(&self, name: &str) -> PathBuf {
        self.paths.links().join(format!("{SOCKET_LINK}{name}"))
    }
}
