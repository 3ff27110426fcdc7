//! Watches for maps of established flows that are nearly full, so that operators hear of it before
//! connections suffer.

use std::collections::BTreeMap;

/// The maps that are three quarters full, each with its capacity. A map leaves the list when less
/// than a half is used, so that one near the bound is not reported again and again.
#[derive(Debug, Default)]
pub(crate) struct Filling(BTreeMap<&'static str, u64>);

impl Filling {
    /// Learns how many entries of a map are used.
    pub(crate) fn see(&mut self, name: &'static str, used: u64, capacity: u64) {
        let is_known = self.0.contains_key(name);
        if used.saturating_mul(4) >= capacity.saturating_mul(3) {
            self.0.insert(name, capacity);
            if !is_known {
                tracing::warn!(
                    map = name,
                    used,
                    capacity,
                    "the map of established flows is nearly full: when it is full, new connections may be \
                     forgotten while they are open; raise ebpf.limits.flows"
                );
            }
        } else if used.saturating_mul(2) < capacity {
            self.0.remove(name);
        }
    }

    pub(crate) fn maps(&self) -> &BTreeMap<&'static str, u64> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_filling_from_three_quarters_on_until_it_is_half_empty() {
        let mut filling = Filling::default();
        for (used, expected) in [(74, false), (75, true), (60, true), (50, true), (49, false), (74, false)] {
            filling.see("flows4", used, 100);
            filling.see("flows6", 0, 100);
            let maps: Vec<_> = filling.maps().iter().map(|(name, capacity)| (*name, *capacity)).collect();
            assert_eq!(maps, if expected { vec![("flows4", 100)] } else { Vec::new() }, "{used}");
        }
    }
}
