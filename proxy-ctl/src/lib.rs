//! Service proxy for Kubernetes nodes.
pub mod config;
pub mod controller;
pub mod dataplane;
pub mod model;
pub mod serve;
pub mod source;
pub mod sys;
