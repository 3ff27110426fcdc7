//! URLs in a form without secrets, for messages.

/// The text that replaces user and password. Go's `URL.Redacted` uses the same.
const HIDDEN: &str = "xxxxx";

/// Returns a URL without user and password: `https://user:secret@host` becomes
/// `https://xxxxx@host`. This also works for a text that is no valid URL.
pub fn without_userinfo(url: &str) -> String {
    let Some(at) = url.rfind('@') else { return url.to_owned() };
    let start = url[..at].find("://").map_or(0, |scheme| scheme + 3);
    format!("{}{HIDDEN}{}", &url[..start], &url[at..])
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("https://10.0.0.1:6443/path", "https://10.0.0.1:6443/path")]
    #[case("https://user:secret@10.0.0.1:6443/", "https://xxxxx@10.0.0.1:6443/")]
    #[case("https://token@[2001:db8::1]", "https://xxxxx@[2001:db8::1]")]
    #[case::that_is_not_escaped("https://user:a/b@c?d@host", "https://xxxxx@host")]
    #[case::without_a_scheme("user:secret@host", "xxxxx@host")]
    #[case::nothing("", "")]
    fn secrets_are_not_shown(#[case] url: &str, #[case] shown: &str) {
        assert_eq!(without_userinfo(url), shown);
    }
}
