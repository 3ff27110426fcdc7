//! Waiting until no program in the kernel can hold what it has read before: an RCU grace period.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use super::{
    CallError,
    bpf::{self, MapInfo},
    map::Map,
};

const MEMBARRIER_CMD_QUERY: libc::c_int = 0;
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;

/// How this kernel is made to wait.
#[derive(Debug)]
pub enum GracePeriod {
    /// `membarrier(MEMBARRIER_CMD_GLOBAL)` is `synchronize_rcu` where more than one CPU is online. Linux 4.3.
    Membarrier,
    /// An update of a map of maps waits for the programs that may use the old inner map (Linux 4.20). For kernels
    /// that refuse membarrier (`nohz_full`), and for one CPU, where membarrier does not wait although a
    /// preempted program may be in the middle of a table.
    MapOfMaps(MapOfMaps),
}

/// An array with one place for a map, and the map to put there.
#[derive(Debug)]
pub struct MapOfMaps {
    outer: Map<u32, u32>,
    inner: OwnedFd,
}

fn membarrier(command: libc::c_int) -> io::Result<libc::c_long> {
    // SAFETY: membarrier takes integers only.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn cpus_online() -> usize {
    std::fs::read_to_string("/sys/devices/system/cpu/online").map_or(1, |list| count_cpus(&list))
}

/// CPUs in a list such as `0-3,6`.
fn count_cpus(list: &str) -> usize {
    list.trim()
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(last.parse::<usize>().ok()?.saturating_sub(first.parse().ok()?) + 1)
        })
        .sum()
}

impl GracePeriod {
    /// Chooses what works here.
    pub fn new() -> Result<Self, CallError> {
        let offered = membarrier(MEMBARRIER_CMD_QUERY)
            .is_ok_and(|commands| commands & libc::c_long::from(MEMBARRIER_CMD_GLOBAL) != 0);
        if offered && cpus_online() > 1 {
            return Ok(Self::Membarrier);
        }
        Ok(Self::MapOfMaps(MapOfMaps::new()?))
    }

    /// Returns when every program that was running when it was called has ended. Takes some milliseconds.
    pub fn wait(&self) -> Result<(), CallError> {
        match self {
            Self::Membarrier => membarrier(MEMBARRIER_CMD_GLOBAL)
                .map(|_| ())
                .map_err(|e| CallError::new("membarrier(MEMBARRIER_CMD_GLOBAL)", e)),
            Self::MapOfMaps(maps) => maps.wait(),
        }
    }
}

impl MapOfMaps {
    pub fn new() -> Result<Self, CallError> {
        let shape = MapInfo {
            kind: BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: 4,
            max_entries: 1,
            ..MapInfo::default()
        };
        let inner = bpf::create_map(&shape, None)?;
        let outer =
            bpf::create_map(&MapInfo { kind: BPF_MAP_TYPE_ARRAY_OF_MAPS, ..shape }, Some(inner.as_fd()))?;
        let outer = Map::new(outer)?
            .map_err(|mismatch| CallError::new("bpf(BPF_MAP_CREATE)", io::Error::other(mismatch)))?;
        Ok(Self { outer, inner })
    }

    fn wait(&self) -> Result<(), CallError> {
        self.outer.put_map(0, self.inner.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::one("0\n", 1)]
    #[case::range("0-3\n", 4)]
    #[case::mixed("0-3,6,8-9", 7)]
    #[case::unreadable("", 0)]
    fn cpus_of_a_list(#[case] list: &str, #[case] count: usize) {
        assert_eq!(count_cpus(list), count);
    }
}
