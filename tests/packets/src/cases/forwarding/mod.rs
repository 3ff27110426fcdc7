//! Packets that this node forwards to backends on other nodes or to pods, without its stack.

pub(crate) mod direct;
pub(crate) mod forward;
pub(crate) mod past_stack;
pub(crate) mod redirect;
