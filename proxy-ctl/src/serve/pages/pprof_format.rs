//! Profiles as `pprof` reads them: the protocol buffer message `perftools.profiles.Profile`.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A call stack and how often it was met.
#[derive(Clone, Debug)]
pub(super) struct Stack {
    /// Names of functions, the innermost first.
    pub(super) frames: Vec<String>,
    pub(super) thread: String,
    pub(super) samples: i64,
}

/// `frequency`: samples a second of CPU time.
pub(super) fn encode(stacks: &[Stack], start: SystemTime, duration: Duration, frequency: i32) -> Vec<u8> {
    let mut strings = Numbered::starting_with("");
    let mut functions = Numbered::default();
    let nanoseconds = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let period = 1_000_000_000 / i64::from(frequency.max(1));
    let value_type = |strings: &mut Numbered, kind: &str, unit: &str| {
        Message::default().number(1, strings.number(kind)).number(2, strings.number(unit))
    };

    let mut profile = Message::default();
    let mut samples = Message::default();
    let kinds = [("samples", "count"), ("cpu", "nanoseconds")];
    for (kind, unit) in kinds {
        profile = profile.message(1, value_type(&mut strings, kind, unit));
    }
    for stack in stacks {
        let locations = stack.frames.iter().map(|frame| functions.number(frame) + 1).collect::<Vec<_>>();
        let thread =
            Message::default().number(1, strings.number("thread")).number(2, strings.number(&stack.thread));
        let sample = Message::default()
            .numbers(1, &locations)
            .numbers(2, &[stack.samples, stack.samples.saturating_mul(period)])
            .message(3, thread);
        samples = samples.message(2, sample);
    }
    profile.0.extend(samples.0);
    // A function is a location: addresses are not kept apart.
    for (index, name) in functions.all.iter().enumerate() {
        let id = index as i64 + 1;
        let line = Message::default().number(1, id);
        profile = profile.message(4, Message::default().number(1, id).message(4, line));
        let name = strings.number(name);
        profile = profile.message(5, Message::default().number(1, id).number(2, name).number(3, name));
    }
    let cpu = value_type(&mut strings, "cpu", "nanoseconds");
    for text in &strings.all {
        profile = profile.bytes(6, text.as_bytes());
    }
    let start = start.duration_since(UNIX_EPOCH).unwrap_or_default();
    profile
        .number(9, nanoseconds(start))
        .number(10, nanoseconds(duration))
        .message(11, cpu)
        .number(12, period)
        .0
}

/// Texts by the order in which they were first named.
#[derive(Default)]
struct Numbered {
    numbers: HashMap<String, i64>,
    all: Vec<String>,
}

impl Numbered {
    fn starting_with(text: &str) -> Self {
        let mut numbered = Self::default();
        numbered.number(text);
        numbered
    }

    fn number(&mut self, text: &str) -> i64 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let number = self.all.len() as i64;
        self.numbers.insert(text.to_owned(), number);
        self.all.push(text.to_owned());
        number
    }
}

/// The wire format: each field a key, then a varint or a length and so many bytes.
#[derive(Default)]
struct Message(Vec<u8>);

const VARINT: u64 = 0;
const LENGTH: u64 = 2;

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(mut self, field: u64, value: i64) -> Self {
        self.varint(field << 3 | VARINT);
        self.varint(value.cast_unsigned());
        self
    }

    fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.varint(field << 3 | LENGTH);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn message(self, field: u64, message: Self) -> Self {
        self.bytes(field, &message.0)
    }

    fn numbers(self, field: u64, values: &[i64]) -> Self {
        let mut packed = Self::default();
        for value in values {
            packed.varint(value.cast_unsigned());
        }
        self.message(field, packed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_profile_byte_by_byte() {
        let stack =
            Stack { frames: vec!["f".into(), "g".into(), "f".into()], thread: "t".into(), samples: 300 };
        let encoded =
            encode(&[stack], UNIX_EPOCH + Duration::from_nanos(7), Duration::from_nanos(5), 1_000_000_000);
        let expected: &[&[u8]] = &[
            &[0x0a, 4, 0x08, 1, 0x10, 2],
            &[0x0a, 4, 0x08, 3, 0x10, 4],
            // Locations f, g, f; 300 samples of 1 ns; thread t.
            &[0x12, 17, 0x0a, 3, 1, 2, 1, 0x12, 4, 0xac, 0x02, 0xac, 0x02, 0x1a, 4, 0x08, 5, 0x10, 6],
            &[0x22, 6, 0x08, 1, 0x22, 2, 0x08, 1],
            &[0x2a, 6, 0x08, 1, 0x10, 7, 0x18, 7],
            &[0x22, 6, 0x08, 2, 0x22, 2, 0x08, 2],
            &[0x2a, 6, 0x08, 2, 0x10, 8, 0x18, 8],
            b"\x32\x00\x32\x07samples\x32\x05count\x32\x03cpu\x32\x0bnanoseconds",
            b"\x32\x06thread\x32\x01t\x32\x01f\x32\x01g",
            &[0x48, 7, 0x50, 5, 0x5a, 4, 0x08, 3, 0x10, 4, 0x60, 1],
        ];
        assert_eq!(encoded, expected.concat());
    }
}
