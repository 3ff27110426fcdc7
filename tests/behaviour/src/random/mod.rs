//! Clusters of random services, slices, node labels and probes, with the expected outcome of each
//! probe.
//!
//! [`cluster`] makes a cluster from a seed and a number. [`expected`] says what kube-proxy's own
//! rules mean for a probe. It is written anew from kube-proxy's documentation, so that no decision
//! of proxy-ctl is compared with itself. [`round`] gives the cluster addresses, and writes its
//! objects. [`observe`] dials. The real kube-proxy, in the same lab, shows whether the expectations
//! are right.

pub mod cluster;
pub mod expected;
pub mod observe;
pub mod round;
pub mod shrink;
