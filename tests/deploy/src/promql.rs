//! Which metrics a PromQL expression asks for.

use std::collections::BTreeSet;

/// What looks like a metric's name and is none.
const KEYWORDS: [&str; 12] = [
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "offset",
    "bool",
    "inf",
];
/// These are followed by label names in parentheses.
const GROUPING: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

/// Names of the metrics in `expression`. Selectors without a name (`{__name__=…}`) are not looked into.
pub fn metrics(expression: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = expression.char_indices().peekable();
    // Inside of {…}, […] and of the label lists after `by` there are no metrics.
    let (mut skipped, mut labels_follow) = (0_u32, false);
    while let Some((start, letter)) = rest.next() {
        match letter {
            '"' | '\'' | '`' => {
                while let Some((_, next)) = rest.next() {
                    if next == '\\' {
                        rest.next();
                    } else if next == letter {
                        break;
                    }
                }
            }
            '{' | '[' => skipped += 1,
            '}' | ']' => skipped = skipped.saturating_sub(1),
            '(' if labels_follow || skipped > 0 => {
                labels_follow = false;
                skipped += 1;
            }
            ')' if skipped > 0 => skipped -= 1,
            letter if letter.is_ascii_alphabetic() || letter == '_' || letter == ':' => {
                let mut end = start + letter.len_utf8();
                while let Some((at, next)) = rest.peek().copied() {
                    if !(next.is_ascii_alphanumeric() || next == '_' || next == ':') {
                        break;
                    }
                    end = at + next.len_utf8();
                    rest.next();
                }
                let word = expression.get(start..end).unwrap_or_default();
                let after = expression.get(end..).unwrap_or_default().trim_start();
                let called =
                    ["(", "by ", "by(", "without ", "without("].iter().any(|call| after.starts_with(call));
                labels_follow = GROUPING.contains(&word);
                if skipped == 0 && !called && !KEYWORDS.contains(&word.to_lowercase().as_str()) {
                    found.insert(word.to_owned());
                }
            }
            digit if digit.is_ascii_digit() => {
                // A number may go on with letters: 1e3, 0x10, 5m.
                while rest.next_if(|(_, next)| next.is_ascii_alphanumeric() || *next == '.').is_some() {}
            }
            _ => {}
        }
    }
    found
}

/// Metrics that an exposition declares, by the names that queries use: a histogram's series too.
pub fn declared(exposition: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in exposition.lines() {
        let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) else {
            continue;
        };
        names.insert(name.to_owned());
        if kind == "histogram" || kind == "summary" {
            names.extend(["bucket", "count", "sum"].map(|part| format!("{name}_{part}")));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(expression: &str) -> Vec<String> {
        metrics(expression).into_iter().collect()
    }

    #[test]
    fn functions_labels_keywords_strings_and_durations_are_no_metrics() {
        assert_eq!(of("sum by (node, reason) (rate(drops_total{reason!=\"a\"}[5m])) > 1e3"), ["drops_total"]);
        assert_eq!(of("a / on (table) group_left (kind) b unless c offset 5m"), ["a", "b", "c"]);
        assert_eq!(
            of("histogram_quantile(0.99, sum by (le) (rate(x_bucket[$__rate_interval])))"),
            ["x_bucket"]
        );
        assert_eq!(of("label_replace(up, \"to\", \"$1 {no}\", \"from\", `(.*)`) == 0"), ["up"]);
        assert_eq!(of("a:b:rate5m and on () (c > bool 0)"), ["a:b:rate5m", "c"]);
        assert_eq!(of("time() - x > 60"), ["x"]);
    }

    #[test]
    fn a_histogram_declares_its_series() {
        let names =
            declared("# HELP a A.\n# TYPE a histogram\na_bucket{le=\"1\"} 1\n# TYPE b_total counter\n");
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        assert_eq!(names, ["a", "a_bucket", "a_count", "a_sum", "b_total"]);
    }
}
