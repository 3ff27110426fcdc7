//! Where CPU time goes, and what is known about memory.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use http::StatusCode;
use pprof::{ProfilerGuardBuilder, Report};

use crate::{
    serve::{
        pages::pprof_format::{self, Stack},
        reply::{Reply, plain, reply},
    },
    sys::allocator,
};

/// Samples a second of CPU time.
const FREQUENCY: i32 = 100;
const SECONDS: u64 = 30;
pub(in crate::serve) const MOST_SECONDS: u64 = 600;
/// Code in which no stack is taken: unwinding asks these for memory and locks, and would wait for itself if the signal
/// came while they hold them.
const LEFT_ALONE: [&str; 4] = ["libc", "libgcc", "pthread", "vdso"];

/// A profile is being taken: signals and timer are the process's.
static RUNNING: AtomicBool = AtomicBool::new(false);

struct Turn;

impl Turn {
    fn take() -> Option<Self> {
        (!RUNNING.swap(true, Ordering::Acquire)).then_some(Self)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        RUNNING.store(false, Ordering::Release);
    }
}

/// Samples this process for `seconds=…` of the query.
pub(super) async fn cpu(query: &str) -> Reply {
    let seconds = seconds(query);
    if seconds > MOST_SECONDS {
        let problem = format!("seconds must be at most {MOST_SECONDS}, found {seconds}\n");
        return plain(StatusCode::BAD_REQUEST, problem);
    }
    let Some(_turn) = Turn::take() else { return failed("CPU profiling is in use") };
    let sampler = ProfilerGuardBuilder::default().frequency(FREQUENCY).blocklist(&LEFT_ALONE);
    let guard = match sampler.build() {
        Ok(guard) => guard,
        Err(error) => return failed(&error.to_string()),
    };
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    // Names are looked up now, which takes long.
    let encoded = tokio::task::spawn_blocking(move || {
        let report = guard.report().build().map_err(|error| error.to_string())?;
        encode(&report)
    });
    match encoded.await {
        Ok(Ok(profile)) => {
            let mut reply = reply(StatusCode::OK, "application/octet-stream", profile);
            let disposition = http::HeaderValue::from_static("attachment; filename=\"profile\"");
            reply.headers_mut().insert(http::header::CONTENT_DISPOSITION, disposition);
            reply
        }
        Ok(Err(error)) => failed(&error),
        Err(error) => failed(&error.to_string()),
    }
}

/// As Go: what is no number above zero asks for the default.
fn seconds(query: &str) -> u64 {
    let given = query.split('&').find_map(|part| part.strip_prefix("seconds="));
    given.and_then(|text| text.parse().ok()).filter(|seconds| *seconds > 0).unwrap_or(SECONDS)
}

fn failed(problem: &str) -> Reply {
    plain(StatusCode::INTERNAL_SERVER_ERROR, format!("Could not take a CPU profile: {problem}\n"))
}

fn encode(report: &Report) -> Result<Vec<u8>, String> {
    let stacks = report.data.iter().map(|(sampled, count)| Stack {
        // Inlined functions stand beside the one that they are inlined in.
        frames: of_ours(sampled.frames.iter().flatten().map(pprof::Symbol::name)),
        thread: sampled.thread_name.clone(),
        samples: i64::try_from(*count).unwrap_or(i64::MAX),
    });
    let stacks = readable(stacks.collect())?;
    Ok(pprof_format::encode(&stacks, report.timing.start_time, report.timing.duration, FREQUENCY))
}

/// An error if nothing but the sampler was seen: musl's signal trampoline has no unwind information, so that a build
/// against it sees nothing behind the signal.
fn readable(stacks: Vec<Stack>) -> Result<Vec<Stack>, String> {
    let sampled = !stacks.is_empty();
    let seen: Vec<Stack> = stacks.into_iter().filter(|stack| !stack.frames.is_empty()).collect();
    if sampled && seen.is_empty() {
        let process = std::process::id();
        return Err(format!(
            "this build cannot look behind a signal (it is static, with musl); use `perf record -g -p {process}`"
        ));
    }
    Ok(seen)
}

