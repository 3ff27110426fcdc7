//! Figures of one run on one machine, which can be compared with each other: without a proxy, of
//! proxy-ctl in its modes and on its paths, and of the real kube-proxy. All serve the same Services
//! of a real API server, one after the other, in one cluster of network namespaces.
//!
//! [`run`] measures the cells that [`plan`] names for each [`contender`], and writes [`results`] as
//! it goes. [`render`] and [`plots`] show them.

pub mod arguments;
mod cluster;
pub mod contender;
mod machine;
mod measure;
mod metrics;
pub mod plan;
pub mod plots;
pub mod render;
pub mod results;
pub mod run;
pub mod statistics;
mod subject;
