//! Services and their endpoints as plain data, and what a node must serve because of them.
//!
//! Sources turn Kubernetes objects into [`objects`] and send [`Update`]s; [`Model`] keeps the objects and
//! answers with [`desired::Changes`]: the service ports whose desired state is now different. No I/O, no
//! clock, no async.

mod addresses;
mod claims;
pub mod desired;
mod names;
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
