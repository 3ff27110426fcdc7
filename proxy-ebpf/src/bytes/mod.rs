//! Access to the bytes of a packet, which `proxy-common` parses and rewrites: the linear part of an skb
//! (`linear.rs`), all of an skb (`skb.rs`), and a frame that no skb holds yet (`frame.rs`).

pub(crate) mod direct;
pub(crate) mod frame;
pub(crate) mod linear;
pub(crate) mod skb;
