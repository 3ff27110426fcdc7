//! Packets that this node forwards to backends on other nodes or to pods, without its stack.

pub(crate) mod direct;
pub(crate) mod forward;
pub(crate) mod redirect;
pub(crate) mod skip_stack;
