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

    /// As a configuration names it: the first that can be read.
    pub(super) fn configured(media_types: &str) -> Option<Self> {
        named(media_types).find_map(Self::of_part)
    }

    fn of_part(part: &str) -> Option<Self> {
        let media_type = part.split(';').next().unwrap_or_default().trim();
        if media_type.eq_ignore_ascii_case(CBOR) { Some(Self::Json) } else { Self::of(media_type) }
    }

    /// The Accept header of those who say nothing else: everything, but rather this. What the API server cannot
    /// encode so comes in JSON.
    pub fn preferred(self) -> String {
        format!("{}, */*", self.media_type())
    }
}

/// An Accept header of those types that can be read; None where there is none.
pub(super) fn accept(text: &str) -> Option<String> {
    let clauses: Vec<String> = named(text).filter_map(clause).collect();
    (!clauses.is_empty()).then(|| clauses.join(","))
}

/// What of an Accept header cannot be read.
pub(super) fn not_accepted(text: &str) -> Vec<String> {
    named(text).filter(|part| clause(part).is_none()).map(str::to_owned).collect()
}

/// What of a configured encoding cannot be read.
pub(super) fn not_sent(text: &str) -> Vec<String> {
    named(text).filter(|part| Encoding::of_part(part).is_none()).map(str::to_owned).collect()
}

/// Whether no type is named at all.
pub(super) fn is_blank(text: &str) -> bool {
    named(text).next().is_none()
}

fn named(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

/// Of the parameters the API server heeds two: `q`, which stays, and `as`, which asks for something else than objects.
fn clause(text: &str) -> Option<String> {
    let mut parts = text.split(';').map(str::trim);
    let media_type = match parts.next()? {
        any @ ("*/*" | "application/*") => any,
        media_type => Encoding::of_part(media_type)?.media_type(),
    };
    let mut quality = None;
    for (name, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
        match name.trim() {
            name if name.eq_ignore_ascii_case("as") => return None,
            name if name.eq_ignore_ascii_case("q") => quality = value.trim().parse::<f64>().ok(),
            _ => {}
        }
    }
    let quality = quality.filter(|quality| (0.0..=1.0).contains(quality));
    Some(quality.map_or_else(|| media_type.to_owned(), |quality| format!("{media_type};q={quality}")))
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
    #[case::one_of_them_cannot_be_read("text/plain,application/json", Some("application/json"))]
    #[case::with_a_parameter("Application/JSON; charset=utf-8;q=0.5", Some("application/json;q=0.5"))]
    #[case::none_of_them_can_be_read("text/plain, text/html", None)]
    #[case::tables("application/json;as=Table;v=v1;g=meta.k8s.io", None)]
    #[case::tables_or_objects(
        "application/json;As=Table;v=v1;g=meta.k8s.io,application/json",
        Some("application/json")
    )]
    #[case::no_number("application/json;q=x", Some("application/json"))]
    #[case::too_large("application/json;q=1.5", Some("application/json"))]
    #[case::an_end_without_a_type("application/json,", Some("application/json"))]
    #[case("application/json\r\nX: y", None)]
    #[case("application/json; a=b\r\nX: y", Some("application/json"))]
    fn all_that_is_accepted_can_be_read(#[case] text: &str, #[case] header: Option<&str>) {
        assert_eq!(accept(text).as_deref(), header);
    }

    #[rstest]
    #[case("application/json; charset=utf-8", Some(Encoding::Json), &[])]
    #[case("application/cbor;x=y", Some(Encoding::Json), &[])]
    #[case("text/plain, application/vnd.kubernetes.protobuf", Some(Encoding::Protobuf), &["text/plain"])]
    #[case("application/yaml;q=1", None, &["application/yaml;q=1"])]
    fn the_first_that_can_be_read_is_sent(
        #[case] text: &str,
        #[case] encoding: Option<Encoding>,
        #[case] left_out: &[&str],
    ) {
        assert_eq!(Encoding::configured(text), encoding);
        assert_eq!(not_sent(text), left_out);
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        let text = "text/plain;q=0.2, application/json,, application/json;as=Table";
        assert_eq!(not_accepted(text), ["text/plain;q=0.2", "application/json;as=Table"]);
        assert!(is_blank(" , ") && !is_blank(text));
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
