//! What mode ebpf cannot do yet: the one list of it. No other mode has such a list.

use crate::setting::{ProxyKind, Setting};

/// Names of cases, of scenarios of the differential suite, and of rows of these, with the reason.
const NOT_YET: &[(&str, &str)] = &[
    ("affinity: a client stays with its endpoint", AFFINITY),
    ("affinity: cluster IP and node port share it", AFFINITY),
    ("affinity: it ends with its endpoint", AFFINITY),
    ("affinity: it lasts while connections come, and expires after", AFFINITY),
    ("affinity: switched on and off", AFFINITY),
    ("affinity", AFFINITY),
    ("affinity, external policy Local", AFFINITY),
    ("both policies Cluster: outside to cluster IP", CLUSTER_IP_FROM_OUTSIDE),
    ("external policy Local: outside to cluster IP", CLUSTER_IP_FROM_OUTSIDE),
    ("masqueradeAll: outside to cluster IP", CLUSTER_IP_FROM_OUTSIDE),
    ("pods are known by a bridge: outside to cluster IP", CLUSTER_IP_FROM_OUTSIDE),
    ("pods are known by the node's range: outside to cluster IP", CLUSTER_IP_FROM_OUTSIDE),
];

const AFFINITY: &str = "session affinity is not built yet";

const CLUSTER_IP_FROM_OUTSIDE: &str =
    "a client outside that dials a cluster IP is not masqueraded towards another node";

/// Why the proxy cannot do it, if so.
pub fn reason(setting: &Setting, name: &str) -> Option<&'static str> {
    let found = || NOT_YET.iter().find(|(listed, _)| *listed == name).map(|(_, reason)| *reason);
    (setting.proxy == ProxyKind::Ebpf).then(found).flatten()
}
