//! Clusters of random services, slices, node labels and probes, and what must become of each probe.
//!
//! [`cluster`] makes a cluster of a seed and a number; [`expected`] says what kube-proxy's own rules mean for a probe, written
//! anew from its documentation so that no decision of ours is compared with itself; [`place`] gives the cluster addresses and
//! writes its objects; [`observe`] dials. The real kube-proxy, in the same lab, says whether what is expected is right.

pub mod cluster;
pub mod expected;
pub mod observe;
pub mod place;
pub mod shrink;
