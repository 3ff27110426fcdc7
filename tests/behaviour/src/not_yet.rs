//! What mode ebpf cannot do yet: the one list of it. No other mode has such a list.

use crate::setting::{ProxyKind, Setting};

/// Names of cases, of scenarios of the differential suite, and of rows of these, with the reason.
const NOT_YET: &[(&str, &str)] = &[];

/// Why the proxy cannot do it, if so.
pub fn reason(setting: &Setting, name: &str) -> Option<&'static str> {
    let found = || NOT_YET.iter().find(|(listed, _)| *listed == name).map(|(_, reason)| *reason);
    (setting.proxy == ProxyKind::Ebpf).then(found).flatten()
}
