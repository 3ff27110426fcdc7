//! List of what mode ebpf cannot do yet. No other mode has such a list.

use crate::setting::{ProxyKind, Setting};

/// Names of cases, of scenarios of the differential suite, and of rows of these, each with the
/// reason.
const NOT_YET: &[(&str, &str)] = &[];

/// Returns the reason if the proxy cannot do this yet.
pub fn reason(setting: &Setting, name: &str) -> Option<&'static str> {
    let found = || NOT_YET.iter().find(|(listed, _)| *listed == name).map(|(_, reason)| *reason);
    (setting.proxy == ProxyKind::Ebpf).then(found).flatten()
}
