//! Weights of endpoints, as an annotation of their slice lists them: nobody watches Pods.

use std::{collections::BTreeMap, net::IpAddr};

use super::{ANNOTATION_WEIGHTS, InvalidFields, address, shortened};
use crate::{
    model::objects::{DEFAULT_WEIGHT, Weight},
    source::schema::discovery,
};

/// `5`: of each endpoint that is not listed; `10.0.0.1=5`: of one. Several are separated by commas.
pub(super) struct Weights {
    of_others: Weight,
    listed: BTreeMap<IpAddr, Weight>,
}

impl Weights {
    /// What is not valid is left out. The first such part is told, as there can be many: the API server looks at no annotation.
    pub(super) fn of(slice: &discovery::EndpointSlice, invalid: &mut InvalidFields) -> Self {
        let mut weights = Self { of_others: DEFAULT_WEIGHT, listed: BTreeMap::new() };
        let text = slice.metadata.annotations.get(ANNOTATION_WEIGHTS);
        let mut first_invalid = None;
        for part in text.into_iter().flat_map(|text| text.split(',')) {
            if weights.read(part).is_none() {
                first_invalid.get_or_insert(part);
            }
        }
        if let Some(part) = first_invalid {
            invalid.add(
                format!("metadata.annotations[{ANNOTATION_WEIGHTS}]"),
                format_args!(
                    "found {:?}, must be a weight or an address and its weight, such as 10.0.0.1=5; weights are 0 to {}",
                    shortened(part.trim()),
                    Weight::MAX
                ),
            );
        }
        weights
    }

    fn read(&mut self, part: &str) -> Option<()> {
        match part.split_once('=') {
            None => self.of_others = part.trim().parse().ok()?,
            Some((text, weight)) => {
                self.listed.insert(address::parse(text.trim())?, weight.trim().parse().ok()?);
            }
        }
        Some(())
    }

    pub(super) fn of_address(&self, address: IpAddr) -> Weight {
        self.listed.get(&address).copied().unwrap_or(self.of_others)
    }
}
