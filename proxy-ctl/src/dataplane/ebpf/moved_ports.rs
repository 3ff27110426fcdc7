//! The table `moved_ports`: source ports of flows that may have another key than their packets say.
//! The programs set a port before they insert such a flow, and nobody clears one: a program could
//! set it in the same moment, and its flow would not be found. Instead a port has the number of the
//! generation in which it was set last, and what is two generations old does not count.
//!
//! A generation lasts until each table of flows has been walked through. For each such flow that a
//! walk meets, the port is set again.

use std::collections::HashSet;

use proxy_common::{
    layout::{FLOW_APART, FLOW_FOREIGN, Flow},
    port::Port,
};

use super::{Error, tables::Table};

/// The complete walks of each table of flows: two of each family.
pub(super) type Walks = [u64; 4];

/// The walks of each table that a generation takes. The first one may have begun before it.
const WALKS: u64 = 2;

/// The generation of the table, and what was set in it.
#[derive(Debug, Default)]
pub(super) struct MovedPorts {
    /// 0: it is not known yet.
    generation: u32,
    /// The ports that walks have set in this generation.
    met: HashSet<Port>,
    /// The number of walks with which the generation is over.
    until: Walks,
}

impl MovedPorts {
    /// Sets the ports of those of these flows that have another key.
    pub(super) fn see<A>(
        &mut self,
        table: &Table<u32, u32>,
        flows: impl Iterator<Item = Flow<A>>,
    ) -> Result<(), Error> {
        for flow in flows.filter(|flow| flow.flags & (FLOW_APART | FLOW_FOREIGN) != 0) {
            let port = flow.client_port();
            if self.generation != 0 && !self.met.contains(&port) && port != Port::NONE {
                table.set(&u32::from(port.number()), &self.generation)?;
                self.met.insert(port);
            }
        }
        Ok(())
    }

    /// Begins the next generation if the walks have met all flows of this one.
    pub(super) fn tend(&mut self, table: &Table<u32, u32>, walks: Walks) -> Result<(), Error> {
        if self.generation == 0 {
            self.generation = table.get(&GENERATION)?.unwrap_or_default().max(1);
            self.begin(walks);
        } else if walks.iter().zip(self.until).all(|(walks, until)| *walks >= until) {
            let next = self.generation.saturating_add(1);
            table.set(&GENERATION, &next)?;
            self.generation = next;
            self.begin(walks);
        }
        Ok(())
    }

    /// Makes the generation last longer, as a walk may have left a flow out.
    pub(super) fn begin(&mut self, walks: Walks) {
        self.until = walks.map(|walks| walks.saturating_add(WALKS));
        self.met.clear();
    }
}

/// No packet has port 0 as its source: the table has the current generation there.
const GENERATION: u32 = 0;
