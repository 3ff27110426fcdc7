//! The environment variables that name a proxy. kube-proxy follows them, and this program does not.
//!
//! kubeadm copies HTTPS_PROXY from the shell that it was started in to the pods of kube-proxy. Such
//! a proxy may be meant for other programs. With it the way to the API server would lead out of the
//! cluster and back.

use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;

use crate::config::without_userinfo;

/// Returns the proxy that kube-proxy would reach this server through, with the variable that names
/// it. None if kube-proxy would dial the server itself.
pub(crate) fn ignored_proxy(
    server: &Uri,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<(&'static str, String)> {
    // Go takes the first variable that is not empty.
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    let either = |upper: &str| set(upper).or_else(|| set(&upper.to_lowercase())).unwrap_or_default();
    let name = if server.scheme_str() == Some("http") { "HTTP_PROXY" } else { "HTTPS_PROXY" };
    let matcher = Matcher::builder().all(either(name)).no(either("NO_PROXY")).build();
    let host = server.host()?.trim_matches(['[', ']']);
    // Go never uses a proxy for loopback, even without NO_PROXY.
    let is_loopback =
        host == "localhost" || host.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
    let proxy = matcher.intercept(server).filter(|_| !is_loopback)?;
    Some((name, without_userinfo(&proxy.uri().to_string())))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const PROXY: (&str, &str) = ("HTTPS_PROXY", "http://user:secret@proxy.example:3128");

    #[rstest]
    #[case::none("https://10.0.0.1:6443", &[], false)]
    #[case::for_https("https://10.0.0.1:6443", &[PROXY], true)]
    #[case::in_lower_case("https://10.0.0.1:6443", &[("https_proxy", PROXY.1)], true)]
    #[case::empty_in_upper_case("https://10.0.0.1:6443", &[("HTTPS_PROXY", ""), ("https_proxy", PROXY.1)], true)]
    #[case::for_http_only("https://10.0.0.1:6443", &[("HTTP_PROXY", PROXY.1)], false)]
    #[case::server_without_tls("http://10.0.0.1:8080", &[PROXY], false)]
    #[case::exempt_by_network("https://10.0.0.1:6443", &[PROXY, ("NO_PROXY", "example.org,10.0.0.0/8")], false)]
    #[case::exempt_by_domain("https://api.example.org", &[PROXY, ("no_proxy", "example.org")], false)]
    #[case::other_servers_exempt("https://192.0.2.1", &[PROXY, ("NO_PROXY", "10.0.0.0/8")], true)]
    #[case::loopback("https://[::1]:6443", &[PROXY], false)]
    fn a_proxy_of_the_environment_is_named_where_kube_proxy_would_use_it(
        #[case] server: &str,
        #[case] variables: &[(&str, &str)],
        #[case] expected: bool,
    ) {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let found = ignored_proxy(&server.parse().unwrap(), variable);
        assert_eq!(found.is_some(), expected, "{found:?}");
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
    }
}
