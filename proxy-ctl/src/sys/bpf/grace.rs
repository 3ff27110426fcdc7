//! Waits for an RCU grace period, after which no BPF program can still use what it has read before.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use super::{
    MapInfo,
    map::{
        Map,
        kind::{ARRAY, ARRAY_OF_MAPS},
    },
};
use crate::sys::{CallError, bpf};

/// A map of maps with one element, and the map that is put there again and again. Such an update
/// waits for all programs that may use the former inner map (Linux 4.20).
///
/// This works on every kernel, also with one CPU and with `nohz_full`, where membarrier does not.
#[derive(Debug)]
pub struct GracePeriod {
    outer: Map<u32, u32>,
    inner: OwnedFd,
}

impl GracePeriod {
    pub fn new() -> Result<Self, CallError> {
        let shape = MapInfo { kind: ARRAY, key_size: 4, value_size: 4, max_entries: 1, ..MapInfo::default() };
        let inner = bpf::create_map(&shape, None)?;
        let outer = bpf::create_map(&MapInfo { kind: ARRAY_OF_MAPS, ..shape }, Some(inner.as_fd()))?;
        let outer = Map::new(outer)?
            .map_err(|mismatch| CallError::new("bpf(BPF_MAP_CREATE)", io::Error::other(mismatch)))?;
        Ok(Self { outer, inner })
    }

    /// Waits until every program that was running at the time of the call has ended. This takes
    /// some milliseconds.
    pub fn wait(&self) -> Result<(), CallError> {
        self.outer.put_map(0, self.inner.as_fd())
    }
}
