//! Profiles as `pprof` reads them: the protocol buffer message `perftools.profiles.Profile`.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What is counted, and in which unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind(pub(super) &'static str, pub(super) &'static str);

/// A call stack and what was counted in it, in the order of [`Profile::kinds`].
#[derive(Clone, Debug)]
pub(super) struct Stack {
    /// Names of functions, the innermost first.
    pub(super) frames: Vec<String>,
    pub(super) thread: Option<String>,
    pub(super) counts: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Profile {
    pub(super) kinds: &'static [Kind],
    /// The one that is shown first, if it is not the last.
    pub(super) default: Option<&'static str>,
    pub(super) stacks: Vec<Stack>,
    /// What is sampled, and how much of it there is to a sample.
    pub(super) period: (Kind, u64),
    pub(super) start: SystemTime,
    /// `None`: it is of a moment.
    pub(super) duration: Option<Duration>,
    pub(super) comments: Vec<String>,
}

impl Profile {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut strings = Numbered::starting_with("");
        let mut functions = Numbered::default();
        let nanoseconds = |duration: Duration| signed(duration.as_nanos());
        let value_type = |strings: &mut Numbered, Kind(kind, unit): Kind| {
            Message::default().number(1, strings.number(kind)).number(2, strings.number(unit))
        };

        let mut profile = Message::default();
        let mut samples = Message::default();
        for kind in self.kinds {
            profile = profile.message(1, value_type(&mut strings, *kind));
        }
        for stack in &self.stacks {
            let locations = stack.frames.iter().map(|frame| functions.number(frame) + 1).collect::<Vec<_>>();
            let counts = stack.counts.iter().copied().map(signed).collect::<Vec<_>>();
            let mut sample = Message::default().numbers(1, &locations).numbers(2, &counts);
            if let Some(thread) = &stack.thread {
                let label = Message::default().number(1, strings.number("thread"));
                sample = sample.message(3, label.number(2, strings.number(thread)));
            }
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
        let period = value_type(&mut strings, self.period.0);
        let comments: Vec<i64> = self.comments.iter().map(|comment| strings.number(comment)).collect();
        let default = self.default.map(|kind| strings.number(kind));
        for text in &strings.all {
            profile = profile.bytes(6, text.as_bytes());
        }
        profile = profile.number(9, nanoseconds(self.start.duration_since(UNIX_EPOCH).unwrap_or_default()));
        if let Some(duration) = self.duration {
            profile = profile.number(10, nanoseconds(duration));
        }
        profile = profile.message(11, period).number(12, signed(self.period.1));
        if !comments.is_empty() {
            profile = profile.numbers(13, &comments);
        }
        match default {
            Some(default) => profile.number(14, default).0,
            None => profile.0,
        }
    }
}

fn signed(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
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
        let profile = Profile {
            kinds: &[Kind("samples", "count"), Kind("cpu", "nanoseconds")],
            default: None,
            stacks: vec![Stack {
                frames: vec!["f".into(), "g".into(), "f".into()],
                thread: Some("t".into()),
                counts: vec![300, 300],
            }],
            period: (Kind("cpu", "nanoseconds"), 1),
            start: UNIX_EPOCH + Duration::from_nanos(7),
            duration: Some(Duration::from_nanos(5)),
            comments: Vec::new(),
        };
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
        assert_eq!(profile.encode(), expected.concat());
    }

    #[test]
    fn what_is_not_in_every_profile() {
        let profile = Profile {
            kinds: &[Kind("space", "bytes")],
            default: Some("space"),
            stacks: vec![Stack { frames: Vec::new(), thread: None, counts: vec![u64::MAX] }],
            period: (Kind("space", "bytes"), 2),
            start: UNIX_EPOCH,
            duration: None,
            comments: vec!["c".into()],
        };
        let expected: &[&[u8]] = &[
            &[0x0a, 4, 0x08, 1, 0x10, 2],
            &[0x12, 13, 0x0a, 0, 0x12, 9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
            b"\x32\x00\x32\x05space\x32\x05bytes\x32\x01c",
            &[0x48, 0, 0x5a, 4, 0x08, 1, 0x10, 2, 0x60, 2, 0x6a, 1, 3, 0x70, 1],
        ];
        assert_eq!(profile.encode(), expected.concat());
    }
}
