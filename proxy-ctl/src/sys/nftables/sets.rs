//! Sets and maps, and their elements.

use super::{attributes::*, expressions::Verdict};
use crate::sys::net::netlink::{Attributes, Messages};

/// The types that keys and values consist of, by which nft lists them. The numbers are nft's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Datum {
    Ipv4Address,
    Ipv6Address,
    /// IANA's number in one byte.
    Protocol,
    /// A port in two bytes.
    Port,
    /// A number of four bytes in the machine's byte order.
    Number,
}

impl Datum {
    const fn number(self) -> u32 {
        match self {
            Self::Number => 4,
            Self::Ipv4Address => 7,
            Self::Ipv6Address => 8,
            Self::Protocol => 12,
            Self::Port => 13,
        }
    }

    const fn length(self) -> u32 {
        match self {
            Self::Ipv6Address => 16,
            Self::Ipv4Address | Self::Number => 4,
            Self::Port => 2,
            Self::Protocol => 1,
        }
    }

    fn numbers(all: &[Self]) -> u32 {
        all.iter().fold(0, |numbers, datum| numbers << 6 | datum.number())
    }

    /// Returns the length of all data. Each has padding if there are several. A single one has
    /// none: nft takes a longer one for damaged and stops.
    fn lengths(all: &[Self]) -> u32 {
        match all {
            [alone] => alone.length(),
            several => several.iter().map(|datum| datum.length().next_multiple_of(4)).sum(),
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Values {
    /// The object is a set, which has no values.
    None,
    Verdict,
    Of(&'static [Datum]),
}

/// The definition of a set or a map.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SetDefinition {
    pub key: &'static [Datum],
    pub values: Values,
    /// The largest number of elements, if rules add elements, which expire. `None` for all other
    /// sets.
    pub dynamic: Option<u32>,
    /// More notes about the set, in the format of nft.
    pub user_data: Vec<u8>,
}

const MAP: u32 = 0x8;
const TIMEOUT: u32 = 0x10;
const EVALUATED: u32 = 0x20;
/// The type of values that are verdicts.
pub(super) const VERDICT: u32 = 0xffff_ff00;

impl SetDefinition {
    pub fn new(key: &'static [Datum], values: Values) -> Self {
        Self { key, values, dynamic: None, user_data: Vec::new() }
    }

    pub fn shape(&self) -> SetShape {
        let map = if self.values == Values::None { 0 } else { MAP };
        let dynamic = if self.dynamic.is_some() { TIMEOUT | EVALUATED } else { 0 };
        let data_length = match self.values {
            Values::None | Values::Verdict => 0,
            Values::Of(data) => Datum::lengths(data),
        };
        SetShape { flags: map | dynamic, key_length: Datum::lengths(self.key), data_length }
    }

    /// Writes the attributes of a new set. `id` distinguishes it from other new sets of the
    /// transaction.
    pub(super) fn write(&self, out: &mut Messages, id: u32) {
        let SetShape { flags, key_length, data_length } = self.shape();
        out.attribute(SET_FLAGS, &flags.to_be_bytes())
            .attribute(SET_KEY_TYPE, &Datum::numbers(self.key).to_be_bytes())
            .attribute(SET_KEY_LENGTH, &key_length.to_be_bytes());
        let data_type = match self.values {
            Values::None => None,
            Values::Verdict => Some(VERDICT),
            Values::Of(data) => Some(Datum::numbers(data)),
        };
        if let Some(data_type) = data_type {
            out.attribute(SET_DATA_TYPE, &data_type.to_be_bytes())
                .attribute(SET_DATA_LENGTH, &data_length.to_be_bytes());
        }
        if let Some(most) = self.dynamic {
            out.nested(SET_DESCRIPTION, |description| {
                description.attribute(DESCRIPTION_SIZE, &most.to_be_bytes());
            });
        }
        out.attribute(SET_ID, &id.to_be_bytes());
        if !self.user_data.is_empty() {
            out.attribute(SET_USERDATA, &self.user_data);
        }
    }
}

/// The properties of a set that decide whether rules can use it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SetShape {
    pub flags: u32,
    pub key_length: u32,
    /// The length of a value. It is 0 for a set and for verdicts.
    pub data_length: u32,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Set {
    pub name: String,
    pub shape: SetShape,
}

/// The value of an element of a map. An element of a set has none.
#[derive(Clone, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum ElementData {
    #[default]
    None,
    Value(Vec<u8>),
    Verdict(Verdict),
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Element {
    pub key: Vec<u8>,
    pub data: ElementData,
    pub user_data: Vec<u8>,
}

/// Writes a key without a value, to delete its element.
pub(super) fn write_key(list: &mut Messages, key: &[u8]) {
    list.nested(LIST_MEMBER, |element| add_key(element, key));
}

fn add_key(element: &mut Messages, key: &[u8]) {
    element.nested(ELEMENT_KEY, |data| {
        data.attribute(DATA_VALUE, key);
    });
}

pub(super) fn write_element(list: &mut Messages, key: &[u8], data: &ElementData, user_data: &[u8]) {
    list.nested(LIST_MEMBER, |element| {
        add_key(element, key);
        match data {
            ElementData::None => {}
            ElementData::Value(value) => {
                element.nested(ELEMENT_DATA, |data| {
                    data.attribute(DATA_VALUE, value);
                });
            }
            ElementData::Verdict(verdict) => {
                element.nested(ELEMENT_DATA, |data| verdict.write(data));
            }
        }
        if !user_data.is_empty() {
            element.attribute(ELEMENT_USERDATA, user_data);
        }
    });
}

pub(super) fn read_element(element: Attributes<'_>) -> Option<Element> {
    let key = element.nested(ELEMENT_KEY)?.get(DATA_VALUE)?.to_vec();
    let data = match element.nested(ELEMENT_DATA) {
        None => ElementData::None,
        Some(data) => match (data.get(DATA_VALUE), data.nested(DATA_VERDICT)) {
            (Some(value), _) => ElementData::Value(value.to_vec()),
            (None, Some(verdict)) => {
                let code = i32::from_be_bytes(*verdict.get(VERDICT_CODE)?.first_chunk()?);
                ElementData::Verdict(Verdict::read(code, verdict.text(VERDICT_CHAIN))?)
            }
            (None, None) => return None,
        },
    };
    let user_data = element.get(ELEMENT_USERDATA).unwrap_or_default().to_vec();
    Some(Element { key, data, user_data })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::port_alone(&[Datum::Port], 2)]
    #[case::protocol_alone(&[Datum::Protocol], 1)]
    #[case::number_alone(&[Datum::Number], 4)]
    #[case::port_among_others(&[Datum::Ipv4Address, Datum::Protocol, Datum::Port], 12)]
    #[case::ipv6_among_others(&[Datum::Ipv6Address, Datum::Port], 20)]
    fn data_are_as_long_as_nft_expects(#[case] data: &'static [Datum], #[case] length: u32) {
        assert_eq!(SetDefinition::new(data, Values::None).shape().key_length, length);
        assert_eq!(SetDefinition::new(&[Datum::Number], Values::Of(data)).shape().data_length, length);
    }
}
