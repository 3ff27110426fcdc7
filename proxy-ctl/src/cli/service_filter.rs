//! Service ports as people name them on the command line.

use std::{convert::Infallible, fmt, str::FromStr};

/// `[NAMESPACE/]NAME[:PORT]`.
#[derive(Clone, Debug)]
pub(super) struct ServiceFilter {
    text: String,
    namespace: Option<String>,
    name: String,
    port: Option<String>,
}

impl FromStr for ServiceFilter {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let (object, port) = text.split_once(':').map_or((text, None), |(object, port)| (object, Some(port)));
        let (namespace, name) =
            object.split_once('/').map_or((None, object), |(namespace, name)| (Some(namespace), name));
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
}
