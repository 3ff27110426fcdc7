//! Service proxy for Kubernetes nodes.
pub mod cleanup;
pub mod cli;
pub mod config;
pub mod controller;
pub mod events;
#[cfg(test)]
mod free_port;
pub mod http;
pub mod kubernetes;
pub mod log;
pub mod manifests;
pub mod model;
pub mod modes;
pub mod names;
pub mod node;
pub mod path_watch;
pub mod process;
pub mod sys;
pub mod version;
