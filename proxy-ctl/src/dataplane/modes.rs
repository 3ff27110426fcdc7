//! The one place that knows modes by name. A new mode is a folder and a line in [`entry`].

use std::{path::Path, sync::Arc};

use super::{
    Dataplane, Error, ErrorKind,
    conntrack::WithConntrack,
    ebpf,
    entry::{BoxedProgrammed, Entry, Removed},
    hand_over::{HandOver, ModeBeside},
    iptables, ipvs,
};
use crate::{
    config::Config,
    mode::{HostFacts, Mode, Probe},
};

/// `None`: the mode is not built.
const fn entry(mode: Mode) -> Option<&'static Entry> {
    match mode {
        Mode::Ebpf => Some(&ebpf::ENTRY),
        Mode::Iptables => Some(&iptables::ENTRY),
        Mode::Ipvs => Some(&ipvs::ENTRY),
        Mode::Nftables | Mode::Userspace => None,
    }
}

fn built(mode: Mode) -> Result<&'static Entry, Error> {
    entry(mode).ok_or_else(|| Error::new(ErrorKind::Other, format!("mode {mode} is not built")))
}

fn entries() -> impl Iterator<Item = (Mode, &'static Entry)> {
    Mode::ALL.into_iter().filter_map(|mode| Some((mode, entry(mode)?)))
}

/// What each mode needs, and whether this node has it.
pub fn probe(config: &Config, host: &HostFacts) -> Vec<Probe> {
    entries().map(|(_, entry)| (entry.probe)(config, host)).collect()
}

/// Does what needs all privileges to run in this mode.
pub fn prepare(mode: Mode, config: &Config) -> Result<(), Error> {
    (built(mode)?.prepare)(config)
}

/// The mode that serves beside `mode` what that cannot: the first that may and can.
pub fn beside(mode: Mode, probes: &[Probe]) -> Option<Mode> {
    entry(mode).filter(|entry| entry.hands_over)?;
    let may = |probe: &&Probe| entry(probe.mode).is_some_and(|entry| entry.serves_beside);
    probes.iter().filter(may).find(|probe| probe.obstacles().next().is_none()).map(|probe| probe.mode)
}

/// The node's dataplane in this mode: takes over what a predecessor left. `beside`: serves what the mode cannot.
pub fn open(mode: Mode, beside: Option<Mode>, config: &Arc<Config>) -> Result<Box<dyn Dataplane>, Error> {
    let dataplane = open_one(mode, config)?;
    Ok(match beside {
        None => dataplane,
        Some(mode) => {
            let beside = Beside { mode, config: Arc::clone(config) };
            Box::new(HandOver::new(dataplane, Box::new(beside)))
        }
    })
}

fn open_one(mode: Mode, config: &Config) -> Result<Box<dyn Dataplane>, Error> {
    let entry = built(mode)?;
    let dataplane = (entry.open)(config)?;
    Ok(if entry.tracks_flows { Box::new(WithConntrack::new(dataplane)) } else { dataplane })
}

struct Beside {
    mode: Mode,
    config: Arc<Config>,
}

impl ModeBeside for Beside {
    fn mode(&self) -> Mode {
        self.mode
    }

    fn open(&self) -> Result<Box<dyn Dataplane>, Error> {
        open_one(self.mode, &self.config)
    }

    fn remove(&self) -> Result<(), Error> {
        (built(self.mode)?.cleanup)(&self.config.ebpf.bpffs).map(drop)
    }
}

/// What is programmed on this node, read without a controller.
pub fn read(bpffs: &Path) -> Result<Option<(Mode, BoxedProgrammed)>, Error> {
    for (mode, entry) in entries() {
        if let Some(programmed) = (entry.read)(bpffs)? {
            return Ok(Some((mode, programmed)));
        }
    }
    Ok(None)
}

/// The process that programs this node. It may only just have begun. `None`: there is none, or the kernel does not
/// tell, as for a process of another PID namespace.
pub fn controller(bpffs: &Path) -> Option<u32> {
    entries().find_map(|(_, entry)| (entry.controller)(bpffs))
}

/// Removes everything that any mode has programmed, and nothing else.
pub fn cleanup(bpffs: &Path) -> Result<Removed, Error> {
    let mut all = Removed::default();
    for (_, entry) in entries() {
        let Removed { links, filters, tables } = (entry.cleanup)(bpffs)?;
        all.links.extend(links);
        all.filters += filters;
        all.tables.extend(tables);
    }
    Ok(all)
}
