//! Durations as Go writes them: `1h0m0s`, `250ms`, `0s`.

use std::time::Duration;

const UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Nanoseconds, which may be negative. `None`: not a duration, or more than 63 bits of them.
pub(super) fn parse(text: &str) -> Option<i64> {
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let nanoseconds = i64::try_from(unsigned_nanoseconds(unsigned)?).ok()?;
    Some(if negative { -nanoseconds } else { nanoseconds })
}

fn unsigned_nanoseconds(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    if text.is_empty() {
        return None;
    }
    let mut rest = text;
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let number_length = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, after) = rest.split_at(number_length);
        let unit_length = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_length);
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit)?;
        total = total.checked_add(scaled(number, *scale)?)?;
        rest = after;
    }
    Some(total)
}

/// A decimal number of units; digits below a nanosecond are cut off, as Go does.
fn scaled(number: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut part: u64 = 0;
    let mut place = scale;
    for digit in fraction.chars() {
        place /= 10;
        part += u64::from(digit.to_digit(10)?) * place;
    }
    whole.checked_mul(scale)?.checked_add(part)
}

/// As Go prints it: `1h0m0s`, `1.5ms`.
pub(super) fn format(duration: Duration) -> String {
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

/// `whole` and a fraction of `digits` digits, without the zeros at its end.
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
