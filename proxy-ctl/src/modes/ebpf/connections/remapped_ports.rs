//! The map `remapped_ports`: source ports of flows with another key than their packets say.
//!
//! Programs set a port before they insert such a flow. Nobody clears a port: a program could set it
//! in the same moment, and its flow would not be found. Instead, each port has the number of the
//! generation in which it was set last. A port that was set two generations ago does not count.
//!
//! A generation lasts until each flow map has been walked through. The walk sets the port again of
//! each such flow that it meets.
//!
//! A version before generations, which was never released, sets ports to 1. If it has served in
//! between, such a port does not count before a walk has met its flow.

use std::collections::HashSet;

use proxy_common::{
    layout::{FLOW_KEYED_BY_ORIGIN, FLOW_OVERLAPPING, Flow},
    port::Port,
};

use crate::modes::ebpf::{Error, maps::handles::NamedMap};

/// The number of complete walks through each flow map. Each family has two.
pub(crate) type Walks = [u64; 4];

/// The number of walks through each map that a generation takes. The first of them may have begun
/// before the generation.
const WALKS: u64 = 2;

/// The current generation of the map, and the ports that were set in it.
#[derive(Debug, Default)]
pub(crate) struct RemappedPorts {
    /// The number of the current generation; 0 until it has been read.
    generation: u32,
    /// The ports that walks have set in this generation.
    met: HashSet<Port>,
    /// The numbers of walks at which the generation is over.
    until: Walks,
}

impl RemappedPorts {
    /// Sets the ports of those flows that have another key than their packets.
    pub(crate) fn see<A>(
        &mut self,
        map: &NamedMap<u32, u32>,
        flows: impl Iterator<Item = Flow<A>>,
    ) -> Result<(), Error> {
        for flow in flows.filter(|flow| flow.flags & (FLOW_KEYED_BY_ORIGIN | FLOW_OVERLAPPING) != 0) {
            let port = flow.client_port();
            if self.generation != 0 && !self.met.contains(&port) && port != Port::NONE {
                map.set(&u32::from(port.number()), &self.generation)?;
                self.met.insert(port);
            }
        }
        Ok(())
    }

    /// Reads the generation at first, and begins the next one if the walks have met all flows of
    /// this one.
    pub(crate) fn tend(&mut self, map: &NamedMap<u32, u32>, walks: Walks) -> Result<(), Error> {
        if self.generation == 0 {
            self.generation = map.get(&GENERATION)?.unwrap_or_default().max(1);
            self.begin(walks);
        } else if walks.iter().zip(self.until).all(|(walks, until)| *walks >= until) {
            let next = self.generation.saturating_add(1);
            map.set(&GENERATION, &next)?;
            self.generation = next;
            self.begin(walks);
        }
        Ok(())
    }

    /// Makes the generation last for further walks, as after a walk that may have missed a flow.
    pub(crate) fn begin(&mut self, walks: Walks) {
        self.until = walks.map(|walks| walks.saturating_add(WALKS));
        self.met.clear();
    }
}

/// The key of the current generation. Port 0 is free for it, because no packet has it as its
/// source.
const GENERATION: u32 = 0;
