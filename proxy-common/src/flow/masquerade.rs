//! Where a flow's first packet leaves the node, it gets a source of the node's own at which the backend's answers can be told from
//! all others.

use super::{Change, FlowEntry as _, FlowTables, Scratch, Stage};
use crate::{family::Family, layout::Address as _, port::Port, reason::Reason};

/// How many ports are tried before the packet is dropped.
const TRIES: u32 = 16;

/// `entry` is that of client and backend, and `scratch.flow` its copy, which learns the source. Two packets of a flow at the same time on
/// two CPUs may choose two: the answers to both are known.
#[inline(never)]
pub(super) fn choose<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    stage: Stage,
    entry: T::Entry,
) -> Result<(), Reason> {
    let address = tables.masquerade_address(scratch.interface);
    if address == F::Address::UNSPECIFIED {
        return Err(Reason::NoMasqueradeAddress);
    }
    scratch.flow.masquerade = address;
    let start = tables.random();
    for attempt in 0..TRIES {
        let port = tables.masquerade_port(start, attempt);
        if port == Port::NONE {
            break;
        }
        let Scratch { key, flow, .. } = &mut *scratch;
        flow.set_masquerade_port(port);
        *key = flow.masquerade_key();
        if tables.flow(other(stage), key).is_some() || tables.insert(stage, key, flow) != Ok(()) {
            continue;
        }
        let source = Change::Masquerade(address, port);
        entry.write(source);
        *key = flow.client_key();
        if let Some(clients) = tables.flow(stage, key)
            && clients.opened() == flow.opened
        {
            clients.write(source);
        }
        return Ok(());
    }
    Err(Reason::MasqueradePortsExhausted)
}

#[inline(always)]
const fn other(stage: Stage) -> Stage {
    match stage {
        Stage::Opening => Stage::Established,
        Stage::Established => Stage::Opening,
    }
}
