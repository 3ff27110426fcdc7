//! Translates packets of flows. The fast path and the slow path share these decisions.

use super::{Scratch, tuples::Position};
use crate::{layout::*, packet::Then, reason::Reason};

/// What a packet of `scratch.flow` becomes where it enters the node.
#[inline(always)]
pub(super) fn translate_arriving<A: Address>(
    scratch: &mut Scratch<A>,
    position: Position,
) -> Result<(), Reason> {
    let Scratch { packet, action, flow, .. } = scratch;
    let (is_host_connection, is_from_host) =
        (flow.flags & FLOW_HOST_CONNECTION != 0, flow.flags & FLOW_FROM_HOST != 0);
    action.rewrite = match position {
        Position::ToFrontend if !is_from_host => flow.dnat_rewrite(),
        Position::FromBackendMasqueraded => flow.unmasquerade_rewrite(),
        Position::FromBackend if is_host_connection => flow.reply_rewrite(),
        Position::FromBackend if is_from_host => {
            action.then = Then::IntoNode;
            flow.reply_rewrite()
        }
        // At the egress it would look like an answer that has come to the masquerade.
        Position::FromBackend if flow.is_masqueraded() && packet.is_tcp() && !packet.is_error() => {
            return Err(Reason::ForgedAnswer);
        }
        Position::ToFrontend
        | Position::FromFrontend
        | Position::ToBackend
        | Position::FromBackend
        | Position::ToBackendMasqueraded => return Err(Reason::NotAService),
    };
    Ok(())
}

/// What a packet of `scratch.flow` becomes where it leaves the node. `is_hosts`: a process of the node sends it to the frontend.
#[inline(always)]
pub(super) fn translate_leaving<A: Address>(
    scratch: &mut Scratch<A>,
    position: Position,
    is_hosts: bool,
) -> Result<(), Reason> {
    let Scratch { action, flow, .. } = scratch;
    action.rewrite = match position {
        Position::FromBackend => flow.reply_rewrite(),
        Position::ToBackend if flow.flags & FLOW_MASQUERADE != 0 => flow.masquerade_rewrite(),
        Position::ToFrontend if is_hosts || flow.flags & FLOW_HOST_CONNECTION != 0 => flow.dnat_rewrite(),
        Position::ToFrontend
        | Position::FromFrontend
        | Position::ToBackend
        | Position::ToBackendMasqueraded
        | Position::FromBackendMasqueraded => return Err(Reason::NotAService),
    };
    Ok(())
}
