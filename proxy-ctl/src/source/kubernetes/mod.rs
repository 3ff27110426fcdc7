//! Services, EndpointSlices and the own Node from an API server.

mod connection;
pub mod failure;
mod kubeconfig;
mod state;

pub use kubeconfig::{Config, ConfigError};
pub use state::{ListMethod, ResourceKind, SourceState};
