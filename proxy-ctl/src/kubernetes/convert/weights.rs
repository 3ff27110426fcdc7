//! Weights of endpoints, which an annotation of their slice lists. An annotation of Pods would not
//! do, because nobody watches Pods.

use std::{collections::BTreeMap, net::IpAddr};

use super::{ANNOTATION_WEIGHTS, InvalidFields, address, shortened};
use crate::{
    kubernetes::schema::discovery,
    model::objects::{DEFAULT_WEIGHT, Weight},
};

/// The weights that the annotation lists, separated by commas. `5` is the weight of each endpoint
/// that is not listed, and `10.0.0.1=5` is the weight of one endpoint.
pub(super) struct Weights {
    of_others: Weight,
    listed: BTreeMap<IpAddr, Weight>,
}

impl Weights {
    /// Reads the annotation, and leaves out what is not valid. Only the first invalid part is
    /// reported, because there can be many: the API server does not validate annotations.
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
