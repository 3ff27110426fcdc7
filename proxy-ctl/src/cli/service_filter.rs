//! The names of service ports on the command line.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// A filter for service ports: `[NAMESPACE/]NAME[:PORT]`.
#[derive(Clone, Debug)]
pub(super) struct ServiceFilter {
    text: String,
    namespace: Option<String>,
    name: String,
    port: Option<String>,
}

/// The reason why a text names no Service.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum NotAService {
    #[error(
        "an address is not the name of a Service; `proxy-ctl services` lists the names with their addresses"
    )]
    Address,
    #[error("a Service is named NAMESPACE/NAME, or NAME alone, and has at most one slash")]
    Slashes,
    #[error(
        "a Service is named NAMESPACE/NAME, or NAME alone, with :PORT for one port; one of these parts is empty"
    )]
    Empty,
}

impl FromStr for ServiceFilter {
    type Err = NotAService;

    fn from_str(text: &str) -> Result<Self, NotAService> {
        if text.parse::<IpAddr>().is_ok() || text.parse::<SocketAddr>().is_ok() {
            return Err(NotAService::Address);
        }
        let (object, port) = text.split_once(':').map_or((text, None), |(object, port)| (object, Some(port)));
        let (namespace, name) =
            object.split_once('/').map_or((None, object), |(namespace, name)| (Some(namespace), name));
        if name.contains('/') {
            return Err(NotAService::Slashes);
        }
        if name.is_empty() || [namespace, port].contains(&Some("")) {
            return Err(NotAService::Empty);
        }
        let owned = str::to_owned;
        Ok(Self {
            text: owned(text),
            namespace: namespace.map(owned),
            name: owned(name),
            port: port.map(owned),
        })
    }
}

impl fmt::Display for ServiceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl ServiceFilter {
    pub(super) fn matches(&self, namespace: &str, name: &str, port: &str) -> bool {
        self.name == name
            && self.namespace.as_ref().is_none_or(|wanted| wanted == namespace)
            && self.port.as_ref().is_none_or(|wanted| wanted == port)
    }

    /// Returns true if the part after the colon may be meant as a port's number. The API server
    /// accepts a number as a port's name too.
    pub(super) fn may_name_port_by_number(&self) -> bool {
        self.port.as_ref().is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("kube-dns", true)]
    #[case("kube-system/kube-dns", true)]
    #[case("kube-system/kube-dns:dns", true)]
    #[case("kube-dns:dns-tcp", false)]
    #[case("default/kube-dns", false)]
    #[case("kube", false)]
    fn a_service_is_found_by(#[case] wanted: ServiceFilter, #[case] found: bool) {
        assert_eq!(wanted.matches("kube-system", "kube-dns", "dns"), found);
    }

    /// The name of a port is a label of DNS-1123, so it may consist of digits only.
    #[rstest]
    #[case::that_number("web:80", true)]
    #[case::another_number("web:8080", false)]
    fn a_port_may_be_named_by_digits(#[case] wanted: ServiceFilter, #[case] found: bool) {
        assert_eq!(wanted.matches("default", "web", "80"), found);
        assert!(wanted.may_name_port_by_number());
    }

    #[rstest]
    #[case::address("10.96.0.16", NotAService::Address)]
    #[case::address_and_port("10.96.0.16:80", NotAService::Address)]
    #[case::ipv6_address("fd00:10:96::a", NotAService::Address)]
    #[case::two_slashes("a/b/c", NotAService::Slashes)]
    #[case::no_name("default/", NotAService::Empty)]
    #[case::no_namespace("/web", NotAService::Empty)]
    #[case::no_port("web:", NotAService::Empty)]
    #[case::nothing("", NotAService::Empty)]
    fn what_names_no_service_is_told(#[case] text: &str, #[case] why: NotAService) {
        assert_eq!(text.parse::<ServiceFilter>().unwrap_err(), why);
    }
}
