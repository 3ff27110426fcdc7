//! The model keeps Services and their endpoints as plain data, and computes what a node must serve
//! because of them.
//!
//! Sources turn Kubernetes objects into [`objects`] and send [`Update`]s. [`Model`] keeps the
//! objects and returns [`desired::Changes`]: the service ports whose desired state is now
//! different.
//!
//! [`node`] has the words for the node itself, and [`mode`] chooses how it is programmed. The
//! module has no I/O, no clock and no async code.

mod addresses;
mod claims;
pub mod desired;
pub mod mode;
mod names;
pub mod node;
pub mod objects;
mod resolve;
mod store;
#[cfg(test)]
pub(crate) mod test_support;
#[cfg(test)]
mod tests;
mod topology;
mod update;

pub use claims::Conflict;
pub(crate) use names::NameInterner;
pub use store::Model;
pub use update::Update;
