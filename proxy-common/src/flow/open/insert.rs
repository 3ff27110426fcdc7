//! Inserts the entries of a flow that is opened, both or none. Another CPU may open the same flow.

use crate::{
    family::Family,
    flow::{
        FlowEntry as _, FlowMaps, InsertError, Scratch, Stage,
        entries::KeyKind,
        find::lookup,
        ports::{Try, alias::take_backend_key},
    },
    layout::*,
    port::Port,
    reason::Reason,
};

/// Inserts `scratch.flow`, whose backend is chosen, as that of the packet. It may be another CPU's then, which was first.
#[inline(always)]
pub(in crate::flow) fn insert<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { packet, flow, .. } = scratch;
    flow.client = packet.source;
    flow.frontend = packet.destination;
    flow.set_client_port(packet.source_port);
    flow.set_frontend_port(packet.destination_port);
    flow.protocol = packet.protocol;
    flow.masquerade = F::Address::UNSPECIFIED;
    flow.set_masquerade_port(Port::NONE);
    let is_resumed = flow.flags & FLOW_RESUMED != 0;
    // The backend's stream has come as far as the client acknowledges.
    let reached = if is_resumed { packet.segment.acknowledgement } else { 0 };
    flow.client_numbers = Numbers { reached, awaited: 0 };
    flow.backend_numbers =
        Numbers { reached: packet.segment.next, awaited: packet.segment.sequence.wrapping_add(1) };
    flow.state = FlowState::default();
    flow.forward_token = 0;
    flow.next_hop = CachedHop::default();
    flow.opened = maps.now();
    flow.last_seen = flow.opened;
    if flow.flags & (FLOW_OVERLAPPING | FLOW_KEYED_BY_ORIGIN) != 0 {
        // The flow whose ends it has may end first.
        maps.set_remapped(packet.source_port);
    }
    if take_backend_key(maps, scratch)? == Try::Joined {
        // The other packet of a race is a step ahead, or only this entry was left of the flow.
        let Some((_, entry)) = lookup(maps, &scratch.key) else { return Err(Reason::FlowNotCreated) };
        entry.read_into(&mut scratch.flow);
        KeyKind::Client.set_key(maps, scratch);
        if maps.insert(Stage::Opening, &scratch.key, &scratch.flow) == Err(InsertError::Exists)
            && let Some(clients) = maps.flow(Stage::Opening, &scratch.key)
        {
            // Of another flow, if the other packet has chosen another backend: the client's next packets go there.
            clients.read_into(&mut scratch.flow);
        }
        return Ok(());
    }
    KeyKind::Client.set_key(maps, scratch);
    if maps.insert(Stage::Opening, &scratch.key, &scratch.flow) == Ok(()) {
        maps.tell(scratch, Reason::FlowOpened);
        maps.count_connection(scratch.flow.service);
        return Ok(());
    }
    let winner = maps.flow(Stage::Opening, &scratch.key);
    if let Some(winner) = winner {
        winner.read_into(&mut scratch.entry);
        if scratch.entry.opened == scratch.flow.opened {
            // The other packet of a race found our entry and went on from there.
            return Ok(());
        }
    }
    KeyKind::Backend.set_key(maps, scratch);
    maps.remove(Stage::Opening, &scratch.key);
    // Lost the race to a packet that chose another backend?
    let Some(winner) = winner else { return Err(Reason::FlowNotCreated) };
    winner.read_into(&mut scratch.flow);
    // It was there, unless this CPU has taken it for one of the flow that the winner has replaced.
    KeyKind::Backend.set_key(maps, scratch);
    let _there_already = maps.insert(Stage::Opening, &scratch.key, &scratch.flow);
    Ok(())
}
