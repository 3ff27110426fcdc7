//! Where CPU time and memory go, for `go tool pprof`; memory also as text.

use std::{
    fmt::Write as _,
    fs,
    time::{Duration, SystemTime},
};

use http::{HeaderValue, StatusCode, header};
use jiff::Timestamp;

use crate::{
    profile::{
        cpu::{self, Recorded, Recording},
        heap::{self, Amount, Snapshot},
        names::Names,
    },
    serve::{
        pages::pprof_format::{Kind, Profile, Stack},
        reply::{Reply, plain, reply},
    },
    sys::allocator,
};

const SECONDS: u64 = 30;
pub(in crate::serve) const MOST_SECONDS: u64 = 600;

const CPU_TIME: Kind = Kind("cpu", "nanoseconds");

/// Samples this process for `seconds=…` of the query.
pub(super) async fn cpu(query: &str) -> Reply {
    let seconds = positive(query, "seconds").unwrap_or(SECONDS);
    if seconds > MOST_SECONDS {
        let problem = format!("seconds must be at most {MOST_SECONDS}, found {seconds}\n");
        return plain(StatusCode::BAD_REQUEST, problem);
    }
    let recording = match Recording::start() {
        Ok(Some(recording)) => recording,
        Ok(None) => return failed("CPU", "CPU profiling is in use"),
        Err(error) => return failed("CPU", &error.to_string()),
    };
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    // Names are looked up now, which takes long.
    match tokio::task::spawn_blocking(move || cpu_profile(recording.stop()).encode()).await {
        Ok(profile) => download("profile", profile),
        Err(error) => failed("CPU", &error.to_string()),
    }
}

/// What the query asks for of all that was allocated since sampling began: text with `debug=1`, else a profile that
/// is shown by `kind` first, if that is given. `gc=1` changes nothing: there is no garbage.
pub(super) async fn memory(name: &'static str, kind: Option<&'static str>, query: &str) -> Reply {
    let Some(snapshot) = heap::snapshot() else {
        return failed("heap", "allocations are not sampled");
    };
    let as_text = positive(query, "debug").is_some();
    let answer = move || {
        if as_text {
            plain(StatusCode::OK, heap_text(&snapshot))
        } else {
            download(name, heap_profile(snapshot, kind).encode())
        }
    };
    match tokio::task::spawn_blocking(answer).await {
        Ok(reply) => reply,
        Err(error) => failed("heap", &error.to_string()),
    }
}

/// As Go: what is no number above zero asks for the default.
fn positive(query: &str, name: &str) -> Option<u64> {
    let given = query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    given.and_then(|text| text.parse().ok()).filter(|number| *number > 0)
}

fn failed(what: &str, problem: &str) -> Reply {
    plain(StatusCode::INTERNAL_SERVER_ERROR, format!("Could not take a {what} profile: {problem}\n"))
}

fn download(name: &str, profile: Vec<u8>) -> Reply {
    let mut reply = reply(StatusCode::OK, "application/octet-stream", profile);
    if let Ok(disposition) = HeaderValue::try_from(format!("attachment; filename=\"{name}\"")) {
        reply.headers_mut().insert(header::CONTENT_DISPOSITION, disposition);
    }
    reply
}

fn cpu_profile(recorded: Recorded) -> Profile {
    let mut names = Names::default();
    let period = u64::try_from(cpu::PERIOD.as_nanos()).unwrap_or(u64::MAX);
    let stacks = recorded.stacks.into_iter().map(|busy| Stack {
        frames: names.of(&busy.frames),
        thread: Some(busy.thread),
        counts: vec![busy.samples, busy.samples.saturating_mul(period)],
    });
    Profile {
        kinds: &[Kind("samples", "count"), CPU_TIME],
        default: None,
        stacks: stacks.collect(),
        period: (CPU_TIME, period),
        start: recorded.since,
        duration: Some(recorded.duration),
        comments: Vec::new(),
    }
}

fn heap_profile(snapshot: Snapshot, default: Option<&'static str>) -> Profile {
    let mut names = Names::default();
    let comments = remarks(&snapshot);
    let stacks = snapshot.sites.into_iter().map(|site| Stack {
        frames: names.of_call_site(&site.frames),
        thread: None,
        counts: vec![site.allocated.objects, site.allocated.bytes, site.in_use.objects, site.in_use.bytes],
    });
    Profile {
        kinds: &[
            Kind("alloc_objects", "count"),
            Kind("alloc_space", "bytes"),
            Kind("inuse_objects", "count"),
            Kind("inuse_space", "bytes"),
        ],
        default,
        stacks: stacks.collect(),
        period: (Kind("space", "bytes"), heap::PERIOD),
        start: SystemTime::now(),
        duration: None,
        comments,
    }
}

