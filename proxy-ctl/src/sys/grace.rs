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

const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;

/// An array with one place for a map, and the map to put there: an update of a map of maps waits for the programs that may use
/// the old inner map (Linux 4.20), on every kernel, also with one CPU and with `nohz_full`, where membarrier does not.
#[derive(Debug)]
pub struct GracePeriod {
    outer: Map<u32, u32>,
    inner: OwnedFd,
}

impl GracePeriod {
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

    /// Returns when every program that was running when it was called has ended. Takes some milliseconds.
    pub fn wait(&self) -> Result<(), CallError> {
        self.outer.put_map(0, self.inner.as_fd())
    }
}
