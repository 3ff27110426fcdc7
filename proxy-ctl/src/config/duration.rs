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

/// `None`: not a duration, negative, or more than 64 bits of nanoseconds.
pub(super) fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut total: u64 = 0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let number_length = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, after) = rest.split_at(number_length);
        let unit_length = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_length);
        let (_, scale) = UNITS.iter().find(|(name, _)| *name == unit)?;
        total = total.checked_add(nanoseconds(number, *scale)?)?;
        rest = after;
    }
    Some(Duration::from_nanos(total))
}

/// A decimal number of units; digits below a nanosecond are cut off, as Go does.
fn nanoseconds(number: &str, scale: u64) -> Option<u64> {
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

/// As Go prints a duration of whole seconds or milliseconds.
pub(super) fn format(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = duration.subsec_millis();
    let rest = if millis == 0 { format!("{rest}") } else { format!("{rest}.{millis:03}") };
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
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
    fn good(#[case] text: &str, #[case] milliseconds: u64) {
        assert_eq!(parse(text), Some(Duration::from_millis(milliseconds)));
    }

    #[rstest]
    #[case("")]
    #[case("30")]
    #[case("-1s")]
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
    #[case(Duration::from_secs(90), "1m30s")]
    #[case(Duration::from_secs(3600), "1h0m0s")]
    #[case(Duration::from_millis(1500), "1.500s")]
    fn printed(#[case] duration: Duration, #[case] text: &str) {
        assert_eq!(format(duration), text);
        assert_eq!(parse(text), Some(duration));
    }
}
