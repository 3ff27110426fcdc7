//! The desired state in the maps: computes the entries of service ports (`entries`), finds room for
//! them (`reserve`), writes them in an order that leaves no hole (`publish`), reads what a
//! predecessor has left (`adopt`), and compares the maps with what is desired (`verify`).

pub(super) mod addresses;
pub(super) mod adopt;
pub(super) mod allocate;
mod backends;
mod draining;
pub(super) mod entries;
mod fit;
mod maglev;
pub(super) mod programmed;
pub(super) mod publish;
mod reserve;
pub(super) mod sync;
pub(super) mod uses;
mod verify;
pub(super) mod writer;
