//! Ports that tell answers apart: who has which, and how a flow gets one that nobody else has.

pub(super) mod alias;
pub(super) mod host_connection;
pub(super) mod masquerade;

/// What came of one of several ports that are tried.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Try {
    #[default]
    Next,
    /// The entry with this port is inserted.
    Taken,
    /// The entry is there, at `scratch.key`: of another CPU's flow that is as good as ours.
    Joined,
    /// No other port is to be tried.
    Failed,
}
