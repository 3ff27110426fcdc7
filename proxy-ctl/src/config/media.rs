//! The encodings of objects in requests to the API server and in its answers.

/// An encoding that can be read and written here. client-go also knows YAML, but API servers serve
/// no watch in it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Encoding {
    #[default]
    Protobuf,
    Json,
}

impl Encoding {
    pub const ALL: [Self; 2] = [Self::Protobuf, Self::Json];

    /// Returns the value of the metric's label.
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

    /// Returns the encoding of a media type. Parameters of the media type are ignored.
    pub fn of(content_type: &str) -> Option<Self> {
        let media_type = without_parameters(content_type);
        Self::ALL.into_iter().find(|encoding| media_type.eq_ignore_ascii_case(encoding.media_type()))
    }

    /// Returns the Accept header for when none is configured. What the API server cannot encode in
    /// this form comes in JSON.
    pub fn preferred(self) -> String {
        format!("{}, */*", self.media_type())
    }
}

/// Returns true if every answer that this Accept header allows can be read, whichever type the API
/// server chooses.
pub(super) fn is_acceptable(header: &str) -> bool {
    let known = |part: &str| {
        matches!(without_parameters(part), "*/*" | "application/*") || Encoding::of(part).is_some()
    };
    header.split(',').all(known)
}

fn without_parameters(media_type: &str) -> &str {
    media_type.split(';').next().unwrap_or_default().trim()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("application/json", true)]
    #[case("application/vnd.kubernetes.protobuf, application/json;q=0.5", true)]
    #[case("application/json,*/*;q=0.1", true)]
    #[case::yaml("application/yaml", false)]
    #[case::one_of_several("application/json,text/plain", false)]
    #[case::nothing_after_a_comma("application/json,", false)]
    fn accept_headers(#[case] header: &str, #[case] acceptable: bool) {
        assert_eq!(is_acceptable(header), acceptable);
    }

    #[rstest]
    #[case("application/json", Some(Encoding::Json))]
    #[case("application/vnd.kubernetes.protobuf;stream=watch", Some(Encoding::Protobuf))]
    #[case("Application/JSON; charset=utf-8", Some(Encoding::Json))]
    #[case("text/html", None)]
    fn the_encoding_of_a_content_type(#[case] content_type: &str, #[case] encoding: Option<Encoding>) {
        assert_eq!(Encoding::of(content_type), encoding);
    }
}