/// Without the innermost functions if they are the sampler's own.
fn of_ours(names: impl Iterator<Item = String>) -> Vec<String> {
    let is_sampler = |name: &String| {
        matches!(name.as_str(), "trace" | "trace_unsynchronized" | "perf_signal_handler")
            || name.contains("pprof::")
            || name.contains("backtrace::")
    };
    names.skip_while(is_sampler).map(|name| without_trait(&name)).collect()
}

/// `<a::B as c::D>::e` → `a::B::e`: what stands in angle brackets is not shown by the tools that read profiles.
fn without_trait(name: &str) -> String {
    let Some(inner) = name.strip_prefix('<') else { return name.to_owned() };
    let mut depth = 1_u32;
    let mut type_end = None;
    for (at, char) in inner.char_indices() {
        match char {
            '<' => depth += 1,
            // Not the arrow of a function's type.
            '>' if !inner[..at].ends_with('-') => depth -= 1,
            ' ' if depth == 1 && inner[at..].starts_with(" as ") => type_end = type_end.or(Some(at)),
            _ => {}
        }
        if depth == 0 {
            let of = &inner[..type_end.unwrap_or(at)];
            return format!("{}{}", without_trait(of), &inner[at + 1..]);
        }
    }
    name.to_owned()
}

/// No profile: which code has allocated what is not recorded. As text, so that nobody takes it for one.
pub(super) fn memory() -> Reply {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let lines = status.lines().filter(|line| line.starts_with("Vm") || line.starts_with("Rss"));
    let kernel: String = lines.map(|line| format!("{line}\n")).collect();
    let text = format!(
        "Which code has allocated how much is not recorded: this is no profile for `go tool pprof`.\n\n\
         # What the kernel counts for this process\n{kernel}\n# What the allocator (mimalloc) knows\n{}",
        allocator::report()
    );
    plain(StatusCode::OK, text)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a::b::c", "a::b::c")]
    #[case("<a::B as c::D>::e", "a::B::e")]
    #[case("<a::B<c::D>>::e", "a::B<c::D>::e")]
    #[case("<<a::B as c::D>::F as g::H>::i", "a::B::F::i")]
    #[case("<fn() -> u8 as c::D>::e", "fn() -> u8::e")]
    #[case("<broken", "<broken")]
    fn names_without_traits(#[case] name: &str, #[case] shown: &str) {
        assert_eq!(without_trait(name), shown);
    }

    #[rstest]
    #[case("", 30)]
    #[case("seconds=0", 30)]
    #[case("seconds=-1", 30)]
    #[case("seconds=soon", 30)]
    #[case("debug=0&seconds=5", 5)]
    #[case("seconds=601", 601)]
    fn seconds_of_a_profile(#[case] query: &str, #[case] expected: u64) {
        assert_eq!(seconds(query), expected);
    }

    #[test]
    fn a_profile_of_the_sampler_alone_is_an_error() {
        let stack = |frames: &[&str]| Stack {
            frames: of_ours(frames.iter().map(|name| (*name).to_owned())),
            thread: "t".into(),
            samples: 1,
        };
        let blind = ["backtrace::backtrace::trace_unsynchronized", "<pprof::Trace as x::Y>::trace"];
        assert!(readable(vec![stack(&blind)]).unwrap_err().contains("perf record"));
        assert_eq!(readable(vec![stack(&blind), stack(&["a::work"])]).unwrap().len(), 1);
        // Nothing ran.
        assert_eq!(readable(Vec::new()).unwrap().len(), 0);
    }

    #[test]
    fn the_sampler_is_not_in_its_samples() {
        let names = ["trace", "<pprof::Trace as x::Y>::trace", "a::work", "backtrace::trace", "main"];
        let kept = of_ours(names.into_iter().map(str::to_owned));
        assert_eq!(kept, ["a::work", "backtrace::trace", "main"]);
    }
}
