//! Has the kernel load what mode ipvs needs, and says what it does not have.

use std::collections::BTreeMap;

use super::probe::modules;
use crate::{
    config::Config,
    mode::HostFacts,
    node::modprobe::{Modprobe, modprobe},
    sys::ipvs::Ipvs,
};

/// Modules that are not there after all, and why. modprobe is tried first; the kernel loads what is used in any case, where it can.
pub(in crate::dataplane) fn load(config: &Config, host: &HostFacts) -> BTreeMap<String, String> {
    let mut refusals = BTreeMap::new();
    for module in modules(&config.ipvs.scheduler, host) {
        if host.modules.has(&module) {
            continue;
        }
        let outcome = modprobe(&module.name);
        tracing::debug!(module = module.name, ?outcome, "modprobe");
        if let Modprobe::Refused(words) = outcome {
            refusals.insert(module.name, words);
        }
    }
    // To be asked for makes the kernel load it, also from a container without modprobe.
    let has_ipvs = matches!(Ipvs::open(), Ok(Some(_)));
    let why = refusals.remove("ip_vs").unwrap_or_else(|| "the kernel does not load it".to_owned());
    if has_ipvs { BTreeMap::new() } else { [("ip_vs".to_owned(), why)].into() }
}
