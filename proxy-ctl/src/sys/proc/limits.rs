//! Resource limits.

use nix::sys::{
    prctl,
    resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit},
};

use crate::sys::CallError;

/// Keeps this process's memory in small pages. In huge pages, the few objects that outlive a parsed
/// list hold 2 MiB each.
pub fn use_small_pages() -> Result<(), CallError> {
    prctl::set_thp_disable(true).map_err(|e| CallError::new("prctl(PR_SET_THP_DISABLE)", e.into()))
}

/// Lets this process lock any amount of memory. Before Linux 5.11, BPF maps count as locked memory.
/// Later kernels have no such limit, so that a refusal matters only on older ones.
pub fn raise_locked_memory() -> Result<(), CallError> {
    set(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY)
}

/// Raises the limit of open files to what this process may have without privileges, and returns it.
pub fn raise_open_files() -> Result<u64, CallError> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|e| CallError::new("getrlimit", e.into()))?;
    set(Resource::RLIMIT_NOFILE, most).map(|()| most)
}

fn set(resource: Resource, limit: u64) -> Result<(), CallError> {
    setrlimit(resource, limit, limit).map_err(|e| CallError::new("setrlimit", e.into()))
}
