//! Services and their endpoints as plain data, and what a node must serve because of them.
//!
//! Sources turn Kubernetes objects into [`objects`]; [`Model`] keeps them and answers every change with a
//! [`Changes`]: the service ports whose [`desired`] state is now different. No I/O, no clock, no async.

pub mod desired;
pub mod objects;
