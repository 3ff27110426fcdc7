//! Metrics that a PromQL expression asks for.

use std::collections::BTreeSet;

use regex::Regex;

/// Returns the names of the metrics in `expression`. It does not search selectors without a name
/// (`{__name__=…}`).
pub fn metrics(expression: &str) -> Result<BTreeSet<String>, regex::Error> {
    let strings = Regex::new(r#""(\\.|[^"])*"|'(\\.|[^'])*'|`[^`]*`"#)?;
    let selectors = Regex::new(r"\{[^}]*\}|\[[^\]]*\]")?;
    let labels = Regex::new(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")?;
    let functions_and_numbers = Regex::new(r"\w+\s*\(|\b[0-9][\w.]*")?;
    let keywords = Regex::new(r"\b(and|or|unless|group_left|group_right|offset|bool|inf)\b")?;
    let mut rest = expression.to_owned();
    for no_metrics in [strings, selectors, labels, functions_and_numbers, keywords] {
        rest = no_metrics.replace_all(&rest, " ").into_owned();
    }
    let name = Regex::new(r"[a-zA-Z_:][\w:]*")?;
    Ok(name.find_iter(&rest).map(|name| name.as_str().to_owned()).collect())
}

/// Returns the metrics that an exposition declares, by the names that queries use. A histogram's
/// series are among them.
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
        metrics(expression).unwrap().into_iter().collect()
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
