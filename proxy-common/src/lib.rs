//! The code that the kernel programs and the controller share.
//!
//! It has every map with its layout, the numbered reasons, and the decisions of the datapath. The
//! decisions are pure functions over a trait of maps, so the same code runs in the kernel and on
//! the host.
#![cfg_attr(not(any(test, fuzzing, feature = "user")), no_std)]

pub mod affinity;
pub mod balance;
pub mod event;
pub mod family;
pub mod flow;
pub mod inventory;
pub mod layout;
pub mod map_access;
pub mod packet;
pub mod port;
pub mod reason;
pub mod select;
pub mod socket;
pub mod unserved;
