//! Durations as Go writes them: `1h0m0s`, `250ms`, `0s`.

use std::time::Duration;

/// Parses a duration into nanoseconds, which may be negative. `None` if it is not a duration, or
/// more than 292 years.
pub(super) fn parse(text: &str) -> Option<i64> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    // kube's parser accepts an empty text as zero, and panics on numbers that are negative or too
    // large.
    let mut numbers = unsigned.split(char::is_alphabetic);
    let bounded = numbers.all(|number| number.len() <= 15 && !number.starts_with(['+', '-']));
    if unsigned.is_empty() || unsigned.len() > 64 || !bounded {
        return None;
    }
    let duration: kube::core::Duration = text.parse().ok()?;
    let nanoseconds = i64::try_from(Duration::from(duration).as_nanos()).ok()?;
    Some(if duration.is_negative() { -nanoseconds } else { nanoseconds })
}

/// Returns a duration as Go prints it: `1h0m0s`, `1.5ms`. kube would print `3600s`.
pub(crate) fn format(duration: Duration) -> String {
    let nanos = duration.subsec_nanos();
    if duration.as_secs() == 0 {
        return match nanos {
            0 => "0s".to_owned(),
            1..1_000 => format!("{nanos}ns"),
            1_000..1_000_000 => format!("{}µs", decimal(u64::from(nanos / 1_000), nanos % 1_000, 3)),
            _ => format!("{}ms", decimal(u64::from(nanos / 1_000_000), nanos % 1_000_000, 6)),
        };
    }
    let (hours, minutes) = (duration.as_secs() / 3600, duration.as_secs() / 60 % 60);
    let seconds = decimal(duration.as_secs() % 60, nanos, 9);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

/// Returns `whole` and a fraction of `digits` digits, without the zeros at its end.
fn decimal(whole: u64, fraction: u32, digits: usize) -> String {
    let text = format!("{whole}.{fraction:0digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", 0)]
    #[case("0s", 0)]
    #[case("30s", 30_000)]
    #[case("1h0m0s", 3_600_000)]
    #[case("24h", 86_400_000)]
    #[case("15m0s", 900_000)]
    #[case("1.5s", 1_500)]
    #[case(".5s", 500)]
    #[case("250ms", 250)]
    #[case("+1m", 60_000)]
    #[case("-1s", -1_000)]
    fn good(#[case] text: &str, #[case] milliseconds: i64) {
        assert_eq!(parse(text), Some(milliseconds * 1_000_000));
    }

    #[rstest]
    #[case("")]
    #[case("-")]
    #[case("30")]
    #[case("s")]
    #[case("1 s")]
    #[case("1d")]
    #[case(".s")]
    #[case("1.2.3s")]
    #[case("9999999999h")]
    #[case::too_large_for_64_bits_of_seconds("99999999999999999999h")]
    #[case::several_that_are_too_large_together("999999999999999h999999999999999h")]
    #[case::a_sign_in_the_middle("1m-5s")]
    #[case::two_signs("--5s")]
    fn bad(#[case] text: &str) {
        assert_eq!(parse(text), None);
    }

    #[rstest]
    #[case(Duration::ZERO, "0s")]
    #[case(Duration::from_nanos(5), "5ns")]
    #[case(Duration::from_nanos(1_500), "1.5µs")]
    #[case(Duration::from_micros(1_500), "1.5ms")]
    #[case(Duration::from_secs(30), "30s")]
    #[case(Duration::from_secs(90), "1m30s")]
    #[case(Duration::from_secs(3600), "1h0m0s")]
    #[case(Duration::from_millis(3_600_500), "1h0m0.5s")]
    fn printed(#[case] duration: Duration, #[case] text: &str) {
        assert_eq!(format(duration), text);
        assert_eq!(parse(text), i64::try_from(duration.as_nanos()).ok());
    }
}