/// What a reader must know to read it right.
fn remarks(snapshot: &Snapshot) -> Vec<String> {
    let since = Timestamp::try_from(snapshot.since).unwrap_or_default();
    let mut remarks = vec![format!(
        "Only what was allocated since {since:.0} is in here, extrapolated from a sample for each {} KiB.",
        heap::PERIOD / 1024
    )];
    if snapshot.lost > 0 {
        remarks.push(format!(
            "There was no room for {} samples: what is in use is more than is told.",
            snapshot.lost
        ));
    }
    remarks
}

/// In the form of Go's, which tools read too, with what the kernel and the allocator know.
fn heap_text(snapshot: &Snapshot) -> String {
    let mut sites: Vec<_> = snapshot.sites.iter().collect();
    sites.sort_by_key(|site| (std::cmp::Reverse(site.in_use.bytes), std::cmp::Reverse(site.allocated.bytes)));
    let sum = |amounts: &mut dyn Iterator<Item = Amount>| {
        amounts.fold(Amount::default(), |sum, more| Amount {
            objects: sum.objects.saturating_add(more.objects),
            bytes: sum.bytes.saturating_add(more.bytes),
        })
    };
    let line = |in_use: Amount, allocated: Amount| {
        format!("{}: {} [{}: {}] @", in_use.objects, in_use.bytes, allocated.objects, allocated.bytes)
    };
    let total = line(
        sum(&mut sites.iter().map(|site| site.in_use)),
        sum(&mut sites.iter().map(|site| site.allocated)),
    );
    let mut names = Names::default();
    let mut text = format!("heap profile: {total} heapprofile\n");
    // Writing to a String cannot fail.
    for site in sites {
        text.push_str(&line(site.in_use, site.allocated));
        for address in &site.frames {
            let _ = write!(text, " {address:#x}");
        }
        text.push('\n');
        for name in names.of_call_site(&site.frames) {
            let _ = writeln!(text, "#\t{name}");
        }
        text.push('\n');
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kernel = status.lines().filter(|line| line.starts_with("Vm") || line.starts_with("Rss"));
    let remarks = remarks(snapshot);
    let allocator = allocator::report();
    let sections = [
        ("", remarks.iter().map(String::as_str).collect::<Vec<_>>()),
        ("What the kernel counts for this process", kernel.collect()),
        ("What the allocator (mimalloc) knows", allocator.lines().collect()),
    ];
    for (title, lines) in sections {
        let _ = writeln!(text, "# {title}");
        for line in lines {
            let _ = writeln!(text, "# {line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::profile::heap::Site;

    #[rstest]
    #[case("", None)]
    #[case("seconds=0", None)]
    #[case("seconds=-1", None)]
    #[case("seconds=soon", None)]
    #[case("debug=0&seconds=5", Some(5))]
    #[case("seconds=601", Some(601))]
    fn numbers_of_a_query(#[case] query: &str, #[case] expected: Option<u64>) {
        assert_eq!(positive(query, "seconds"), expected);
    }

    fn snapshot(lost: u64) -> Snapshot {
        let site = |bytes| Site {
            frames: vec![1, 2],
            allocated: Amount { objects: 4, bytes },
            in_use: Amount { objects: 1, bytes: bytes / 4 },
        };
        Snapshot { since: SystemTime::UNIX_EPOCH, sites: vec![site(400), site(4000)], lost }
    }

    #[test]
    fn memory_as_text_has_the_largest_first_and_the_sum() {
        let text = heap_text(&snapshot(0));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..6],
            [
                "heap profile: 2: 1100 [8: 4400] @ heapprofile",
                "1: 1000 [4: 4000] @ 0x1 0x2",
                "#\t[unknown]",
                "",
                "1: 100 [4: 400] @ 0x1 0x2",
                "#\t[unknown]"
            ]
        );
        assert!(lines[7..].iter().all(|line| line.starts_with('#')), "{text}");
        assert!(
            text.contains("since 1970-01-01T00:00:00Z is in here") && text.contains("# VmRSS:"),
            "{text}"
        );
        assert!(!text.contains("no room"));
    }

    #[test]
    fn samples_that_are_lost_are_told() {
        let profile = heap_profile(snapshot(3), Some("alloc_space"));
        assert!(profile.comments[1].contains("no room for 3 samples"), "{profile:?}");
        assert_eq!(profile.stacks[1].counts, [4, 4000, 1, 1000]);
    }
}
