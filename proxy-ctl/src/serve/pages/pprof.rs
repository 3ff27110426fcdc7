//! CPU profiles in the form that `go tool pprof` reads: the fields of the protobuf message
//! `perftools.profiles.Profile` that are needed. Texts are stored as indexes into the string table,
//! whose first entry is empty.

use std::{
    collections::HashMap,
    time::{Duration, UNIX_EPOCH},
};

use prost::Message;

use crate::profile::{CpuProfile, PERIOD, SymbolNames};

#[derive(Clone, PartialEq, Message)]
pub(in crate::serve) struct Profile {
    #[prost(message, repeated, tag = "1")]
    pub(in crate::serve) sample_types: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    pub(in crate::serve) samples: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    pub(in crate::serve) locations: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    pub(in crate::serve) functions: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    pub(in crate::serve) strings: Vec<String>,
    #[prost(int64, tag = "9")]
    pub(in crate::serve) time_nanos: i64,
    #[prost(int64, tag = "10")]
    pub(in crate::serve) duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    pub(in crate::serve) period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    pub(in crate::serve) period: i64,
    #[prost(int64, repeated, tag = "13")]
    pub(in crate::serve) comments: Vec<i64>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::serve) struct ValueType {
    #[prost(int64, tag = "1")]
    pub(in crate::serve) kind: i64,
    #[prost(int64, tag = "2")]
    pub(in crate::serve) unit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::serve) struct Sample {
    /// The functions of the stack, the innermost first.
    #[prost(uint64, repeated, tag = "1")]
    pub(in crate::serve) location_ids: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    pub(in crate::serve) values: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    pub(in crate::serve) labels: Vec<Label>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::serve) struct Label {
    #[prost(int64, tag = "1")]
    pub(in crate::serve) key: i64,
    #[prost(int64, tag = "2")]
    pub(in crate::serve) text: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::serve) struct Location {
    #[prost(uint64, tag = "1")]
    pub(in crate::serve) id: u64,
    #[prost(message, repeated, tag = "4")]
    pub(in crate::serve) lines: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::serve) struct Line {
    #[prost(uint64, tag = "1")]
    pub(in crate::serve) function_id: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(in crate::serve) struct Function {
    #[prost(uint64, tag = "1")]
    pub(in crate::serve) id: u64,
    #[prost(int64, tag = "2")]
    pub(in crate::serve) name: i64,
    #[prost(int64, tag = "3")]
    pub(in crate::serve) system_name: i64,
}

impl Profile {
    /// Converts a profile. This takes long, because it looks up the names of all functions.
    pub(super) fn of(recorded: CpuProfile) -> Self {
        let (mut strings, mut functions) = (Numbered::default(), Numbered::default());
        strings.number("");
        let cpu = ValueType { kind: strings.number("cpu"), unit: strings.number("nanoseconds") };
        let count = ValueType { kind: strings.number("samples"), unit: strings.number("count") };
        let thread = strings.number("thread");
        let (period, mut names) = (nanoseconds(PERIOD), SymbolNames::default());
        let samples = recorded.stacks.into_iter().map(|(stack, count)| {
            let name = String::from_utf8_lossy(&stack.thread);
            let label = Label { key: thread, text: strings.number(name.trim_end_matches('\0')) };
            let frames = names.of(&stack.frames);
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            Sample {
                // Each function is one location, because addresses within a function are not
                // distinguished.
                location_ids: frames.iter().map(|name| functions.number(name) as u64 + 1).collect(),
                values: vec![count, count.saturating_mul(period)],
                labels: vec![label],
            }
        });
        let samples = samples.collect();
        let lost = (recorded.lost > 0).then(|| {
            strings.number(&format!("{} samples are missing: there was no room for them.", recorded.lost))
        });
        let since_epoch = recorded.start.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            sample_types: vec![count, cpu],
            samples,
            locations: (1..=functions.texts.len() as u64)
                .map(|id| Location { id, lines: vec![Line { function_id: id }] })
                .collect(),
            functions: (1..)
                .zip(&functions.texts)
                .map(|(id, name)| (id, strings.number(name)))
                .map(|(id, name)| Function { id, name, system_name: name })
                .collect(),
            strings: strings.texts,
            time_nanos: nanoseconds(since_epoch),
            duration_nanos: nanoseconds(recorded.duration),
            period_type: Some(cpu),
            period,
            comments: lost.into_iter().collect(),
        }
    }
}

fn nanoseconds(duration: Duration) -> i64 {
    duration.as_nanos().try_into().unwrap_or(i64::MAX)
}

/// A table that numbers texts in the order in which they first occur.
#[derive(Default)]
struct Numbered {
    numbers: HashMap<String, i64>,
    texts: Vec<String>,
}

impl Numbered {
    fn number(&mut self, text: &str) -> i64 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        let number = self.texts.len() as i64;
        self.numbers.insert(text.to_owned(), number);
        self.texts.push(text.to_owned());
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::sampler;

    #[test]
    fn a_sample_has_its_thread_its_function_and_its_time() {
        let stack = sampler::Sample { thread: *b"worker\0\0\0\0\0\0\0\0\0\0", frames: vec![1, 1] };
        let recorded = CpuProfile {
            start: UNIX_EPOCH + Duration::from_nanos(7),
            duration: Duration::from_nanos(5),
            stacks: [(stack, 300)].into(),
            lost: 2,
        };
        let profile = Profile::of(recorded);
        let text = |number: i64| profile.strings[number as usize].as_str();
        let [sample] = &profile.samples[..] else { panic!("{profile:?}") };
        let [label] = sample.labels[..] else { panic!("{profile:?}") };
        assert_eq!((text(label.key), text(label.text)), ("thread", "worker"));
        assert_eq!(sample.values, [300, 3_000_000_000]);
        assert_eq!((&sample.location_ids[..], profile.locations[0].lines[0].function_id), (&[1][..], 1));
        assert_eq!(text(profile.functions[0].name), "[unknown]");
        let kinds: Vec<_> = profile.sample_types.iter().map(|one| (text(one.kind), text(one.unit))).collect();
        assert_eq!(kinds, [("samples", "count"), ("cpu", "nanoseconds")]);
        assert_eq!(
            (text(0), profile.time_nanos, profile.duration_nanos, profile.period),
            ("", 7, 5, 10_000_000)
        );
        assert_eq!(text(profile.comments[0]), "2 samples are missing: there was no room for them.");
        assert!(profile.encode_to_vec().starts_with(&[0x0a, 4, 0x08, 3, 0x10, 4, 0x0a, 4, 0x08, 1, 0x10, 2]));
    }
}
