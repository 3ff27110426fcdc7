//! Kubernetes quantities: `64Ki`, `1.5`, `2e3`, and how Kubernetes writes them.

/// Powers of ten, three apart, from the smallest part that a quantity can have.
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
/// Powers of 1024.
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const NANO: i128 = 1_000_000_000;
/// In billionths; what is more counts as this.
const MOST: i128 = i64::MAX as i128 * NANO;

#[derive(Clone, Copy, Eq, PartialEq)]
enum Form {
    Decimal,
    Exponent,
    Binary,
}

/// In the form in which it is usually written; `None`: no quantity.
pub(super) fn canonical(text: &str) -> Option<String> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (billionths, form) = parse(unsigned)?;
    let sign = if text.starts_with('-') && billionths != 0 { "-" } else { "" };
    Some(format!("{sign}{}", written(billionths, form)))
}

fn parse(text: &str) -> Option<(i128, Form)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.is_empty() || fraction.contains('.') {
        return None;
    }
    let digits: i128 = format!("0{whole}{fraction}").parse().ok()?;
    let places = i32::try_from(fraction.len()).ok()?;
    let (form, factor, exponent) = unit(suffix)?;
    let scaled = digits.checked_mul(factor).unwrap_or(MOST);
    Some((billionths(scaled, exponent.saturating_sub(places)), form))
}

/// What a suffix stands for: a factor, and a power of ten.
fn unit(suffix: &str) -> Option<(Form, i128, i32)> {
    let position = |units: &[&str]| units.iter().position(|unit| *unit == suffix);
    if let Some(thousands) = position(&DECIMAL) {
        return Some((Form::Decimal, 1, i32::try_from(thousands).ok()? * 3 - 9));
    }
    if let Some(power) = position(&BINARY) {
        return Some((Form::Binary, 1 << (10 * power), 0));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?;
    Some((Form::Exponent, 1, exponent.parse().ok()?))
}

/// `digits` times ten to the power of `exponent`, rounded up.
fn billionths(digits: i128, exponent: i32) -> i128 {
    let exponent = exponent.saturating_add(9);
    let power = 10_i128.checked_pow(exponent.unsigned_abs());
    let exact = match power {
        _ if digits == 0 => 0,
        Some(power) if exponent < 0 => digits / power + i128::from(digits % power != 0),
        None if exponent < 0 => 1,
        Some(power) => digits.checked_mul(power).unwrap_or(MOST),
        None => MOST,
    };
    exact.min(MOST)
}

fn written(billionths: i128, form: Form) -> String {
    if billionths == 0 {
        return "0".to_owned();
    }
    let is_whole = billionths % NANO == 0;
    if form == Form::Binary && is_whole && billionths >= 1024 * NANO {
        let (number, power) = without_factor(billionths / NANO, 1024, BINARY.len());
        return format!("{number}{}", BINARY.get(power).unwrap_or(&""));
    }
    let (number, thousands) = without_factor(billionths, 1000, DECIMAL.len());
    match (form, thousands) {
        (Form::Exponent, 3) => number.to_string(),
        (Form::Exponent, _) => format!("{number}e{}", thousands as i32 * 3 - 9),
        (Form::Decimal | Form::Binary, _) => {
            format!("{number}{}", DECIMAL.get(thousands).unwrap_or(&""))
        }
    }
}

/// How often `number` has `factor`, less often than `limit`; and what is left.
fn without_factor(mut number: i128, factor: i128, limit: usize) -> (i128, usize) {
    let mut times = 0;
    while number % factor == 0 && times + 1 < limit {
        number /= factor;
        times += 1;
    }
    (number, times)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    // What kube-proxy 1.36.1 writes for each.
    #[rstest]
    #[case("0", "0")]
    #[case("00", "0")]
    #[case("0Ki", "0")]
    #[case("-0", "0")]
    #[case(".", "0")]
    #[case("0e3", "0")]
    #[case("1000", "1k")]
    #[case("1024", "1024")]
    #[case("1024Ki", "1Mi")]
    #[case("1023Ki", "1023Ki")]
    #[case("1.5Ki", "1536")]
    #[case("1.5Mi", "1536Ki")]
    #[case("0.5Ki", "512")]
    #[case("1.3Ki", "1331200m")]
    #[case("0.001Ki", "1024m")]
    #[case("-1Ki", "-1Ki")]
    #[case("-1.5Ki", "-1536")]
    #[case("8Ei", "9223372036854775807")]
    #[case("100Ei", "9223372036854775807")]
    #[case("7Ei", "7Ei")]
    #[case("1.5", "1500m")]
    #[case(".5", "500m")]
    #[case("1.0005", "1000500u")]
    #[case("0.1n", "1n")]
    #[case("1500", "1500")]
    #[case("1.3k", "1300")]
    #[case("9E", "9E")]
    #[case("1E", "1E")]
    #[case("1e3", "1e3")]
    #[case("1e4", "10e3")]
    #[case("1e2", "100")]
    #[case("10e-1", "1")]
    #[case("1e-12", "1e-9")]
    #[case("-5e-10", "-1e-9")]
    #[case("1e18", "1e18")]
    fn good(#[case] text: &str, #[case] usual: &str) {
        assert_eq!(canonical(text).as_deref(), Some(usual));
    }

    #[rstest]
    #[case("")]
    #[case("1.1.1")]
    #[case("1K")]
    #[case("1ki")]
    #[case("1Zi")]
    #[case("1e")]
    #[case("1e3k")]
    #[case("1 Ki")]
    #[case(" 1")]
    #[case("Ki")]
    #[case("--1")]
    fn bad(#[case] text: &str) {
        assert_eq!(canonical(text), None);
    }

    #[rstest]
    #[case("1e99999", "9223372036854775807")]
    #[case("1e-99999", "1e-9")]
    #[case("99999999999999999999999999999999Ei", "9223372036854775807")]
    fn out_of_bounds(#[case] text: &str, #[case] bound: &str) {
        assert_eq!(canonical(text).as_deref(), Some(bound));
    }
}
