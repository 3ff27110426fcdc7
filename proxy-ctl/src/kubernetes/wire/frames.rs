//! Framing of a watch: its body is cut into events. These are lines in JSON, and messages with
//! their length before them in protobuf.

use std::fmt::Display;

use bytes::{Bytes, BytesMut};
use tokio_util::codec::{AnyDelimiterCodec, Decoder as _, LengthDelimitedCodec};

use crate::{
    config::Encoding,
    kubernetes::failure::{Failure, FailureReason},
};

/// The longest event in bytes, as in client-go.
const LONGEST: usize = 16 << 20;

enum Codec {
    Lines(AnyDelimiterCodec),
    Messages(LengthDelimitedCodec),
}

/// The frames of one watch. It keeps the bytes of an event that is not complete yet.
pub(crate) struct Frames {
    codec: Codec,
    buffer: BytesMut,
}

impl Frames {
    pub(crate) fn new(encoding: Encoding) -> Self {
        let codec = match encoding {
            Encoding::Json => {
                Codec::Lines(AnyDelimiterCodec::new_with_max_length(b"\n".to_vec(), Vec::new(), LONGEST))
            }
            // The length before a message has four bytes, big endian. This is the codec's default.
            Encoding::Protobuf => {
                Codec::Messages(LengthDelimitedCodec::builder().max_frame_length(LONGEST).new_codec())
            }
        };
        Self { codec, buffer: BytesMut::new() }
    }

    pub(crate) fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// Returns true if an event has begun that is not complete yet.
    pub(super) fn is_within_one(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Returns the next complete event, or None if more data must arrive first.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match &mut self.codec {
            Codec::Lines(codec) => loop {
                match codec.decode(&mut self.buffer).map_err(too_long)? {
                    Some(line) if line.trim_ascii().is_empty() => {}
                    line => return Ok(line),
                }
            },
            Codec::Messages(codec) => {
                Ok(codec.decode(&mut self.buffer).map_err(too_long)?.map(BytesMut::freeze))
            }
        }
    }
}

fn too_long(error: impl Display) -> Failure {
    let problem = format!("a watch event: {error}; {LONGEST} bytes are the most that is read");
    Failure::new(FailureReason::Malformed, problem)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framed(encoding: Encoding, events: &[Vec<u8>]) -> Vec<u8> {
        events
            .iter()
            .flat_map(|event| match encoding {
                Encoding::Json => [event.as_slice(), b"\n"].concat(),
                Encoding::Protobuf => {
                    [&u32::try_from(event.len()).unwrap().to_be_bytes(), event.as_slice()].concat()
                }
            })
            .collect()
    }

    fn cut(encoding: Encoding, stream: &[u8], chunk: usize) -> Vec<Vec<u8>> {
        let mut frames = Frames::new(encoding);
        let mut events = Vec::new();
        for part in stream.chunks(chunk) {
            frames.push(part);
            while let Some(event) = frames.next().unwrap() {
                events.push(event.to_vec());
            }
        }
        assert!(!frames.is_within_one());
        events
    }

    proptest! {
        #[test]
        fn events_are_the_same_however_they_arrive(
            events in prop::collection::vec("[!-~]{1,40}", 0..8),
            chunk in 1_usize..50,
        ) {
            let events: Vec<Vec<u8>> = events.into_iter().map(String::into_bytes).collect();
            for encoding in [Encoding::Json, Encoding::Protobuf] {
                prop_assert_eq!(&cut(encoding, &framed(encoding, &events), chunk), &events);
            }
        }
    }

    #[test]
    fn a_length_that_no_event_has_is_an_error_before_anything_is_read() {
        let mut frames = Frames::new(Encoding::Protobuf);
        frames.push(&[0x7f, 0xff, 0xff, 0xff]);
        assert_eq!(frames.next().unwrap_err().reason, FailureReason::Malformed);
    }

    #[test]
    fn a_line_without_end_is_an_error() {
        let mut frames = Frames::new(Encoding::Json);
        frames.push(&vec![b'x'; LONGEST]);
        assert!(frames.next().unwrap().is_none());
        frames.push(b"x");
        assert_eq!(frames.next().unwrap_err().reason, FailureReason::Malformed);
    }

    #[test]
    fn part_of_an_event_is_none() {
        let mut frames = Frames::new(Encoding::Protobuf);
        for byte in [0, 0, 0, 2, 7] {
            frames.push(&[byte]);
            assert!(frames.next().unwrap().is_none());
        }
        frames.push(&[8]);
        assert_eq!(frames.next().unwrap().as_deref(), Some(&[7, 8][..]));
    }
}
