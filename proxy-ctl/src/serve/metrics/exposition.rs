//! The two text formats that scrapers ask for.
//!
//! Metrics are encoded as OpenMetrics. kube-proxy answers in the older Prometheus text format unless asked
//! otherwise, and so do we: there a counter's family bears the name of its samples, `_total` included.

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores";

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::serve) enum Format {
    OpenMetrics,
    Prometheus,
}

impl Format {
    /// By the request's `Accept` header.
    pub(in crate::serve) fn wanted(accept: &str) -> Self {
        let open =
            accept.split(',').any(|kind| kind.trim_start().starts_with("application/openmetrics-text"));
        if open { Self::OpenMetrics } else { Self::Prometheus }
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
            push(&mut written, &[line]);
        }
    }
    written
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
    #[case("application/openmetrics-text;version=1.0.0;q=0.9, text/plain;q=0.5", Format::OpenMetrics)]
    fn negotiation(#[case] accept: &str, #[case] format: Format) {
        assert_eq!(Format::wanted(accept), format);
    }

    #[test]
    fn counters_get_the_name_of_their_samples() {
        let open = "# HELP a Changes.\n# TYPE a counter\na_total{code=\"200\"} 3\n# HELP b Depth.\n# TYPE b gauge\nb 1\n# EOF\n";
        let old = "# HELP a_total Changes.\n# TYPE a_total counter\na_total{code=\"200\"} 3\n# HELP b Depth.\n# TYPE b gauge\nb 1\n";
        assert_eq!(Format::Prometheus.write(open.into()), old);
        assert_eq!(Format::OpenMetrics.write(open.into()), open);
    }
}
