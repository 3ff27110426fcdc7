//! Resource limits.

use nix::sys::prctl;

use super::CallError;

/// Keeps this process's memory in small pages. In huge ones the few objects that outlive a parsed list hold 2 MiB each.
pub fn use_small_pages() -> Result<(), CallError> {
    prctl::set_thp_disable(true).map_err(|e| CallError::new("prctl(PR_SET_THP_DISABLE)", e.into()))
}

/// Lets this process lock any amount of memory. Before Linux 5.11 BPF maps count as locked memory; later kernels
/// do not ask, so that a refusal matters only there.
pub fn raise_locked_memory() -> Result<(), CallError> {
    let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    let source: *const libc::rlimit = &limit;
    // SAFETY: the kernel reads a rlimit from `source`.
    if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, source) } == 0 {
        Ok(())
    } else {
        Err(CallError::last("setrlimit(RLIMIT_MEMLOCK)"))
    }
}

/// Lets this process have as many open files as it may without privileges, and answers how many that are.
pub fn raise_open_files() -> Result<u64, CallError> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let target: *mut libc::rlimit = &mut limit;
    // SAFETY: the kernel writes a rlimit to `target`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, target) } != 0 {
        return Err(CallError::last("getrlimit(RLIMIT_NOFILE)"));
    }
    limit.rlim_cur = limit.rlim_max;
    let source: *const libc::rlimit = &limit;
    // SAFETY: the kernel reads a rlimit from `source`.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, source) } != 0 {
        return Err(CallError::last("setrlimit(RLIMIT_NOFILE)"));
    }
    Ok(limit.rlim_cur)
}
