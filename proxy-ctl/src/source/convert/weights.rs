//! Weights of endpoints, as an annotation of their slice lists them: nobody watches Pods.

use std::{collections::BTreeMap, net::IpAddr};

use super::{ANNOTATION_WEIGHTS, InvalidFields};
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
    /// What is not valid is left out.
    pub(super) fn of(slice: &discovery::EndpointSlice, invalid: &mut InvalidFields) -> Self {
        let mut weights = Self { of_others: DEFAULT_WEIGHT, listed: BTreeMap::new() };
        let text = slice.metadata.annotations.get(ANNOTATION_WEIGHTS);
        let field = || format!("metadata.annotations[{ANNOTATION_WEIGHTS}]");
        for part in text.into_iter().flat_map(|text| text.split(',')).map(str::trim) {
            let (address, number) =
                part.split_once('=').map_or((None, part), |(one, weight)| (Some(one), weight));
            let Ok(weight) = number.trim().parse() else {
                invalid.add(
                    field(),
                    format_args!("found {part:?}, must be a weight or an address and its weight, such as 10.0.0.1=5; weights are 0 to {}", Weight::MAX),
                );
                continue;
            };
            match address {
                None => weights.of_others = weight,
                Some(text) => {
                    let address = invalid.address(field, text.trim());
                    weights.listed.extend(address.map(|address| (address, weight)));
                }
            }
        }
        weights
    }

    pub(super) fn of_address(&self, address: IpAddr) -> Weight {
        self.listed.get(&address).copied().unwrap_or(self.of_others)
    }
}
