//! The body of a watch is cut into events: lines of JSON, or messages of protobuf with their length before them.

use bytes::{Buf as _, Bytes, BytesMut};

use super::failure::{Failure, FailureReason};
use crate::config::Encoding;

/// Longest event, as in client-go.
const LONGEST: usize = 16 << 20;
/// Of a message: four bytes, big endian.
const LENGTH: usize = 4;

/// Holds the parts of events that are not complete yet.
pub(super) struct Frames {
    encoding: Encoding,
    buffer: BytesMut,
    /// Bytes of the buffer that have no end of a line.
    searched: usize,
}

impl Frames {
    pub(super) fn new(encoding: Encoding) -> Self {
        Self { encoding, buffer: BytesMut::new(), searched: 0 }
    }

    pub(super) fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// Whether an event has begun that is not whole yet.
    pub(super) fn is_within_one(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// The next complete event; None: more data must arrive first.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self.encoding {
            Encoding::Json => self.line(),
            Encoding::Protobuf => self.message(),
        }
    }

    fn line(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let Some(end) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') else {
                self.searched = self.buffer.len();
                return if self.searched > LONGEST { Err(too_long(self.searched)) } else { Ok(None) };
            };
            let end = self.searched + end;
            self.searched = 0;
            let line = self.buffer.split_to(end).freeze();
            self.buffer.advance(1);
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
    }

    fn message(&mut self) -> Result<Option<Bytes>, Failure> {
        let Some(length) = self.buffer.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > LONGEST {
            return Err(too_long(length));
        }
        if self.buffer.len() < LENGTH + length {
            return Ok(None);
        }
        self.buffer.advance(LENGTH);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }
}

fn too_long(length: usize) -> Failure {
    let problem = format!("a watch event of {length} bytes or more, {LONGEST} are the most that is read");
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
        let failure = frames.next().unwrap_err();
        assert_eq!(failure.reason, FailureReason::Malformed);
        assert!(failure.message.contains("2147483647 bytes"), "{failure}");
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
            assert!(frames.next().unwrap().is_none() && frames.is_within_one());
        }
        frames.push(&[8]);
        assert_eq!(frames.next().unwrap().as_deref(), Some(&[7, 8][..]));
    }
}
