//! The two text formats that scrapers ask for.
//!
//! Metrics are encoded as OpenMetrics. kube-proxy answers in the older Prometheus text format unless asked
//! otherwise, and so do we: there a counter's family bears the name of its samples, `_total` included.

use std::borrow::Cow;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores";

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::serve) enum Format {
    OpenMetrics,
    Prometheus,
}

impl Format {
    /// By the request's `Accept` header. Prometheus takes both formats and likes OpenMetrics better; it gets the format
    /// that kube-proxy gives, because the other writes `le="1.0"` for `le="1"`, which is another time series.
    pub(in crate::serve) fn wanted(accept: &str) -> Self {
        let takes = |kind: &str| accept.split(',').any(|choice| choice.trim_start().starts_with(kind));
        if takes("application/openmetrics-text") && !takes("text/plain") {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    pub(in crate::serve) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => OPEN_METRICS,
            Self::Prometheus => PROMETHEUS,
        }
    }

    /// `text` is OpenMetrics.
    pub(in crate::serve) fn write(self, text: String) -> String {
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => to_prometheus(&text),
        }
    }
}

fn to_prometheus(text: &str) -> String {
    let mut written = String::with_capacity(text.len() + text.len() / 16);
    let mut help = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
                push(&mut written, &["# HELP ", name, suffix, " ", help]);
            }
            push(
                &mut written,
                &["# TYPE ", name, suffix, " ", if kind == "unknown" { "untyped" } else { kind }],
            );
        } else if !line.starts_with('#') {
            match line.split_once("le=\"").and_then(|(before, rest)| Some((before, rest.split_once('"')?))) {
                Some((before, (bound, after))) if before.ends_with(['{', ',']) => {
                    push(&mut written, &[before, "le=\"", &as_go_writes(bound), "\"", after]);
                }
                _ => push(&mut written, &[line]),
            }
        }
    }
    written
}

/// The upper bound of a bucket.
fn as_go_writes(bound: &str) -> Cow<'_, str> {
    let Some(number) = bound.parse::<f64>().ok().filter(|number| number.is_finite()) else {
        return bound.into();
    };
    let scientific = format!("{number:e}");
    match scientific.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
        Some((digits, Ok(exponent))) if !(-4..6).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs()).into()
        }
        _ => number.to_string().into(),
    }
}

fn push(text: &mut String, parts: &[&str]) {
    text.extend(parts.iter().copied());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("", Format::Prometheus)]
    #[case("*/*", Format::Prometheus)]
    #[case("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", Format::Prometheus)]
    #[case("application/openmetrics-text;version=1.0.0;q=0.9, text/plain;q=0.5", Format::Prometheus)]
    #[case("application/openmetrics-text;version=1.0.0", Format::OpenMetrics)]
    fn negotiation(#[case] accept: &str, #[case] format: Format) {
        assert_eq!(Format::wanted(accept), format);
    }

    #[rstest]
    #[case("0.00001", "1e-05")]
    #[case("0.001", "0.001")]
    #[case("16.384", "16.384")]
    #[case("1.0", "1")]
    #[case("262144.0", "262144")]
    #[case("4194304.0", "4.194304e+06")]
    #[case("+Inf", "+Inf")]
    fn bounds_are_written_as_kube_proxy_writes_them(#[case] ours: &str, #[case] theirs: &str) {
        let open = format!("a_bucket{{le=\"{ours}\",verb=\"GET\"}} 5\n");
        assert_eq!(Format::Prometheus.write(open), format!("a_bucket{{le=\"{theirs}\",verb=\"GET\"}} 5\n"));
    }

    #[test]
    fn counters_get_the_name_of_their_samples() {
        let open = "# HELP a Changes.\n# TYPE a counter\na_total{code=\"200\"} 3\n# HELP b Depth.\n# TYPE b gauge\nb 1\n# EOF\n";
        let old = "# HELP a_total Changes.\n# TYPE a_total counter\na_total{code=\"200\"} 3\n# HELP b Depth.\n# TYPE b gauge\nb 1\n";
        assert_eq!(Format::Prometheus.write(open.into()), old);
        assert_eq!(Format::OpenMetrics.write(open.into()), open);
    }
}
