//! A variant of prost that accepts strings that are not UTF-8.
//!
//! Go does not check that a string in protobuf is UTF-8, so API servers store and serve strings
//! that are not. They are read here as the API server writes them in JSON: U+FFFD replaces the
//! invalid bytes.

pub use prost::*;

pub mod encoding {
    pub use prost::encoding::*;

    pub mod string {
        use prost::{
            DecodeError,
            bytes::Buf,
            encoding::{self, DecodeContext, WireType},
        };

        pub use prost::encoding::string::{encode, encode_repeated, encoded_len, encoded_len_repeated};

        pub fn merge(
            wire_type: WireType,
            value: &mut String,
            buf: &mut impl Buf,
            context: DecodeContext,
        ) -> Result<(), DecodeError> {
            let mut bytes = Vec::new();
            encoding::bytes::merge(wire_type, &mut bytes, buf, context)?;
            *value = String::from_utf8(bytes)
                .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
            Ok(())
        }

        pub fn merge_repeated(
            wire_type: WireType,
            values: &mut Vec<String>,
            buf: &mut impl Buf,
            context: DecodeContext,
        ) -> Result<(), DecodeError> {
            let mut value = String::new();
            merge(wire_type, &mut value, buf, context)?;
            values.push(value);
            Ok(())
        }
    }
}
