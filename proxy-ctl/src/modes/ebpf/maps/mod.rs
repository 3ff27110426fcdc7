//! The BPF maps as files and typed handles: their shapes, pins, folders and sizes, and lookups in
//! them. Nothing here decides what they hold.

pub(super) mod family;
pub(super) mod filling;
pub(super) mod handles;
pub(super) mod lookups;
pub(super) mod paths;
pub(super) mod pinned;
pub(super) mod pins;
pub(super) mod resize;
pub(super) mod sizes;
