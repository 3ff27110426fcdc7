//! Where a flow's first packet leaves the node, it gets a source of the node's own at which the backend's answers can be told from
//! all others.

use crate::{
    family::Family,
    flow::{
        Change, FlowEntry as _, FlowMaps, Routine, Scratch, Stage,
        ports::{
            Try,
            host_connection::{self, Held},
        },
    },
    layout::Address as _,
    port::{PORT_TRIES, Port, RANDOM_TRIES},
    reason::Reason,
};

/// `scratch.flow` and its entries, which are in `scratch.stage`, learn the source. Two packets of a flow at the same time on two CPUs may
/// choose two: the answers to both are known.
#[inline(always)]
pub(in crate::flow) fn masquerade<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    choose(maps, scratch)?;
    tell_entries(maps, scratch);
    Ok(())
}

#[inline(always)]
fn choose<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) -> Result<(), Reason> {
    let address = maps.masquerade_address(scratch.interface);
    if address == F::Address::UNSPECIFIED {
        return Err(Reason::NoMasqueradeAddress);
    }
    scratch.flow.masquerade = address;
    for attempt in 0..PORT_TRIES {
        scratch.attempt = attempt;
        maps.run(scratch, Routine::TryMasqueradePort);
        match scratch.tried {
            Try::Taken => return Ok(()),
            Try::Next => {}
            Try::Joined | Try::Failed => break,
        }
    }
    Err(Reason::MasqueradePortsExhausted)
}

/// Inserts the entry of backend and node with this attempt's port.
#[inline(always)]
pub(in crate::flow) fn try_port<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Try {
    let attempt = scratch.attempt;
    let is_random = attempt < RANDOM_TRIES;
    if is_random {
        scratch.random = maps.random();
    }
    let port = maps.masquerade_port(scratch.random, attempt);
    if port == Port::NONE {
        return Try::Failed;
    }
    let Scratch { packet, key, flow, .. } = scratch;
    flow.set_masquerade_port(port);
    *key = flow.masquerade_key();
    let held = if is_random { Held::ByAny } else { Held::ByRecent };
    let is_free = !host_connection::holds(maps, key, packet.is_tcp(), held)
        && maps.flow(Stage::Established, key).is_none()
        && maps.insert(Stage::Opening, key, flow) == Ok(());
    if is_free { Try::Taken } else { Try::Next }
}

/// Writes the source that was chosen to the other entries of the flow, which lie in `scratch.stage`.
#[inline(always)]
fn tell_entries<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { key, flow, stage, .. } = scratch;
    let stage = *stage;
    // The one that was inserted may be evicted; nobody else gets the key as long as it is there.
    if stage == Stage::Established {
        // Without room it is as with every flow that cannot be established.
        let _inserted = maps.insert(stage, key, flow);
    }
    let source = Change::Masquerade(flow.masquerade, flow.masquerade_port());
    for is_client in [false, true] {
        *key = if is_client { flow.client_key() } else { flow.backend_key() };
        if let Some(entry) = maps.flow(stage, key)
            && entry.opened() == flow.opened
        {
            entry.write(source);
        }
    }
}
