//! The one place that knows modes by name. A new mode is a folder and a line in [`entry`] and [`ALL`].

use std::path::Path;

use super::{
    Dataplane, Error, ebpf,
    entry::{BoxedProgrammed, Entry, Removed},
};
use crate::{
    config::Config,
    mode::{HostFacts, Mode, Probe},
};

/// The mode to prefer first.
const ALL: [Mode; 1] = [Mode::Ebpf];

const fn entry(mode: Mode) -> &'static Entry {
    match mode {
        Mode::Ebpf => &ebpf::ENTRY,
    }
}

/// What each mode needs, and whether this node has it.
pub fn probe(config: &Config, host: &HostFacts) -> Vec<Probe> {
    ALL.iter().map(|mode| (entry(*mode).probe)(config, host)).collect()
}

/// Does what needs all privileges to run in this mode.
pub fn prepare(mode: Mode, config: &Config) -> Result<(), Error> {
    (entry(mode).prepare)(config)
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
