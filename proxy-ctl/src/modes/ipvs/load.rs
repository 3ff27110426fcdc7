//! Has the kernel load the modules that mode ipvs needs, and says which ones are missing.

use std::collections::BTreeMap;

use super::probe::modules;
use crate::{
    config::Config,
    model::mode::HostFacts,
    node::modprobe::{Modprobe, modprobe},
    sys::net::ipvs::Ipvs,
};

/// Returns the modules that are missing in the end, each with the reason. modprobe is tried first.
/// The kernel also loads a module when it is used, where it can.
pub(in crate::modes) fn load(config: &Config, host: &HostFacts) -> BTreeMap<String, String> {
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
    // Opening IPVS makes the kernel load it, also from a container without modprobe.
    let has_ipvs = matches!(Ipvs::open(), Ok(Some(_)));
    let why = refusals.remove("ip_vs").unwrap_or_else(|| "the kernel does not load it".to_owned());
    if has_ipvs { BTreeMap::new() } else { [("ip_vs".to_owned(), why)].into() }
}
