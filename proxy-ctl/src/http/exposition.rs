//! The two text formats that scrapers ask for.
//!
//! Metrics are encoded as OpenMetrics. kube-proxy answers in the older Prometheus text format
//! unless asked otherwise, and so does this proxy. In that format the name of a counter's metric
//! family is that of its samples, `_total` included.

use std::borrow::Cow;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores";

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Format {
    OpenMetrics,
    Prometheus,
}

impl Format {
    /// Returns the format for an `Accept` header. Prometheus accepts both formats and prefers
    /// OpenMetrics. It gets the older format, as from kube-proxy, because OpenMetrics writes
    /// `le="1.0"` for `le="1"`, which is another time series.
    pub(super) fn wanted(accept: &str) -> Self {
        let takes = |kind: &str| accept.split(',').any(|choice| choice.trim_start().starts_with(kind));
        if takes("application/openmetrics-text") && !takes("text/plain") {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => OPEN_METRICS,
            Self::Prometheus => PROMETHEUS,
        }
    }

    /// Returns metrics in this format. `text` is in OpenMetrics.
    pub(super) fn write(self, text: String) -> String {
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => to_prometheus(&text),
        }
    }
}

/// A metric family in the Prometheus format.
#[derive(Default)]
struct MetricFamily {
    name: String,
    head: String,
    samples: Vec<String>,
}

/// Converts OpenMetrics to the Prometheus format. Metric families are sorted by name, and samples
/// by their labels, as in kube-proxy, so that two answers can be compared.
fn to_prometheus(text: &str) -> String {
    let mut families: Vec<MetricFamily> = Vec::new();
    let mut help = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let mut family = MetricFamily { name: format!("{name}{suffix}"), ..MetricFamily::default() };
            if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
                push(&mut family.head, &["# HELP ", &family.name, " ", help]);
            }
            let kind = if kind == "unknown" { "untyped" } else { kind };
            push(&mut family.head, &["# TYPE ", &family.name, " ", kind]);
            families.push(family);
        } else if !line.starts_with('#')
            && let Some(family) = families.last_mut()
        {
            family.samples.push(match bound(line) {
                Some((before, bound, after)) => {
                    format!("{before}le=\"{}\"{after}", as_go_writes(bound))
                }
                None => line.to_owned(),
            });
        }
    }
    families.sort_by(|one, other| one.name.cmp(&other.name));
    let mut written = String::with_capacity(text.len() + text.len() / 16);
    for mut family in families {
        // The sort is stable, so a histogram's buckets stay in their order: their labels differ in
        // the bound only.
        family.samples.sort_by_cached_key(|sample| labels(sample));
        written.push_str(&family.head);
        for sample in &family.samples {
            push(&mut written, &[sample]);
        }
    }
    written
}

/// Splits the sample of a bucket into the text before its upper bound, the bound, and the text
/// after the closing quote.
fn bound(sample: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = sample.split_once("le=\"").filter(|(before, _)| before.ends_with(['{', ',']))?;
    let (bound, after) = rest.split_once('"')?;
    Some((before, bound, after))
}

/// Returns the labels of a sample without the upper bound of a bucket.
fn labels(sample: &str) -> String {
    let without_bound = match bound(sample) {
        Some((before, _, after)) => Cow::from(format!("{before}{}", after.trim_start_matches(','))),
        None => sample.into(),
    };
    let labels = without_bound.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}'));
    labels.map_or("", |(labels, _)| labels.trim_end_matches(',')).to_owned()
}

/// Returns the upper bound of a bucket as Go writes it.
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
        let text = |bound: &str| format!("# TYPE a histogram\na_bucket{{le=\"{bound}\",verb=\"GET\"}} 5\n");
        assert_eq!(Format::Prometheus.write(text(ours)), text(theirs));
    }

    #[test]
    fn counters_get_the_name_of_their_samples() {
        let open = "# HELP a Changes.\n# TYPE a counter\na_total{code=\"200\"} 3\n# HELP b Depth.\n# TYPE b gauge\nb 1\n# EOF\n";
        let old = "# HELP a_total Changes.\n# TYPE a_total counter\na_total{code=\"200\"} 3\n# HELP b Depth.\n# TYPE b gauge\nb 1\n";
        assert_eq!(Format::Prometheus.write(open.into()), old);
        assert_eq!(Format::OpenMetrics.write(open.into()), open);
    }

    #[test]
    fn families_and_samples_are_in_an_order_that_stays() {
        let open = "# TYPE b histogram\n\
                    b_sum{verb=\"PUT\"} 1\nb_count{verb=\"PUT\"} 1\n\
                    b_bucket{le=\"2.0\",verb=\"PUT\"} 1\nb_bucket{le=\"10.0\",verb=\"PUT\"} 1\n\
                    b_sum{verb=\"GET\"} 0\nb_bucket{verb=\"GET\",le=\"2.0\"} 0\nb_bucket{verb=\"GET\",le=\"10.0\"} 0\n\
                    # TYPE a gauge\na{x=\"2\"} 0\na{x=\"1}\"} 5\n# EOF\n";
        let old = "# TYPE a gauge\na{x=\"1}\"} 5\na{x=\"2\"} 0\n\
                   # TYPE b histogram\n\
                   b_sum{verb=\"GET\"} 0\nb_bucket{verb=\"GET\",le=\"2\"} 0\nb_bucket{verb=\"GET\",le=\"10\"} 0\n\
                   b_sum{verb=\"PUT\"} 1\nb_count{verb=\"PUT\"} 1\n\
                   b_bucket{le=\"2\",verb=\"PUT\"} 1\nb_bucket{le=\"10\",verb=\"PUT\"} 1\n";
        assert_eq!(Format::Prometheus.write(open.into()), old);
    }
}
