//! Parts of decisions that are off the way of most packets. In the kernel each is a function of its own that takes no pointers, so that the
//! verifier goes through it once, and not once more with all that each of its callers knows.

use super::{
    FlowMaps, Scratch, direct, entries,
    find::find_remapped,
    forward, fragments,
    open::{self, prepare},
    ports::{alias, host_connection, masquerade},
    tcp,
};
use crate::{family::Family, reason::Reason};

/// What it needs, and what comes of it, is in the [`Scratch`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Routine {
    /// Sets `key` to that of the entry of `flow` for `key_kind`.
    SetKey,
    /// Tries the port of `attempt` as the alias of `flow`: `tried`.
    TryAliasPort,
    /// Tries the port of `attempt` as the source of `flow`: `tried`.
    TryMasqueradePort,
    /// Learns what a segment of the slow path says.
    TrackSlow,
    /// Sets `key` to another one at which the packet may have its flow.
    FindRemapped,
    /// Makes `flow` one to what the packet dials, if it dials something: `failure`.
    Prepare,
    /// Inserts `flow`: `failure`.
    Insert,
    /// Chooses the source of `flow`: `failure`.
    Masquerade,
    /// Copies `flow` to the established ones: `failure`.
    Establish,
    /// Stamps the entries of `flow`.
    Refresh,
    /// Inserts a missing entry of `flow`, for `key_kind` at `key` in `stage`.
    Restore,
    /// Moves `flow`, which has ended, from the established ones.
    Demote,
    /// Removes `entry`, of a client, from the established ones.
    Leave,
    /// Removes `flow`, whose client gets another backend.
    Replace,
    /// Finds what became of the packet's first fragment: `failure`.
    FollowFragment,
    /// Keeps `failure` for the packet's other fragments.
    RecordFragment,
    /// Notes the ends of a packet that leaves and has no flow.
    NoteHostConnection,
    /// Makes the packet, which goes to a backend, what the client has sent again, and sets `tunnel` to the ends of the one that it leaves
    /// in: `failure`. Lets XDP forward packets of `flow`.
    Encapsulate,
    /// Notes that the stack has let a packet of `flow` out.
    AllowForwarding,
    /// Notes that XDP sends the client's packets of `flow` to a pod, by `next_hop`.
    NoteForwardedByXdp,
    /// Leaves all packets of `flow`, which XDP has sent to a pod, to the stack.
    LeaveToStack,
    /// Keeps a flow whose answers are not seen here: `failure`.
    GoOnDirectly,
    /// Learns what a client says whose answers are not seen here.
    TrackClient,
}

/// Carries out a routine that may fail.
#[inline(always)]
pub(super) fn decide<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    routine: Routine,
) -> Result<(), Reason> {
    maps.run(scratch, routine);
    scratch.failure.map_or(Ok(()), Err)
}

/// Carries out the routine.
#[inline(always)]
pub fn run<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>, routine: Routine) {
    match routine {
        Routine::SetKey => entries::set_key(scratch),
        Routine::TrackSlow => tcp::track_slow(maps, scratch),
        Routine::TryAliasPort => scratch.tried = alias::try_port(maps, scratch),
        Routine::TryMasqueradePort => scratch.tried = masquerade::try_port(maps, scratch),
        Routine::FindRemapped => find_remapped(maps, scratch),
        Routine::Prepare => scratch.failure = prepare(maps, scratch).err(),
        Routine::Insert => scratch.failure = open::insert(maps, scratch).err(),
        Routine::Masquerade => scratch.failure = masquerade::masquerade(maps, scratch).err(),
        Routine::Establish => scratch.failure = entries::establish(maps, scratch).err(),
        Routine::Refresh => entries::refresh(maps, scratch),
        Routine::Restore => entries::restore(maps, scratch),
        Routine::Leave => entries::leave(maps, scratch),
        Routine::Demote => entries::demote(maps, scratch),
        Routine::Replace => entries::replace(maps, scratch),
        Routine::FollowFragment => scratch.failure = fragments::follow(maps, scratch).err(),
        Routine::RecordFragment => fragments::record(maps, scratch),
        Routine::NoteHostConnection => host_connection::note(maps, scratch),
        Routine::Encapsulate => scratch.failure = direct::encapsulate(maps, scratch).err(),
        Routine::AllowForwarding => forward::allow_forwarding(maps, scratch),
        Routine::NoteForwardedByXdp => forward::note_forwarded_by_xdp(maps, scratch),
        Routine::LeaveToStack => forward::leave_to_stack(maps, scratch),
        Routine::GoOnDirectly => scratch.failure = direct::go_on(maps, scratch).err(),
        Routine::TrackClient => direct::track_client(maps, scratch),
    }
}
