//! The one place that knows modes by name. A new mode is a folder and a line in [`entry`] and [`ALL`].

use std::path::Path;

use super::{Dataplane, Error, Programmed, ebpf};
use crate::{config::Config, mode::Mode};

type BoxedProgrammed = Box<dyn Programmed>;

const ALL: [Mode; 1] = [Mode::Ebpf];

const fn entry(mode: Mode) -> &'static Entry {
    match mode {
        Mode::Ebpf => &ebpf::ENTRY,
    }
}

/// What is done with a mode where there is no dataplane of it.
pub(super) struct Entry {
    pub(super) open: fn(&Config) -> Result<Box<dyn Dataplane>, Error>,
    /// `None`: nothing is programmed, or not all tables are there yet.
    pub(super) read: fn(bpffs: &Path) -> Result<Option<BoxedProgrammed>, Error>,
    pub(super) controller: fn(bpffs: &Path) -> Option<u32>,
    pub(super) cleanup: fn(bpffs: &Path) -> Result<Removed, Error>,
    pub(super) reasons: fn() -> Vec<(&'static str, &'static str)>,
}

/// The node's dataplane in this mode: takes over what a predecessor left.
pub fn open(mode: Mode, config: &Config) -> Result<Box<dyn Dataplane>, Error> {
    (entry(mode).open)(config)
}

/// What is programmed on this node, read without a controller.
pub fn read(bpffs: &Path) -> Result<Option<(Mode, BoxedProgrammed)>, Error> {
    for mode in ALL {
        if let Some(programmed) = (entry(mode).read)(bpffs)? {
            return Ok(Some((mode, programmed)));
        }
    }
    Ok(None)
}

/// The process that programs this node. It may only just have begun. `None`: there is none, or the kernel does not
/// tell, as for a process of another PID namespace.
pub fn controller(bpffs: &Path) -> Option<u32> {
    ALL.iter().find_map(|mode| (entry(*mode).controller)(bpffs))
}

/// What was removed, in the order in which it was.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Removed {
    /// Names of links: `cgroup_connect4`, `3_ingress`.
    pub links: Vec<String>,
    /// Number of filters on clsact qdiscs.
    pub filters: usize,
    /// Names of tables.
    pub tables: Vec<String>,
}

impl Removed {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Removes everything that any mode has programmed, and nothing else.
pub fn cleanup(bpffs: &Path) -> Result<Removed, Error> {
    let mut all = Removed::default();
    for mode in ALL {
        let Removed { links, filters, tables } = (entry(mode).cleanup)(bpffs)?;
        all.links.extend(links);
        all.filters += filters;
        all.tables.extend(tables);
    }
    Ok(all)
}

/// Every reason that a mode counts decisions by, with the verdict: `pass`, `refuse` or `drop`.
pub fn reasons(mode: Mode) -> Vec<(&'static str, &'static str)> {
    (entry(mode).reasons)()
}
