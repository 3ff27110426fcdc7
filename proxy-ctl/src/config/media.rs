//! How objects are encoded on the way to the API server and back.

/// What is read and written here. client-go also knows YAML, which no watch is served in.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Encoding {
    #[default]
    Protobuf,
    Json,
}

/// CBOR is switched off in client-go, which says JSON instead.
const CBOR: &str = "application/cbor";

impl Encoding {
    pub const ALL: [Self; 2] = [Self::Protobuf, Self::Json];

    /// Label value of metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Protobuf => "protobuf",
            Self::Json => "json",
        }
    }

    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
            Self::Json => "application/json",
        }
    }

    /// By its media type, whatever parameters that has.
    pub fn of(content_type: &str) -> Option<Self> {
        let media_type = content_type.split(';').next().unwrap_or_default().trim();
        Self::ALL.into_iter().find(|encoding| media_type.eq_ignore_ascii_case(encoding.media_type()))
    }

    /// As a configuration names it.
    pub(super) fn configured(media_type: &str) -> Option<Self> {
        if media_type == CBOR {
            return Some(Self::Json);
        }
        Self::ALL.into_iter().find(|encoding| media_type == encoding.media_type())
    }

    /// The Accept header of those who say nothing else: everything, but rather this. What the API server cannot
    /// encode so comes in JSON.
    pub fn preferred(self) -> String {
        format!("{}, */*", self.media_type())
    }
}

/// An Accept header all of whose types can be read.
pub(super) fn accept(text: &str) -> Option<String> {
    let clauses: Option<Vec<String>> = text.split(',').map(clause).collect();
    clauses.map(|clauses| clauses.join(","))
}

fn clause(text: &str) -> Option<String> {
    let (media_type, quality) =
        text.split_once(';').map_or((text, None), |(of, quality)| (of, Some(quality)));
    let media_type = match media_type.trim() {
        any @ ("*/*" | "application/*") => any,
        media_type => Encoding::configured(media_type)?.media_type(),
    };
    let Some(quality) = quality else { return Some(media_type.to_owned()) };
    let number: f64 = quality.trim().strip_prefix("q=")?.parse().ok()?;
    (0.0..=1.0).contains(&number).then(|| format!("{media_type};q={number}"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("application/json", Some("application/json"))]
    #[case(
        "application/vnd.kubernetes.protobuf, application/json",
        Some("application/vnd.kubernetes.protobuf,application/json")
    )]
    #[case("application/json; q=0.50,*/*;q=0.1", Some("application/json;q=0.5,*/*;q=0.1"))]
    #[case::as_client_go_rewrites_it(
        "application/cbor,application/json",
        Some("application/json,application/json")
    )]
    #[case::nobody_reads_yaml("application/yaml", None)]
    #[case::one_of_them_cannot_be_read("application/json,text/plain", None)]
    #[case::tables("application/json;as=Table;v=v1;g=meta.k8s.io", None)]
    #[case::no_number("application/json;q=x", None)]
    #[case::too_large("application/json;q=1.5", None)]
    #[case::an_end_without_a_type("application/json,", None)]
    #[case("application/json\r\nX: y", None)]
    fn all_that_is_accepted_can_be_read(#[case] text: &str, #[case] header: Option<&str>) {
        assert_eq!(accept(text).as_deref(), header);
    }

    #[rstest]
    #[case("application/json", Some(Encoding::Json))]
    #[case("application/vnd.kubernetes.protobuf;stream=watch", Some(Encoding::Protobuf))]
    #[case("Application/JSON; charset=utf-8", Some(Encoding::Json))]
    #[case("text/html", None)]
    fn an_answer_tells_its_encoding(#[case] content_type: &str, #[case] encoding: Option<Encoding>) {
        assert_eq!(Encoding::of(content_type), encoding);
    }
}
